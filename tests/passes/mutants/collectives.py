"""Collectives that are not waited for, run among the wrong ranks, or out of order: rules "wait", "group", "order"."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.passes.mutants import (
    Places,
    aten,
    breaks,
    bypass,
    c10d,
    give,
    group_of,
    inner,
    like,
    numel,
    outputs_of,
    set_arg,
    tagged,
    tags,
    when,
    without_marks,
)
from zerofx import _torch
from zerofx.model.layout import make_layout
from zerofx.passes import Context, Tag, edit
from zerofx.passes.proof.meaning import Op

_WAIT = c10d.wait_tensor.default
_collectives = tags("all_gather", "reduce_scatter", "all_reduce")

_reductions = tags("reduce_scatter", "all_reduce")

# ---- wait -----------------------------------------------------------------------------------------------------------

_waits = tags("wait", "wait_grad", "refresh", pinned=False)


@breaks("wait", _waits)
def a_dropped_wait(gm: GraphModule, ctx: Context, node: Node) -> None:
    without_marks(node)
    bypass(node)


@breaks("wait", _waits)
def a_second_wait(gm: GraphModule, ctx: Context, node: Node) -> None:
    like(node, _WAIT, node.args[0], tag=node.meta["zerofx"])


@breaks("wait", _waits)
def a_wait_for_what_was_waited_for(gm: GraphModule, ctx: Context, node: Node) -> None:
    like(node, _WAIT, node, tag=node.meta["zerofx"])


def _from_a_wait(gm: GraphModule, ctx: Context) -> list[Node]:
    return [w for w in tags("weight", pinned=False)(gm, ctx) if w.args[0].op == "call_function"]


@breaks("wait", _from_a_wait)
def a_use_before_the_wait(gm: GraphModule, ctx: Context, weight: Node) -> None:
    set_arg(weight, 0, Op.of(weight.args[0]).args[0])


@breaks("wait", tags("pack", "weight"))
def a_wait_for_nothing(gm: GraphModule, ctx: Context, node: Node) -> None:
    like(node, _WAIT, node, tag=Tag("wait", "x"))


@breaks("wait", tags("shard"))
def a_shard_that_is_waited_for_like_a_replica(gm: GraphModule, ctx: Context, shard: Node) -> None:
    like(shard, _WAIT, shard, tag=Tag("refresh", group_of(shard)))


def _equal_waits(gm: GraphModule, ctx: Context) -> list[tuple[Node, Node]]:
    return [(a, b) for a, b in pairwise(_waits(gm, ctx)) if a.meta["val"].shape == b.meta["val"].shape]


@breaks("wait", _equal_waits)
def one_collective_that_two_groups_wait_for(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    set_arg(pair[1], 0, pair[0].args[0])


@breaks("wait", _waits)
def a_cast_before_the_wait(gm: GraphModule, ctx: Context, wait: Node) -> None:
    set_arg(wait, 0, like(wait.args[0], edit.CAST, wait.args[0], torch.float64))


@breaks("wait", _waits)
def a_view_of_what_is_under_way_is_waited_for(gm: GraphModule, ctx: Context, wait: Node) -> None:
    set_arg(wait, 0, like(wait.args[0], aten.view.default, wait.args[0], [-1]))


@breaks("wait", _waits)
def a_write_to_what_is_under_way(gm: GraphModule, ctx: Context, wait: Node) -> None:
    like(wait.args[0], aten.zero_.default, wait.args[0])


def _large_shards(gm: GraphModule, ctx: Context) -> list[Node]:
    return [s for s in tagged(gm, "shard") if numel(s) > 64 and ctx.found.shards[0].world_size > 1]


@breaks("wait", _large_shards)
def a_gather_that_is_never_waited_for(gm: GraphModule, ctx: Context, shard: Node) -> None:
    part = like(shard, aten.slice.Tensor, shard, 0, 0, 16, tag=Tag("narrow", group_of(shard)))
    ranks = next(s.world_size for s in ctx.found.shards if s.name == group_of(shard))
    like(part, torch.ops.zerofx.all_gather_pairwise.default, part, ranks, ctx.process_group, tag=shard.meta["zerofx"])


@breaks("wait", lambda gm, ctx: [n for n in _reductions(gm, ctx) if n.target is not c10d.all_reduce_.default])
def a_reduction_that_is_never_waited_for(gm: GraphModule, ctx: Context, start: Node) -> None:
    call = Op.of(start)
    like(call.args[0], call.target, *call.args, tag=start.meta["zerofx"])


@breaks("wait", lambda gm, ctx: [(w, i) for w in _waits(gm, ctx) for i, x in enumerate(outputs_of(gm)) if x is w])
def what_leaves_the_graph_is_under_way(gm: GraphModule, ctx: Context, place: tuple[Node, int]) -> None:
    """A group that is kept for backward, for one."""
    give(gm, place[1], place[0].args[0])


@breaks("wait", tags("replica"))
def a_replica_that_is_never_waited_for(gm: GraphModule, ctx: Context, replica: Node) -> None:
    layout = make_layout("more", [("w", (64, 64))], replica.meta["val"].dtype, 2)
    last = edit.last_placeholder(gm.graph) if not ctx.found.kept else tagged(gm, "replica")[-1]
    value = replica.meta["val"].new_empty(layout.numel)
    edit.placeholder(gm.graph, "replica_more", value, Tag("replica", "more"), last)
    ctx.found.shards.append(layout)


# ---- group ----------------------------------------------------------------------------------------------------------


def _wrong(name: str, kinds: Places, i: int, wrong: Callable[[Any], Any], kind: type) -> None:
    """A mutant that changes a collective's argument number ``i``, if it is of that type."""

    def places(gm: GraphModule, ctx: Context) -> list[Node]:
        found = []
        for node in kinds(gm, ctx):
            args = Op.of(node).args
            if len(args) >= -i and isinstance(args[i], kind):
                found.append(node)
        return found

    def break_(gm: GraphModule, ctx: Context, node: Node) -> None:
        call = inner(gm, node)
        place = len(call.args) + i
        set_arg(call, place, wrong(call.args[place]))

    break_.__name__ = name
    breaks("group", places)(break_)


