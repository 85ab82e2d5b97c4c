"""Counts the bytes that are allocated on this device while something runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

import zerofx
from zerofx._torch import memory_profile

_SESSIONS = 3
"""Kineto cancels a session now and then ("cancelled during warmup"), where the machine is busy."""


def allocated_peak(run: Callable[[], object], device: str = "cpu") -> int:
    """The most bytes that allocations outweigh releases by during ``run``.

    On CPU the allocator's own events, as the profiler keeps them; elsewhere the allocator's statistics.
    """
    if device != "cpu":
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        run()
        return torch.accelerator.max_memory_allocated() - before
    for _ in range(_SESSIONS):
        with memory_profile() as prof:
            with record_function("allocated_peak"):
                run()
        events = prof.profiler.kineto_results.events()
        began = next((e.start_ns() for e in events if e.name() == "allocated_peak"), None)
        if began is not None:
            break
    else:
        raise RuntimeError(f"the profiler noted nothing in {_SESSIONS} sessions")
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    return max(itertools.accumulate((nbytes for time, nbytes in sorted(changes) if time >= began), initial=0))


def held_over_steps(run: Callable[[], object], net: nn.Module, optimizer: Any, batch: Iterable[Any]) -> int:
    """The most bytes that a rank holds in all over ``run``, forwards and backwards of ``batch``.

    It is run in four steps. The first compiles. gloo's thread may hold on to a buffer for a moment longer than its
    wait, so it is the least of the other three.
    """
    peaks = []
    for i in range(4):
        if i:
            peaks.append(allocated_peak(run))
        else:
            run()
        optimizer.step()
        optimizer.zero_grad()
    held = zerofx.memory_summary(net, optimizer)
    tensors = [x for x in batch if isinstance(x, torch.Tensor)]
    return min(peaks) + held.total - held.nbytes["activations"] + sum(x.nbytes for x in tensors)
