"""Wrong inputs, wrong gathers, wrong parts of what was gathered: the rules "inputs", "gather" and "slice"."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.fx import GraphModule, Node

from tests.passes.mutants import (
    aten,
    breaks,
    c10d,
    group_of,
    instead,
    like,
    numel,
    set_arg,
    tagged,
    tags,
    when,
    without_marks,
)
from zerofx.passes import Context, Tag, edit

# ---- inputs ---------------------------------------------------------------------------------------------------------


def _placeholders(gm: GraphModule, ctx: Context) -> list[Node]:
    """Those that are the model's own, no parameters."""
    found = gm.graph.find_nodes(op="placeholder")
    return [node for node in found if "zerofx" not in node.meta and node.name not in ctx.parameters]


@breaks("inputs", tags("shard", "replica", "kept", "gathered"))
def an_input_of_another_size(gm: GraphModule, ctx: Context, node: Node) -> None:
    node.meta["val"] = node.meta["val"].new_empty(numel(node) + 32)


@breaks("inputs", tags("shard", "replica", "gathered"))
def an_input_of_another_dtype(gm: GraphModule, ctx: Context, node: Node) -> None:
    node.meta["val"] = node.meta["val"].to(torch.float64)


@breaks("inputs", when(lambda ctx: all(s.world_size > 1 for s in ctx.found.shards), tags("shard")))
def a_replica_for_a_shard(gm: GraphModule, ctx: Context, node: Node) -> None:
    layout = next(s for s in ctx.found.shards if s.name == group_of(node))
    node.meta["val"] = node.meta["val"].new_empty(layout.numel)


@breaks("inputs", lambda gm, ctx: range(len(ctx.found.shards)))
def a_shard_that_is_not_promised(gm: GraphModule, ctx: Context, place: int) -> None:
    del ctx.found.shards[place]


@breaks("inputs", lambda gm, ctx: range(len(ctx.found.shards)))
def a_shard_that_is_promised_twice(gm: GraphModule, ctx: Context, place: int) -> None:
    ctx.found.shards.insert(place, ctx.found.shards[place])


@breaks("inputs", lambda gm, ctx: [i for i, (a, b) in enumerate(pairwise(ctx.found.shards)) if a.numel != b.numel])
def two_shards_come_in_another_order(gm: GraphModule, ctx: Context, place: int) -> None:
    ctx.found.shards[place : place + 2] = reversed(ctx.found.shards[place : place + 2])


@breaks("inputs", lambda gm, ctx: sorted(ctx.parameters) if ctx.stage else [])
def a_parameter_that_is_an_input_still(gm: GraphModule, ctx: Context, name: str) -> None:
    first = next(iter(gm.graph.nodes))
    with gm.graph.inserting_before(first):
        gm.graph.placeholder(name).meta["val"] = first.meta["val"]


def _behind_the_models(gm: GraphModule, ctx: Context) -> list[Node]:
    return tagged(gm, "shard", "replica") if _placeholders(gm, ctx) else []


@breaks("inputs", _behind_the_models)
def a_shard_before_the_models_inputs(gm: GraphModule, ctx: Context, node: Node) -> None:
    _placeholders(gm, ctx)[0].prepend(node)


