"""A whole step captured as a CUDA graph: its replays give what steps without it give."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import zerofx
from benchmarks.gpu.kinds.ranks import BOUND
from benchmarks.gpu.lines import Line, Setting, at_most, not_run, told
from benchmarks.gpu.ranks import on_ranks
from benchmarks.gpu.training import batch, build, difference

LIMIT = 100
WARM, REPLAYS = 3, 5


def lines(setting: Setting) -> Iterator[Line]:
    cases = {f"stage {stage}: a captured step": (setting.small, stage) for stage in (3, 2)}
    if setting.device == "cpu":
        yield from (not_run(name, f"losses off at most {BOUND['cuda']:g}") for name in cases)
        return
    yield from on_ranks(setting, measure, cases, lambda name, results: _read(name, results[0]))


def _read(name: str, found: dict[str, Any]) -> list[Line]:
    off = difference(found["replays"], found["steps"])
    return [
        at_most(f"{name}: losses of replays off those of steps", off, BOUND["cuda"]),
        at_most(f"{name}: an ordinary forward behind replays, off", found["behind"], BOUND["cuda"]),
        told(f"{name}: a replay", f"{1e3 * found['replay_s']:.2f} ms, a step {1e3 * found['step_s']:.2f} ms"),
    ]


def measure(device: torch.device, small: bool, stage: int) -> dict[str, Any]:
    """On each rank: two models from the same weights, one of which is captured after a few steps."""
    inputs = batch(device, small, 0, dist.get_rank())
    plain, captured = _Training(device, small, stage, inputs), _Training(device, small, stage, inputs)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is captured must have run before, not on the default stream
        for _ in range(WARM):
            captured.step()
    torch.cuda.current_stream().wait_stream(side)
    for _ in range(WARM):
        plain.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = captured.step(clear=False)  # gradients stay where the graph writes them
    found: dict[str, Any] = {"replays": [], "steps": []}
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(REPLAYS):
        graph.replay()
        found["replays"].append(loss.item())
    found["replay_s"] = (time.perf_counter() - began) / REPLAYS
    began = time.perf_counter()
    for _ in range(REPLAYS):
        found["steps"].append(plain.step().item())
    found["step_s"] = (time.perf_counter() - began) / REPLAYS
    with torch.no_grad():
        behind, wanted = (x.model(*inputs).item() for x in (captured, plain))
    found["behind"] = abs(behind - wanted) / abs(wanted)
    return found


class _Training:
    def __init__(self, device: torch.device, small: bool, stage: int, inputs: torch.Tensor) -> None:
        self.model = zerofx.compile(build(device, small), stage=stage)
        self.optimizer = zerofx.AdamW(self.model.parameters(), lr=1e-3, max_grad_norm=1.0)
        self.inputs = inputs

    def step(self, *, clear: bool = True) -> torch.Tensor:
        loss = self.model(*self.inputs)
        loss.backward()
        self.optimizer.step()
        if clear:
            self.optimizer.zero_grad()
        return loss.detach()
