"""Streams and events that are not there, under `zerofx.runtime.state.copies.AcceleratorCopies` as it ships.

::

    its streams, and the computing one     ─▶  lanes, which tell the log
    a copy_ inside of ``with lane``        ─▶  noted, and done as late as anybody waits for it

A copy holds neither of its tensors, as on a GPU it does not. The CPU's tensors stand for the device's. `unordered`
finds what touches memory that a copy, a collective or the host may be at: of two events neither of which comes before
the other, by what was recorded and waited for.
"""

from __future__ import annotations

import contextlib
import ctypes
import unittest.mock
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tests.nccl.events import Event, Log, spans, touch
from tests.nccl.recording import Change, alone_with
from tests.seams.copies import staged
from zerofx._torch.tensors import TorchDispatchMode
from zerofx.kernels import cpu
from zerofx.runtime.optim import through_host
from zerofx.runtime.optim.adamw import AdamW
from zerofx.runtime.state.copies import AcceleratorCopies

LANES = ("out", "back")
"""In the order in which `AcceleratorCopies` makes its streams."""

Clock = dict[str, int]


class Done:
    """An event: a place in the order of a lane."""

    def __init__(self, lane: Lane, number: int) -> None:
        self.lane, self.number, self.place = lane, number, len(lane.given)

    def synchronize(self) -> None:
        self.lane.run(self.place)
        self.lane.log.add(Event("host waits", self.lane.name or "computing", self.number, "host"))


class Lane:
    """A stream. What it is given is done when somebody waits for it; on the computing one, at once."""

    def __init__(self, log: Log, name: str) -> None:
        self.log, self.name = log, name
        self.given: list[Any] = []
        self.done = 0
        self._entered: list[Under] = []

    def __enter__(self) -> None:
        self._entered.append(Under(self))
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)

    def record_event(self) -> Done:
        mark = Done(self, next(self.log.numbers))
        self.log.add(Event("record", self.name, mark.number, self.name))
        return mark

    def wait_event(self, mark: Done) -> None:
        self.log.add(Event("block", mark.lane.name or "computing", mark.number, self.name))
        self.given.append(lambda: mark.lane.run(mark.place))
        if not self.name:
            self.run(len(self.given))

    def run(self, place: int) -> None:
        while self.done < place:
            self.done += 1
            self.given[self.done - 1]()

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        to, of, nbytes = into.data_ptr(), source.data_ptr(), source.nbytes
        self.log.add(Event("compute", "copy", None, self.name, spans([source]), spans([into])))
        self.given.append(lambda: ctypes.memmove(to, of, nbytes))


class Under(TorchDispatchMode):
    """``with lane``: copies inside are the lane's."""

    def __init__(self, lane: Lane) -> None:
        super().__init__()
        self.lane = lane

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.copy_.default, f"{func} on the stream {self.lane.name}"
        into, source, *non_blocking = args
        assert non_blocking == [True], "the host waits for this copy"
        assert into.dtype == source.dtype and into.is_contiguous() and source.is_contiguous(), "it needs temporaries"
        self.lane.copy(into, source)
        return into


class Pretended(AcceleratorCopies):
    """With memory that is not pinned. `streams` says what its streams are."""

    @classmethod
    def takes(cls, device: torch.device) -> bool:
        return device.type == "cpu"

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 255, dtype=torch.uint8)  # which floating-point types read as NaN


@contextlib.contextmanager
def streams(log: Log) -> Iterator[None]:
    """Copies inside are on lanes that tell ``log``, and so does arithmetic on the host."""
    computing, names = Lane(log, ""), iter(LANES)
    theirs = cpu.adamw

    def adamw(params: Any, grads: Any, exp_avgs: Any, exp_avg_sqs: Any, *rest: Any) -> None:
        memory = spans([*params, *grads, *exp_avgs, *exp_avg_sqs])
        log.add(Event("compute", "adamw", None, "host", memory, memory))
        theirs(params, grads, exp_avgs, exp_avg_sqs, *rest)

    with contextlib.ExitStack() as stack:
        for owner, name, new in (
            (Pretended, "stream", lambda self: Lane(log, next(names))),
            (Pretended, "computing", lambda self: computing),
            (cpu, "adamw", adamw),
            (through_host, "UNIT", 16),
        ):
            stack.enter_context(unittest.mock.patch.object(owner, name, new))
        stack.enter_context(staged(Pretended, buffer=256))
        yield


@contextlib.contextmanager
def alone_on_lanes(change: Change | None = None) -> Iterator[Log]:
    """`alone_with`, with `streams`. The optimizer's update is what it does on lanes and on the host."""
    update = AdamW._update
    with alone_with(change) as log, unittest.mock.patch.object(AdamW, "_update", update), streams(log):
        yield log


def unordered(events: Sequence[Event]) -> list[str]:
    """Each two events that touch the same memory, one of them to write, and of which neither comes before the other."""
    found, clocks, marks = [], {}, {}  # type: tuple[list[str], dict[str, Clock], dict[int | None, Clock]]
    touched: list[tuple[str, int, Event]] = []
    for event in events:
        lane = event.stream if event.kind in ("start", "record", "block") or event.stream in (*LANES, "host") else ""
        clock = clocks.setdefault(lane, {})
        _join(clock, clocks.get("host", {}))  # the host gives a lane what comes behind all that it has waited for
        if event.kind in ("block", "host waits", "wait"):
            _join(clock, marks.get(event.number, {}))
            continue
        if event.kind == "record":
            marks[event.number] = dict(clock)
            continue
        if event.kind == "drop":
            continue
        if event.kind == "start":
            _join(clock, clocks.get("", {}))
        clock[lane] = clock.get(lane, 0) + 1
        for other_lane, at, other in touched:
            before = at <= clock.get(other_lane, 0)
            if not before and (touch(event.writes, other.reads + other.writes) or touch(event.reads, other.writes)):
                found.append(f"{_named(event)} while {_named(other)} may be at its memory")
        touched.append((lane, clock[lane], event))
        if event.kind == "start":
            marks[event.number] = dict(clock)
    return found


def _join(clock: Clock, other: Clock) -> None:
    for lane, at in other.items():
        clock[lane] = max(clock.get(lane, 0), at)


def _named(event: Event) -> str:
    return f"{event.what} {event.stream}".rstrip()
