"""Seconds until the first step has run: zerofx beside torch.compile, with nothing in a cache."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator

import torch

import zerofx
from benchmarks.gpu.lines import Line, Setting, at_most, told
from benchmarks.gpu.ranks import on_ranks
from benchmarks.gpu.training import batch, build

LIMIT = 70
MOST = 2.0
"""Times as long as torch.compile: two graphs and their passes for one."""


def lines(setting: Setting) -> Iterator[Line]:
    executor = "eager" if setting.small else "inductor"
    cases = {name: (setting.small, name, executor) for name in ("torch.compile", "stage 3", "stage 2")}
    seconds: dict[str, float] = {}

    def read(name: str, found: list[float]) -> Line:
        seconds[name] = found[0]
        return told(f"{name}, the first step", f"{found[0]:.1f} s", found[0])

    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # read by the ranks as they start
        yield from on_ranks(setting, first_step, cases, read)
    if {"stage 3", "torch.compile"} <= set(seconds):
        ratio = seconds["stage 3"] / seconds["torch.compile"]
        yield at_most("stage 3: times as long as torch.compile", ratio, MOST, judged=not setting.small)


def first_step(device: torch.device, small: bool, name: str, executor: str) -> float:
    """On each rank. What the first case has loaded, the others find."""
    model, inputs = build(device, small), batch(device, small, 0, 0)
    began = time.perf_counter()
    if name == "torch.compile":
        model.compile(backend="aot_eager" if executor == "eager" else "inductor")
    else:
        zerofx.compile(model, stage=int(name.split()[1]), executor=executor)  # type: ignore[arg-type]
    model(*inputs).backward()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began
