"""A training step beside FSDP2's and DistributedDataParallel's, in turns: benchmarks/step.py, read."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu.lines import Line, Setting, at_most, attempt, told
from benchmarks.gpu.programs import run_benchmark

LIMIT = 200
RIVALS = {"zerofx": "fsdp2+compile", "zerofx-2": "ddp+compile", "zerofx-0": "ddp+compile", "zerofx-eager": "fsdp2"}
"""Contender -> the peer that does the same; it is to be no slower than 5 percent more."""
MOST, SPREAD = 1.05, 1e-3


def lines(setting: Setting) -> Iterator[Line]:
    yield from attempt("a step beside FSDP2 and DDP", "", lambda: _lines(setting))


def _lines(setting: Setting) -> list[Line]:
    names = [*RIVALS, "fsdp2", "fsdp2+compile", "ddp", "ddp+compile"]
    sizes = ["--layers=12", "--dim=1024", "--heads=16", "--vocab=16384", "--length=512", "--batch=8", "--rounds=4"]
    if setting.small:
        names = ["zerofx-eager", "fsdp2", "ddp"]
        sizes = [
            "--layers=1",
            "--dim=16",
            "--heads=2",
            "--vocab=64",
            "--length=8",
            "--batch=1",
            "--rounds=1",
            "--warmup=1",
        ]
    result = run_benchmark("step", setting, names, sizes)
    rows = result["contenders"]
    found = [
        told(name, f"{1e3 * row['median_s']:.2f} ms, {row['peak_bytes'] / 2**20:,.0f} MiB at the peak", row["median_s"])
        for name, row in rows.items()
    ]
    found += [Line(name, "it trains", why, "failed") for name, why in result["failed"].items()]
    for name, rival in RIVALS.items():
        if name in rows and rival in rows:
            ratio = rows[name]["median_s"] / rows[rival]["median_s"]
            found.append(at_most(f"{name}: times as long as {rival}", ratio, MOST, judged=not setting.small))
    spread = result["largest_relative_difference_of_losses"]
    return [*found, at_most("losses of all contenders differ by", spread, SPREAD)]
