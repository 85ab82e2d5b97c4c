"""What was done in which order, on the computing stream and on those of collectives; and what of it is a race.

An event reads and writes *spans* of memory, ``(first byte, behind the last)``. `races` finds each that touches memory
while a collective may be at it::

    start 3     all-gather     reads shard    writes buffer
    compute     mm             reads buffer                    ◀── a race: nothing has waited for 3
    wait 3
    compute     mm             reads buffer
    free                       writes buffer
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

Span = tuple[int, int]
Kind = Literal["start", "wait", "compute", "free", "drop", "record", "block", "host waits"]


@dataclass(frozen=True)
class Event:
    """One thing that the host has put on a stream.

    Attributes:
        kind: "free" gives memory back, whoever still holds the tensor; "drop" lets a tensor go, whose memory is free
            if nobody else holds it. The last three are of an event on a stream (tests/nccl/lanes.py): it is recorded, a
            stream waits for it, the host does.
        what: the operator, or the collective.
        number: the collective's.
        stream: that it runs on; "" is the computing one.
        group: of zerofx's, if known.
    """

    kind: Kind
    what: str
    number: int | None = None
    stream: str = ""
    reads: tuple[Span, ...] = ()
    writes: tuple[Span, ...] = ()
    group: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.what}{'' if self.number is None else f' {self.number}'} {self.group}".rstrip()


@dataclass
class Log:
    """The events of one process, in the order that its host made them."""

    events: list[Event] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    streams: Iterator[int] = field(default_factory=itertools.count)

    def add(self, event: Event) -> None:
        self.events.append(event)

    def clear(self) -> None:
        """Forget what is through. Nothing may be under way."""
        assert not under_way(self.events), "a collective was started and not waited for"
        self.events.clear()

    def where(self, kind: Kind | None = None, what: str = "", over: Iterable[Span] = (), group: str = "") -> list[int]:
        """The places of events of a kind, of an operator or collective, of a group, that touch ``over``."""
        over = tuple(over)
        return [
            i
            for i, event in enumerate(self.events)
            if kind in (None, event.kind)
            and what in event.what
            and group in ("", event.group)
            and (not over or touch(over, event.reads + event.writes))
        ]

    def span_of(self, start: int) -> tuple[int, int]:
        """From the start of a collective to its wait, or to the end of the log."""
        number, end = self.events[start].number, len(self.events)
        return start, next((i for i, e in enumerate(self.events) if e.kind == "wait" and e.number == number), end)


def spans(tensors: Iterable[torch.Tensor]) -> tuple[Span, ...]:
    """The memory of tensors, from the first byte of each to its last."""
    return tuple(
        (x.data_ptr(), x.data_ptr() + x.element_size() * (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride()))))
        for x in tensors
        if x.numel() and x.untyped_storage().nbytes()
    )


def storage_span(tensor: torch.Tensor) -> tuple[Span, ...]:
    """All memory of its storage."""
    storage = tensor.untyped_storage()
    return ((storage.data_ptr(), storage.data_ptr() + storage.nbytes()),) if storage.nbytes() else ()


def touch(a: Iterable[Span], b: Sequence[Span]) -> bool:
    """Whether two lots of memory have a byte in common."""
    return any(first < other_end and other_first < end for first, end in a for other_first, other_end in b)


def under_way(events: Sequence[Event]) -> list[Event]:
    """The collectives that were started and not waited for."""
    waited = {event.number for event in events if event.kind == "wait"}
    return [event for event in events if event.kind == "start" and event.number not in waited]


def races(events: Sequence[Event]) -> list[str]:
    """What touches memory that a collective is at. Collectives of one stream follow each other, whatever they touch.

    To drop a tensor is none: NCCL's work holds it until the wait.
    """
    found, open_ = [], {}  # type: tuple[list[str], dict[int | None, Event]]
    for event in events:
        if event.kind == "wait":
            open_.pop(event.number, None)
            continue
        for other in open_.values() if event.kind != "drop" else ():
            if event.kind == "start" and event.stream == other.stream:
                continue
            if touch(event.writes, other.reads + other.writes) or touch(event.reads, other.writes):
                found.append(f"{event} while {other.what} {other.number} may be at its memory")
        if event.kind == "start":
            open_[event.number] = event
    return found