@breaks("inputs", lambda gm, ctx: list(pairwise(_placeholders(gm, ctx))))
def two_of_the_models_inputs_change_places(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    pair[0].prepend(pair[1])


@breaks("inputs", _placeholders)
def an_input_that_nobody_brings(gm: GraphModule, ctx: Context, node: Node) -> None:
    with gm.graph.inserting_after(node):
        gm.graph.placeholder("more").meta["val"] = node.meta["val"]


def _shapes_differ(gm: GraphModule, ctx: Context) -> list[int]:
    return [i for i, (a, b) in enumerate(pairwise(ctx.found.kept)) if a.slot.shape != b.slot.shape]


@breaks("inputs", _shapes_differ)
def two_kept_gradients_come_in_another_order(gm: GraphModule, ctx: Context, place: int) -> None:
    ctx.found.kept[place : place + 2] = reversed(ctx.found.kept[place : place + 2])


@breaks("inputs", lambda gm, ctx: range(len(ctx.found.gathered)))
def a_gathered_group_that_is_not_promised(gm: GraphModule, ctx: Context, place: int) -> None:
    del ctx.found.gathered[place]


def _sizes_differ(gm: GraphModule, ctx: Context) -> list[int]:
    return [i for i, (a, b) in enumerate(pairwise(tagged(gm, "gathered"))) if numel(a) != numel(b)]


@breaks("inputs", _sizes_differ)
def two_gathered_groups_come_in_another_order(gm: GraphModule, ctx: Context, place: int) -> None:
    ctx.found.gathered[place : place + 2] = reversed(ctx.found.gathered[place : place + 2])


# ---- gather ---------------------------------------------------------------------------------------------------------

_GATHER = torch.ops.zerofx.all_gather_pairwise.default


def _starts(gm: GraphModule, ctx: Context) -> list[Node]:
    """Of shards as they are: what is wrong with codes breaks another rule."""
    found: list[Node] = tags("all_gather", pinned=False)(gm, ctx)  # type: ignore[assignment]
    return [start for start in found if start.args[0].meta["zerofx"].kind != "quantize"]  # type: ignore[union-attr]


def _weights_of_shards(gm: GraphModule, ctx: Context) -> list[tuple[Node, Node]]:
    shards = {group_of(s): s for s in tagged(gm, "shard")}
    weights = tags("weight", pinned=False)(gm, ctx)
    return [(w, shards[group_of(w)]) for w in weights if group_of(w) in shards and w.args[0] != shards[group_of(w)]]


@breaks("gather", when(lambda ctx: ctx.found.shards and ctx.found.shards[0].world_size > 1, _weights_of_shards))
def a_weight_from_the_shard(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    """Used before it is gathered."""
    set_arg(pair[0], 0, pair[1])


_sharded = when(lambda ctx: ctx.found.shards and ctx.found.shards[0].world_size > 1, tags("shard"))


@breaks("gather", _sharded)
def a_shard_that_the_model_reads(gm: GraphModule, ctx: Context, shard: Node) -> None:
    like(shard, aten.neg.default, shard)


@breaks("gather", _sharded)
def a_shard_that_is_reduced(gm: GraphModule, ctx: Context, shard: Node) -> None:
    scatter = torch.ops.zerofx.all_to_all_pairwise.default
    start = like(shard, scatter, shard, 2, ctx.process_group, tag=Tag("reduce_scatter", group_of(shard)))
    like(start, c10d.wait_tensor.default, start, tag=Tag("wait_grad", group_of(shard)))


@breaks("gather", _sharded)
def a_shard_that_is_summed_over_ranks(gm: GraphModule, ctx: Context, shard: Node) -> None:
    like(shard, c10d.all_reduce.default, shard, "sum", ctx.process_group, tag=Tag("all_reduce", group_of(shard)))


@breaks("gather", _starts)
def a_scaled_shard(gm: GraphModule, ctx: Context, start: Node) -> None:
    set_arg(start, 0, like(start.args[0], aten.mul.Tensor, start.args[0], 1.0))


@breaks("gather", _starts)
def a_view_of_a_shard(gm: GraphModule, ctx: Context, start: Node) -> None:
    set_arg(start, 0, like(start.args[0], aten.view.default, start.args[0], [2, -1]))


@breaks("gather", _starts)
def every_second_element_of_a_shard(gm: GraphModule, ctx: Context, start: Node) -> None:
    shard = start.args[0]
    set_arg(start, 0, like(shard, aten.slice.Tensor, shard, 0, 0, numel(shard), 2))


@breaks("gather", _starts)
def a_second_gather(gm: GraphModule, ctx: Context, start: Node) -> None:
    again = like(start, start.target, *start.args, tag=start.meta["zerofx"])
    like(again, c10d.wait_tensor.default, again, tag=Tag("wait", "x"))


@breaks("gather", tags("weight"))
def a_gather_of_a_weight(gm: GraphModule, ctx: Context, weight: Node) -> None:
    like(weight, _GATHER, weight, 2, ctx.process_group, tag=Tag("all_gather", "x"))


def _activations(gm: GraphModule, ctx: Context) -> list[Node]:
    nodes = [n for n in gm.graph.nodes if n.op == "call_function" and "zerofx" not in n.meta]
    return [n for n in nodes if n.target in (aten.tanh.default, aten.add.Tensor, aten.mm.default)]


@breaks("gather", _activations)
def a_gather_of_an_activation(gm: GraphModule, ctx: Context, node: Node) -> None:
    like(node, _GATHER, node, 2, ctx.process_group, tag=Tag("all_gather", "x"))


def _parts(gm: GraphModule, ctx: Context) -> list[Node]:
    return [start for start in _starts(gm, ctx) if start.args[0].op == "placeholder"]


@breaks("gather", when(lambda ctx: ctx.executor == "eager", _parts))
def a_gather_that_nothing_reads(gm: GraphModule, ctx: Context, start: Node) -> None:
    """Of a part of the shard, waited for and given back."""
    ctx.memory_budget = float("inf")
    (wait,) = start.users
    tag = start.meta["zerofx"]
    part = like(start, aten.slice.Tensor, start.args[0], 0, 0, 32, tag=Tag("narrow", tag.group))
    more = like(part, start.target, part, *start.args[1:], tag=tag)
    again = like(wait, c10d.wait_tensor.default, more, tag=wait.meta["zerofx"])
    for mark in [u for u in wait.users if "zerofx" in u.meta and u.meta["zerofx"].kind == "discard"]:
        with gm.graph.inserting_after(again):
            gm.graph.call_function(mark.target, (again,))


def _given_back(gm: GraphModule, ctx: Context) -> list[Node]:
    kinds = {
        start: {u.meta["zerofx"].kind for w in start.users for u in w.users}
        for start in _parts(gm, ctx)
        if all("zerofx" in u.meta for w in start.users for u in w.users)
    }
    return [start for start, found in kinds.items() if {"weight", "discard"} <= found]


@breaks("gather", _given_back)
def a_weight_that_is_gathered_twice(gm: GraphModule, ctx: Context, start: Node) -> None:
    """Each time the same numbers; the bytes are twice as many."""
    ctx.memory_budget = float("inf")
    (wait,), tag, dtype = start.users, Tag("narrow", group_of(start)), start.meta["val"].dtype
    wide = like(start, edit.CAST, start.args[0], torch.float64, tag=tag)
    back = like(wide, edit.CAST, wide, dtype, tag=tag)
    more = like(back, start.target, back, *start.args[1:], tag=start.meta["zerofx"])
    again = like(wait, c10d.wait_tensor.default, more, tag=wait.meta["zerofx"])
    first = next(u for u in wait.users if u.meta["zerofx"].kind == "weight")
    weight = like(again, first.target, again, *first.args[1:], tag=first.meta["zerofx"])
    reader = like(weight, aten.neg.default, weight)
    mark = next(u for u in wait.users if u.meta["zerofx"].kind == "discard")
    with gm.graph.inserting_after(reader):
        gm.graph.call_function(mark.target, (again,))


# ---- slice ----------------------------------------------------------------------------------------------------------

_weights = tags("weight", pinned=False)


@breaks("slice", _weights)
def a_weight_one_element_on(gm: GraphModule, ctx: Context, node: Node) -> None:
    set_arg(node, 3, node.args[3] + 1)


@breaks("slice", _weights)
def a_weight_one_line_of_the_cache_back(gm: GraphModule, ctx: Context, node: Node) -> None:
    set_arg(node, 3, node.args[3] - 16)


@breaks("slice", lambda gm, ctx: [w for w in _weights(gm, ctx) if w.args[3]])
def an_offset_in_bytes(gm: GraphModule, ctx: Context, node: Node) -> None:
    set_arg(node, 3, node.args[3] * 4 + numel(node.args[0]))


@breaks("slice", _weights)
def a_weight_past_the_end(gm: GraphModule, ctx: Context, node: Node) -> None:
    set_arg(node, 3, numel(node.args[0]))


def _matrices(gm: GraphModule, ctx: Context) -> list[Node]:
    return [w for w in _weights(gm, ctx) if len(w.args[1]) == 2]


@breaks("slice", _matrices)
def a_transposed_weight(gm: GraphModule, ctx: Context, node: Node) -> None:
    set_arg(node, 2, [1, node.args[1][0]])


@breaks("slice", _matrices)
def a_row_in_the_place_of_every_row(gm: GraphModule, ctx: Context, node: Node) -> None:
    set_arg(node, 2, [0, 1])


@breaks("slice", _matrices)
def a_flat_weight(gm: GraphModule, ctx: Context, node: Node) -> None:
    node.args = (node.args[0], [numel(node)], [1], node.args[3])


@breaks("slice", lambda gm, ctx: [w for w in _weights(gm, ctx) if len(w.args[1]) == 1])
def a_weight_of_another_shape(gm: GraphModule, ctx: Context, node: Node) -> None:
    set_arg(node, 1, [node.args[1][0] // 2])


def _elsewhere(gm: GraphModule, ctx: Context) -> list[tuple[Node, Node]]:
    """A matrix, and a whole group that has none of that shape."""
    wholes = [w for w in tagged(gm, "wait", "refresh", "gathered")]
    names = {layout.name: layout for layout in ctx.found.shards}
    shapes = {name: {slot.shape for slot in layout.slots} for name, layout in names.items()}
    return [
        (w, whole)
        for w in _matrices(gm, ctx)
        for whole in wholes
        if group_of(whole) in shapes
        and tuple(w.args[1]) not in shapes[group_of(whole)]
        and edit.positions(gm.graph)[whole] < edit.positions(gm.graph)[w]
    ]


@breaks("slice", when(lambda ctx: ctx.executor == "inductor" or ctx.stage != 3, _elsewhere))
def a_weight_of_another_group(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    set_arg(pair[0], 0, pair[1])


_wholes = tags("wait", "refresh", "gathered")


@breaks("slice", _wholes)
def a_whole_group_that_the_model_reads(gm: GraphModule, ctx: Context, node: Node) -> None:
    like(node, aten.neg.default, node)


@breaks("slice", _wholes)
def a_whole_group_cast_behind_the_wait(gm: GraphModule, ctx: Context, node: Node) -> None:
    """Half the point of `narrow`: what was gathered is of the wrong dtype, and twice the bytes."""
    without_marks(node)
    instead(node, edit.CAST, torch.float16)


@breaks("slice", _wholes)
def a_copy_of_a_whole_group(gm: GraphModule, ctx: Context, node: Node) -> None:
    without_marks(node)
    instead(node, aten.clone.default)


def _slices(gm: GraphModule, ctx: Context) -> list[Node]:
    """Of a group that is gathered in two parts; no parameter begins half a line of the cache further on."""
    return [x for x in tagged(gm, "narrow") if x.target is aten.slice.Tensor]


@breaks("slice", _slices)
def another_part_of_the_shard(gm: GraphModule, ctx: Context, node: Node) -> None:
    shift = 16 if node.args[2] == 0 else -16
    node.args = (*node.args[:2], node.args[2] + shift, node.args[3] + shift)


def _several_parts(gm: GraphModule, ctx: Context) -> list[Node]:
    return [x for x in tagged(gm, "narrow") if x.target is aten.cat.default]


@breaks("slice", _several_parts)
def parts_of_a_shard_in_another_order(gm: GraphModule, ctx: Context, node: Node) -> None:
    set_arg(node, 0, list(reversed(node.args[0])))


@breaks("slice", _several_parts)
def one_part_of_a_shard_twice(gm: GraphModule, ctx: Context, node: Node) -> None:
    set_arg(node, 0, [node.args[0][0], *node.args[0][:-1]])


@breaks("slice", _several_parts)
def a_part_of_a_shard_is_left_out(gm: GraphModule, ctx: Context, node: Node) -> None:
    set_arg(node, 0, node.args[0][:-1])


def _neighbours(gm: GraphModule, ctx: Context) -> list[tuple[Node, Node]]:
    cats = _several_parts(gm, ctx)
    return [(a, b) for a, b in pairwise(cats) if group_of(a) != group_of(b)]


@breaks("slice", _neighbours)
def parts_of_two_shards_together(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    first, second = pair
    for x in reversed(second.args[0]):
        first.prepend(x)
    set_arg(first, 0, [first.args[0][0], second.args[0][1]])
