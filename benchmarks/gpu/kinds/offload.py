"""The optimizer's state in the host's memory: losses, bytes on the device, seconds, beside the same run on the device.

Without a GPU the CPU is taken for one (tests/seams/copies.py), so that all but streams is run.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import zerofx
from benchmarks.gpu.lines import Line, Setting, at_least, at_most, not_run, told
from benchmarks.gpu.ranks import on_ranks
from benchmarks.gpu.training import batch, build, difference
from tests.seams.copies import staged

LIMIT = 130
OFF = 1e-5
"""Of a loss, relative: the update's arithmetic is the CPU's here, and the GPU's there."""
SLACK = 0.02
"""Of the weights, for padding, tables and what the allocator rounds up."""
STEPS = 5


def lines(setting: Setting) -> Iterator[Line]:
    ways = [(3, "eager", False), (3, "eager", True), (2, "inductor", False), (1, "eager", False)]
    cases = {}
    for stage, executor, inside in ways[:2] if setting.small else ways:
        name = f"stage {stage}, {executor}{', step_in_backward' * inside}"
        cases[name] = setting.small, stage, executor, inside
    yield from on_ranks(setting, measure, cases, lambda name, results: _read(setting, name, results[0]))


def _read(setting: Setting, name: str, found: dict[str, Any]) -> list[Line]:
    off = difference(found["cpu"]["losses"], found["device"]["losses"])
    result = [
        at_most(f"{name}: losses off the run with state on the device", off, OFF),
        at_least(f"{name}: optimizer state on the host, of 8 N/M", found["cpu"]["on_host"] / found["moments"], 1.0),
        told(f"{name}: pinned", f"{found['cpu']['pinned'] / 2**20:,.1f} MiB", found["cpu"]["pinned"]),
    ]
    at_rest = f"{name}: bytes on the device at rest, of the weights"
    if setting.device == "cpu":
        return [*result, not_run(at_rest, f"at most {1 + SLACK}"), not_run(f"{name}: seconds")]
    rest, copied = found["cpu"], found["cpu"]["copied"]
    said = f"a step {1e3 * rest['step_s']:.1f} ms, {1e3 * found['device']['step_s']:.1f} with state on the device; "
    said += f"the optimizer's {1e3 * rest['optimizer_s']:.1f} ms, in which {copied / 2**20:,.0f} MiB are copied"
    return [
        *result,
        at_most(at_rest, rest["allocated"] / found["weights"], 1 + SLACK),
        told(
            f"{name}: bytes on the device at rest", f"{rest['allocated']:,}, {found['device']['allocated']:,} without"
        ),
        told(f"{name}: seconds", said, rest["step_s"]),
    ]


def measure(device: torch.device, small: bool, stage: int, executor: str, inside: bool) -> dict[str, Any]:
    """On each rank: both runs, one after the other."""
    numel = sum(p.numel() for p in build(torch.device("meta"), small).parameters())
    ranks = dist.get_world_size()
    found: dict[str, Any] = {"moments": 8 * numel / ranks, "weights": 4 * numel / (ranks if stage == 3 else 1)}
    for offload in (None, "cpu"):
        with staged(buffer=1 << 13) if device.type == "cpu" else contextlib.nullcontext():
            found[offload or "device"] = _train(device, small, stage, executor, inside, offload)
    return found


def _train(device: torch.device, small: bool, stage: int, executor: Any, inside: bool, offload: Any) -> dict[str, Any]:
    gc.collect()  # of the run before
    before = _allocated(device)
    model = zerofx.compile(build(device, small), stage=stage, executor=executor, offload=offload)
    optimizer = zerofx.AdamW(model.parameters(), lr=1e-3, max_grad_norm=None if inside else 1.0)
    losses, rank, steps, updates = [], dist.get_rank(), [], []
    for step in range(STEPS):
        inputs = batch(device, small, step, rank)
        began = _now(device)
        loss = model(*inputs)
        if inside:
            with zerofx.step_in_backward(optimizer):
                loss.backward()
        else:
            loss.backward()
            updated = _now(device)
            optimizer.step()
            updates.append(_now(device) - updated)
            optimizer.zero_grad()
        steps.append(_now(device) - began)
        dist.all_reduce(mean := loss.detach().clone())
        losses.append(mean.item() / dist.get_world_size())
        del loss, inputs, mean
    summary = zerofx.memory_summary(model, optimizer)
    return {
        "losses": losses,
        "on_host": summary.on_host,
        "pinned": summary.pinned,
        "copied": 12 * sum(p.to_local().numel() for p in model.parameters()),  # type: ignore[operator]
        "allocated": _allocated(device) - before,
        "step_s": min(steps[2:]),
        "optimizer_s": min(updates[2:], default=0.0),
    }


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
