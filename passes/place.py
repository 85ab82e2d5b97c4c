"""Every buffer that a graph makes for its collectives has a place in one frame, from its node to its last use.

::

    start = all_gather_pairwise(shard, M, pg)                start = all_gather_pairwise(shard, M, pg, room=0)
    full = wait_tensor(start)                                full = wait_tensor(start)
    ...                                            ─────▶    ...
    discard(full)                                            discard(full)
    pack = cat([dw, db])                                     pack = zerofx.pack([dw, db], room=1)
    others = all_to_all_pairwise(pack, M, pg)                others = all_to_all_pairwise(pack, M, pg, room=2)

    ctx.frame    room 0: bytes 0 to 4096     room 1: bytes 0 to 4096, when 0 is gone     room 2: bytes 4096 to 6144

Whoever runs the graph takes the frame once (`zerofx.passes.pool`); an operator finds its room by the number. A buffer
lives from the node that makes it to the last one that reads it or a view of it. What a collective sends, and what it
brings, also live until it was waited for. `zerofx.passes.colour` finds the places.

What a graph has brought of state that lives elsewhere (`zerofx.passes.carry`) lies there, too: from the start of
bringing it, to the last use of what came.

Not in the frame: what leaves the graph, or may (an update keeps the gradient that it is given); what has no fixed size;
what other operators make than those that take a room. These have memory of their own, as ever.

Code that Inductor generates packs gradients by itself, and orders its lines by itself. There packs stay ``cat``, and
the frame is made once more, of the code (`zerofx.passes.place_in_code`).

Sound because nothing reads a buffer behind its last use, by the operators' schemas: what `discard` rests on. `verify`
proves it once more, and does not ask how long a buffer was thought to live.

Requires ``lower``, which spells the collectives. Provides ``ctx.frame``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from zerofx._torch import OpOverload, inner_call, pinned, pytree
from zerofx.passes import edit
from zerofx.passes.carry import FETCH, UNSTOW, WAIT_FETCH, WAIT_UNSTOW
from zerofx.passes.colour import Interval, colour
from zerofx.passes.context import Context
from zerofx.passes.pool import Frame, Room
from zerofx.passes.travel import communicates

_CAT, _PACK, _STEP = torch.ops.aten.cat.default, torch.ops.zerofx.pack.default, torch.ops.zerofx.step.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_BRING, _BROUGHT = (FETCH, UNSTOW), (WAIT_FETCH, WAIT_UNSTOW)


def place(gm: GraphModule, ctx: Context) -> int:
    """Give every such buffer its room; returns how many have one."""
    if not ctx.pool:
        return 0
    found = _Lives(gm).found()
    rooms = [
        Room(i, life.node.name, *_tag(life.node), life.nbytes, life.first, life.last) for i, life in enumerate(found)
    ]
    ctx.frame = framed(rooms)
    for room, life in zip(ctx.frame.rooms, found, strict=True):
        call = inner_call(life.node)
        if call.target is _CAT and ctx.executor == "eager":
            call.target = _PACK
        if takes_room(call.target):
            call.kwargs = {**call.kwargs, "room": room.number}
        if call is not life.node:
            call.graph.owning_module.recompile()  # type: ignore[union-attr]
    return edit.finish(gm, len(rooms))


def framed(rooms: list[Room], **more: Any) -> Frame:
    """The frame of ``rooms`` whose times are known."""
    starts, nbytes, least = colour([Interval(room.first, room.last, room.nbytes) for room in rooms])
    placed = tuple(replace(room, start=start) for room, start in zip(rooms, starts, strict=True))
    return Frame(placed, nbytes, least, **more)


def takes_room(target: Any) -> bool:
    """Whether an operator takes the number of a room."""
    return isinstance(target, OpOverload) and any(a.name == "room" for a in target._schema.arguments)


def _tag(node: Node) -> tuple[str, str]:
    tag = node.meta.get("zerofx")
    return (tag.kind, tag.group) if tag is not None else ("", "")


@dataclass
class _Life:
    """One buffer: the places of the node that makes it, and of its last use."""

    node: Node
    first: int
    last: int
    nbytes: int
    leaves: bool = False


@dataclass
class _Lives:
    """One walk over a graph.

    Attributes:
        holds: of a node, the buffers that its value may lie in;
        behind: the collectives that it is what they bring, or a view of that.
        sends: of a collective, the buffers that it is at until it was waited for.
    """

    gm: GraphModule
    lives: list[_Life] = field(default_factory=list)
    holds: dict[Node, list[_Life]] = field(default_factory=dict)
    behind: dict[Node, list[Node]] = field(default_factory=dict)
    sends: dict[Node, list[_Life]] = field(default_factory=dict)

    def found(self) -> list[_Life]:
        """The buffers that have a place, in the order of the graph."""
        under_way: dict[Node, None] = {}
        for i, node in enumerate(self.gm.graph.nodes):
            if node.op == "output":
                for life in self._held(node.all_input_nodes):
                    life.leaves = True
            elif node.op == "call_function":
                self._read(node, i, under_way)
        for start in under_way:  # whoever waits for it is not in this graph
            for life in self.sends[start]:
                life.leaves = True
        return [life for life in self.lives if not life.leaves]

    def _read(self, node: Node, i: int, under_way: dict[Node, None]) -> None:
        target, args, kwargs, _ = pinned(node) or (node.target, node.args, node.kwargs, ())
        inputs = [x for x in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(x, Node)]
        held = self._held(inputs)
        for life in held:
            life.last = i
            life.leaves = life.leaves or target is _STEP
        shares = target in (_WAIT, *_BROUGHT) or edit.may_alias(_Call(target))  # type: ignore[arg-type]
        self.holds[node] = held if shares else []
        self.behind[node] = [start for x in inputs for start in self.behind.get(x, ())] if shares else []
        if (made := self._made(node, target, args, i)) is not None:
            self.lives.append(made)
            self.holds[node] = [*self.holds[node], made]
        if target is _WAIT:
            for start in self.behind[node]:
                under_way.pop(start, None)
                for life in self.sends[start]:
                    life.last = i
            self.behind[node] = []
        elif communicates(target):
            self.sends[node] = [*held, *self.holds[node]]
            self.behind[node] = [node]
            under_way[node] = None

    def _held(self, nodes: list[Node]) -> list[_Life]:
        found = {id(life): life for node in nodes for life in self.holds.get(node, ())}
        return list(found.values())

    def _made(self, node: Node, target: Any, args: Any, i: int) -> _Life | None:
        if not takes_room(target) and not (target is _CAT and edit.is_kind(node, "pack")):
            return None
        value = (args[0] if target in _BRING else node).meta.get("val")
        if not isinstance(value, torch.Tensor) or type(value.numel()) is not int or value.device.type != "cpu":
            return None
        return _Life(node, i, i, value.numel() * value.dtype.itemsize) if value.numel() else None


@dataclass(frozen=True)
class _Call:
    target: Callable[..., Any]
