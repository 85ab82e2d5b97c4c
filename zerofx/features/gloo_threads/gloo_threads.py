"""Gloo's threads wait for their turn on a core that computes.

A thread that starts a send fills a socket's buffer and holds a lock meanwhile. A thread of gloo's may wake in that
time and take the core. It tries the lock, gives up, and asks for the same event again at once, until its time slice is
over. That takes some milliseconds, and the holder of the lock has no core to go on (``Pair::handleEvents`` in gloo's
transport/tcp/pair.cc). Threads of ``SCHED_BATCH`` do not take a core away when they wake.

This concerns Linux and processes that have one core. Gloo names its threads since torch 2.13. With 2.11 this file does
nothing.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def batch_gloo_threads() -> None:
    """Where this process has one core, have gloo's threads wait for their turn on it."""
    if not hasattr(os, "SCHED_BATCH") or len(os.sched_getaffinity(0)) > 1:
        return
    for thread in gloo_threads():
        with contextlib.suppress(OSError):  # it has ended, or may not be touched: slower, not wrong
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def gloo_threads() -> list[int]:
    """The ids of the threads in which gloo sends and receives, by their name. Torch 2.11 gives none."""
    found = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if (thread / "comm").read_text().strip() == "gloo_tcp_loop":
                found.append(int(thread.name))
    return found
