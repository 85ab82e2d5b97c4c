"""More ways to break a graph: what leaves it, in which order its collectives run, what it computes. See mutants.py."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch.fx import GraphModule, Node

from tests.passes.mutants import at, aten, breaks, like, plain, set_arg, tagged
from tests.passes.mutants import first_reader as first_reader
from zerofx import _torch
from zerofx.passes import Context, edit
from zerofx.passes.ops import discard as discard_storage
from zerofx.passes.proof.meaning import Op

# ---- saved ----------------------------------------------------------------------------------------------------------


def _free_place(gm: GraphModule, ctx: Context, n: int) -> int | None:
    """Where forward saves a parameter."""
    return at(sorted(ctx.saved_parameters), n)


def _save(gm: GraphModule, place: int, node: Node) -> None:
    outputs = edit.output_values(gm.graph)
    outputs[place] = node
    edit.set_output_values(gm.graph, outputs)


def _without_marks(gm: GraphModule, buffer: Node) -> None:
    for mark in [u for u in buffer.users if u.target is discard_storage]:
        gm.graph.erase_node(mark)


@breaks("saved")
def a_whole_group_is_saved(gm: GraphModule, ctx: Context, n: int) -> bool:
    place = _free_place(gm, ctx, n)
    waits = [w for w in tagged(gm, "wait", "refresh") if w.meta["zerofx"].group not in ctx.kept_gathered]
    if place is None or not waits:
        return False
    _without_marks(gm, waits[-1])
    _save(gm, place, waits[-1])
    return True


@breaks("saved")
def a_weight_is_saved(gm: GraphModule, ctx: Context, n: int) -> bool:
    place, weights = _free_place(gm, ctx, n), tagged(gm, "weight")
    if place is None or not weights:
        return False
    _without_marks(gm, weights[-1].args[0])
    _save(gm, place, weights[-1])
    return True


@breaks("saved")
def a_view_of_a_weight_is_saved(gm: GraphModule, ctx: Context, n: int) -> bool:
    place, weights = _free_place(gm, ctx, n), [w for w in tagged(gm, "weight") if w.meta["val"].dim() == 2]
    if place is None or not weights:
        return False
    _without_marks(gm, weights[0].args[0])
    _save(gm, place, like(gm, weights[0], aten.t.default, weights[0]))
    return True


@breaks("saved")
def a_cast_of_a_weight_is_saved(gm: GraphModule, ctx: Context, n: int) -> bool:
    place, weights = _free_place(gm, ctx, n), tagged(gm, "weight")
    if place is None or not weights:
        return False
    cast = like(gm, weights[0], edit.CAST, weights[0], torch.float64)
    for mark in [u for u in weights[0].args[0].users if u.target is discard_storage]:
        if mark.args[0].meta["zerofx"].kind == "wait":  # behind the new last reader, should it be that
            order = edit.positions(gm.graph)
            if order[mark] < order[cast]:
                cast.append(mark)
    _save(gm, place, cast)
    return True


# ---- reduction ------------------------------------------------------------------------------------------------------


def _extras(gm: GraphModule, ctx: Context) -> int:
    """The first extra output."""
    return len(edit.output_values(gm.graph)) - len(ctx.reductions)


@breaks("reduction")
def a_group_is_not_reduced(gm: GraphModule, ctx: Context, n: int) -> bool:
    if n >= len(ctx.reductions):
        return False
    outputs = edit.output_values(gm.graph)
    del outputs[_extras(gm, ctx) + n], ctx.reductions[n]
    edit.set_output_values(gm.graph, outputs)
    return True


@breaks("reduction")
def a_doubled_reduction(gm: GraphModule, ctx: Context, n: int) -> bool:
    if n >= len(ctx.reductions):
        return False
    outputs = edit.output_values(gm.graph)
    outputs.append(outputs[_extras(gm, ctx) + n])
    ctx.reductions.append(ctx.reductions[n])
    edit.set_output_values(gm.graph, outputs)
    return True


@breaks("reduction")
def a_missing_scale(gm: GraphModule, ctx: Context, n: int) -> bool:
    scales = [x for x in tagged(gm, "gradient", "pack") if x.target is aten.mul.Tensor]
    node = at(scales, n)
    if node is not None and ctx.sync != "keep":
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)
        return True
    return False


@breaks("reduction")
def a_doubled_scale(gm: GraphModule, ctx: Context, n: int) -> bool:
    scale = at([x for x in tagged(gm, "gradient") if x.target is aten.mul.Tensor], n)
    if scale is not None:
        set_arg(scale, 1, scale.args[1] ** 2)
    return scale is not None


@breaks("reduction")
def two_gradients_change_places(gm: GraphModule, ctx: Context, n: int) -> bool:
    """Of different sizes, in a pack."""
    pack = at([x for x in tagged(gm, "pack") if x.target is aten.cat.default], n)
    if pack is None:
        return False
    parts = list(pack.args[0])
    sizes = [p.meta["val"].numel() for p in parts]
    other = next(
        (i for i in range(1, len(parts)) if sizes[i] != sizes[0] and parts[i].target is aten.reshape.default), 0
    )
    parts[0], parts[other] = parts[other], parts[0]
    set_arg(pack, 0, parts)
    return bool(other)


@breaks("reduction")
def ones_for_padding(gm: GraphModule, ctx: Context, n: int) -> bool:
    node = at([x for x in tagged(gm, "pack") if x.target is aten.full.default], n)
    if node is not None:
        set_arg(node, 1, 1.0)
    return node is not None


@breaks("reduction")
def a_gradient_for_autograd_too(gm: GraphModule, ctx: Context, n: int) -> bool:
    place, pack = at(sorted(ctx.gradients), n), tagged(gm, "pack")
    if place is None or not pack:
        return False
    _save(gm, place, pack[0].all_input_nodes[0] if pack[0].all_input_nodes else pack[0])
    return True


@breaks("reduction")
def another_slot_is_promised(gm: GraphModule, ctx: Context, n: int) -> bool:
    reduction = at([r for r in ctx.reductions if len(r.slots) > 1], n)
    if reduction is None or ctx.sync == "keep":
        return False
    ctx.reductions[ctx.reductions.index(reduction)] = replace(reduction, slots=reduction.slots[1:])
    return True


# ---- order ----------------------------------------------------------------------------------------------------------


def _swap(gm: GraphModule, a: Node, b: Node) -> None:
    """Two nodes, and what stands in front of them for them alone, change places, where that is possible."""
    order = edit.positions(gm.graph)
    if order[a] > order[b]:
        a, b = b, a
    for node in (*(x for x in b.all_input_nodes if "zerofx" in x.meta and x.op != "placeholder"), b):
        a.prepend(node)


@breaks("order")
def two_gathers_change_places(gm: GraphModule, ctx: Context, n: int) -> bool:
    starts = tagged(gm, "all_gather")
    if n + 1 >= len(starts) or ctx.executor == "inductor":
        return False
    ctx.memory_budget = float("inf")
    _swap(gm, starts[n], starts[n + 1])
    return True


@breaks("order")
def two_waits_change_places(gm: GraphModule, ctx: Context, n: int) -> bool:
    """The reduction that is waited for first is waited for last, with all that follows from it."""
    waits = tagged(gm, "wait_grad")
    if n + 1 >= len(waits):
        return False
    group = waits[n].meta["zerofx"].group
    for node in tagged(gm, "wait_grad", "gradient"):
        if node.meta["zerofx"].group == group:
            gm.graph.output_node().prepend(node)
    return True


@breaks("order")
def a_gather_that_nothing_holds_back(gm: GraphModule, ctx: Context, n: int) -> bool:
    starts = tagged(gm, "all_gather")
    pairs = [(a, b) for a, b in pairwise(starts) if (p := _torch.pinned(b)) is not None and a in p[3]]
    pair = at(pairs, n)
    if pair is not None:
        first, second = pair
        set_arg(second, 0, tuple(x for x in second.args[0] if x is not first))
    return pair is not None


@breaks("order")
def a_reader_that_nothing_holds_back(gm: GraphModule, ctx: Context, n: int) -> bool:
    """A product that reads a buffer which is to be gone when the next gather starts."""
    pinned = [(node, p[3]) for node in tagged(gm, "all_gather") if (p := _torch.pinned(node)) is not None]
    products = (aten.mm.default, aten.addmm.default)
    places = [(node, x) for node, after in pinned for x in after if Op.of(x).target in products]
    place = at(places, n)
    if place is not None:
        node, reader = place
        set_arg(node, 0, tuple(x for x in node.args[0] if x is not reader))
    return place is not None


# ---- write ----------------------------------------------------------------------------------------------------------


@breaks("write")
def a_write_to_a_weight(gm: GraphModule, ctx: Context, n: int) -> bool:
    node = at(tagged(gm, "weight") if ctx.stage == 3 else [], n)
    if node is not None:
        like(gm, node, aten.zero_.default, node)
    return node is not None


@breaks("write")
def a_write_to_a_whole_group(gm: GraphModule, ctx: Context, n: int) -> bool:
    node = at(tagged(gm, "wait", "refresh", "gathered"), n)
    if node is not None:
        like(gm, node, aten.zero_.default, node)
    return node is not None


@breaks("write")
def a_write_to_a_shard(gm: GraphModule, ctx: Context, n: int) -> bool:
    node = at(tagged(gm, "shard"), n)
    if node is not None:
        like(gm, node, aten.zero_.default, node)
    return node is not None


@breaks("write")
def a_write_to_an_input(gm: GraphModule, ctx: Context, n: int) -> bool:
    places = [x for x in gm.graph.find_nodes(op="placeholder") if "zerofx" not in x.meta and x.users]
    node = at([x for x in places if isinstance(x.meta["val"], torch.Tensor)], n)
    if node is not None:
        with gm.graph.inserting_before(gm.graph.output_node()):
            gm.graph.call_function(aten.zero_.default, (node,)).meta["val"] = node.meta["val"]
    return node is not None


# ---- value ----------------------------------------------------------------------------------------------------------


@breaks("value")
def two_weights_of_one_shape(gm: GraphModule, ctx: Context, n: int) -> bool:
    """Taken for each other: both are parts of the buffer where the layout has a parameter."""
    weights = plain(tagged(gm, "weight"))
    pairs = [
        (a, b)
        for i, a in enumerate(weights)
        for b in weights[i + 1 :]
        if a.args[:3] == b.args[:3] and first_reader(a) is not None
    ]
    pair = at(pairs, n)
    if pair is not None:
        a, b = pair
        here, there = a.args[3], b.args[3]
        set_arg(a, 3, there)
        set_arg(b, 3, here)
    return pair is not None


@breaks("value")
def two_gradients_of_one_shape(gm: GraphModule, ctx: Context, n: int) -> bool:
    pack = at([x for x in tagged(gm, "pack") if x.target is aten.cat.default], n)
    if pack is None:
        return False
    parts = list(pack.args[0])
    grads = [i for i, p in enumerate(parts) if p.target is aten.reshape.default]
    shape = {i: tuple(parts[i].args[0].meta["val"].shape) for i in grads}
    pair = next(((i, j) for i in grads for j in grads if i < j and shape[i] == shape[j]), None)
    if pair is None:
        return False
    i, j = pair
    parts[i], parts[j] = parts[j], parts[i]
    set_arg(pack, 0, parts)
    return True


@breaks("value")
def another_operator(gm: GraphModule, ctx: Context, n: int) -> bool:
    others = {aten.tanh.default: aten.sin.default, aten.sub.Tensor: aten.div.Tensor}
    node = at(plain([x for x in gm.graph.nodes if x.target in others]), n)
    if node is not None:
        node.target = others[node.target]
    return node is not None


@breaks("value")
def another_constant(gm: GraphModule, ctx: Context, n: int) -> bool:
    node = at(plain([x for x in gm.graph.nodes if x.target is aten.native_layer_norm.default]), n)
    if node is not None:
        set_arg(node, 4, 2 * node.args[4])
    return node is not None
