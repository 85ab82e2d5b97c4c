"""The watchdog: a thread per process group that turns a hang into an error which says what hangs, where, and for whom.

::

    the rank's own thread                              the watchdog's, once a second
    stepped             an optimizer has stepped
    enter(schedule)     the next graph, its digest     writes to the store:  which graphs ran last, what is under way
    agree(schedule)     all enter the same one?        reads of its neighbour:  the same. Different graphs: fail
    started(works)      its next collective            waits for longer than the timeout: asks all who is missing; fail
    wait                where a rank hangs             waits, and another rank waits for something else: fail

A rank whose optimizer did not step runs the same graphs as the others. So each graph is noted with what optimizers did
before it (`zerofx.runtime.ranks.steps`). Only steps over sharded parameters count, stages 1 to 3: each rank has other
parts of those, so all must step or none. In stage 0 a program may step on one rank and broadcast.

**A call** that every rank must make, as `zerofx.save`, is noted as a graph is. So a rank that calls alone is out of
step with the next graph of the others. What the watchdog makes of all that ranks tell: `zerofx.runtime.ranks.lookout`.

**To agree** is to tell all others the digest, and to compare, before anything else is sent. Gloo ends the process where
a message is longer than the buffer that its receiver has posted. Pairwise exchanges have a tag by size; gloo's own
collectives, all-reduce above all, have none. So a graph or a call that runs one of those agrees first, on gloo.

Entering and starting cost a few appends; the store is written and read by the watchdog alone, over a connection of its
own. Each rank looks at the next one only, so the store is asked as often as there are ranks; where all neighbours
agree, all do.

**To fail** is to write why under the key "failed", which every watchdog reads, and to end what this rank waits in
(`zerofx._torch.abort_collectives`). The wait then raises `zerofx.OutOfStepError` with the reason. A process group
that failed is of no more use; restart the ranks. Where a rank was killed gloo raises, and the error is completed.

**Tensor-parallel ranks** (`partition_activations`) have a watch of their own group. Collectives of the model's own run
there, whose waits are PyTorch's. So a whole graph counts as a wait (`Watch.inside`). After the timeout it fails only
where a rank has not come to this graph, or was not heard of: to compute for long is no hang.

The timeout is `Options.timeout`; without one, that of the process group.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerofx import _torch
from zerofx.passes import pairwise
from zerofx.runtime.ranks.agree import OWN_OF_BACKEND, Collective, OutOfStepError, Schedule, own_part, publish
from zerofx.runtime.ranks.lookout import AFTER, BY_DATA, UNEVEN, Lookout
from zerofx.runtime.ranks.place import Place, standing
from zerofx.runtime.ranks.steps import Steps
from zerofx.runtime.ranks.tracing import while_profiled
from zerofx.runtime.ranks.turns import Turns

TICK = 1.0
"""Seconds between two looks."""
STILL = 0.05 * TICK
"""A thread that is at one instruction for so long stands still."""
SILENT = 4 * TICK
"""A rank whose watchdog has not written for so long is gone, or stopped."""
REMEMBERED = 256
"""Graphs that a rank remembers to have run."""


class Watch(Lookout):
    """What this rank is doing in one process group."""

    turns: Turns | None = None  # of modules whose graphs differ between ranks

    def __init__(self, name: str) -> None:
        group = _torch.resolve_process_group(name)
        self.name = name
        self.rank: int = group.rank()
        self.world_size: int = group.size()
        self.called: list[int] = list(range(self.world_size))  # the numbers by which messages call its ranks
        self.names: set[str] = {name}  # and those of process groups that share the watch
        self.others: list[Watch] = []  # of process groups that fail with this one
        self.default_store: dist.Store = _torch.default_store()
        self.store: dist.Store = own_part(self.default_store, f"zerofx/{name}/{self.world_size}", self.world_size)
        self.timeout: float | None = None
        self.failure: str = ""
        self.steps: Steps = Steps(self.store)
        self.families = 0
        self._runs: deque[tuple[int, str]] = deque(maxlen=REMEMBERED)
        self._count = 0
        self._published: set[str] = set()
        self._schedule = Schedule("nothing yet", ())
        self._started, self._running = 0, False
        self._waiting: dict[object, tuple[float, str]] = {}
        self._inside: tuple[float, str] | None = None
        self._calls: list[tuple[float, str]] = []
        self._thread = threading.get_ident()
        self._place: tuple[float, Place] = 0.0, Place()
        self._agrees = _torch.backend_name(group, torch.device("cpu")) == "gloo"
        self._heard: dict[int, tuple[int, float]] = {}  # of a rank: its last beat, and when that was new
        self._beat = 0
        self._stop = threading.Event()
        self._watching = threading.Thread(target=self._look, name=f"zerofx watchdog of {name!r}", daemon=True)
        self._watching.start()

    # ---- the rank's own thread --------------------------------------------------------------------------------------

    def enter(self, schedule: Schedule, digest: str, timeout: float | None = None) -> None:
        """The next collectives are those of ``schedule``."""
        self.check()
        self._count += 1
        self._runs.append((self._count, digest + AFTER + self.steps.told))
        self._thread = threading.get_ident()
        self._schedule, self._started, self.timeout, self._running = schedule, schedule.heard(0), timeout, True

    def starting(self) -> contextlib.AbstractContextManager[Any]:
        """The next collective of the schedule is started inside."""
        schedule, i = self._schedule, self._started
        return while_profiled(lambda: f"start {schedule.short(i)}")

    def subject(self) -> str:
        """The kind and the group of the next collective of the schedule that runs; "" where there is none."""
        due = self._running and self._started < len(self._schedule.collectives)
        return self._schedule.short(self._started) if due else ""

    def started(self, works: list[dist.Work]) -> list[dist.Work]:
        """The next collective of the schedule is under way: ``works``, as one that explains itself when it fails."""
        i = self._started
        self.skip()
        return [_Watched(self, self._schedule, i, works)]

    def skip(self) -> None:
        """The next collective of the schedule is left out."""
        self._started = self._schedule.heard(self._started + 1)

    def check(self) -> None:
        """Raise what the watchdog found, if anything."""
        if self.failure:
            raise OutOfStepError(self.failure)

    def publish(self, schedule: Schedule, what: str | None) -> None:
        """A graph was compiled; see `zerofx.runtime.ranks.agree.publish`."""
        publish(self.store, schedule, what, self.rank, self.world_size)

    def agree(self, schedule: Schedule, digest: str) -> None:
        """Compare what was entered with what all others have, on gloo. A collective."""
        if not self._agrees:
            return
        mine = torch.frombuffer(bytearray.fromhex(digest), dtype=torch.uint8)
        told, works = pairwise.all_gather_small(mine, self.name, pairwise.COMPARISON_TAG)
        with self.waiting(schedule, 0):
            for work in works:
                work.wait()
        for rank, one in enumerate(told):
            if (theirs := bytes(one.tolist()).hex()) != digest:
                self._fail(self._out_of_step(rank, digest, theirs))
                self.check()

    @contextlib.contextmanager
    def alone(self, where: str, kind: str, group: str, nbytes: int, dtype: Any) -> Iterator[None]:
        """Collectives outside of any graph run inside."""
        schedule = Schedule(where, (Collective(kind, group, nbytes, str(dtype).removeprefix("torch.")),))
        digest = self._announce(schedule)
        if kind in OWN_OF_BACKEND:
            self.agree(schedule, digest)
        try:
            with self.waiting(schedule, 0):
                yield
        finally:
            self._running = False

    @contextlib.contextmanager
    def call(self, what: str) -> Iterator[None]:
        """This rank is in the call ``what`` inside, which every rank must make."""
        schedule = Schedule.of_call(what)
        digest = self._announce(schedule)
        self._calls.append((time.monotonic(), what))
        try:
            self.agree(schedule, digest)
            with self.explaining(what):
                yield
        except OutOfStepError as e:  # of all ranks alike: nobody waits
            self.failure = self.failure or str(e)
            raise
        finally:
            self._calls.pop()
        self.check()

    def _announce(self, schedule: Schedule) -> str:
        """Enter what was not compiled; returns its digest."""
        digest = schedule.digest
        if digest not in self._published:
            self.store.set(f"schedule/{digest}", schedule.to_json())
            self._published.add(digest)
        self.enter(schedule, digest, self.timeout)
        return digest

    @contextlib.contextmanager
    def waiting(self, schedule: Schedule, i: int) -> Iterator[None]:
        """This rank waits for a collective inside; what is raised there is explained."""
        key = object()
        self._waiting[key] = time.monotonic(), schedule.where(i)
        try:
            yield
        except OutOfStepError:
            raise
        except RuntimeError as e:
            raise OutOfStepError(self.failure or self.explain(schedule.where(i), e)) from e
        finally:
            self._waiting.pop(key, None)
        self.check()

    @contextlib.contextmanager
    def inside(self, what: str) -> Iterator[None]:
        """This rank runs a graph inside, and may wait in it for ``what``; where that is broken off it is explained."""
        self._inside = time.monotonic(), what
        try:
            with self.explaining(what):
                yield
        finally:
            self._inside = None
            self._heard.clear()
        self.check()

    @contextlib.contextmanager
    def explaining(self, what: str) -> Iterator[None]:
        """What breaks off a collective of ``what`` inside is explained."""
        try:
            yield
        except RuntimeError as e:  # of a collective that is not pairwise, so that nobody has explained it
            if isinstance(e, OutOfStepError) or not (self.failure or _torch.is_communication_error(e)):
                raise
            raise OutOfStepError(self.failure or self.explain(what, e)) from e
        finally:
            self._running = False

    def explain(self, what: str, error: RuntimeError) -> str:
        """Why a collective failed by itself: most likely somebody is gone. The other ranks are told."""
        why = str(error).splitlines()[0]
        try:
            before = self._states()
            time.sleep(SILENT)
            pairs = {rank: (before[rank], now) for rank, now in self._states().items()}
            silent = [r for r, (was, now) in pairs.items() if now is None or (was and now["beat"] == was["beat"])]
            gone = f"rank {', '.join(str(self.called[r]) for r in silent)} was not heard of for {SILENT:g} s"
            found = gone if silent else "all ranks are there"
            if not self.failure:
                self._fail(f"rank {self.called[self.rank]} waited for {what}, which failed: {found}. {why}")
            return self.failure
        except dist.DistError as e:
            return f"rank {self.rank} waited for {what}, which failed, and so did the store ({e}). {why}"

    # ---- the watchdog's thread --------------------------------------------------------------------------------------

    def _look(self) -> None:
        while not self._stop.wait(TICK):
            try:
                if _torch.default_store() is not self.default_store:
                    break
                self._tell()
                self._compare()
                self._check_waiting()
                self._look_around()
            except (RuntimeError, ValueError):  # the store, or the process group, is gone: so is what there is to watch
                break
        with contextlib.suppress(RuntimeError):  # the store is gone
            self._tell(ended=True)

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._watching.join(2 * TICK)

    def _tell(self, *, ended: bool = False) -> None:
        self._beat += 1
        now, place = time.monotonic(), self._where()
        if place != self._place[1]:
            self._place = now, place
        since, doing = self._calls[-1] if self._calls else next(iter(list(self._waiting.values())), self._place)
        state = {
            "beat": self._beat,
            "at": [self._count, self._started],
            "last": self._schedule.where(max(0, self._started - 1)),
            "runs": list(self._runs),
            "steps": self.steps.told,
            "ended": ended,
            "doing": str(doing),
            "since": now - since,
            "own": list(place.ranks) if doing == place and place.collective else [],
        }
        self.store.set(f"rank/{self.rank}", json.dumps(state))
        if not self.failure and self.store.check(["failed"]):
            self._fail(self.store.get("failed").decode())
        if self.store.check([key := f"waited for/{self.rank}"]):
            print(self.store.get(key).decode(), file=sys.stderr, flush=True)
            self.store.delete_key(key)

    def _where(self) -> Place:
        """Where the program is; nothing is said of one that goes on."""
        if _torch.compiles_now():  # its frames are being built, and it has not left its line
            return self._place[1]
        before = standing(self._thread)
        time.sleep(STILL)
        return Place.of(self._thread) if standing(self._thread) == before else Place()

    def _state(self, rank: int) -> dict[str, Any] | None:
        key = f"rank/{rank}"
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def _states(self) -> dict[int, dict[str, Any] | None]:
        return {rank: self._state(rank) for rank in range(self.world_size) if rank != self.rank}

    def _check_waiting(self) -> None:
        waiting = next(iter(list(self._waiting.values())), None)
        inside, now = self._inside, time.monotonic()
        since = waiting or inside
        if self.failure or since is None or self.timeout is None or now - since[0] < self.timeout:
            return
        at, missing = (self._count, self._started), []
        for rank, state in self._states().items():
            if state is None:
                missing.append(f"rank {self.called[rank]} (never heard of)")
                continue
            if self._heard.get(rank, (-1, now))[0] != state["beat"]:
                self._heard[rank] = state["beat"], now
            is_silent = now - self._heard[rank][1] > SILENT
            if tuple(state["at"]) < at if waiting is not None else state["at"][0] < at[0] or is_silent:
                missing.append(f"rank {self.called[rank]} (last at {state['last']})")
        if waiting is None and not missing:  # all are in this graph, and well
            return
        who = ", ".join(missing) or "no rank: all have started it"
        me, hint = self.called[self.rank], BY_DATA if self.turns is None else UNEVEN
        self._fail(f"rank {me} has waited {self.timeout:g} s for {since[1]}; missing: {who}. {hint}")

    def _fail(self, why: str) -> None:
        self.failure = why
        if self._place[1].collective and not (self._calls or self._waiting):  # what ends there is not ours to explain
            print(f"zerofx: {why}", file=sys.stderr, flush=True)
        if not self.store.check(["failed"]):
            self.store.set("failed", why)
        for name in self.names:
            pairwise.give_up(name)
            _torch.abort_collectives(name)
        for other in self.others:
            if not other.failure:
                other._fail(why)


class _Watched(_torch.PythonWork):
    """Works that are waited for as one, under the eyes of the watchdog."""

    def __init__(self, watch: Watch, schedule: Schedule, i: int, works: list[dist.Work]) -> None:
        super().__init__()
        self.watch = watch
        self.schedule = schedule
        self.i = i
        self.works: list[dist.Work] = works

    def wait(self, timeout: Any = None) -> bool:
        named = while_profiled(lambda: f"wait for {self.schedule.short(self.i)}")
        with self.ending(), named, self.watch.waiting(self.schedule, self.i):
            works, self.works = self.works, []
            for work in works:
                work.wait()
        return True


_watches: dict[str, Watch] = {}


def watch_of(name: str) -> Watch | None:
    """The watch of a process group; None where there is nobody to be out of step with, or nothing real."""
    watch = _watches.get(name)
    if watch is not None and watch.default_store is _torch.default_store():
        return watch
    if watch is not None:
        watch.stop()
        del _watches[name]
    group = _torch.resolve_process_group(name)
    if group.size() == 1 or not _torch.has_backend(group, ("gloo", "nccl")):
        return None
    _watches[name] = Watch(name)
    return _watches[name]


def watch_too(watch: Watch, name: str) -> None:
    """Collectives in the process group ``name``, of the same ranks, are under ``watch`` as well."""
    watch.names.add(name)
    _watches[name] = watch


def watch_together(watches: Sequence[Watch]) -> None:
    """This rank is in several process groups: where one fails, nobody is to wait for it in another."""
    for one in watches:
        one.others += [other for other in watches if other is not one and other not in one.others]


def alone(
    name: str, where: str, kind: str, group: str, nbytes: int, dtype: Any
) -> contextlib.AbstractContextManager[Any]:
    """A collective outside of any graph, under watch: `Watch.alone`."""
    watch = watch_of(name)
    return contextlib.nullcontext() if watch is None else watch.alone(where, kind, group, nbytes, dtype)


def skip_collective(name: str) -> None:
    """The next collective of the graph that runs is left out, on this rank as on the others."""
    if (watch := _watches.get(name)) is not None:
        watch.skip()


class _Exchanges:
    """Hears of every pairwise exchange (`zerofx.passes.pairwise.Watcher`)."""

    def starting(self, name: str) -> contextlib.AbstractContextManager[Any]:
        watch = _watches.get(name)
        return contextlib.nullcontext() if watch is None else watch.starting()

    def subject(self, name: str) -> str:
        return "" if (watch := _watches.get(name)) is None else watch.subject()

    def under_watch(self, works: list[dist.Work], name: str) -> list[dist.Work]:
        return works if (watch := _watches.get(name)) is None else watch.started(works)


@contextlib.contextmanager
def call(names: Collection[str], what: str) -> Iterator[None]:
    """A call that all ranks of the process groups ``names`` must make, under watch: `Watch.call`."""
    with contextlib.ExitStack() as stack:
        for watch in dict.fromkeys(_watches[name] for name in sorted(names) if name in _watches):
            stack.enter_context(watch.call(what))
        yield


def stepped(name: str, frozen: dict[str, tuple[str, ...]], *, counted: bool) -> None:
    """An optimizer with parameters that the process group ``name`` shares has stepped.

    ``frozen``: by group, the parameters that require no gradient. ``counted``: ranks hold parts of what was updated.
    """
    watch = _watches.get(name)
    if watch is None:
        return
    for group, names in frozen.items():
        watch.steps.froze(group, names)
    if counted:
        watch.steps.stepped()


def check(name: str) -> None:
    """Raise what the watchdog of a process group has found, if anything."""
    watch = _watches.get(name)
    if watch is not None:
        watch.check()


@atexit.register
def _end() -> None:
    """Before the store goes away with rank 0: say goodbye, and look whether the ranks have stepped alike."""
    for watch in dict.fromkeys(_watches.values()):
        watch.stop()
        watch.last_look()


pairwise.WATCHERS.append(_Exchanges())
