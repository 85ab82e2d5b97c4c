"""Of the processes that share Inductor's folder, one generates the code of a graph; the others wait, and load it.

Whoever meets the graph first has its lock, a file that is named by the graph's key in Inductor's cache::

    process 0    lock of K ──▶ miss: code ─────────▶ written ──▶ unlocked
    process 1    lock of K: taken, so it waits ················▶ hit: loaded
    process 2    lock of L ──▶ miss: code ───▶ written           a graph of another key waits for nobody

The system unlocks what a process has locked when that ends, however it ends. Who has waited for long generates the code
by itself. Where the folder's file system has no locks, or Inductor's cache is off, each does.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PATIENCE = 300.0
"""Seconds that a process waits for the code that another one generates."""

_WAITS: contextvars.ContextVar[bool] = contextvars.ContextVar("zerofx_waits", default=True)


class Claimed(Exception):
    """Another process generates the code of this graph now."""


@contextlib.contextmanager
def unclaimed() -> Iterator[None]:
    """Inside, nobody waits: where another process has the graph, that is a `Claimed`."""
    token = _WAITS.set(False)
    try:
        yield
    finally:
        _WAITS.reset(token)


@contextlib.contextmanager
def code_shared() -> Iterator[None]:
    """The graph that Inductor compiles inside is locked from the miss in its cache to the entry (2.11, 2.13, 2.15).

    Raises:
        Claimed: inside of `unclaimed`.
    """
    import torch._inductor.config
    from torch._inductor.codecache import FxGraphCache

    theirs = FxGraphCache.load_with_key
    if torch._inductor.config.distributed_max_autotune_gemm:  # its ranks wait for one another while they compile
        yield
        return
    with contextlib.ExitStack() as held:

        def load(key: str, *args: Any, **kwargs: Any) -> Any:
            if (lock := _locked(key)) is not None:
                held.callback(lock.release)
            return theirs(key, *args, **kwargs)

        with unittest.mock.patch.object(FxGraphCache, "load_with_key", load):
            yield


def _locked(key: str) -> Any:
    """The lock of a graph that this process is to compile; None: it is compiled, or has no lock (2.11, 2.13, 2.15)."""
    from filelock import FileLock, Timeout
    from torch._inductor.codecache import get_lock_dir

    if _is_written(key):
        return None
    waits = _WAITS.get()
    lock = FileLock(Path(get_lock_dir(), f"zerofx-{key}.lock"), timeout=PATIENCE if waits else 0)
    try:
        lock.acquire()
    except Timeout:
        if not waits:
            raise Claimed from None
        log = logging.getLogger("zerofx")
        log.warning("another process has compiled a graph for %g s: it is compiled here as well", PATIENCE)
        return None
    except (OSError, NotImplementedError):  # the file system has none
        return None
    if _is_written(key):  # by who had the lock
        lock.release()
        return None
    return lock


def _is_written(key: str) -> bool:
    """Whether Inductor's cache has an entry, whole (2.11, 2.13, 2.15)."""
    from torch._inductor.codecache import FxGraphCache

    with contextlib.suppress(OSError):
        return any(not name.startswith(".") for name in os.listdir(FxGraphCache._get_tmp_dir_for_key(key)))
    return False
