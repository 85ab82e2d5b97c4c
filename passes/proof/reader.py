"""The walk over a finished graph: what each node is, and the rules that concern one operation.

The rules are the table in `zerofx.passes.verify`. Those of outputs are in outputs.py, of the whole graph in live.py.
What is found out stays in known.py.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch.fx import Node

from zerofx.model.layout import GroupLayout, Slot, contiguous_stride
from zerofx.passes import edit
from zerofx.passes.context import ParameterRef
from zerofx.passes.ops import discard as discard_storage
from zerofx.passes.ops import release
from zerofx.passes.proof import own
from zerofx.passes.proof.facts import ALL_REDUCES, Flat, Pack, Share, Started, divided
from zerofx.passes.proof.known import Known, is_reshape
from zerofx.passes.proof.live import check_sorted
from zerofx.passes.proof.meaning import Number, Op, input_number, write
from zerofx.passes.proof.rules import ask, readers
from zerofx.passes.travel import EXCHANGES, GATHERS, SCATTERS

_aten, _zerofx = torch.ops.aten, torch.ops.zerofx
_c10d = torch.ops._c10d_functional
_WAIT, _OWN_PART = _c10d.wait_tensor.default, _zerofx.own_part.default


class Reader(Known):
    """One walk over a graph."""

    def read(self) -> None:
        """Read inputs and operations, and check the rules that they alone can break."""
        check_sorted(self.order)
        self._read_inputs()
        for node in self.nodes:
            if own.is_own(self, node):
                self.own.add(node)
                if node.op == "call_function":
                    own.read_own(self, Op.of(node))
            elif node.op == "get_attr":
                self.numbers[node] = hash(("attribute", node.target))
            elif node.op == "call_function":
                self._read(Op.of(node))
        for start, waits in self.waits.items():
            if not waits:
                self.fail("wait", start, "it is never waited for", "exactly one wait")

    # ---- inputs -----------------------------------------------------------------------------------------------------

    def _read_inputs(self) -> None:
        ctx, inputs = self.ctx, [node for node in self.nodes if node.op == "placeholder"]
        promised = len(ctx.found.shards) + len(ctx.found.kept) + len(ctx.found.gathered)
        theirs, ours = inputs[: len(inputs) - promised], iter(inputs[len(inputs) - promised :])
        wanted = [n.name for n in theirs if n.name not in ctx.parameters]
        if self.before is not None:
            wanted = [name for name in self.before.inputs if name not in ctx.parameters or not ctx.stage]
        known = ctx.stage or self.before is not None
        if len(inputs) < promised or (known and [n.name for n in theirs] != wanted):
            odd = next((n for n, name in zip(theirs, wanted) if n.name != name), self.gm.graph.output_node())
            self.fail("inputs", odd, f"the inputs are not the model's and {promised} more", "shards for parameters")
        for node in theirs:
            brought = self.meanings.given if ctx.phase == "backward" else {}
            self.numbers[node] = brought.get(node.name) or input_number(node, ctx, self.numbering)
            if not ctx.stage and node.name in ctx.parameters:
                self.derived.add(node)
        ask("inputs", self, theirs)
        for layout, node in zip(ctx.found.shards, ours):
            self._read_shard(layout, node)
        for ref, node in zip(ctx.found.kept, ours):
            self._sized(node, ref.slot.shape, None)
            self.numbers[node] = self.kept(ref)
        for name, node in zip(ctx.found.gathered, ours):
            kept = self.meanings.kept.get(name)
            if kept is None:  # the forward was not read
                layout = next(ref.layout for ref in ctx.parameters.values() if ref.layout.name == name)
                cast = () if node.meta["val"].dtype == layout.dtype else (node.meta["val"].dtype,)
                kept = Flat(layout, (range(layout.shard_numel),), cast, whole=True)
                if (ranks := ctx.handover.kept_gathered[name].ranks) > 1:
                    kept = divided(kept, ranks)
            self._sized(node, (kept.numel,), kept.dtypes[-1] if kept.dtypes else kept.layout.dtype)
            if kept.whole:
                self.new_buffer(node, node, kept)
            else:
                self.facts[node] = kept

    def _read_shard(self, layout: GroupLayout, node: Node) -> None:
        sharded = self.ctx.gathers
        self.homes.setdefault(layout.name, []).append(node)
        dtype = layout.dtype if sharded else layout.weight_dtype
        cast = (dtype,) if dtype != layout.dtype else ()
        layout = ask("held", self, layout) or layout
        self._sized(node, (layout.shard_numel if sharded else layout.numel,), dtype)
        flat = Flat(layout, (range(layout.shard_numel),), cast)
        flat = replace(flat, whole=layout.world_size == 1 or not sharded)
        if layout.world_size > 1 and not sharded:
            self.refreshed(node, flat)
        else:
            self.facts[node] = flat
            ask("shard", self, node, flat)

    def _sized(self, node: Node, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
        value = node.meta["val"]
        if tuple(value.shape) != tuple(shape) or dtype not in (None, value.dtype):
            found = f"it has {value.numel()} elements of {value.dtype}"
            self.fail("inputs", node, found, f"shape {tuple(shape)}" + (f" of {dtype}" if dtype else ""))

    def kept(self, ref: ParameterRef) -> Number:
        return hash(("kept", ref.layout.name, ref.slot.name))

    # ---- operations -------------------------------------------------------------------------------------------------

    def _read(self, op: Op) -> None:
        node = op.node
        self.ops[node] = op
        if op.target in (discard_storage, release):
            self._give_back(op)
            return
        inputs = op.inputs
        own.refuse_reading_own(self, op)
        for x in inputs:
            # A second reduction breaks a rule of its own.
            if x in self.travelling and op.target not in (*SCATTERS, _OWN_PART):
                self.fail("write", node, f"it reads {x.name!r}, which is being sent", "memory of its own")
            for buffer in self.memory.get(x, ()):
                buffer.read(node, self.order[node])
        facts = [f for x in inputs if (f := self.facts.get(x)) is not None]
        fact = next((f for f in facts if isinstance(f, Started)), facts[0] if facts else None)
        for target in op.written():
            if (target in self.weights or isinstance(self.facts.get(target), Flat)) and op.target not in ALL_REDUCES:
                self.fail("write", node, f"it writes to {target.name!r}, which holds weights", "no write to weights")
        ask("writes", self, op)
        if isinstance(fact, Started):
            self._read_started(op, fact)
        elif (reader := readers(op, fact)) is not None:
            reader(self, op, fact)
        elif op.target is _WAIT and not self._theirs(node):
            self.fail("wait", node, "it waits for what is not under way", "a collective that was started")
        elif isinstance(fact, Flat):
            self._read_flat(op, fact, inputs)
        elif isinstance(fact, (Pack, Share)):
            self._read_pack(op, fact)
        elif (op.target in SCATTERS or op.target in GATHERS or op.target in ALL_REDUCES) and not self._theirs(node):
            self._start_reduction(op)
        elif op.target in EXCHANGES and not self._theirs(node):
            self.fail("reduction", node, f"it exchanges {inputs[0].name!r}", "a reduction")
        elif op.target is _OWN_PART:
            self._read_own_part(op)
        else:
            self._compute(op, inputs)

    def _compute(self, op: Op, inputs: list[Node]) -> None:
        """One of the model's operations, or one that stands in its place."""
        node, start = op.node, next((self.weights[x] for x in inputs if x in self.weights), None)
        self.numbers[node] = self.numbering.of(op, self.numbers, self._calls, start or 0)
        write(op, self.numbers, self.writes)
        memory = [b for x in inputs for b in self.memory.get(x, ())]
        if op.shares_memory():
            if memory:
                self.memory[node] = memory
            if start is not None:
                self.weights[node] = start
        if len(inputs) == 1 and inputs[0] in self.derived and edit.views_or_casts(op.target):
            self.derived.add(node)

    def _theirs(self, node: Node) -> bool:
        """Whether the model's own code has that node (a collective of its own, then)."""
        return node.name in self.before.nodes if self.before is not None else "zerofx" not in node.meta

    def _give_back(self, op: Op) -> None:
        (node,) = op.inputs
        buffer = self.buffers.get(node) or self.owned.get(node)
        if buffer is None:
            self.fail("discard", op.node, f"it gives back {node.name!r}", "a gathered buffer")
        if (op.target is release) != (buffer.start is node or node in self.owned):
            self.fail("discard", op.node, "what autograd owns is freed, or what is ours is not", "the other of the two")
        buffer.ends.append(self.order[op.node])

    def _read_started(self, op: Op, fact: Started) -> None:
        if op.target is not _WAIT:
            self.fail("wait", op.node, f"it reads {fact.start.name!r}, which may be under way", "a wait before it")
        if self.waits[fact.start]:
            self.fail("wait", op.node, f"{fact.start.name!r} was waited for before", "exactly one wait")
        self.waits[fact.start].append(op.node)
        if isinstance(fact.yields, Flat) and fact.yields.whole and self.ctx.gathers and fact.start in self.ops:
            self.new_buffer(op.node, fact.start, fact.yields)
        else:
            self.facts[op.node] = fact.yields

    def _read_flat(self, op: Op, flat: Flat, inputs: list[Node]) -> None:
        node, to = op.node, op.cast_to()
        if ask("flats", self, op, flat):
            return
        if flat.whole and not (to is not None and flat.layout.world_size == 1):  # one rank's shard is the whole
            if op.target is not _aten.as_strided.default:
                self.fail("slice", node, "it reads a whole group", "weights as views of it")
            self._read_weight(op, flat)
        elif to is not None:
            self.facts[node] = replace(flat, dtypes=(*flat.dtypes, to))
        elif op.target is _aten.slice.Tensor and len(flat.ranges) == 1 and op.args[1] == 0 and len(op.args) == 4:
            self.facts[node] = replace(flat, ranges=(flat.ranges[0][op.args[2] : op.args[3]],))
            if inputs[0] in self.memory:
                self.memory[node] = self.memory[inputs[0]]
        elif op.target is _aten.cat.default and all(isinstance(self.facts.get(x), Flat) for x in op.args[0]):
            pieces = [self.facts[x] for x in op.args[0]]
            ranges = tuple(r for piece in pieces for r in piece.ranges)
            ascending = all(a.stop <= b.start for a, b in pairwise(ranges))
            if not ascending or any(replace(piece, ranges=()) != replace(flat, ranges=()) for piece in pieces):
                self.fail("slice", node, "it mixes parts of a shard", "ascending parts of one shard")
            self.facts[node] = replace(flat, ranges=ranges)
        elif op.target in GATHERS:
            self.facts[node] = Started(node, self.start_gather(op, flat))
        else:
            self.fail("gather", node, f"it reads the shard of {flat.layout.name!r}", "the gathered weight")

    def _read_weight(self, op: Op, flat: Flat) -> None:
        (full, shape, stride, *rest) = op.args
        shape, offset, layout = tuple(shape), rest[0] if rest else 0, flat.layout
        numel = Slot("", shape, 0).numel
        at = flat.contiguous_from(offset, numel)
        slot = self.slot(layout, at, shape) if at is not None else None
        if slot is None and not numel:  # an empty parameter may lie anywhere
            slot = next((s for s in layout.slots if s.shape == shape), None)
        if slot is None or tuple(stride) != slot.stride:
            where = f"{shape} with strides {tuple(stride)} from element {offset} on"
            self.fail("slice", op.node, f"it takes {where}", f"one of {layout.name!r}'s parameters as it is laid out")
        number = self.numbering.casts(self.numbering.stored(ParameterRef(layout, slot)), layout.dtype, flat.dtypes)
        if numel and self._brought.setdefault((layout.name, slot.name), full) is not full:
            twice = f"{slot.name!r} is read from {self._brought[layout.name, slot.name].name!r} too"
            self.fail("gather", op.node, twice, "one gather of each parameter")
        self.numbers[op.node] = number
        self.derived.add(op.node)
        self.weights[op.node] = offset * op.value.dtype.itemsize
        if full in self.memory:
            self.memory[op.node] = self.memory[full]

    # ---- collectives ------------------------------------------------------------------------------------------------

    def _start_reduction(self, op: Op) -> None:
        node, name = op.node, op.target
        if name in GATHERS:
            if not ask("other_gathers", self, op):
                self.fail("gather", node, "it gathers what is no shard", "a shard")
            return
        pack = self.pack(op.args[0])
        layout = self.layout_of(pack, node)
        if ask("reductions", self, op, pack):
            return
        operation = op.args[1] if isinstance(op.args[1], str) else "sum"
        *_, world_size, process_group = op.args if name in SCATTERS else (layout.world_size, op.args[-1])
        self.check_collective(op, layout, world_size, process_group, self.ctx.reduce_group, operation)
        if name is _c10d.all_reduce_.default and (len(op.args[0].users) > 1 or is_reshape(op.args[0])):
            self.fail("write", node, f"it reduces {op.args[0].name!r} in place, which others read", "memory of its own")
        if name in SCATTERS and is_reshape(op.args[0]):
            self._travels_from_where_it_is(op.args[0])
        state = "parts" if name is _zerofx.all_to_all_pairwise.default else "shard" if name in SCATTERS else "whole"
        self.facts[node] = Started(node, replace(pack, state=state))
        self.waits[node] = []

    def _read_own_part(self, op: Op) -> None:
        pack, world_size, process_group = op.args
        fact = self.pack(pack)
        if ask("reductions", self, op, fact):
            return
        self.check_collective(op, self.layout_of(fact, op.node), world_size, process_group, self.ctx.reduce_group)
        self.facts[op.node] = replace(fact, state=f"own of {world_size}")

    def _travels_from_where_it_is(self, node: Node) -> None:
        """A kernel that reads it from now on might be given its memory to write to."""
        self.travelling.add(node)
        while edit.may_alias(node) and len(sources := edit.sources(node)) == 1:
            (node,) = sources
            self.travelling.add(node)

    # ---- gradients --------------------------------------------------------------------------------------------------

    def _read_pack(self, op: Op, fact: Pack | Share) -> None:
        node, to = op.node, op.cast_to()
        if isinstance(fact, Share):
            self.fail("reduction", node, "it reads an averaged gradient", "gradients leave the graph as they are")
        if ask("packs", self, op, fact):
            return
        if fact.state.startswith(("parts", "own", "others")):
            if self.read_exchange(op, fact):
                return
        elif to is not None and not fact.narrowed:
            widens = fact.dtype.itemsize < to.itemsize
            if not widens and fact.scale == 1.0:
                self.fail("reduction", node, "a sum over ranks is narrowed: it may overflow", "the scaling before that")
            self.facts[node] = replace(fact, narrowed=not widens, dtype=to)
            return
        elif op.target is _aten.mul.Tensor and isinstance(op.args[1], float):
            self.facts[node] = replace(fact, scale=fact.scale * op.args[1])
            return
        elif op.target is _aten.as_strided.default and fact.state == "whole":
            _, shape, stride, *rest = op.args
            if tuple(stride) == contiguous_stride(shape):
                self.facts[node] = Share(fact, rest[0] if rest else 0, tuple(shape))
                return
        self.fail("reduction", node, "it does something else with a reduced gradient", "a sum, a cast, or a scaling")
