"""One training step of a pair of finished graphs, as the runtime takes it, on all ranks at once.

What comes out is all that anybody could see of it, by name: what the model returns, gradients, updated weights, what
was written to buffers, and what forward saved, which backward must leave alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.passes.blind.lockstep import Lockstep, another_order
from tests.passes.mutants import Graph
from zerofx.model.layout import GroupLayout, Slot
from zerofx.passes import Context, edit

Seen = dict[str, torch.Tensor | None]
ROWS = 48
"""Integers that a model is given are smaller."""


@dataclass
class Pair:
    """A forward and its backward."""

    forward: Graph
    backward: Graph

    @property
    def graphs(self) -> tuple[Graph, Graph]:
        return self.forward, self.backward

    @property
    def layouts(self) -> dict[str, GroupLayout]:
        contexts = [ctx for _, ctx in self.graphs]
        refs = [ref for ctx in contexts for ref in (*ctx.parameters.values(), *ctx.gradients.values())]
        return {ref.layout.name: ref.layout for ref in refs}


class _Parameter:
    """What stands for a sharded parameter where forward saves it: it has no memory, and must not reach a graph."""


@dataclass
class _Rank:
    """What one rank holds, by group."""

    rank: int
    shards: dict[str, torch.Tensor]
    replicas: dict[str, torch.Tensor]
    whole: dict[str, torch.Tensor]
    """Stage 0: all parameters."""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    stepped: set[str] = field(default_factory=set)


class TrainingStep:
    """A step of ``pair`` on ``world_size`` ranks. It is the same for all pairs whose graphs began as the same."""

    def __init__(self, pair: Pair, world_size: int = 2, order: int | None = None) -> None:
        self.pair, self.world_size, self.order = pair, world_size, order
        _, ctx = pair.forward
        self.lockstep = Lockstep(world_size, (ctx.process_group, ctx.reduce_group))
        self.ranks = [self._rank(rank, ctx) for rank in range(world_size)]
        self.inputs: list[dict[str, torch.Tensor]] = [{} for _ in self.ranks]

    def run(self) -> Seen:
        """Take the step."""
        seen: Seen = {}
        _, ctx = self.pair.forward
        forwards = self._forward()
        saved = [[values[i] for i in sorted(ctx.saved)] for values in forwards]
        before = [[x.clone() if isinstance(x, torch.Tensor) else x for x in values] for values in saved]
        backwards = self._backward(saved)
        for me, forward, backward, old, new in zip(self.ranks, forwards, backwards, before, saved, strict=True):
            seen |= {f"{me.rank}: output {i}": x for i, x in enumerate(forward) if i not in ctx.saved}
            seen |= {f"{me.rank}: gradient {i}": x for i, x in enumerate(backward)}
            seen |= {f"{me.rank}: gradient of {name}": x for name, x in me.gradients.items()}
            seen |= {f"{me.rank}: {name}": x for name, x in self.inputs[me.rank].items()}
            for kind in (me.shards, me.whole):
                seen |= {f"{me.rank}: weights of {name}": x for name, x in kind.items()}
            for x, y in zip(old, new, strict=True):
                if isinstance(x, torch.Tensor) and not _equal(x, y):
                    raise RuntimeError("backward writes to what forward saved")
        return seen

    def _rank(self, rank: int, ctx: Context) -> _Rank:
        flats = {name: _random(name, (x.numel,), x.dtype) for name, x in self.pair.layouts.items()}
        shards, replicas = {}, {}
        for name, layout in self.pair.layouts.items():
            shards[name] = flats[name].chunk(self.world_size)[rank].clone()
            replicas[name] = flats[name].to(layout.weight_dtype, copy=True)
        return _Rank(rank, shards, replicas, flats) if not ctx.stage else _Rank(rank, shards, replicas, {})

    def _forward(self) -> list[list[Any]]:
        _, ctx = self.pair.forward
        assert ctx.before is not None
        inputs: list[list[Any]] = []
        for me in self.ranks:
            args: list[Any] = []
            for node in ctx.before.graph.find_nodes(op="placeholder"):
                if node.name in ctx.parameters:
                    args += [] if ctx.stage else [self._parameter(me, ctx, ctx.parameters[node.name])]
                    continue
                value = node.meta["val"]
                self.inputs[me.rank][node.name] = _random(f"{node.name} {me.rank}", value.shape, value.dtype)
                args.append(self.inputs[me.rank][node.name])
            inputs.append(args + self._buffers(me, ctx))
        outputs = self._run(self.pair.forward, inputs)
        for me, values in zip(self.ranks, outputs, strict=True):
            for i, ref in ctx.found.saved_parameters.items():
                values[i] = self._parameter(me, ctx, ref)
            for name, kept in ctx.handover.kept_gathered.items():
                wanted = (self.pair.layouts[name].numel, kept.dtype)
                if (values[kept.position].numel(), values[kept.position].dtype) != wanted:
                    raise RuntimeError(f"what is left gathered is not {name!r}")
        return outputs

    def _backward(self, saved: list[list[Any]]) -> list[list[Any]]:
        gm, ctx = self.pair.backward
        assert ctx.before is not None
        placeholders = ctx.before.graph.find_nodes(op="placeholder")
        names = [node.name for node in placeholders]
        inputs: list[list[Any]] = []
        for me, values in zip(self.ranks, saved, strict=True):
            tangents = [_random(f"{n.name} {me.rank}", n.meta["val"].shape, n.meta["val"].dtype) for n in placeholders]
            given = [*values, *tangents[len(values) :]]
            args = [x for x, name in zip(given, names, strict=True) if not ctx.stage or name not in ctx.parameters]
            args += self._buffers(me, ctx)
            likes = {n.name: n.meta["val"] for n in edit.tagged(gm.graph, "kept")}
            for ref, like in zip(ctx.found.kept, likes.values(), strict=True):
                args.append(_random(f"kept {ref.slot.name} {me.rank}", ref.slot.shape, like.dtype))
            args += [given[names.index(ctx.handover.kept_gathered[name].saved)] for name in ctx.found.gathered]
            if any(isinstance(x, _Parameter) for x in args):
                raise RuntimeError("a sharded parameter reaches a graph that did not expect it")
            inputs.append(args)
        outputs = self._run(self.pair.backward, inputs)
        first = len(edit.output_values(ctx.before.graph))
        for me, values in zip(self.ranks, outputs, strict=True):
            for reduction, gradient in zip(ctx.found.reductions, values[first:], strict=True):
                if ctx.sync == "keep":
                    self._accumulate(me, f"{reduction.slots[0].name}, kept", gradient)
                elif not ctx.steps:
                    for slot in reduction.slots:
                        self._accumulate(me, slot.name, self._local(me, ctx, reduction.layout, slot, gradient))
        return [values[:first] for values in outputs]

    def _run(self, graph: Graph, inputs: list[list[Any]]) -> list[list[Any]]:
        gm, _ = graph
        order = None if self.order is None else another_order(gm, self.order)
        return self.lockstep.run(gm, inputs, self, order)

    def _parameter(self, me: _Rank, ctx: Context, ref: Any) -> Any:
        return _Parameter() if ctx.stage else ref.layout.view(me.whole[ref.layout.name], ref.slot)

    def _buffers(self, me: _Rank, ctx: Context) -> list[torch.Tensor]:
        """Of the groups in ``ctx.found.shards``; the caller has started to refresh replicas."""
        if ctx.gathers:
            return [me.shards[layout.name] for layout in ctx.found.shards]
        for layout in ctx.found.shards:
            replica = me.replicas[layout.name]
            self.lockstep.start(me.rank, replica, replica.clone())
        return [me.replicas[layout.name] for layout in ctx.found.shards]

    # ---- gradients and updates, as zerofx.runtime.state.gradients has them -------------------------------------

    def _local(self, me: _Rank, ctx: Context, layout: GroupLayout, slot: Slot, gradient: torch.Tensor) -> torch.Tensor:
        if not ctx.stage:
            if (tuple(gradient.shape), gradient.dtype) != (slot.shape, layout.dtype):
                raise RuntimeError(f"a gradient of {slot.name!r} has another shape, or another dtype")
            return gradient
        piece = layout.piece(slot, me.rank)
        return gradient.narrow(0, piece.in_shard, piece.length)

    def _accumulate(self, me: _Rank, name: str, gradient: torch.Tensor) -> None:
        me.gradients[name] = me.gradients[name] + gradient if name in me.gradients else gradient

    def step(self, rank: int, group: str, gradient: torch.Tensor) -> None:
        """`zerofx.passes.ops.Stepper`: every parameter with a gradient by a tenth of it, in shard and replica."""
        me, (_, ctx) = self.ranks[rank], self.pair.backward
        layout, slots = self._reduced(ctx, group)
        if group in me.stepped:
            raise RuntimeError(f"{group!r} was updated before")
        me.stepped.add(group)
        shard = me.shards[group]
        for slot in slots:
            piece = layout.piece(slot, rank)
            part = shard.narrow(0, piece.in_shard, piece.length)
            part -= self._local(me, ctx, layout, slot, gradient) / 10
        if not ctx.gathers:
            me.replicas[group].chunk(self.world_size)[rank].copy_(shard)

    def refresh(self, rank: int, group: str) -> None:
        """`zerofx.passes.ops.Stepper`: who reads the replica before it was waited for finds no numbers."""
        me, (_, ctx) = self.ranks[rank], self.pair.backward
        self._reduced(ctx, group)
        if group in me.stepped:
            self.lockstep.start(rank, me.replicas[group], me.replicas[group].clone())

    def _reduced(self, ctx: Context, name: str) -> tuple[GroupLayout, Sequence[Slot]]:
        for reduction in ctx.found.reductions:
            if reduction.layout.name == name:
                return reduction.layout, reduction.slots
        raise RuntimeError(f"no group {name!r} is reduced here")


def _random(name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if not dtype.is_floating_point:
        return torch.randint(2 if dtype == torch.bool else ROWS, tuple(shape), generator=generator).to(dtype)
    return (torch.randn(tuple(shape), generator=generator) / 4).to(dtype)


def difference(found: Seen, wanted: Seen) -> str | None:
    """The first name under which both have not the same; numbers may differ by rounding."""
    if found.keys() != wanted.keys():
        return f"only one has {sorted(found.keys() ^ wanted.keys())[0]}"
    return next((name for name in wanted if not _equal(found[name], wanted[name])), None)


def _equal(x: Any, y: Any) -> bool:
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return x is y is None or (type(x) is type(y) and not isinstance(x, torch.Tensor))
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        return False
    if torch.equal(x, y):
        return True
    x, y = x.double(), y.double()
    bound = 2e-6 * y.abs().max() + 1e-12
    return bool(((x - y).abs() <= bound).all())  # not, where there is no number
