"""The finished graph, read once more from its first node to its last: is it the graph that was to be made?

The passes are not asked. What each node is follows from operators, arguments and shapes, and from what a graph is given:
which inputs are parameters, which outputs gradients, the layouts. What a pass wrote into the context is read only where
it is a promise to whoever runs the graph (which inputs are shards, what the extra outputs are), and is checked like the
rest. Tags name things in errors.

===========  ============================================================================================
rule         what must hold
===========  ============================================================================================
inputs       no parameter is an input any more; the last inputs are the shards (replicas, kept gradients, what was
             left gathered) that were promised, in size and dtype
gather       nothing reads a shard but the one gather that brings it
wait         each collective is waited for exactly once; nothing reads what is under way
group        every collective runs in the process group, over as many ranks as the layout has, and sums
slice        each weight is exactly the part of the gathered buffer where its layout has it
discard      a gathered buffer is given back right after its last use, and not read afterwards
budget       gathered bytes never exceed the memory budget
saved        nothing full-size goes from forward to backward, but what is kept
reduction    each gradient is reduced once: where its layout has it, times one over the number of ranks
order        gathers start in the order they are waited for, reductions too; no size depends on data; where the executor
             schedules, the order is pinned
write        nothing writes to weights; all other writes stay as they were
value        every output, and every gradient before it is reduced, is what the graph before all passes computes
===========  ============================================================================================

``value`` needs that graph (``ctx.before``); it is told by numbers, see `zerofx.passes.meaning`. It is what finds two
weights of one shape that were swapped.

Sound passes are not enough: this one would have to be wrong in the same way. Time is linear in the size of the graph.
Runs last; changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch.fx import GraphModule, Node

from zerofx.layout import GroupLayout, Slot, contiguous_stride
from zerofx.passes import edit
from zerofx.passes.context import Context, ParameterRef
from zerofx.passes.live import Buffer, check_discards, check_live_bytes, check_order, check_pinned
from zerofx.passes.meaning import Meanings, Number, Numbered, Op, Original, input_number, write
from zerofx.passes.ops import discard as discard_storage
from zerofx.passes.ops import release
from zerofx.passes.refusal import VerificationError, refuse

_aten, _c10d, _zerofx = torch.ops.aten, torch.ops._c10d_functional, torch.ops.zerofx

GATHERS = (_c10d.all_gather_into_tensor.default, _zerofx.all_gather_pairwise.default)
SCATTERS = (_c10d.reduce_scatter_tensor.default, _zerofx.all_to_all_pairwise.default)
ALL_REDUCES = (_c10d.all_reduce.default, _c10d.all_reduce_.default)
_WAIT = _c10d.wait_tensor.default


def verify(gm: GraphModule, ctx: Context) -> int:
    """Check the graph after all passes; returns 0, for it edits nothing.

    Raises:
        VerificationError: a rule is broken; it names the rule, the node, the group and the layer.
    """
    _Reader(gm, ctx).run()
    return 0


@dataclass(frozen=True)
class Flat:
    """Elements of a group's flat buffer: the same ranges of every rank's shard, here (a rank's own) or end to end.

    ``dtypes``: what they were cast to, one after the other.
    """

    layout: GroupLayout
    ranges: tuple[range, ...]
    dtypes: tuple[torch.dtype, ...] = ()
    whole: bool = False

    @property
    def part(self) -> int:
        """Elements of one rank."""
        return sum(map(len, self.ranges))

    @property
    def numel(self) -> int:
        return self.part * self.layout.world_size if self.whole else self.part

    def flat_index(self, i: int) -> int:
        """Where element ``i`` of the whole lies in the flat buffer."""
        rank, i = divmod(i, self.part)
        for r in self.ranges:
            if i < len(r):
                return rank * self.layout.shard_numel + r[i]
            i -= len(r)
        raise AssertionError("divmod")

    def contiguous_from(self, offset: int, numel: int) -> int | None:
        """Where ``numel`` elements from ``offset`` lie in the flat buffer, if side by side: indices ascend strictly."""
        if not 0 <= offset <= offset + numel <= self.numel:
            return None
        if not numel:
            return offset
        first = self.flat_index(offset)
        return first if self.flat_index(offset + numel - 1) == first + numel - 1 else None


@dataclass(frozen=True)
class Part:
    """One gradient in a pack: ``numel`` elements from ``offset``."""

    offset: int
    numel: int
    node: Node


@dataclass(frozen=True)
class Pack:
    """Gradients and zeros end to end, on the way through a reduction.

    ``state``: "packed", then "parts" (of every rank, unsummed), "shard" (summed, this rank's) or "whole" (summed).
    """

    parts: tuple[Part, ...]
    numel: int
    state: str = "packed"
    scale: float = 1.0


@dataclass(frozen=True)
class Share:
    """A view of a reduced `Pack`: ``numel`` elements from ``offset``."""

    pack: Pack
    offset: int
    numel: int


@dataclass(frozen=True)
class Started:
    """A collective under way: ``brings`` is what waiting for it yields."""

    start: Node
    brings: Flat | Pack


@dataclass
class _Expected:
    """The gradients of one parameter that are to be reduced."""

    ref: ParameterRef
    numbers: list[Number | None] = field(default_factory=list)
    found: int = 0


class _Reader:
    """One walk over a graph; see `verify`."""

    def __init__(self, gm: GraphModule, ctx: Context) -> None:
        self.gm, self.ctx, self.meanings = gm, ctx, ctx.meanings or Meanings()
        self.nodes = list(gm.graph.nodes)
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.before = Original.read(ctx.before, ctx, self.meanings) if ctx.before is not None else None
        self.facts: dict[Node, Any] = {}
        self.numbers: dict[Node, Number] = {}
        self.memory: dict[Node, list[Buffer]] = {}
        self.buffers: dict[Node, Buffer] = {}
        self.derived: set[Node] = set()
        self.waits: dict[Node, list[Node]] = {}
        self.started: dict[Flat, Node] = {}
        self.ops: dict[Node, Op] = {}
        self.writes: list[Number] = []
        self._calls: dict[Any, int] = {}
        self._slots: dict[str, dict[tuple[int, tuple[int, ...]], Slot]] = {}

    def run(self) -> None:
        self._read_inputs()
        for node in self.nodes:
            if node.op == "get_attr":
                self.numbers[node] = hash(("attribute", node.target))
            elif node.op == "call_function":
                self._read(Op.of(node))
        for start, waits in self.waits.items():
            if len(waits) != 1:
                self._fail("wait", start, f"it is waited for {len(waits)} times", "exactly one wait")
        buffers = list(self.buffers.values())
        for node in edit.output_values(self.gm.graph):
            for buffer in self.memory.get(node, ()):
                buffer.escapes = True
        self._check_outputs()
        check_discards(buffers, self.nodes, self.ctx)
        check_live_bytes(buffers, self.order, self.ctx)
        check_order(self.waits, self.order)
        if self.ctx.executor == "inductor":
            check_pinned(buffers, self.ops, self.order, GATHERS)
        if self.before is not None and self.writes != self.before.writes:
            self._fail("write", self.gm.graph.output_node(), "other writes to memory, or in another order", "as before")

    # ---- inputs -----------------------------------------------------------------------------------------------------

    def _read_inputs(self) -> None:
        ctx, inputs = self.ctx, [node for node in self.nodes if node.op == "placeholder"]
        promised = len(ctx.shards) + len(ctx.kept) + len(ctx.gathered)
        theirs, ours = inputs[: len(inputs) - promised], iter(inputs[len(inputs) - promised :])
        wanted = [n.name for n in theirs if n.name not in ctx.parameters]
        if self.before is not None:
            wanted = [name for name in self.before.inputs if name not in ctx.parameters or not ctx.stage]
        if len(inputs) < promised or (ctx.stage and [n.name for n in theirs] != wanted):
            odd = next((n for n, name in zip(theirs, wanted) if n.name != name), self.gm.graph.output_node())
            self._fail("inputs", odd, f"the inputs are not the model's and {promised} more", "shards for parameters")
        for node in theirs:
            brought = self.meanings.brought if ctx.phase == "backward" else {}
            self.numbers[node] = brought.get(node.name) or input_number(node, ctx, self.meanings)
            if not ctx.stage and node.name in ctx.parameters:
                self.derived.add(node)
        for layout, node in zip(ctx.shards, ours):
            self._read_shard(layout, node)
        for ref, node in zip(ctx.kept, ours):
            self._sized(node, ref.slot.shape, None)
            self.numbers[node] = self._kept(ref)
        for name, node in zip(ctx.gathered, ours):
            kept = self.meanings.kept.get(name)
            if kept is None:  # the forward was not read
                layout = next(ref.layout for ref in ctx.parameters.values() if ref.layout.name == name)
                cast = () if node.meta["val"].dtype == layout.dtype else (node.meta["val"].dtype,)
                kept = Flat(layout, (range(layout.shard_numel),), cast, whole=True)
            self._sized(node, (kept.numel,), kept.dtypes[-1] if kept.dtypes else kept.layout.dtype)
            self._new_buffer(node, node, kept)

    def _read_shard(self, layout: GroupLayout, node: Node) -> None:
        ctx, sharded = self.ctx, self.ctx.stage == 3
        dtype = layout.dtype if sharded else ctx.param_dtype or layout.dtype
        self._sized(node, (layout.shard_numel if sharded else layout.numel,), dtype)
        cast = (dtype,) if dtype != layout.dtype else ()
        flat = Flat(layout, (range(layout.shard_numel),), cast)
        if layout.world_size == 1:
            self.facts[node] = replace(flat, whole=True)
        elif sharded:
            self.facts[node] = flat
        else:  # the caller started to refresh it
            self.facts[node] = Started(node, replace(flat, whole=True))
            self.waits[node] = []

    def _sized(self, node: Node, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
        value = node.meta["val"]
        if tuple(value.shape) != tuple(shape) or dtype not in (None, value.dtype):
            found = f"it has {value.numel()} elements of {value.dtype}"
            self._fail("inputs", node, found, f"shape {tuple(shape)}" + (f" of {dtype}" if dtype else ""))

    def _kept(self, ref: ParameterRef) -> Number:
        return hash(("kept", ref.layout.name, ref.slot.name))

    # ---- operations -------------------------------------------------------------------------------------------------

    def _read(self, op: Op) -> None:
        node = op.node
        self.ops[node] = op
        if op.target in (discard_storage, release):
            self._give_back(op)
            return
        inputs = op.inputs
        for x in inputs:
            for buffer in self.memory.get(x, ()):
                buffer.read(node, self.order[node])
        fact = next((f for x in inputs if (f := self.facts.get(x)) is not None), None)
        for target in op.written():
            if (target in self.memory or isinstance(self.facts.get(target), Flat)) and op.target not in ALL_REDUCES:
                self._fail("write", node, f"it writes to {target.name!r}, which holds weights", "no write to weights")
        if isinstance(fact, Started):
            self._read_started(op, fact)
        elif isinstance(fact, Flat):
            self._read_flat(op, fact, inputs)
        elif isinstance(fact, (Pack, Share)):
            self._read_pack(op, fact)
        elif op.target in SCATTERS + ALL_REDUCES + GATHERS and not self._theirs(node):
            self._start_reduction(op)
        elif op.target is _WAIT and not self._theirs(node):
            self._fail("wait", node, "it waits for what was not started", "a collective")
        else:
            self.numbers[node] = self.meanings.of(op, self.numbers, self._calls)
            write(op, self.numbers, self.writes)
            memory = [b for x in inputs for b in self.memory.get(x, ())]
            if memory and op.shares_memory():
                self.memory[node] = memory
            if len(inputs) == 1 and inputs[0] in self.derived and op.target in edit.VIEWS_AND_CASTS:
                self.derived.add(node)

    def _theirs(self, node: Node) -> bool:
        """Whether the model's own code has that node (a collective of its own, then)."""
        return node.name in self.before.nodes if self.before is not None else "zerofx" not in node.meta

    def _give_back(self, op: Op) -> None:
        (node,) = op.inputs
        buffer = self.buffers.get(node)
        if buffer is None:
            self._fail("discard", op.node, f"it gives back {node.name!r}", "a gathered buffer")
        if (op.target is release) != (buffer.start is node):
            self._fail(
                "discard", op.node, "what autograd owns is freed, or what is ours is not", "the other of the two"
            )
        buffer.ends.append(self.order[op.node])

    def _read_started(self, op: Op, fact: Started) -> None:
        if op.target is not _WAIT:
            self._fail("wait", op.node, f"it reads {fact.start.name!r}, which may be under way", "a wait before it")
        self.waits[fact.start].append(op.node)
        if isinstance(fact.brings, Flat) and self.ctx.stage == 3:
            self._new_buffer(op.node, fact.start, fact.brings)
        else:
            self.facts[op.node] = fact.brings

    def _new_buffer(self, node: Node, start: Node, flat: Flat) -> None:
        self.facts[node] = flat
        value = node.meta["val"]
        nbytes = value.numel() * value.dtype.itemsize
        self.buffers[node] = Buffer(node, start, flat.layout.name, nbytes, last=self.order[node])
        self.memory[node] = [self.buffers[node]]

    def _read_flat(self, op: Op, flat: Flat, inputs: list[Node]) -> None:
        node, to = op.node, op.cast_to()
        if flat.whole:
            if op.target is not _aten.as_strided.default:
                self._fail("slice", node, "it reads a whole group", "weights as views of it")
            self._read_weight(op, flat)
        elif to is not None:
            self.facts[node] = replace(flat, dtypes=(*flat.dtypes, to))
        elif op.target is _aten.slice.Tensor and len(flat.ranges) == 1 and op.args[1] == 0 and len(op.args) == 4:
            self.facts[node] = replace(flat, ranges=(flat.ranges[0][op.args[2] : op.args[3]],))
        elif op.target is _aten.cat.default and all(isinstance(self.facts.get(x), Flat) for x in op.args[0]):
            pieces = [self.facts[x] for x in op.args[0]]
            ranges = tuple(r for piece in pieces for r in piece.ranges)
            ascending = all(a.stop <= b.start for a, b in zip(ranges, ranges[1:]))
            if not ascending or any(replace(piece, ranges=()) != replace(flat, ranges=()) for piece in pieces):
                self._fail("slice", node, "it mixes parts of a shard", "ascending parts of one shard")
            self.facts[node] = replace(flat, ranges=ranges)
        elif op.target in GATHERS:
            self._start_gather(op, flat)
        else:
            self._fail("gather", node, f"it reads the shard of {flat.layout.name!r}", "the gathered weight")

    def _read_weight(self, op: Op, flat: Flat) -> None:
        (full, shape, stride, *rest) = op.args
        shape, offset, layout = tuple(shape), rest[0] if rest else 0, flat.layout
        if layout.name not in self._slots:
            self._slots[layout.name] = {(slot.offset, slot.shape): slot for slot in layout.slots}
        numel = Slot("", shape, 0).numel
        at = flat.contiguous_from(offset, numel)
        slot = self._slots[layout.name].get((at, shape)) if at is not None else None
        if slot is None and not numel:  # an empty parameter may lie anywhere
            slot = next((s for s in layout.slots if s.shape == shape), None)
        if slot is None or tuple(stride) != slot.stride:
            where = f"{shape} with strides {tuple(stride)} from element {offset} on"
            self._fail("slice", op.node, f"it takes {where}", f"one of {layout.name!r}'s parameters as it is laid out")
        number, dtype = self.meanings.stored(ParameterRef(layout, slot)), layout.dtype
        for to in flat.dtypes:
            number, dtype = self.meanings.cast(number, dtype, to), to
        self.numbers[op.node] = number
        self.derived.add(op.node)
        if full in self.memory:
            self.memory[op.node] = self.memory[full]

    # ---- collectives ------------------------------------------------------------------------------------------------

    def _start_gather(self, op: Op, flat: Flat) -> None:
        _, world_size, process_group = op.args
        self._check_collective(op, flat.layout, world_size, process_group)
        if flat in self.started:
            self._fail("gather", op.node, f"{self.started[flat].name!r} brings the same", "one gather")
        self.started[flat] = op.node
        self.facts[op.node] = Started(op.node, replace(flat, whole=True))
        self.waits[op.node] = []

    def _start_reduction(self, op: Op) -> None:
        node, name = op.node, op.target
        if name in GATHERS:
            self._fail("gather", node, "it gathers what is no shard", "a shard")
        pack = self._pack(op.args[0])
        layout = self._layout_of(pack, node)
        operation = op.args[1] if name is not _zerofx.all_to_all_pairwise.default else "sum"
        *_, world_size, process_group = op.args if name in SCATTERS else (layout.world_size, op.args[-1])
        self._check_collective(op, layout, world_size, process_group, operation)
        if name is _c10d.all_reduce_.default and (len(op.args[0].users) > 1 or self._is_reshape(op.args[0])):
            self._fail(
                "write", node, f"it reduces {op.args[0].name!r} in place, which others read", "memory of its own"
            )
        states = {_c10d.reduce_scatter_tensor.default: "shard", _zerofx.all_to_all_pairwise.default: "parts"}
        self.facts[node] = Started(node, replace(pack, state=states.get(name, "whole")))
        self.waits[node] = []

    def _check_collective(
        self, op: Op, layout: GroupLayout, world_size: int, process_group: str, operation: str = "sum"
    ) -> None:
        found = (world_size, process_group, operation)
        wanted = (layout.world_size, self.ctx.process_group, "sum")
        if found != wanted:
            self._fail(
                "group", op.node, "it runs over {} ranks of {!r} ({})".format(*found), "{} of {!r} ({})".format(*wanted)
            )
        if type(op.value.numel()) is not int:
            self._fail("order", op.node, f"it moves {op.value.numel()} elements, which depends on data", "a number")

    def _layout_of(self, pack: Pack, node: Node) -> GroupLayout:
        layouts = {ref.layout.name: ref.layout for ref in self.ctx.gradients.values()}
        tag = node.meta.get("zerofx")
        if not layouts:
            self._fail("reduction", node, "there are no gradients to reduce", "no reduction")
        return layouts.get(tag.group if tag else "") or next(iter(layouts.values()))

    # ---- gradients --------------------------------------------------------------------------------------------------

    def _is_reshape(self, node: Node) -> bool:
        return node.target is _aten.reshape.default

    def _pack(self, node: Node) -> Pack:
        """``node`` as gradients and zeros, end to end."""
        parts, end = [], 0
        for x in node.args[0] if node.target is _aten.cat.default else [node]:  # type: ignore[union-attr]
            numel = x.meta["val"].numel()  # type: ignore[union-attr]
            if self._is_reshape(x):  # type: ignore[arg-type]
                parts.append(Part(end, numel, x.args[0]))  # type: ignore[union-attr, arg-type]
            elif x.target is not _aten.full.default or x.args[1] != 0:  # type: ignore[union-attr]
                self._fail("reduction", x, "it is neither a gradient nor zeros", "gradients, with zeros between")  # type: ignore[arg-type]
            end += numel
        return Pack(tuple(parts), end)

    def _read_pack(self, op: Op, fact: Pack | Share) -> None:
        node, to = op.node, op.cast_to()
        if isinstance(fact, Share):
            self._fail("reduction", node, "it reads an averaged gradient", "gradients leave the graph as they are")
        if fact.state == "parts":
            ranks = op.value.shape[0] if op.value.dim() == 2 else 0
            if op.target is _aten.view.default and ranks * op.value.shape[1] == fact.numel:
                self.facts[node] = replace(fact, state=f"parts of {ranks}")
                return
        elif fact.state.startswith("parts of") and op.target is _aten.sum.dim_IntList and op.args[1:] == ([0],):
            self.facts[node] = replace(fact, state=f"shard of {fact.state.split()[-1]}")
            return
        elif to is not None:
            self.facts[node] = fact
            return
        elif op.target is _aten.mul.Tensor and isinstance(op.args[1], float):
            self.facts[node] = replace(fact, scale=fact.scale * op.args[1])
            return
        elif op.target is _aten.as_strided.default and fact.state == "whole":
            (_, shape, stride, *rest) = op.args
            if tuple(stride) == contiguous_stride(shape):
                self.facts[node] = Share(fact, rest[0] if rest else 0, op.value.numel())
                return
        self._fail("reduction", node, "it does something else with a reduced gradient", "a sum, a cast, or a scaling")

    def _check_outputs(self) -> None:
        ctx, values = self.ctx, edit.output_values(self.gm.graph)
        first = len(values) - len(ctx.reductions)
        if self.before is not None and first != len(self.before.outputs):
            self._fail("reduction", self.gm.graph.output_node(), f"{len(values)} outputs", "those promised")
        for i, value in enumerate(values[:first]):
            self._check_output(i, value)
        if ctx.phase == "backward":
            self._check_reductions(values[first:])

    def _check_output(self, i: int, value: Any) -> None:
        ctx, output = self.ctx, self.gm.graph.output_node()
        was = self.before.outputs[i] if self.before is not None else None
        name = self._saved_name(i)
        if i in ctx.gradients:
            if value is not None:
                self._fail("reduction", value, "it leaves the graph as it is, for autograd to add up", "None there")
            return
        if value is None:
            if i in ctx.saved_parameters:
                self.meanings.brought[name] = self.meanings.parameter(ctx.saved_parameters[i], ctx)
            elif was is not None:
                self._fail("value", output, f"output {i} is gone", "what the graph returned before")
        elif i in ctx.saved:
            self._check_saved(i, name, value, was)
        elif isinstance(value, Node):
            self._check_number(value, was, f"output {i}")
        if i in ctx.saved and was is not None:
            self.meanings.saved[name] = was

    def _saved_name(self, i: int) -> str:
        if self.ctx.before is None or i not in self.ctx.saved:
            return ""
        was = edit.output_values(self.ctx.before.graph)[i]
        return was.name if isinstance(was, Node) else ""

    def _check_saved(self, i: int, name: str, value: Any, was: Number | None) -> None:
        flat = self.facts.get(value)
        if isinstance(flat, Flat):
            kept = self.ctx.kept_gathered.get(flat.layout.name)
            if kept is None or kept.position != i or kept.numel != flat.numel:
                self._fail("saved", value, "a whole group leaves with what backward needs", "only what is kept")
            self.meanings.kept[flat.layout.name] = flat
            return
        if not isinstance(value, Node):
            return
        if value in self.memory or (value in self.derived and value.op != "placeholder"):
            self._fail("saved", value, "a weight, or a view or a cast of one, goes to backward", "the parameter itself")
        number = self.numbers.get(value)
        if value not in self.derived:
            self._check_number(value, was, f"saved output {i}")
        if number is not None:
            self.meanings.brought[name] = number

    def _check_number(self, value: Node, was: Number | None, what: str) -> None:
        if self.before is None:
            return
        if self.numbers.get(value) != was:
            node = self._first_difference() or value
            self._fail("value", node, f"{what} is computed from something else than before", "the same value")

    def _first_difference(self) -> Node | None:
        assert self.before is not None
        known = self.before.nodes
        return next((n for n, x in self.numbers.items() if n.op != "placeholder" and known.get(n.name, x) != x), None)

    def _check_reductions(self, extra: list[Any]) -> None:
        ctx, expected = self.ctx, self._expected()
        for reduction, value in zip(ctx.reductions, extra, strict=True):
            layout, slots = reduction.layout, {slot.offset: slot for slot in reduction.slots if slot.numel}
            if ctx.sync == "keep":
                self._check_gradient(expected, ParameterRef(layout, reduction.slots[0]), value, value)
                continue
            share = self._averaged(value, layout)
            pack = share.pack
            inside = [p for p in pack.parts if p.numel and share.offset <= p.offset < share.offset + share.numel]
            if ctx.stage == 0:
                slots = {share.offset: slot for slot in slots.values()}
            elif pack.numel != layout.numel:
                self._fail("reduction", value, f"it is a part of {pack.numel} elements", f"of {layout.numel}")
            found = {p.offset: p.numel for p in inside}
            if found != {offset: slot.numel for offset, slot in slots.items()} or len(found) != len(inside):
                self._fail("reduction", value, f"gradients lie at {sorted(found)}", f"at {sorted(slots)}, as laid out")
            for part in inside:
                ref = ParameterRef(layout, slots[part.offset])
                self._check_gradient(expected, ref, part.node, value, share.pack.scale)
            for slot in reduction.slots:
                if not slot.numel:
                    expected[layout.name, slot].found = len(expected[layout.name, slot].numbers)
        for gradient in expected.values():
            if gradient.found != len(gradient.numbers):
                ref, n = gradient.ref, gradient.found
                found = f"the gradient of {ref.slot.name!r} is reduced {n} times"
                refuse("reduction", self.gm.graph.output_node(), found, f"{len(gradient.numbers)}", ref.layout.name)

    def _expected(self) -> dict[tuple[str, Slot], _Expected]:
        expected: dict[tuple[str, Slot], _Expected] = {}
        before = edit.output_values(self.ctx.before.graph) if self.ctx.before is not None else None
        for i, ref in sorted(self.ctx.gradients.items()):
            if before is not None:
                if not isinstance(before[i], Node):
                    continue
                assert self.before is not None
                number: Number | None = self.before.outputs[i]
                number = self._prepared(ref, number, before[i].meta["val"].dtype)  # type: ignore[arg-type]
            else:
                if not any(ref.slot in r.slots for r in self.ctx.reductions):
                    continue
                number = None
            expected.setdefault((ref.layout.name, ref.slot), _Expected(ref)).numbers.append(number)
        return expected

    def _prepared(self, ref: ParameterRef, number: Number, dtype: torch.dtype) -> Number:
        ctx = self.ctx
        if ctx.reduce_dtype is not None:
            number = self.meanings.cast(number, dtype, ctx.reduce_dtype)
        if ctx.sync == "merge":
            number = self.meanings.call(_aten.add.Tensor, Numbered(number), Numbered(self._kept(ref)))
        return number

    def _averaged(self, value: Node, layout: GroupLayout) -> Share:
        """An extra output as a share of a reduced pack."""
        fact, scatter = self.facts.get(value), self.ctx.stage != 0
        if fact is None and layout.world_size == 1:
            fact = self._alone(value)
        if isinstance(fact, Pack) and scatter:
            ranks = fact.state.split()[-1] if " " in fact.state else str(layout.world_size)
            if fact.state.startswith("shard") and ranks == str(layout.world_size):
                fact = Share(fact, 0, fact.numel)
        if not isinstance(fact, Share) or fact.pack.state.startswith("shard") != scatter:
            self._fail("reduction", value, "it is no averaged gradient", "a gradient, reduced over all ranks")
        if value.meta["val"].dtype != layout.dtype:
            self._fail("reduction", value, f"it is of {value.meta['val'].dtype}", f"{layout.dtype}")
        return fact

    def _alone(self, value: Node) -> Share:
        """On one rank nothing is reduced: the pack itself, cast, and in stage 0 copied and taken apart."""
        offset, numel, op = 0, value.meta["val"].numel(), self.ops[value]
        if not self.ctx.stage:
            offset = op.args[3]
        while op.cast_to() is not None or op.target in (_aten.as_strided.default, _aten.clone.default):
            op = self.ops[op.inputs[0]]
        return Share(replace(self._pack(op.node), state="shard" if self.ctx.stage else "whole"), offset, numel)

    def _check_gradient(
        self, expected: dict[Any, _Expected], ref: ParameterRef, node: Node, output: Node, scale: float | None = None
    ) -> None:
        want = expected.get((ref.layout.name, ref.slot))
        number = self.numbers.get(node)
        if want is None:
            self._fail("reduction", output, f"it brings a gradient of {ref.slot.name!r}", "none: it has none")
        share = 1.0 / ref.layout.world_size
        if scale is not None and scale != share:
            undivided = next((n for n in want.numbers if n is not None and self._divided(n, share) == number), None)
            if scale != 1.0 or (undivided is None and self.before is not None):
                self._fail("reduction", output, f"the gradient of {ref.slot.name!r} is scaled by {scale}", f"{share}")
            number = undivided
        if self.before is None:
            want.found += 1
        elif number == self._sum(want.numbers):  # of all uses at once
            want.found += len(want.numbers)
        elif number in want.numbers:
            want.found += 1
        else:
            found = f"what is reduced for {ref.slot.name!r} is not its gradient"
            self._fail("value", self._first_difference() or node, found, "the gradient that backward computed before")

    def _divided(self, number: Number, by: float) -> Number:
        return self.meanings.call(_aten.mul.Tensor, Numbered(number), by)

    def _sum(self, numbers: list[Any]) -> Number:
        total = numbers[0]
        for number in numbers[1:]:
            total = self.meanings.call(_aten.add.Tensor, Numbered(total), Numbered(number))
        return total

    def _fail(self, rule: str, node: Node, found: str, expected: str) -> NoReturn:
        tag = node.meta.get("zerofx")
        refuse(rule, node, found, expected, tag.group if tag else None)


__all__ = ["Meanings", "VerificationError", "verify"]
