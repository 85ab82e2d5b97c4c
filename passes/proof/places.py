"""The rule "place": in the frame of a graph, nothing touches a buffer once another has its addresses.

Read once more, node by node. How long a buffer was thought to live is not asked. It has its addresses from the node
that makes it, until a node makes another that overlaps it. From then on it is lost, and so are all views of it. What a
collective sends or brings is in use until the wait, and so is what is brought of state that lives elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.fx import Node

from zerofx._torch import OpOverload
from zerofx.passes.carry import FETCH, UNSTOW, WAIT_FETCH, WAIT_UNSTOW
from zerofx.passes.pool import Frame, Room
from zerofx.passes.proof.facts import STEP
from zerofx.passes.proof.known import Known
from zerofx.passes.proof.meaning import Op
from zerofx.passes.travel import communicates

_WAITS = (torch.ops._c10d_functional.wait_tensor.default, WAIT_FETCH, WAIT_UNSTOW)
_BRING = (FETCH, UNSTOW)


def check_places(known: Known) -> None:
    """Check the whole graph; nothing to do where there is no frame."""
    if known.ctx.frame is not None:
        _Places(known, known.ctx.frame).check()


@dataclass
class _Places:
    """One walk.

    Attributes:
        views: of each node, the makers of the memory that it may look at.
        begun: of each node, the collectives that may still be bringing it.
        held: by maker, its room.
        lost: by maker, who has its addresses by now.
        at: by collective, what it is at until the wait.
    """

    known: Known
    frame: Frame
    views: dict[Node, set[Node]] = field(default_factory=dict)
    begun: dict[Node, set[Node]] = field(default_factory=dict)
    held: dict[Node, Room] = field(default_factory=dict)
    lost: dict[Node, Node] = field(default_factory=dict)
    at: dict[Node, set[Node]] = field(default_factory=dict)

    def check(self) -> None:
        for node in self.known.nodes:
            if node.op == "output":
                self._check_kept(node, self._seen(node.all_input_nodes))
            elif node.op == "call_function":
                self._read(Op.of(node))
        if len(self.held) < len(self.frame.rooms):
            missing = next(room.name for room in self.frame.rooms if room not in self.held.values())
            self.known.fail("place", self.known.gm.graph.output_node(), f"no node is in the room of {missing!r}", "it")

    def _read(self, op: Op) -> None:
        node, seen = op.node, self._seen(op.inputs)
        for maker in seen & self.lost.keys():
            other = self.lost[maker].name
            self.known.fail(
                "place", node, f"it touches {maker.name!r}, whose addresses {other!r} has by then", "its own addresses"
            )
        if op.target is STEP:
            self._check_kept(node, seen)
        views = op.shares_memory() or op.target in _WAITS
        self.views[node] = set(seen) if views else set()
        self.begun[node] = set().union(*(self.begun.get(x, ()) for x in op.inputs)) if views else set()
        room = self._room(op)
        if room is not None:
            self.views[node].add(node)
        if op.target in _WAITS:
            for start in self.begun.pop(node):
                self.at.pop(start, None)
        elif communicates(op.target) or op.target in _BRING:
            self.begun[node] = {node}
            self.at[node] = seen | self.views[node]
        if room is not None:
            self._take(op, room, seen)

    def _seen(self, nodes: list[Node]) -> set[Node]:
        return set().union(*(self.views.get(node, ()) for node in nodes))

    def _room(self, op: Op) -> Room | None:
        """The room of what it makes."""
        room, asked = self.frame.named.get(op.node.name), op.kwargs.get("room", -1)
        takes = isinstance(op.target, OpOverload) and "room" in {a.name for a in op.target._schema.arguments}
        if (room.number if room is not None and takes else -1) != asked:
            has = "none" if room is None else f"number {room.number}"
            self.known.fail("place", op.node, f"it asks for the room of number {asked}", f"the one that it has, {has}")
        return room

    def _take(self, op: Op, room: Room, seen: set[Node]) -> None:
        node, value = op.node, (op.args[0] if op.target in _BRING else op.node).meta["val"]
        nbytes, start, stop = value.numel() * value.dtype.itemsize, room.start, room.start + room.nbytes
        if nbytes != room.nbytes or not 0 <= start <= stop <= self.frame.nbytes:
            found = f"its {nbytes:,} bytes have the places {start:,} to {stop:,}"
            self.known.fail("place", node, found, f"as many, in the frame of {self.frame.nbytes:,}")
        busy = seen.union(*self.at.values())
        for other, there in self.held.items():
            if other in self.lost or there.start >= stop or there.start + there.nbytes <= start:
                continue
            if other in busy:
                self.known.fail(
                    "place", node, f"it gets addresses of {other.name!r}, which is still in use", "a place that is free"
                )
            self.lost[other] = node
        self.held[node] = room

    def _check_kept(self, node: Node, seen: set[Node]) -> None:
        for maker in seen & self.held.keys():
            self.known.fail("place", node, f"{maker.name!r}, which lies in the frame, leaves the graph", "other memory")
