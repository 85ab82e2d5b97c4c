"""What only stage 0 has, or what the caller is promised: the rules "saved" and "reduction"."""

from __future__ import annotations

from itertools import combinations

from torch.fx import GraphModule, Node

from tests.passes.mutants import aten, breaks, give, outputs_of, set_arg, tagged, when
from zerofx.passes import Context, ParameterRef, Reduction

# ---- saved ----------------------------------------------------------------------------------------------------------


def _of_one_shape(gm: GraphModule, ctx: Context) -> list[tuple[int, int]]:
    """Two outputs at which the caller puts parameters of one shape."""
    saved = sorted(ctx.found.saved_parameters.items())
    return [(i, j) for (i, a), (j, b) in combinations(saved, 2) if a != b and a.slot.shape == b.slot.shape]


@breaks("saved", _of_one_shape)
def two_saved_parameters_change_places(gm: GraphModule, ctx: Context, pair: tuple[int, int]) -> None:
    i, j = pair
    ctx.found.saved_parameters[i], ctx.found.saved_parameters[j] = (
        ctx.found.saved_parameters[j],
        ctx.found.saved_parameters[i],
    )


@breaks("saved", _of_one_shape)
def one_parameter_is_saved_twice(gm: GraphModule, ctx: Context, pair: tuple[int, int]) -> None:
    ctx.found.saved_parameters[pair[0]] = ctx.found.saved_parameters[pair[1]]


def _not_saved(gm: GraphModule, ctx: Context) -> list[tuple[int, ParameterRef]]:
    """Outputs that are the caller's own, and a parameter."""
    refs = list(ctx.found.saved_parameters.values())[:1]
    return [(i, ref) for ref in refs for i in range(len(outputs_of(gm))) if i not in ctx.saved]


@breaks("saved", _not_saved)
def a_parameter_is_put_where_the_model_returns_something(
    gm: GraphModule, ctx: Context, place: tuple[int, ParameterRef]
) -> None:
    ctx.found.saved_parameters[place[0]] = place[1]


def _inputs(gm: GraphModule, ctx: Context) -> list[tuple[int, Node]]:
    names = {ref: name for name, ref in ctx.parameters.items()}
    inputs = {node.name: node for node in gm.graph.find_nodes(op="placeholder")}
    saved = sorted(ctx.found.saved_parameters.items())
    return [(i, inputs[names[ref]]) for i, ref in saved if names.get(ref) in inputs]


@breaks("saved", when(lambda ctx: not ctx.stage, _inputs))
def a_parameter_leaves_the_graph(gm: GraphModule, ctx: Context, place: tuple[int, Node]) -> None:
    """Inductor may return it in other strides than backward reads."""
    del ctx.found.saved_parameters[place[0]]
    give(gm, *place)


# ---- reduction ------------------------------------------------------------------------------------------------------


def _views(gm: GraphModule, ctx: Context) -> list[tuple[Node, int]]:
    """A gradient of one dimension, and how many elements more."""
    if ctx.stage or ctx.sync == "keep":
        return []
    views = [x for x in tagged(gm, "gradient") if x.target is aten.as_strided.default and len(x.args[1]) == 1]  # type: ignore[arg-type]
    return [(x, more) for x in views for more in (-1, 1, 2)]


@breaks("reduction", _views)
def a_gradient_of_another_size(gm: GraphModule, ctx: Context, place: tuple[Node, int]) -> None:
    node, more = place
    set_arg(node, 1, [node.args[1][0] + more])  # type: ignore[index, operator]


@breaks("reduction", lambda gm, ctx: [x for x, more in _views(gm, ctx) if more == 1])
def a_gradient_of_another_shape(gm: GraphModule, ctx: Context, node: Node) -> None:
    (numel,) = node.args[1]  # type: ignore[misc]
    node.args = (node.args[0], [1, numel], [numel, 1], node.args[3])


@breaks(
    "reduction",
    when(lambda ctx: not ctx.stage and ctx.sync != "keep", lambda gm, ctx: range(len(ctx.found.reductions))),
)
def a_gradient_for_two_parameters(gm: GraphModule, ctx: Context, place: int) -> None:
    reduction = ctx.found.reductions[place]
    ctx.found.reductions[place] = Reduction(reduction.layout, reduction.slots * 2)


@breaks("reduction", lambda gm, ctx: range(len(ctx.found.reductions)))
def none_for_a_gradient(gm: GraphModule, ctx: Context, place: int) -> None:
    give(gm, len(outputs_of(gm)) - 1 - place, None)


def _zeros(gm: GraphModule, ctx: Context) -> list[Node]:
    return [x for x in tagged(gm, "pack") if x.target is aten.full.default]


@breaks("reduction", _zeros)
def a_gap_of_another_size_than_its_node_says(gm: GraphModule, ctx: Context, node: Node) -> None:
    set_arg(node, 0, [node.args[0][0] + 32])  # type: ignore[index, operator]
