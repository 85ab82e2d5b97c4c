"""The frame of a graph once more, by the code that Inductor generated for it: its lines have an order of their own.

::

    buf22 = empty_strided_cpu((2099200, ), (1, ), torch.float32)      a pack begins here, long before it is sent
    extern_kernels.mm(…, out=reinterpret_tensor(buf22, …))
    …
    buf23 = torch.ops.zerofx.all_to_all_pairwise.default(buf22, 2, '0', room=4)
    torch.ops._c10d_functional.wait_tensor.default(buf7)
    …

`zerofx.passes.place` has numbered the rooms of operators. Here each room gets its times, as places among the lines
that touch memory. What such an operator is given, a pack or a shard in 16 bits, has a room, too, if a line allocates
it; that line finds it by its own number (`zerofx.passes.pool.empty_strided`).

Not in the frame: what leaves, or is given to an update, which keeps it; what is made in a branch or a loop, or by a
line that runs twice.

Sound because a memory's last use is the last line that touches it under any name, or waits for what it is sent by: the
reading that `zerofx.passes.proof.code` rests on, which proves the outcome.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from zerofx.passes.place import framed
from zerofx.passes.pool import Frame, Room
from zerofx.passes.proof.code.line import Line, Memory
from zerofx.passes.proof.code.wrapper import Walk, Wrapper


def place_in_code(code: str, frame: Frame) -> Frame | None:
    """The frame of ``code``, which was generated for the graph of ``frame``; None: there is no code to read."""
    wrapper = Wrapper(code)
    if wrapper.call is None:
        return None
    reading = _Reading(Walk(wrapper), frame)
    for line in reading.walk.lines():
        reading.read(line)
    return reading.frame_of_code()


@dataclass
class _Reading:
    """One walk over a wrapper.

    Attributes:
        time: how many lines there were.
        first, last: of each memory, when it is touched.
        rooms: of each memory that has one, what is known of it.
        sends: of what a collective brings, what it is at until it was waited for.
        out: what has no place in a frame.
    """

    walk: Walk
    frame: Frame
    time: int = 0
    first: dict[Memory, int] = field(default_factory=dict)
    last: dict[Memory, int] = field(default_factory=dict)
    rooms: dict[Memory, Room] = field(default_factory=dict)
    sends: dict[Memory, set[Memory]] = field(default_factory=dict)
    out: set[Memory] = field(default_factory=set)

    def read(self, line: Line) -> None:
        """Note what a line touches, makes, sends and waits for."""
        self.time += 1
        result = {line.result} - {None}
        touched = {whole(m) for m in line.reads.union(line.writes, result, *line.values)}
        for memory in touched:
            self.first.setdefault(memory, self.time)
            self.last[memory] = self.time
        if line.kind in ("return", "step") or self.walk.loops:
            self.out |= touched
        if line.kind == "wait":
            for sent in set().union(*(self.sends.pop(memory, ()) for memory in touched)):
                self.last[sent] = self.time
        elif line.kind == "start":
            for memory in result or {whole(m) for m in line.writes}:
                self.sends.setdefault(memory, set()).update(touched)
        if (asked := self.frame.numbered.get(line.room)) is not None:
            for memory in result:
                self.rooms[memory] = asked
            given = {whole(m) for m in line.reads} & self.walk.allocated.keys()
            for memory in given - self.rooms.keys():
                number, nbytes = self.walk.allocated[memory]
                self.rooms[memory] = Room(-number, f"line {number}", "sent", asked.group, nbytes, 0, 0)

    def frame_of_code(self) -> Frame:
        """What has a room lives from its first use to its last."""
        for memory in set().union(*self.sends.values()):  # nobody here waits for it
            self.out.add(memory)
        runs = Counter(number for number, _ in self.walk.allocated.values())
        twice = Counter(room.number for room in self.rooms.values())
        rooms = [
            replace(room, first=self.first[memory], last=self.last[memory])
            for memory, room in self.rooms.items()
            if memory not in self.out and twice[room.number] == 1 and runs[-room.number] <= 1
        ]
        placed = framed(rooms, order="code")
        return replace(placed, lines={-room.number: room for room in placed.rooms if room.number < 0})


def whole(memory: Memory) -> Memory:
    """What a call returned, of one of its results."""
    return whole(memory[0]) if isinstance(memory, tuple) else memory
