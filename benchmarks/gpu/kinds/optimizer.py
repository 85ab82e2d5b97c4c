"""The optimizer's bytes per second beside a copy's: benchmarks/optimizer.py, read."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu.lines import Line, Setting, at_least, attempt, told
from benchmarks.gpu.programs import run_benchmark

LIMIT = 60
LEAST = {"zerofx unclipped": 0.9, "zerofx": 0.85, "zerofx bf16": 0.85, "zerofx bf16 split": 0.8, "zerofx 8-bit": 0.6}
"""Contender -> of a copy's bytes per second."""


def lines(setting: Setting) -> Iterator[Line]:
    yield from attempt("the optimizer beside a copy", "", lambda: _lines(setting))


def _lines(setting: Setting) -> list[Line]:
    names = ["copy", "fused kernel", *LEAST, "torch fused", "fsdp2 fused"]
    sizes = ["--layers=36", "--dim=768", "--vocab=16384", "--rounds=30"]
    if setting.small:
        names = ["copy", "zerofx", "zerofx unclipped"]
        sizes = ["--layers=1", "--dim=16", "--heads=2", "--vocab=64", "--rounds=1", "--warmup=1"]
    rows = run_benchmark("optimizer", setting, names, sizes)["contenders"]
    copy = rows["copy"]["gb_per_s_and_rank"]
    found = [
        told(name, f"{row['gb_per_s_and_rank']:.1f} GB/s, {1e3 * row['median_s']:.2f} ms", row["gb_per_s_and_rank"])
        for name, row in rows.items()
    ]
    for name, bound in LEAST.items():
        if name in rows:
            rate = rows[name]["gb_per_s_and_rank"] / copy
            found.append(at_least(f"{name}: of a copy's rate", rate, bound, judged=not setting.small))
    return found
