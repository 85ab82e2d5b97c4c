"""What is known of a finished graph while it is read, and the rules that more than one kind of node can break."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import torch
from torch.fx import GraphModule, Node

from zerofx.model.layout import GroupLayout, Slot
from zerofx.passes.context import Context, Meanings
from zerofx.passes.proof.facts import Flat, Pack, Part, Started
from zerofx.passes.proof.live import Buffer
from zerofx.passes.proof.meaning import Number, Numbering, Op, Original
from zerofx.passes.proof.refusal import refuse
from zerofx.passes.proof.rules import ask

_aten = torch.ops.aten

T = TypeVar("T")


class Known:
    """What is known of a graph, as far as it was read; `zerofx.passes.proof.reader` finds it out.

    Attributes:
        nodes, order: of the graph; each node's place.
        before: the graph before all passes, read; None where it is not known.
        facts: of nodes that are no values of the model's (facts.py).
        numbers: of those that are (meaning.py).
        memory: of nodes that may be views of gathered buffers: which.
        weights: nodes that may share memory with a shard, a replica or a gathered buffer, and the byte of it where the
            weight begins that they look at.
        buffers: the gathered ones, by the node that yields them.
        derived: the nodes that are a weight, or views and casts of one.
        waits: for each collective's start.
        travelling: gradients that are sent from where they are, and what shares their memory.
        ops: of all calls.
        homes: by group, the inputs that hold its weights.
        updates: the operations that change these.
        apart: the starts of a feature's collectives, which neither gather a shard nor reduce a pack.
        owned: buffers of a feature's that weights may be read from, by the node that yields them.
        renumbered: by the name of what was saved, the number of what is the same view of the same memory.
        own: what a user's passes inserted; and
        fresh: of these, what has memory of its own.
    """

    def __init__(self, gm: GraphModule, ctx: Context) -> None:
        self.gm = gm
        self.ctx = ctx
        self.meanings: Meanings = ctx.handover.meanings
        self.numbering: Numbering = Numbering(self.meanings)
        self.nodes: list[Node] = list(gm.graph.nodes)
        self.order: dict[Node, int] = {node: i for i, node in enumerate(self.nodes)}
        self.before: Original | None = None
        if ctx.before is not None:
            self.before = Original.read(ctx.before, ctx, self.numbering)
        self.facts: dict[Node, Any] = {}
        self.numbers: dict[Node, Number] = {}
        self.memory: dict[Node, list[Buffer]] = {}
        self.weights: dict[Node, int] = {}
        self.buffers: dict[Node, Buffer] = {}
        self.derived: set[Node] = set()
        self.waits: dict[Node, list[Node]] = {}
        self.travelling: set[Node] = set()
        self.started: dict[Flat, Node] = {}
        self.ops: dict[Node, Op] = {}
        self.writes: list[Number] = []
        self.homes: dict[str, list[Node]] = {}
        self.updates: list[Op] = []
        self.apart: set[Node] = set()
        self.owned: dict[Node, Buffer] = {}
        self.renumbered: dict[str, Any] = {}
        self.own: set[Node] = set()
        self.fresh: set[Node] = set()
        self._records: dict[type, Any] = {}
        self._ranks: int = ctx.world_size
        self._calls = itertools.count()
        self._slots: dict[str, dict[tuple[int, tuple[int, ...]], Slot]] = {}
        self._brought: dict[tuple[str, str], Node] = {}  # group and parameter: the buffer it is read from

    def record(self, kind: type[T]) -> T:
        """What a feature's rules have found out: one record of its own class."""
        return self._records.setdefault(kind, kind())

    def is_part(self, flat: Flat) -> bool:
        """Whether it is a part of a shard, of which each replica has one: it crosses between hosts first."""
        several = self.ctx.replicas > 1 and not flat.whole
        return several and flat.layout.world_size == self._ranks * self.ctx.replicas

    def slot(self, layout: GroupLayout, offset: int, shape: tuple[int, ...]) -> Slot | None:
        """The parameter that lies there, if it is all of it."""
        if layout.name not in self._slots:
            self._slots[layout.name] = {(slot.offset, slot.shape): slot for slot in layout.slots}
        return self._slots[layout.name].get((offset, shape))

    def check_collective(
        self, op: Op, layout: GroupLayout, world_size: int, process_group: str, right: str, operation: str = "sum"
    ) -> None:
        found = (world_size, process_group, operation)
        wanted = (layout.world_size, right, "sum")
        if found != wanted:
            self.fail(
                "group", op.node, "it runs over {} ranks of {!r} ({})".format(*found), "{} of {!r} ({})".format(*wanted)
            )
        if type(op.value.numel()) is not int:
            self.fail("order", op.node, f"it moves {op.value.numel()} elements, which depends on data", "a number")

    def refreshed(self, node: Node, flat: Flat) -> None:
        """The input ``node`` is ``flat``, and whoever runs the graph has started to bring it up to date."""
        self.facts[node] = Started(node, flat)
        self.waits[node] = []

    def start_gather(self, op: Op, flat: Flat) -> Flat:
        """Check the start of a gather; returns what it brings."""
        _, world_size, process_group = op.args
        core = replace(flat, whole=True), flat.layout, self.ctx.process_group
        brings, over, right = ask("gathers", self, op, flat) or core
        self.check_collective(op, over, world_size, process_group, right)
        if flat in self.started:
            self.fail("gather", op.node, f"{self.started[flat].name!r} brings the same", "one gather")
        self.started[flat] = op.node
        self.waits[op.node] = []
        return brings

    def new_buffer(self, node: Node, start: Node, flat: Flat, wait: Node | None = None) -> None:
        """``node`` is a gathered buffer; ``wait``: for what it was made of, if that is another node."""
        self.facts[node] = flat
        value = node.meta["val"]
        nbytes = value.numel() * value.dtype.itemsize
        self.buffers[node] = Buffer(node, start, flat.layout.name, nbytes, last=self.order[node], wait=wait or node)
        self.memory[node] = [self.buffers[node]]

    def layout_of(self, pack: Pack, node: Node) -> GroupLayout:
        """Of the group whose gradients are in ``pack``, by the tag of ``node``; where that is unknown, of any."""
        layouts = {ref.layout.name: ref.layout for ref in self.ctx.gradients.values()}
        tag = node.meta.get("zerofx")
        if not layouts:
            self.fail("reduction", node, "there are no gradients to reduce", "no reduction")
        return layouts.get(tag.group if tag else "") or next(iter(layouts.values()))

    def pack(self, node: Node) -> Pack:
        """``node`` as gradients and zeros, end to end."""
        parts, end, packed = [], 0, Op.of(node)
        together = packed.target is _aten.cat.default and len(packed.args) == 1 and not packed.kwargs
        dtypes: set[torch.dtype] = set()
        for x in packed.args[0] if together else [node]:
            op = Op.of(x)
            if is_reshape(x) and op.args[1] == [-1]:
                value = op.args[0].meta["val"]
                parts.append(Part(end, value.numel(), op.args[0]))
                end, dtype = end + value.numel(), value.dtype
            elif op.target is _aten.full.default and op.args[1] == 0 and len(op.args[0]) == 1:
                end, dtype = end + op.args[0][0], op.kwargs["dtype"]
            else:
                self.fail("reduction", x, "it is neither a gradient nor zeros", "gradients, with zeros between")
            dtypes.add(dtype)
        if len(dtypes) != 1:
            found = f"it mixes {' and '.join(sorted(map(str, dtypes)))}"
            self.fail("reduction", node, found, "gradients and zeros of one dtype")
        return Pack(tuple(parts), end, dtypes.pop())

    def read_exchange(self, op: Op, fact: Any) -> bool:
        """Whether it is one of the steps from the others' parts to the sum of all.

        ``fact``: a `Pack`, or what a feature sends as one: it has a state, a dtype and a number of elements.
        """
        ranks, state, dtype = fact.state.split()[-1], "", fact.dtype
        if fact.state == "parts":
            others, part = op.args[1] if op.target is _aten.view.default and len(op.args[1]) == 2 else (0, 0)
            if (others + 1) * part == fact.numel:
                state = f"parts of {others + 1}"
        elif fact.state.startswith("parts of") and op.target is _aten.sum.dim_IntList and op.args[1:] == ([0],):
            dtype = op.kwargs.get("dtype", dtype)
            if dtype.itemsize >= fact.dtype.itemsize:  # a sum over ranks, in a narrower one, may overflow
                state = f"others of {ranks}"
        elif fact.state.startswith(("own of", "others of")) and op.target is _aten.add.Tensor and not op.kwargs:
            terms: list[Any] = [self.facts.get(x) for x in op.args]
            own, others = terms
            if (
                type(own) is type(others) is type(fact)
                and own.state == f"own of {ranks}"
                and others == replace(own, state=f"others of {ranks}", dtype=others.dtype)
            ):
                fact, dtype = own, torch.promote_types(own.dtype, others.dtype)
                state = f"shard of {ranks}"
        if not state:
            return False
        if isinstance(fact, Pack) and fact.of is not None and state.startswith("shard"):
            self.facts[op.node] = replace(fact.of, replicas=int(ranks), divided=True, dtype=dtype)
            return True
        self.facts[op.node] = replace(fact, state=state, dtype=dtype)
        return True

    def fail(self, rule: str, node: Node, found: str, expected: str) -> NoReturn:
        tag = node.meta.get("zerofx")
        refuse(rule, node, found, expected, tag.group if tag else None)


def is_reshape(node: Node) -> bool:
    """Whether the node looks at a tensor another way, or copies it."""
    return Op.of(node).target is _aten.reshape.default
