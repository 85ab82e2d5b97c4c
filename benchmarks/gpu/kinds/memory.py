"""A step's peak by the allocator beside `zerofx.predict`'s, what fragments, and a snapshot of one step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zerofx
from benchmarks.gpu.lines import Line, Setting, at_most, not_run, told
from benchmarks.gpu.ranks import on_ranks
from benchmarks.gpu.training import batch, build
from tests.memory import allocated_peak

LIMIT = 120
OFF, FRAGMENTED = 0.03, 0.1
"""Of the peak: how far the prediction may be off, and how much more may be reserved than allocated."""


def lines(setting: Setting) -> Iterator[Line]:
    cases = {}
    for stage, executor in ((3, "eager"), (3, "inductor"), (2, "inductor"))[: 1 if setting.small else None]:
        path = str(Path(setting.folder) / f"snapshot-stage{stage}-{executor}.pickle")
        cases[f"stage {stage}, {executor}"] = setting.small, stage, executor, path
    yield from on_ranks(setting, measure, cases, lambda name, results: _read(setting, name, results[0]))


def _read(setting: Setting, name: str, found: dict[str, Any]) -> list[Line]:
    peak = found["peak"]
    off = found["predicted"] / peak - 1
    said = f"{found['predicted'] / 2**20:,.1f} MiB predicted, {peak / 2**20:,.1f} allocated"
    result = [
        told(f"{name}: peak of a step", said, peak),
        at_most(f"{name}: prediction off the allocator's peak", abs(off), OFF, judged=not setting.small),
    ]
    if setting.device == "cpu":
        return [
            *result,
            not_run(f"{name}: reserved less allocated at the peak", f"at most {FRAGMENTED} of the peak"),
            not_run(f"{name}: snapshot of a step"),
        ]
    return [
        *result,
        at_most(f"{name}: reserved less allocated at the peak, of the peak", found["fragmented"], FRAGMENTED),
        told(f"{name}: snapshot of a step", f"{found['events']} events of the allocator, in {found['path']}"),
    ]


def measure(device: torch.device, small: bool, stage: int, executor: str, path: str) -> dict[str, Any]:
    """On each rank: the third step, when all is compiled."""
    model = zerofx.compile(build(device, small), stage=stage, executor=executor)  # type: ignore[arg-type]
    optimizer = zerofx.AdamW(model.parameters(), lr=1e-3)
    inputs = batch(device, small, 0, dist.get_rank())

    def step() -> None:
        model(*inputs).backward()

    for _ in range(2):
        step()
        optimizer.step()
        optimizer.zero_grad()
    found: dict[str, Any] = {"path": path}
    if device.type == "cuda":
        torch.cuda.empty_cache()
    found["peak"] = allocated_peak(step, device.type)
    if device.type == "cuda":
        most = torch.cuda.max_memory_reserved() - torch.cuda.max_memory_allocated()
        found["fragmented"] = most / torch.cuda.max_memory_allocated()
        optimizer.zero_grad()
        found["events"] = _snapshot(step, path)
    found["predicted"] = zerofx.predict(model, probe=True).peak_bytes
    return found


def _snapshot(step: Any, path: str) -> int:
    """Of one step, on rank 0; returns how many events it has."""
    torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    try:
        step()
        torch.cuda.synchronize()
        snapshot = torch.cuda.memory._snapshot()
        if dist.get_rank() == 0:
            torch.cuda.memory._dump_snapshot(path)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return sum(map(len, snapshot["device_traces"]))
