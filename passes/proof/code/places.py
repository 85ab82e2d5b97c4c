"""The rule "place" of generated code: nothing touches a buffer of the frame whose addresses another has taken.

Addresses are the frame's: an operator with the number of a room, and a line that allocates, will be given them. How
long a buffer was thought to live is not asked. It has its addresses from the first line that touches it, until a buffer
that overlaps it is touched for the first time. From then on it is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from zerofx.passes.pool import Frame, Room
from zerofx.passes.proof.code.line import Line, Memory
from zerofx.passes.proof.code.wrapper import Walk

Refuse = Callable[[str, str], None]
"""Called with what was found, and what was expected."""


@dataclass
class Places:
    """Which memories have which addresses, while a wrapper is read.

    Attributes:
        held: of each memory of the frame, its room.
        lost: of each that another has taken the addresses of, the other's name.
    """

    walk: Walk
    frame: Frame
    held: dict[Memory, Room] = field(default_factory=dict)
    lost: dict[Memory, str] = field(default_factory=dict)

    def read(self, line: Line, busy: Iterable[Memory], refuse: Refuse) -> None:
        """Check one line. ``busy``: what collectives are at, those that the line starts among them."""
        touched = line.reads.union(line.writes, *line.values)
        touched |= {line.result} if line.result is not None else set()
        touched |= {memory[0] for memory in touched if isinstance(memory, tuple)}
        for memory in touched:
            if memory in self.lost:
                refuse(f"it touches a buffer whose addresses {self.lost[memory]} has", "addresses of its own")
        for memory in touched - self.held.keys():
            if (room := self._room(memory, line)) is not None:
                self._take(memory, room, {*touched, *busy}, refuse)
        if line.kind in ("return", "step") and (out := touched & self.held.keys()):
            name = self.held[min(out, key=str)].name
            refuse(f"{name}, which lies in the graph's frame, leaves it", "memory that outlives the frame")

    def _room(self, memory: Memory, line: Line) -> Room | None:
        if memory == line.result and line.room >= 0:
            return self.frame.numbered.get(line.room)
        number, nbytes = self.walk.allocated.get(memory, (-1, 0))
        room = self.frame.lines.get(number)
        return room if room is not None and room.nbytes == nbytes else None

    def _take(self, memory: Memory, room: Room, busy: set[Memory], refuse: Refuse) -> None:
        start, stop = room.start, room.start + room.nbytes
        if not 0 <= start <= stop <= self.frame.nbytes:
            refuse(f"{room.name} lies at bytes {start:,} to {stop:,}", f"a place in the frame of {self.frame.nbytes:,}")
        for other, there in self.held.items():
            if other in self.lost or there.start >= stop or there.start + there.nbytes <= start:
                continue
            if other in busy:
                refuse(f"{room.name} gets addresses of {there.name}, which is still in use", "a place that is free")
            self.lost[other] = room.name
        self.held[memory] = room
