"""What a finished graph returns: values, what backward needs, and each gradient once.

The rules "saved", "reduction" and "value" of `zerofx.passes.verify`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from zerofx._torch import symbols_of
from zerofx.model.layout import GroupLayout, Slot, contiguous_stride
from zerofx.passes import edit
from zerofx.passes.context import Context, Meanings, ParameterRef, Reduction
from zerofx.passes.proof.facts import Flat, Pack, Share, Started
from zerofx.passes.proof.meaning import Number, Numbered, Numbering, Original
from zerofx.passes.proof.own import check_own
from zerofx.passes.proof.reader import Reader
from zerofx.passes.proof.refusal import refuse
from zerofx.passes.proof.rules import ask

_aten = torch.ops.aten


@dataclass
class _Expected:
    """The gradients of one parameter that are to be reduced."""

    ref: ParameterRef
    numbers: list[Number | None] = field(default_factory=list)
    found: int = 0


class Outputs:
    """The outputs of the graph that ``reader`` has read."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.gm: GraphModule = reader.gm
        self.ctx: Context = reader.ctx
        self.meanings: Meanings = reader.meanings
        self.numbering: Numbering = reader.numbering
        self.before: Original | None = reader.before
        self.facts: dict[Node, Any] = reader.facts
        self.numbers: dict[Node, Number] = reader.numbers
        self.derived: set[Node] = reader.derived

        self.left: set[str] = set()  # groups that leave gathered

    def check(self) -> None:
        """Check the rules that outputs can break."""
        for node in edit.output_values(self.gm.graph):
            if isinstance(self.facts.get(node), Started):
                self.reader.fail("wait", node, "it leaves the graph, and may be under way", "a wait before that")
            for buffer in self.reader.memory.get(node, ()):
                buffer.escapes = True
        self._check_outputs()

    def _check_outputs(self) -> None:
        ctx, values = self.ctx, edit.output_values(self.gm.graph)
        behind = len(values) - len(ctx.found.reductions)
        first = behind - len(ctx.found.published)
        if self.before is not None and first != len(self.before.outputs):
            self.reader.fail("reduction", self.gm.graph.output_node(), f"{len(values)} outputs", "those promised")
        odd = next((i for i in ctx.found.saved_parameters if i not in ctx.saved), None)
        if odd is not None:
            found = f"a parameter is put at output {odd}, which is not saved"
            self.reader.fail("saved", self.gm.graph.output_node(), found, "one where a parameter was saved")
        for i, value in enumerate([*values[:first], *values[behind:]]):
            if value in self.reader.own:
                found = f"it is output {i}, which is the model's or a gradient"
                self.reader.fail("own", value, found, "edit.publish, for what is neither")
        for i, value in enumerate(values[:first]):
            ask("outputs", self.reader, i, value)
            self._check_output(i, value)
        if (
            ctx.phase == "forward"
            and self.before is not None
            and (lost := ctx.handover.kept_gathered.keys() - self.left)
        ):
            found = f"{sorted(lost)[0]!r} does not leave the graph gathered"
            self.reader.fail("saved", self.gm.graph.output_node(), found, "all that is promised to backward")
        if ctx.phase == "backward":
            self._check_reductions(values[behind:])
        check_own(self.reader, values[first:behind])
        if self.before is not None and self.reader.writes != self.before.writes:
            self.reader.fail(
                "write", self.gm.graph.output_node(), "other writes to memory, or in another order", "as before"
            )

    def _check_output(self, i: int, value: Any) -> None:
        ctx, output = self.ctx, self.gm.graph.output_node()
        was = self.before.outputs[i] if self.before is not None else None
        name = self._saved_name(i)
        if i in ctx.gradients:
            if value is not None:
                self.reader.fail(
                    "reduction", value, "it leaves the graph as it is, for autograd to add up", "None there"
                )
            return
        if value is not None and i in ctx.found.saved_parameters:
            self.reader.fail("saved", value, "it leaves where the caller puts a parameter", "None there")
        if value is None:
            if i in ctx.found.saved_parameters:
                self._check_promised(i, ctx.found.saved_parameters[i])
                self.meanings.given[name] = self.numbering.parameter(ctx.found.saved_parameters[i], ctx)
            elif was is not None:
                self.reader.fail("value", output, f"output {i} is gone", "what the graph returned before")
        elif i in ctx.saved:
            if not ask("saved", self.reader, i, name, value, was):
                self._check_saved(i, name, value, was)
        elif isinstance(value, Node):
            self._check_number(value, was, f"output {i}")
            if self.before is not None and value in self.reader.weights and i not in self.before.of_weights:
                self.reader.fail("write", value, "the caller may write to it, and it is a view of weights", "a copy")
        if i in ctx.saved and was is not None:
            self.meanings.saved[name] = self.reader.renumbered.get(name, was)

    def _check_promised(self, i: int, ref: ParameterRef) -> None:
        """The caller puts ``ref`` at output ``i``: it must be what was saved there, or what that was a view of."""
        if self.before is not None and self.before.roots[i] != ref:
            found = f"the caller puts {ref.slot.name!r} at output {i}"
            root = self.before.roots[i]
            expected = "no parameter there" if root is None else f"{root.slot.name!r}, which was saved there"
            self.reader.fail("saved", self.gm.graph.output_node(), found, expected)

    def _saved_name(self, i: int) -> str:
        if self.ctx.before is None or i not in self.ctx.saved:
            return ""
        was = edit.output_values(self.ctx.before.graph)[i]
        return was.name if isinstance(was, Node) else ""

    def _check_saved(self, i: int, name: str, value: Any, was: Number | None) -> None:
        flat = self.facts.get(value)
        if isinstance(flat, Flat):
            kept = self.ctx.handover.kept_gathered.get(flat.layout.name)
            found = flat.numel, value.meta["val"].dtype, 1 if flat.whole else flat.layout.world_size
            if kept is None or kept.position != i or (kept.numel, kept.dtype, kept.ranks) != found:
                self.reader.fail("saved", value, "a whole group leaves with what backward needs", "only what is kept")
            root = self.before.roots[i] if self.before is not None else None
            same = root is not None and replace(flat.layout, world_size=root.layout.world_size) == root.layout
            if self.before is not None and (not same or kept.saved != name):
                where = f"it leaves at output {i}, and backward looks for it under {kept.saved!r}"
                self.reader.fail("saved", value, where, "a place where a parameter of its group was saved")
            self.left.add(flat.layout.name)
            self.meanings.kept[flat.layout.name] = flat
            return
        if not isinstance(value, Node):
            return
        whole = value.op == "placeholder" or self.ctx.stage
        if value in self.reader.memory or (whole and value in self.derived):
            full_size = "a weight, or a view or a cast of one, goes to backward"
            self.reader.fail("saved", value, full_size, "None there, and the caller puts the parameter itself")
        number = self.numbers.get(value)
        self._check_number(value, was, f"saved output {i}")
        if number is not None:
            self.meanings.given[name] = number

    def _check_number(self, value: Node, was: Number | None, what: str) -> None:
        if self.before is None:
            return
        if self.numbers.get(value) != was:
            node = self._first_difference() or value
            self.reader.fail("value", node, f"{what} is computed from something else than before", "the same value")

    def _first_difference(self) -> Node | None:
        assert self.before is not None
        known = self.before.nodes
        return next((n for n, x in self.numbers.items() if n.op != "placeholder" and known.get(n.name, x) != x), None)

    def _check_reductions(self, extra: list[Any]) -> None:
        ctx, expected = self.ctx, self._expected()
        buckets: dict[Pack, list[tuple[int, str, int]]] = {}
        for i, (reduction, value) in enumerate(zip(ctx.found.reductions, extra, strict=True)):
            layout, slots = reduction.layout, {slot.offset: slot for slot in reduction.slots if slot.numel}
            if not isinstance(value, Node):
                self.reader.fail(
                    "reduction", self.gm.graph.output_node(), "it returns None for a gradient", "its value"
                )
            if ctx.sync == "keep":
                self._check_gradient(expected, ParameterRef(layout, reduction.slots[0]), value, value)
                continue
            if ctx.stage:
                value = ask("gradients", self.reader, value, layout, i) or value
            share = self._averaged(value, layout)
            pack = share.pack
            inside = [p for p in pack.parts if p.numel and share.offset <= p.offset < share.offset + share.numel]
            if ctx.stage == 0:
                self._check_shape(value, share, reduction)
                unused = (layout.name, reduction.slots[0]) not in expected
                if unused and ParameterRef(layout, reduction.slots[0]) not in ctx.trained:
                    found = f"it returns a gradient of {reduction.slots[0].name!r}"
                    self.reader.fail("reduction", value, found, "none: no rank has one")
                slots = {share.offset: reduction.slots[0]} if slots and not unused else {}
                buckets.setdefault(share.pack, []).append((share.offset, layout.name, reduction.slots[0].offset))
            elif pack.numel != layout.numel:
                self.reader.fail("reduction", value, f"it is a part of {pack.numel} elements", f"of {layout.numel}")
            lie = {p.offset: p.numel for p in inside}
            if lie != {offset: slot.numel for offset, slot in slots.items()} or len(lie) != len(inside):
                self.reader.fail(
                    "reduction", value, f"gradients lie at {sorted(lie)}", f"at {sorted(slots)}, as laid out"
                )
            for part in inside:
                ref = ParameterRef(layout, slots[part.offset])
                self._check_gradient(expected, ref, part.node, value, share.pack.scale)
            for slot in reduction.slots:
                if not slot.numel and (layout.name, slot) in expected:
                    expected[layout.name, slot].found = len(expected[layout.name, slot].numbers)
        self._check_places(buckets)
        for gradient in expected.values():
            if gradient.found != len(gradient.numbers):
                ref, n = gradient.ref, gradient.found
                times = f"the gradient of {ref.slot.name!r} is reduced {n} times"
                refuse("reduction", self.gm.graph.output_node(), times, f"{len(gradient.numbers)}", ref.layout.name)

    def _check_places(self, buckets: dict[Pack, list[tuple[int, str, int]]]) -> None:
        """Stage 0: a rank whose graph has other gradients has each parameter at the same place of a bucket."""
        ctx, output = self.ctx, self.gm.graph.output_node()
        for places in buckets.values():
            if [x[1:] for x in sorted(places)] != sorted(x[1:] for x in places):
                found = f"a bucket has gradients at {sorted(x[0] for x in places)}"
                self.reader.fail("reduction", output, found, "in the order of groups, and of places there")
        if ctx.sync == "keep" or ctx.buckets == "parameter":
            return
        returned = {(r.layout.name, slot.name) for r in ctx.found.reductions for slot in r.slots}
        for ref in ctx.trained:
            if (ref.layout.name, ref.slot.name) not in returned:
                found = f"nothing stands for the gradient of {ref.slot.name!r}"
                self.reader.fail("reduction", output, found, "zeros, for other ranks may have one")

    def _check_shape(self, value: Node, share: Share, reduction: Reduction) -> None:
        """Stage 0: what becomes a parameter's ``.grad`` is all of its gradient, and nothing else."""
        shapes = [slot.shape for slot in reduction.slots]
        if shapes != [share.shape]:
            found = f"it is a gradient of shape {share.shape}"
            self.reader.fail("reduction", value, found, f"one parameter's: {shapes}")

    def _expected(self) -> dict[tuple[str, Slot], _Expected]:
        expected: dict[tuple[str, Slot], _Expected] = {}
        before = edit.output_values(self.ctx.before.graph) if self.ctx.before is not None else None
        for i, ref in sorted(self.ctx.gradients.items()):
            if before is not None:
                if not isinstance(before[i], Node):
                    continue
                assert self.before is not None
                number: Number | None = self.before.outputs[i]
                number = self._prepared(ref, number, before[i].meta["val"])  # type: ignore[arg-type]
            else:
                if not any(ref.slot in r.slots for r in self.ctx.found.reductions):
                    continue
                number = None
            expected.setdefault((ref.layout.name, ref.slot), _Expected(ref)).numbers.append(number)
        return expected

    def _prepared(self, ref: ParameterRef, number: Number, value: torch.Tensor) -> Number:
        ctx, dtype = self.ctx, value.dtype
        if symbols_of(value):
            number = self.numbering.in_numbers(number, ref.slot.shape)
        if (reduced := ref.layout.gradient_dtype) is not None:
            number = self.numbering.cast(number, dtype, reduced)
        if ctx.sync == "merge":
            number = self.numbering.call(_aten.add.Tensor, Numbered(number), Numbered(self.reader.kept(ref)))
        return number

    def _averaged(self, value: Node, layout: GroupLayout) -> Share:
        """An extra output as a share of a reduced pack."""
        fact, scatter = self.facts.get(value), self.ctx.stage != 0
        if fact is None and layout.world_size == 1:
            fact = self._alone(value)
        if isinstance(fact, Pack) and scatter:
            ranks = fact.state.split()[-1] if " " in fact.state else str(layout.world_size)
            if fact.state.startswith("shard") and ranks == str(layout.world_size):
                fact = Share(fact, 0, (fact.numel,))
        if not isinstance(fact, Share) or fact.pack.state.startswith("shard") != scatter:
            self.reader.fail("reduction", value, "it is no averaged gradient", "a gradient, reduced over all ranks")
        ask("averaged", self.reader, value, fact.pack)
        if fact.pack.dtype != layout.dtype:
            self.reader.fail("reduction", value, f"it is of {fact.pack.dtype}", f"{layout.dtype}")
        return fact

    def _alone(self, value: Node) -> Share:
        """On one rank nothing is reduced: the pack itself, cast, and in stage 0 copied and taken apart."""
        op, shape, offset, dtype = self.reader.ops[value], None, 0, None
        if not self.ctx.stage:
            _, shape, stride, offset = op.args if op.target is _aten.as_strided.default else (None, (), None, 0)
            if op.target is not _aten.as_strided.default or tuple(stride) != contiguous_stride(shape):
                self.reader.fail("reduction", value, "it is no view of averaged gradients", "one, as laid out")
            op = self.reader.ops[op.inputs[0]]
        while (to := op.cast_to()) is not None or op.target is _aten.clone.default:
            dtype, op = dtype or to, self.reader.ops[op.inputs[0]]
        pack = self.reader.pack(op.node)
        pack = replace(pack, state="shard" if self.ctx.stage else "whole", dtype=dtype or pack.dtype)
        return Share(pack, offset, tuple(shape) if shape is not None else (pack.numel,))

    def _check_gradient(
        self, expected: dict[Any, _Expected], ref: ParameterRef, node: Node, output: Node, scale: float | None = None
    ) -> None:
        want = expected.get((ref.layout.name, ref.slot))
        number = self.numbers.get(node)
        if want is None:
            self.reader.fail("reduction", output, f"it brings a gradient of {ref.slot.name!r}", "none: it has none")
        share = 1.0 / self.ctx.averaged_over(ref.layout)
        if scale is not None and scale != share:
            undivided = next((n for n in want.numbers if n is not None and self._divided(n, share) == number), None)
            if scale != 1.0 or (self.before is not None and number in (*want.numbers, self._sum(want.numbers))):
                self.reader.fail(
                    "reduction", output, f"the gradient of {ref.slot.name!r} is scaled by {scale}", f"{share}"
                )
            number = undivided if undivided is not None else number
        if self.before is None:
            want.found += 1
        elif number == self._sum(want.numbers):  # of all uses at once
            want.found += len(want.numbers)
        elif number in want.numbers:
            want.found += 1
        else:
            found = f"what is reduced for {ref.slot.name!r} is not its gradient"
            self.reader.fail(
                "value", self._first_difference() or node, found, "the gradient that backward computed before"
            )

    def _divided(self, number: Number, by: float) -> Number:
        return self.numbering.call(_aten.mul.Tensor, Numbered(number), by)

    def _sum(self, numbers: list[Any]) -> Number:
        total = numbers[0]
        for number in numbers[1:]:
            total = self.numbering.call(_aten.add.Tensor, Numbered(total), Numbered(number))
        return total
