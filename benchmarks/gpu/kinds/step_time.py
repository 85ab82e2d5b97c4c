"""A training step beside FSDP2's and DistributedDataParallel's, two by two in turns: benchmarks/step.py, read."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu.lines import Line, Setting, at_most, attempt, told
from benchmarks.gpu.programs import run_benchmark

LIMIT = 150
RIVALS = {"zerofx-eager": "fsdp2", "zerofx": "fsdp2+compile", "zerofx-2": "ddp+compile", "zerofx-0": "ddp+compile"}
"""Contender -> the peer that does the same; it is to be no slower than 5 percent more."""
MOST, SPREAD = 1.05, 1e-3


def lines(setting: Setting) -> Iterator[Line]:
    for name in list(RIVALS)[: 1 if setting.small else None]:
        yield from attempt(f"a step of {name} and {RIVALS[name]}", "", lambda name=name: _lines(setting, name))  # type: ignore[misc]


def _lines(setting: Setting, name: str) -> list[Line]:
    rival = RIVALS[name]
    sizes = ["--layers=8", "--dim=1024", "--heads=16", "--vocab=16384", "--length=512", "--batch=8", "--rounds=4"]
    if setting.small:
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
    result = run_benchmark("step", setting, [name, rival], sizes)
    rows = result["contenders"]
    found = [
        told(of, f"{1e3 * row['median_s']:.2f} ms, {row['peak_bytes'] / 2**20:,.0f} MiB at the peak", row["median_s"])
        for of, row in rows.items()
    ]
    found += [Line(of, "it trains", why, "failed") for of, why in result["failed"].items()]
    if len(rows) == 2:
        ratio = rows[name]["median_s"] / rows[rival]["median_s"]
        found.append(at_most(f"{name}: times as long as {rival}", ratio, MOST, judged=not setting.small))
    spread = result["largest_relative_difference_of_losses"]
    return [*found, at_most(f"losses of {name} and {rival} differ by", spread, SPREAD)]
