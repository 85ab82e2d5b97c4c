"""The watchdog: a thread per process group that turns a hang into an error which says what hangs, where, and for whom.

::

    the rank's own thread                              the watchdog's, once a second
    enter(schedule)     the next graph, its digest     writes to the store:  which graphs ran last, what is under way
    started(works)      its next collective            reads of its neighbour:  the same. Different graphs: fail
    wait                where a rank hangs             waits for longer than the timeout: asks all who is missing; fail

Entering and starting cost a few appends; the store is written and read by the watchdog alone, over a connection of its
own. Each rank looks at the next one only, so the store is asked as often as there are ranks; where all neighbours
agree, all do.

**To fail** is to write why under the key "failed", which every watchdog reads, and to end what this rank waits in
(`zerofx._torch.abort_collectives`). The wait then raises `zerofx.OutOfStepError` with the reason. A process group
that failed is of no more use; restart the ranks.

A rank that was killed closes its connections, and gloo raises by itself: the error is completed with who is gone.

The timeout is `Options.timeout`; without one, that of the process group.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from zerofx import _torch
from zerofx.agree import Collective, OutOfStepError, Schedule, difference, publish
from zerofx.passes import ops

TICK = 1.0
"""Seconds between two looks."""
SILENT = 4 * TICK
"""A rank whose watchdog has not written for so long is gone, or stopped."""
REMEMBERED = 256
"""Graphs that a rank remembers to have run."""


class Watch:
    """What this rank is doing in one process group."""

    def __init__(self, name: str) -> None:
        group = _torch.resolve_process_group(name)
        self.name, self.rank, self.world_size = name, group.rank(), group.size()
        self.default_store = _torch.default_store()
        self.store = dist.PrefixStore(f"zerofx/{name}", self.default_store.clone())
        self.timeout: float | None = None
        self.failure = ""
        self.families = 0
        self._runs: deque[tuple[int, str]] = deque(maxlen=REMEMBERED)
        self._count = 0
        self._published: set[str] = set()
        self._schedule = Schedule("nothing yet", ())
        self._started = 0
        self._waiting: dict[int, tuple[float, str]] = {}
        self._beat = 0
        self._stop = threading.Event()
        threading.Thread(target=self._look, name=f"zerofx watchdog of {name!r}", daemon=True).start()

    # ---- the rank's own thread --------------------------------------------------------------------------------------

    def enter(self, schedule: Schedule, digest: str, timeout: float | None = None) -> None:
        """The next collectives are those of ``schedule``."""
        self.check()
        self._count += 1
        self._runs.append((self._count, digest))
        self._schedule, self._started, self.timeout = schedule, 0, timeout

    def started(self, works: list[dist.Work]) -> list[dist.Work]:
        """The next collective of the schedule is under way: ``works``, as one that explains itself when it fails."""
        self._started += 1
        return [_Watched(self, self._schedule.where(self._started - 1), works)]

    def check(self) -> None:
        """Raise what the watchdog found, if anything."""
        if self.failure:
            raise OutOfStepError(self.failure)

    def publish(self, schedule: Schedule, what: str) -> None:
        """A graph was compiled; see `zerofx.agree.publish`."""
        publish(self.store, schedule, what, self.rank, self.world_size)

    @contextlib.contextmanager
    def alone(
    name: str, where: str, kind: str, group: str, nbytes: int, dtype: Any
) -> contextlib.AbstractContextManager[Any]:
    """A collective outside of any graph, under watch: `Watch.alone`."""
    watch = watch_of(name)
    return contextlib.nullcontext() if watch is None else watch.alone(where, kind, group, nbytes, dtype)


def _under_watch(works: list[dist.Work], name: str) -> list[dist.Work]:
    watch = _watches.get(name)
    return works if watch is None else watch.started(works)


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


ops.under_watch = _under_watch
