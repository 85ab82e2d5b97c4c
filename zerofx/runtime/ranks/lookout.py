"""What a watchdog makes of what the other ranks tell: whether they are in step, and whether they will come.

::

    compare        the neighbour ran another graph, made another call, or stepped otherwise      fail
    look_around    this rank waits, and another has ended, or waits in a collective of its own   fail
                   this rank waits in a call, and another computes                               print where, wait on
    last_look      the program ends, and the neighbour has stepped more often, or less           print

A rank that computes may be slow, and come. Only what cannot end well fails.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from typing import Any

import torch.distributed as dist

from zerofx.runtime.ranks.agree import CALL, ON_DEMAND, Schedule, difference
from zerofx.runtime.ranks.steps import Steps, difference_of_steps

PATIENCE = 12.0
"""Seconds that a rank waits before it looks at where those are who do not come."""
LAST_LOOK = 5.0
"""Seconds that a program waits, as it ends, for ranks that have stepped less often, or more."""
AFTER = "+"
"""Stands between the digest of a graph and what optimizers did before it (`Steps.told`)."""

_NOT_CAPTURED = (
    "One of them runs this outside of any graph: next to a graph break Dynamo may capture code for inputs of one "
    "shape and not for those of another. Mend the graph break, or give all ranks inputs of the same shapes."
)
BY_DATA = "If data decide which layers a rank runs: uneven=True, or leaf_modules= for experts (docs/models.md)."

UNEVEN = (
    "With uneven=True every rank steps as often, and timeout= is longer than one rank may compile alone "
    "(docs/models.md)."
)


class Lookout:
    """The half of a `zerofx.runtime.ranks.watch.Watch` that judges; its attributes are those."""

    rank: int
    world_size: int
    called: list[int]
    store: dist.Store
    failure: str
    steps: Steps
    _runs: deque[tuple[int, str]]
    _count: int
    _calls: list[tuple[float, str]]
    _waiting: dict[object, tuple[float, str]]
    _beat: int
    _last: dict[str, Any] | None = None  # of the neighbour, once it has ended
    _warned: tuple[float, str] | None = None

    def _state(self, rank: int) -> dict[str, Any] | None:
        raise NotImplementedError

    def _states(self) -> dict[int, dict[str, Any] | None]:
        raise NotImplementedError

    def _tell(self, *, ended: bool = False) -> None:
        raise NotImplementedError

    def _fail(self, why: str) -> None:
        raise NotImplementedError

    def _compare(self) -> None:
        other = (self.rank + 1) % self.world_size
        state = self._state(other)
        if state is None or self.failure:
            return
        self._last = state if state["ended"] else None
        mine, theirs = dict(list(self._runs)), dict(state["runs"])
        for i in sorted(set(mine) & set(theirs)):
            if mine[i] == theirs[i]:
                continue
            (a, did), (b, they_did) = mine[i].split(AFTER), theirs[i].split(AFTER)
            if a != b:
                self._fail(self._out_of_step(other, a, b))
            else:
                ranks = self.called[self.rank], self.called[other]
                why = difference_of_steps(self.store, did, they_did, *ranks)
                self._fail(f"ranks {ranks[0]} and {ranks[1]} are out of step: before graph number {i} {why}")
            return

    def _out_of_step(self, other: int, mine: str, theirs: str) -> str:
        mine_, theirs_ = self.called[self.rank], self.called[other]
        ranks = f"ranks {mine_} and {theirs_} are out of step"
        a, b = (Schedule.from_json(self.store.get(f"schedule/{digest}")) for digest in (mine, theirs))
        if CALL in (a.phase, b.phase):
            call = a if a.phase == CALL else b
            return (
                f"{ranks}: rank {mine_} is in {a.where(0)}, rank {theirs_} in {b.where(0)}. Call {call.where(0)} on "
                "every rank, at the same place of the program (docs/debugging.md)."
            )
        return (
            f"{ranks}: {difference(a, b, mine_, theirs_)}. "
            "Every rank must run the same layers in the same order (docs/debugging.md). "
            f"{_NOT_CAPTURED if (a.phase == ON_DEMAND) != (b.phase == ON_DEMAND) else BY_DATA}"
        )

    def _look_around(self) -> None:
        """Where those are for whom this rank waits: they may be seen not to come."""
        call = self._calls[-1] if self._calls else None
        waiting = call or next(iter(list(self._waiting.values())), None)
        if self.failure or waiting is None or time.monotonic() - waiting[0] < PATIENCE or self._beat % 2:
            return
        since, what = waiting
        me, here = self.called[self.rank], f"has been in {what} for {time.monotonic() - since:.0f} s"
        for rank, state in self._states().items():
            if state is None or state["at"][0] >= self._count:
                continue
            other = self.called[rank]
            if state["ended"]:
                there = "has left the process group, or its program has ended (fewer batches? drop_last=True)"
            elif dist.get_rank() in state["own"] and state["since"] > PATIENCE / 2:
                there = f"has been {state['doing']} for {state['since']:.0f} s"
            else:
                if call is not None and self._warned != waiting:
                    self._warn(rank, f"rank {me} {here}, and rank {other} is {state['doing'] or 'elsewhere'}")
                continue
            self._fail(
                f"ranks {me} and {other} are out of step: rank {me} {here}; rank {other} {there}. Neither "
                f"can go on. Every rank must run the same graphs and make the same calls, {what} for one "
                "(docs/debugging.md)."
            )
            return
        self._warned = waiting

    def _warn(self, rank: int, text: str) -> None:
        """Say on both ranks that one waits for the other, which may still come."""
        text = f"zerofx: {text}. It must be called on every rank (docs/debugging.md); waiting."
        self.store.set(f"waited for/{rank}", text)
        print(text, file=sys.stderr, flush=True)

    def last_look(self) -> None:
        """The program ends: print where the neighbour has stepped its optimizers more often, or less."""
        other, until = (self.rank + 1) % self.world_size, time.monotonic() + LAST_LOOK
        state, mine = self._last, self.steps.told
        with contextlib.suppress(RuntimeError):  # the store is gone; what its watchdog said last still counts
            self._tell(ended=True)
            while state is None and not self.failure and time.monotonic() < until:
                now = self._state(other)
                if now is None or now["steps"] == mine:
                    return
                state = now if now["ended"] else None
                time.sleep(0.05)
        if state is not None and state["steps"] != mine and not self.failure:
            ranks = self.called[self.rank], self.called[other]
            why = difference_of_steps(self.store, mine, state["steps"], *ranks)
            print(f"zerofx: the program ends, and {why}", file=sys.stderr, flush=True)