_wrong("a_gather_in_another_process_group", tags("all_gather"), -1, lambda group: "elsewhere", str)
_wrong("a_reduction_in_another_process_group", _reductions, -1, lambda group: "elsewhere", str)
_wrong("a_collective_in_a_process_group_without_a_name", _collectives, -1, lambda group: "", str)
_wrong("a_gather_over_one_rank_more", tags("all_gather"), -2, lambda ranks: ranks + 1, int)
_wrong("a_reduction_over_one_rank_more", _reductions, -2, lambda ranks: ranks + 1, int)
_wrong("a_collective_over_this_rank_alone", _collectives, -2, lambda ranks: 1, int)
_wrong("a_collective_over_all_ranks_twice", _collectives, -2, lambda ranks: 2 * ranks, int)
_wrong("a_maximum_over_ranks", tags("reduce_scatter"), -3, lambda operation: "max", str)
_wrong("a_product_over_ranks", tags("all_reduce"), -2, lambda operation: "product", str)
_wrong("an_average_that_is_scaled_once_more", tags("reduce_scatter"), -3, lambda operation: "avg", str)
_wrong("an_average_that_was_scaled_before", tags("all_reduce"), -2, lambda operation: "avg", str)


@breaks("group", lambda gm, ctx: _collectives(gm, ctx)[:1])
def a_graph_of_another_mesh(gm: GraphModule, ctx: Context, node: Node) -> None:
    ctx.process_group = ctx.reduce_group = "of the other mesh"


