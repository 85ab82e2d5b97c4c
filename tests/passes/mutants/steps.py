"""Groups that backward updates wrongly: the rule "step"."""

from __future__ import annotations

from itertools import pairwise

from torch.fx import GraphModule, Node

from tests.passes.mutants import (
    Places,
    aten,
    breaks,
    group_of,
    inner,
    like,
    numel,
    outputs_of,
    set_arg,
    tagged,
    tags,
    when,
)
from zerofx import _torch
from zerofx.passes import Context, Tag
from zerofx.passes.proof.facts import REFRESH as _REFRESH
from zerofx.passes.proof.facts import STEP as _STEP
from zerofx.passes.proof.meaning import Op

_steps, _ahead = tags("step"), tags("ahead")


def _returned(gm: GraphModule, node: Node) -> Node:
    """What the graph returns for the update ``node``: itself, or its refresh."""
    return next((user for user in node.users if user.meta.get("zerofx", Tag("", "")).kind == "ahead"), node)


def _gradient(node: Node) -> Node:
    return Op.of(node).args[0]  # type: ignore[no-any-return]


def _return(gm: GraphModule, old: Node, new: Node) -> None:
    output = gm.graph.output_node()
    output.args = (tuple(new if x is old else x for x in outputs_of(gm)),)


def _pairs(places: Places) -> Places:
    return lambda gm, ctx: list(pairwise(places(gm, ctx)))


def _name(gm: GraphModule, node: Node, group: str) -> None:
    call = inner(gm, node)
    set_arg(call, 1, group)


@breaks("step", _steps)
def a_dropped_update(gm: GraphModule, ctx: Context, node: Node) -> None:
    _return(gm, _returned(gm, node), _gradient(node))


@breaks("step", _steps)
def a_second_update(gm: GraphModule, ctx: Context, node: Node) -> None:
    like(_returned(gm, node), _STEP, _gradient(node), group_of(node), tag=node.meta["zerofx"])


@breaks("step", _pairs(_steps))
def an_update_of_another_group(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    _name(gm, pair[0], group_of(pair[1]))


@breaks("step", _pairs(_steps))
def two_updates_in_each_others_place(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    a, b = (_returned(gm, node) for node in pair)
    output = gm.graph.output_node()
    output.args = (tuple({a: b, b: a}.get(x, x) if isinstance(x, Node) else x for x in outputs_of(gm)),)


def _in_place(gm: GraphModule, ctx: Context) -> list[tuple[Node, Node]]:
    """Updates, and weights that lie in the very memory that they change."""
    if ctx.stage == 3 and ctx.found.shards and ctx.found.shards[0].world_size > 1:
        return []
    steps = {group_of(node): node for node in tagged(gm, "step")}
    return [(steps[group_of(w)], w) for w in tagged(gm, "weight") if group_of(w) in steps and numel(w)]


@breaks("step", _in_place)
def a_weight_that_is_read_after_its_update(gm: GraphModule, ctx: Context, place: tuple[Node, Node]) -> None:
    node, weight = place
    like(node, aten.neg.default, weight)


@breaks("step", _in_place)
def a_view_of_a_weight_that_is_read_after_its_update(gm: GraphModule, ctx: Context, place: tuple[Node, Node]) -> None:
    node, weight = place
    view = like(weight, aten.view.default, weight, [-1])
    like(node, aten.neg.default, view)


@breaks("step", _ahead)
def a_refresh_that_does_not_wait_for_the_update(gm: GraphModule, ctx: Context, node: Node) -> None:
    step = Op.of(node).args[0]
    early = like(_gradient(step), _REFRESH, _gradient(step), group_of(node), tag=node.meta["zerofx"])
    _return(gm, node, early)


@breaks("step", _ahead)
def a_second_refresh(gm: GraphModule, ctx: Context, node: Node) -> None:
    _return(gm, node, like(node, _REFRESH, node, group_of(node), tag=node.meta["zerofx"]))


@breaks("step", _ahead)
def a_refresh_of_another_group(gm: GraphModule, ctx: Context, node: Node) -> None:
    others = [group_of(other) for other in tagged(gm, "step") if group_of(other) != group_of(node)]
    _name(gm, node, others[-1])


@breaks("step", when(lambda ctx: ctx.stage == 3, _steps))
def a_refresh_where_there_are_no_replicas(gm: GraphModule, ctx: Context, node: Node) -> None:
    _return(gm, node, like(node, _REFRESH, node, group_of(node), tag=Tag("ahead", group_of(node))))


@breaks("step", _ahead)
def a_refresh_that_nobody_returns(gm: GraphModule, ctx: Context, node: Node) -> None:
    _return(gm, node, Op.of(node).args[0])


@breaks("step", when(lambda ctx: not ctx.steps and ctx.stage, tags("gradient")))
def an_update_that_nobody_asked_for(gm: GraphModule, ctx: Context, gradient: Node) -> None:
    like(gradient, _STEP, gradient, group_of(gradient), tag=Tag("step", group_of(gradient)))


def _dependences(gm: GraphModule, ctx: Context) -> list[tuple[Node, Node]]:
    """Updates, and the update or reduction whose turn was before, which they are told to follow."""
    turns = tags("step", "ahead", "reduce_scatter")(gm, ctx)
    pairs = [(node, before) for before, node in pairwise(turns) if node.meta["zerofx"].kind != "reduce_scatter"]
    return [(node, before) for node, before in pairs if before in Op.of(node).after]


@breaks("step", _dependences)
def an_update_out_of_turn(gm: GraphModule, ctx: Context, place: tuple[Node, Node]) -> None:
    node, before = place
    set_arg(node, 0, tuple(x for x in node.args[0] if x is not before))  # type: ignore[union-attr]


def _followed(gm: GraphModule, ctx: Context) -> list[tuple[Node, Node]]:
    """Updates in place, and the model's operations that they are told to follow: readers of what they change."""
    steps = dict.fromkeys(node for node, _ in _in_place(gm, ctx) if _torch.pinned(node) is not None)
    return [(node, x) for node in steps for x in Op.of(node).after if "zerofx" not in x.meta]


@breaks("step", _followed)
def an_update_that_a_reader_may_come_after(gm: GraphModule, ctx: Context, place: tuple[Node, Node]) -> None:
    node, reader = place
    set_arg(node, 0, tuple(x for x in node.args[0] if x is not reader))  # type: ignore[union-attr]
