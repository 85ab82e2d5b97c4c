"""Counts the bytes that are allocated on this device while something runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch.profiler import record_function

from zerofx._torch import memory_profile


def allocated_peak(run: Callable[[], object], device: str = "cpu") -> int:
    """The most bytes that allocations outweigh releases by during ``run``.

    On CPU the allocator's own events, as the profiler keeps them; elsewhere the allocator's statistics.
    """
    if device != "cpu":
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        run()
        return torch.accelerator.max_memory_allocated() - before
    with memory_profile() as prof:
        with record_function("allocated_peak"):
            run()
    events = prof.profiler.kineto_results.events()
    began = next(e.start_ns() for e in events if e.name() == "allocated_peak")
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    return max(itertools.accumulate((nbytes for time, nbytes in sorted(changes) if time >= began), initial=0))
