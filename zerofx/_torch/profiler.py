"""PyTorch's profiler: what was allocated, and whether it is on."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function


@contextlib.contextmanager
def memory_profile() -> Iterator[Any]:
    """A profile of what is allocated on the CPU (2.11, 2.13, 2.15).

    Kineto says on stderr where it starts and stops, at every log level (2.13). These lines are kept from the terminal.
    """
    prof = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _without_marks():
        prof.start()
    try:
        yield prof
    finally:
        with _without_marks():
            prof.stop()


_MARK = b"USDT:"
"""What Kineto's marks begin with: user-level statically defined tracing."""


@contextlib.contextmanager
def _without_marks() -> Iterator[None]:
    """What is written to stderr meanwhile, by C++ too, comes out at the end, but for Kineto's marks."""
    if sys.stderr is not None:
        sys.stderr.flush()
    try:
        stderr = os.dup(2)
    except OSError:  # there is none, so nothing is seen of the marks either
        yield
        return
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            if sys.stderr is not None:
                sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            caught.seek(0)
            for line in caught:
                if not line.startswith(_MARK):
                    os.write(2, line)


def allocations(runs: Sequence[Callable[[], object]]) -> list[list[int]]:
    """Calls ``runs``; for each the bytes that it allocated on the CPU, and as negative numbers gave back, in order.

    What a run returns is held until the next is over (2.11, 2.13, 2.15).
    """
    name = "zerofx::run"
    with memory_profile() as prof:
        for run in runs:
            with record_function(name):
                held = run()  # noqa: F841
    events = prof.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    spans = sorted((e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name() == name)
    return [[nbytes for time, nbytes in changes if start <= time <= end] for start, end in spans]


def profiler_is_on() -> bool:
    """Whether `torch.profiler` records this thread now."""
    return torch.autograd._profiler_enabled()