@breaks("group", lambda gm, ctx: _reductions(gm, ctx)[:1])
def a_reduction_that_has_a_group_of_its_own_among_gathers(gm: GraphModule, ctx: Context, node: Node) -> None:
    ctx.reduce_group = "of reductions"


# ---- order ----------------------------------------------------------------------------------------------------------


def _moved_up(node: Node, before: Node) -> None:
    """Move ``node``, and what stands there for it alone, in front of ``before``, where that is behind its inputs."""
    for source in [x for x in node.all_input_nodes if x.op == "call_function" and len(x.users) == 1]:
        _moved_up(source, before)
    before.prepend(node)


def _pairs(*kinds: str) -> Places:
    def places(gm: GraphModule, ctx: Context) -> list[tuple[Node, Node]]:
        ctx.memory_budget = float("inf")
        return list(pairwise(tagged(gm, *kinds)))

    return places


_as_it_reads = lambda ctx: ctx.executor == "eager"  # noqa: E731
_as_pinned = lambda ctx: ctx.executor == "inductor"  # noqa: E731


@breaks("order", when(_as_it_reads, _pairs("all_gather")))
def two_gathers_change_places(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    ctx.memory_budget = float("inf")
    _moved_up(pair[1], pair[0])


@breaks("order", when(_as_it_reads, lambda gm, ctx: tagged(gm, "all_gather")[2:]))
def the_last_gather_starts_first(gm: GraphModule, ctx: Context, start: Node) -> None:
    ctx.memory_budget = float("inf")
    _moved_up(start, tagged(gm, "narrow", "all_gather")[0])


def _waits_in_flight(gm: GraphModule, ctx: Context) -> list[tuple[Node, Node]]:
    """A wait, and the next one, whose gather has started by then."""
    order = edit.positions(gm.graph)
    pairs = list(pairwise(tagged(gm, "wait")))
    return [(a, b) for a, b in pairs if order[b.args[0]] < order[a]]


@breaks("order", when(_as_it_reads, _waits_in_flight))
def a_wait_that_comes_too_soon(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    pair[0].prepend(pair[1])


def _ends(gm: GraphModule) -> list[Node]:
    """The waits for reductions, the sums of codes that came, and the gradients, in order."""
    waits = set(tagged(gm, "wait_grad"))
    found = tagged(gm, "wait_grad", "dequantize", "gradient")
    return [n for n in found if n.meta["zerofx"].kind != "dequantize" or not waits.isdisjoint(n.all_input_nodes)]


@breaks("order", _pairs("wait_grad"))
def the_first_reduction_is_waited_for_last(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    for node in _ends(gm):
        if group_of(node) == group_of(pair[0]):
            gm.graph.output_node().prepend(node)


@breaks("order", _pairs("reduce_scatter", "all_reduce"))
def a_reduction_starts_late(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    """Behind the next one; so does its wait, but not behind the other's."""
    first, second = pair
    moved = [n for n in _ends(gm) if group_of(n) in (group_of(first), group_of(second))]
    second.append(first)
    place = first
    for node in sorted(moved, key=lambda n: group_of(n) == group_of(second)):
        place.append(node)
        place = node


def _replicas(gm: GraphModule, ctx: Context) -> list[tuple[Node, Node]]:
    return list(pairwise(tagged(gm, "replica"))) if not ctx.found.kept else []


@breaks("order", when(lambda ctx: ctx.found.shards and ctx.found.shards[0].world_size > 1, _replicas))
def replicas_are_refreshed_in_another_order(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    pair[0].prepend(pair[1])
    i = next(i for i, layout in enumerate(ctx.found.shards) if layout.name == group_of(pair[0]))
    ctx.found.shards[i : i + 2] = reversed(ctx.found.shards[i : i + 2])


@breaks("order", _collectives)
def a_collective_whose_size_depends_on_data(gm: GraphModule, ctx: Context, node: Node) -> None:
    node.meta["val"] = _Sized(ShapeEnv().create_unbacked_symint())


class _Sized:
    """A value of so many elements."""

    def __init__(self, numel: Any) -> None:
        self._numel = numel

    def numel(self) -> Any:
        return self._numel


def _pinned_behind(*kinds: str, of: tuple[str, ...] = ("all_gather",)) -> Places:
    """Starts of the kinds ``of``, and what of ``kinds`` each is pinned behind."""

    def places(gm: GraphModule, ctx: Context) -> list[tuple[Node, Node]]:
        starts = [(node, p[3]) for node in tagged(gm, *of) if (p := _torch.pinned(node)) is not None]
        return [
            (node, x) for node, after in starts for x in after if "zerofx" in x.meta and x.meta["zerofx"].kind in kinds
        ]

    return places


def _unpin(node: Node, other: Node) -> None:
    set_arg(node, 0, tuple(x for x in node.args[0] if x is not other))  # type: ignore[union-attr]


@breaks("order", _pinned_behind("all_gather"))
def a_gather_that_nothing_holds_back(gm: GraphModule, ctx: Context, place: tuple[Node, Node]) -> None:
    _unpin(*place)


@breaks("order", _pinned_behind("ask", "answer", "give"))
def a_gather_that_may_come_before_rows_are_asked_for(gm: GraphModule, ctx: Context, place: tuple[Node, Node]) -> None:
    _unpin(*place)


@breaks("order", _pinned_behind("all_gather", of=("ask", "answer", "give")))
def rows_that_may_be_asked_for_before_a_gather(gm: GraphModule, ctx: Context, place: tuple[Node, Node]) -> None:
    _unpin(*place)


def _products(gm: GraphModule, ctx: Context) -> list[tuple[Node, Node]]:
    """Gathers, and products that read a buffer which is to be gone when they start."""
    starts = [(node, p[3]) for node in tagged(gm, "all_gather") if (p := _torch.pinned(node)) is not None]
    return [(n, x) for n, after in starts for x in after if Op.of(x).target in (aten.mm.default, aten.addmm.default)]


@breaks("order", _products)
def a_reader_that_nothing_holds_back(gm: GraphModule, ctx: Context, place: tuple[Node, Node]) -> None:
    _unpin(*place)


@breaks("order", lambda gm, ctx: [n for n in tagged(gm, "all_gather") if _torch.pinned(n) is not None])
def a_gather_that_is_not_pinned_at_all(gm: GraphModule, ctx: Context, node: Node) -> None:
    set_arg(node, 0, ())


def _pinned_waits(gm: GraphModule, ctx: Context) -> list[Node]:
    return [n for n in tagged(gm, "wait") if _torch.pinned(n) is not None]


@breaks("order", _pinned_waits)
def a_wait_that_may_come_before_the_next_gather(gm: GraphModule, ctx: Context, node: Node) -> None:
    set_arg(node, 0, ())


def _stored(gm: GraphModule, ctx: Context) -> list[tuple[Node, Node]]:
    """Readers of values that are stored before, so that no later kernel computes them from a buffer that is gone."""
    starts = [p[3] for node in tagged(gm, "all_gather") if (p := _torch.pinned(node)) is not None]
    held = {x for after in starts for x in after}
    found = []
    collectives = ("all_gather", "wait", "reduce_scatter", "step", "ahead", "ask", "answer", "give")
    for node in gm.graph.nodes:
        theirs = node.op != "call_function" or node.meta.get("zerofx", Tag("", "")).kind in collectives
        pinned = None if theirs else _torch.pinned(node)
        found += [(node, x) for x in (pinned[3] if pinned else ()) if x in held]
    return found


@breaks("order", when(_as_pinned, _stored))
def a_value_that_may_be_computed_again_from_what_is_gone(
    gm: GraphModule, ctx: Context, place: tuple[Node, Node]
) -> None:
    _unpin(*place)
