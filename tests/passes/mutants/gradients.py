"""What backward is given, and gradients on their way out: the rules "saved" and "reduction"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch.fx import GraphModule, Node

from tests.passes.mutants import (
    Places,
    aten,
    breaks,
    bypass,
    c10d,
    give,
    group_of,
    instead,
    like,
    numel,
    outputs_of,
    set_arg,
    tagged,
    tags,
    when,
    without_marks,
)
from zerofx.passes import Context, ParameterRef, Tag, edit

# ---- saved ----------------------------------------------------------------------------------------------------------


def _places(*kinds: str, where: Callable[[Node], object] = lambda node: True) -> Places:
    """Outputs at which forward saves a parameter, and nodes of ``kinds`` for them."""

    def places(gm: GraphModule, ctx: Context) -> list[tuple[int, Node]]:
        nodes = [n for n in tagged(gm, *kinds) if where(n) and group_of(n) not in ctx.handover.kept_gathered]
        return [(place, node) for place in sorted(ctx.found.saved_parameters) for node in nodes]

    return places


def _give(gm: GraphModule, ctx: Context, place: int, node: Node) -> None:
    """Forward saves ``node``; the caller does not put a parameter there."""
    ctx.found.saved_parameters.pop(place, None)
    give(gm, place, node)


def _save(gm: GraphModule, ctx: Context, place: int, weight: Node, node: Node) -> None:
    """Forward saves ``node``, which it made of ``weight``."""
    without_marks(weight.args[0] if weight.meta["zerofx"].kind == "weight" else weight)  # type: ignore[arg-type]
    _give(gm, ctx, place, node)


_matrix = lambda w: len(w.args[1]) == 2  # noqa: E731


@breaks("saved", _places("wait", "refresh"))
def a_whole_group_is_saved(gm: GraphModule, ctx: Context, place: tuple[int, Node]) -> None:
    _save(gm, ctx, *place, place[1])


@breaks("saved", when(lambda ctx: ctx.found.shards and ctx.found.shards[0].world_size > 1, _places("shard")))
def a_shard_is_saved(gm: GraphModule, ctx: Context, place: tuple[int, Node]) -> None:
    _give(gm, ctx, *place)


@breaks("saved", _places("weight"))
def a_weight_is_saved(gm: GraphModule, ctx: Context, place: tuple[int, Node]) -> None:
    _save(gm, ctx, *place, place[1])


@breaks("saved", _places("weight", where=_matrix))
def a_view_of_a_weight_is_saved(gm: GraphModule, ctx: Context, place: tuple[int, Node]) -> None:
    _save(gm, ctx, *place, like(place[1], aten.t.default, place[1]))


@breaks("saved", _places("weight", where=_matrix))
def a_row_of_a_weight_is_saved(gm: GraphModule, ctx: Context, place: tuple[int, Node]) -> None:
    _save(gm, ctx, *place, like(place[1], aten.select.int, place[1], 0, 0))


@breaks("saved", _places("weight"))
def a_weight_is_saved_under_another_name(gm: GraphModule, ctx: Context, place: tuple[int, Node]) -> None:
    _save(gm, ctx, *place, like(place[1], aten.alias.default, place[1]))


def _copy(weight: Node, target: Any, *args: Any) -> Node:
    """A copy; the weight's buffer is discarded behind it, should it have been before."""
    copied = like(weight, target, weight, *args)
    order = edit.positions(weight.graph)
    marks = [u for u in weight.args[0].users if "zerofx" in u.meta and u.meta["zerofx"].kind == "discard"]  # type: ignore[union-attr]
    for mark in marks:
        if order[mark] < order[copied]:
            copied.append(mark)
    return copied


@breaks("saved", _places("weight"))
def a_cast_of_a_weight_is_saved(gm: GraphModule, ctx: Context, place: tuple[int, Node]) -> None:
    _give(gm, ctx, place[0], _copy(place[1], edit.CAST, torch.float64))


@breaks("saved", _places("weight"))
def a_copy_of_a_weight_is_saved(gm: GraphModule, ctx: Context, place: tuple[int, Node]) -> None:
    _give(gm, ctx, place[0], _copy(place[1], aten.clone.default))


@breaks("saved", _places("weight", where=_matrix))
def a_copy_of_a_view_is_saved(gm: GraphModule, ctx: Context, place: tuple[int, Node]) -> None:
    turned = like(place[1], aten.t.default, place[1])
    copied = like(turned, aten.clone.default, turned)
    order = edit.positions(gm.graph)
    for mark in [u for u in place[1].args[0].users if "zerofx" in u.meta and u.meta["zerofx"].kind == "discard"]:  # type: ignore[union-attr]
        if order[mark] < order[copied]:
            copied.append(mark)
    _give(gm, ctx, place[0], copied)


def _activations(gm: GraphModule, ctx: Context) -> list[tuple[int, Node]]:
    saved = [i for i in sorted(ctx.saved) if isinstance(x := outputs_of(gm)[i], Node) and "zerofx" not in x.meta]
    return [(i, w) for i in saved for w in tagged(gm, "weight")]


@breaks("saved", when(lambda ctx: ctx.stage, _activations))
def a_weight_in_the_place_of_an_activation(gm: GraphModule, ctx: Context, place: tuple[int, Node]) -> None:
    _save(gm, ctx, *place, place[1])


def _kept(gm: GraphModule, ctx: Context) -> list[tuple[int, str]]:
    """What forward leaves gathered, and where."""
    return [(g.position, name) for name, g in ctx.handover.kept_gathered.items()] if ctx.phase == "forward" else []


@breaks("saved", _kept)
def a_kept_group_where_a_parameter_is_promised(gm: GraphModule, ctx: Context, place: tuple[int, str]) -> None:
    """The caller would put the parameter there, and backward take it for the group."""
    layout = next(layout for layout in ctx.found.shards if layout.name == place[1])
    ctx.found.saved_parameters[place[0]] = ParameterRef(layout, layout.slots[0])


@breaks("saved", _kept)
def a_group_is_kept_that_was_not_promised(gm: GraphModule, ctx: Context, place: tuple[int, str]) -> None:
    del ctx.handover.kept_gathered[place[1]]


@breaks("saved", lambda gm, ctx: _kept(gm, ctx) if ctx.found.saved_parameters else [])
def a_kept_group_in_another_place(gm: GraphModule, ctx: Context, place: tuple[int, str]) -> None:
    other = min(ctx.found.saved_parameters)
    ctx.found.saved_parameters[place[0]] = ctx.found.saved_parameters.pop(other)
    give(gm, other, outputs_of(gm)[place[0]])
    give(gm, place[0], None)


@breaks("saved", lambda gm, ctx: _kept(gm, ctx) if ctx.found.saved_parameters else [])
def a_kept_group_twice(gm: GraphModule, ctx: Context, place: tuple[int, str]) -> None:
    other = min(ctx.found.saved_parameters)
    del ctx.found.saved_parameters[other]
    give(gm, other, outputs_of(gm)[place[0]])


@breaks("saved", _kept)
def a_kept_group_of_another_size(gm: GraphModule, ctx: Context, place: tuple[int, str]) -> None:
    kept = ctx.handover.kept_gathered[place[1]]
    ctx.handover.kept_gathered[place[1]] = kept._replace(numel=kept.numel // 2)


@breaks("saved", _kept)
def a_kept_group_of_another_dtype(gm: GraphModule, ctx: Context, place: tuple[int, str]) -> None:
    ctx.handover.kept_gathered[place[1]] = ctx.handover.kept_gathered[place[1]]._replace(dtype=torch.float64)


# ---- reduction ------------------------------------------------------------------------------------------------------


def _extras(gm: GraphModule, ctx: Context) -> int:
    """The first extra output."""
    return len(outputs_of(gm)) - len(ctx.found.reductions)


def _reductions(gm: GraphModule, ctx: Context) -> range:
    return range(len(ctx.found.reductions))


@breaks("reduction", _reductions)
def a_gradient_that_is_not_returned(gm: GraphModule, ctx: Context, n: int) -> None:
    outputs = outputs_of(gm)
    del outputs[_extras(gm, ctx) + n], ctx.found.reductions[n]
    edit.set_output_values(gm.graph, outputs)


@breaks("reduction", _reductions)
def a_gradient_that_is_returned_twice(gm: GraphModule, ctx: Context, n: int) -> None:
    outputs = outputs_of(gm)
    outputs.append(outputs[_extras(gm, ctx) + n])
    ctx.found.reductions.append(ctx.found.reductions[n])
    edit.set_output_values(gm.graph, outputs)


def _sizes_differ(gm: GraphModule, ctx: Context) -> list[int]:
    pairs = enumerate(pairwise(ctx.found.reductions))
    return [n for n, (a, b) in pairs if a.layout.numel != b.layout.numel] if ctx.sync != "keep" and ctx.stage else []


@breaks("reduction", _sizes_differ)
def two_groups_gradients_are_promised_in_another_order(gm: GraphModule, ctx: Context, n: int) -> None:
    ctx.found.reductions[n : n + 2] = reversed(ctx.found.reductions[n : n + 2])


def _scales(gm: GraphModule, ctx: Context) -> list[Node]:
    return [x for x in tagged(gm, "gradient", "pack") if x.target is aten.mul.Tensor] if ctx.sync != "keep" else []


@breaks("reduction", _scales)
def a_missing_scale(gm: GraphModule, ctx: Context, scale: Node) -> None:
    bypass(scale)


def _scales_of_sums(gm: GraphModule, ctx: Context) -> list[Node]:
    return [x for x in _scales(gm, ctx) if x.meta["zerofx"].kind == "gradient"]


@breaks("reduction", _scales_of_sums)
def a_scale_by_all_ranks_twice(gm: GraphModule, ctx: Context, scale: Node) -> None:
    set_arg(scale, 1, scale.args[1] ** 2)  # type: ignore[operator]


@breaks("reduction", _scales_of_sums)
def a_second_scale(gm: GraphModule, ctx: Context, scale: Node) -> None:
    instead(scale, aten.mul.Tensor, scale.args[1])


def _cats(gm: GraphModule, ctx: Context) -> list[Node]:
    return [x for x in tagged(gm, "pack") if x.target is aten.cat.default and len(x.args[0]) > 1]


def _unequal(gm: GraphModule, ctx: Context) -> list[tuple[Node, int]]:
    """Packs, and a gradient in it of another size than the first."""
    found = []
    for cat in _cats(gm, ctx):
        parts = list(cat.args[0])
        grads = [i for i, p in enumerate(parts) if p.target is aten.reshape.default and numel(p) != numel(parts[0])]
        found += [(cat, i) for i in grads[:1]]
    return found


@breaks("reduction", _unequal)
def two_gradients_change_places(gm: GraphModule, ctx: Context, place: tuple[Node, int]) -> None:
    """Of different sizes, in a pack."""
    cat, i = place
    parts = list(cat.args[0])  # type: ignore[arg-type]
    parts[0], parts[i] = parts[i], parts[0]
    set_arg(cat, 0, parts)


@breaks("reduction", when(lambda ctx: ctx.stage, _cats))
def a_gradient_that_is_not_packed(gm: GraphModule, ctx: Context, cat: Node) -> None:
    """Zeros are, in its place."""
    first, *rest = cat.args[0]  # type: ignore[misc]
    zeros = like(first, aten.full.default, [numel(first)], 0.0, dtype=first.meta["val"].dtype)
    set_arg(cat, 0, [zeros, *rest])


@breaks("reduction", when(lambda ctx: ctx.stage, _cats))
def padding_in_front(gm: GraphModule, ctx: Context, cat: Node) -> None:
    *parts, last = cat.args[0]  # type: ignore[misc]
    set_arg(cat, 0, [last, *parts])


@breaks("reduction", lambda gm, ctx: [x for x in tagged(gm, "pack") if x.target is aten.full.default])
def ones_for_padding(gm: GraphModule, ctx: Context, node: Node) -> None:
    set_arg(node, 1, 1.0)


@breaks("reduction", lambda gm, ctx: [(i, p) for i in sorted(ctx.gradients) for p in tagged(gm, "pack")[:1]])
def a_gradient_for_autograd_too(gm: GraphModule, ctx: Context, place: tuple[int, Node]) -> None:
    give(gm, place[0], place[1].all_input_nodes[0] if place[1].all_input_nodes else place[1])


def _several_slots(gm: GraphModule, ctx: Context) -> list[int]:
    return [n for n, r in enumerate(ctx.found.reductions) if len(r.slots) > 1] if ctx.sync != "keep" else []


@breaks("reduction", _several_slots)
def a_slot_that_is_not_promised(gm: GraphModule, ctx: Context, n: int) -> None:
    ctx.found.reductions[n] = replace(ctx.found.reductions[n], slots=ctx.found.reductions[n].slots[1:])


def _sums(gm: GraphModule, ctx: Context) -> list[Node]:
    return [x for x in tagged(gm, "gradient") if x.target is aten.sum.dim_IntList]


@breaks("reduction", _sums)
def a_sum_over_elements(gm: GraphModule, ctx: Context, node: Node) -> None:
    set_arg(node, 1, [1])


@breaks("reduction", _sums)
def a_maximum_of_the_parts(gm: GraphModule, ctx: Context, node: Node) -> None:
    node.target, node.kwargs = aten.amax.default, {}


@breaks("reduction", _sums)
def one_other_ranks_part(gm: GraphModule, ctx: Context, node: Node) -> None:
    """Instead of the sum of all of these."""
    node.target, node.kwargs, node.args = aten.select.int, {}, (node.args[0], 0, 0)


def _own_and_others(gm: GraphModule, ctx: Context) -> list[Node]:
    own = torch.ops.zerofx.own_part.default
    return [x for n in tagged(gm, "gradient") if n.target is own for x in n.users]


@breaks("reduction", _own_and_others)
def the_others_without_this_rank(gm: GraphModule, ctx: Context, node: Node) -> None:
    node.replace_all_uses_with(node.args[1])  # type: ignore[arg-type]


@breaks("reduction", _own_and_others)
def this_rank_without_the_others(gm: GraphModule, ctx: Context, node: Node) -> None:
    set_arg(node, 1, node.args[0])


@breaks("reduction", _own_and_others)
def this_rank_less_the_others(gm: GraphModule, ctx: Context, node: Node) -> None:
    node.target = aten.sub.Tensor


@breaks("reduction", lambda gm, ctx: [*pairwise(_own_and_others(gm, ctx))])
def this_ranks_part_of_another_group(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    """Added to the others' of this one."""
    own = pair[1].args[0]
    set_arg(own, 0, pair[0].args[0].args[0])  # type: ignore[union-attr, arg-type]
    own.meta["zerofx"] = pair[0].meta["zerofx"]  # type: ignore[union-attr]


@breaks("group", _own_and_others)
def a_part_of_one_more_rank(gm: GraphModule, ctx: Context, node: Node) -> None:
    pack, world_size, group = node.args[0].args  # type: ignore[union-attr]
    node.args[0].args = (pack, world_size + 1, group)  # type: ignore[union-attr, operator]


@breaks("reduction", _sums)
def a_sum_in_half_precision(gm: GraphModule, ctx: Context, node: Node) -> None:
    """Of parts that are wider, and back again: a large gradient overflows."""
    wide = instead(node, edit.CAST, torch.float16)
    instead(wide, edit.CAST, node.meta["val"].dtype)


def _halves(gm: GraphModule, ctx: Context) -> list[tuple[Node, Node]]:
    """The scale, and the sum."""
    return [(x, x.args[0]) for x in tagged(gm, "gradient") if x.target is aten.mul.Tensor]  # type: ignore[misc]


@breaks("reduction", _halves)
def a_sum_that_is_narrowed_before_it_is_scaled(gm: GraphModule, ctx: Context, place: tuple[Node, Node]) -> None:
    scale, total = place
    dtype = scale.meta["val"].dtype
    narrow = like(total, edit.CAST, total, torch.float16)
    set_arg(scale, 0, narrow)
    scale.meta["val"] = narrow.meta["val"]
    instead(scale, edit.CAST, dtype)


def _reduce_scatters(gm: GraphModule, ctx: Context) -> list[Node]:
    return [n for n in tagged(gm, "reduce_scatter") if n.target is c10d.reduce_scatter_tensor.default]


@breaks("reduction", _reduce_scatters)
def a_sum_of_whole_gradients_for_that_of_shards(gm: GraphModule, ctx: Context, node: Node) -> None:
    pack, operation, _, group = node.args
    node.target, node.args = c10d.all_reduce.default, (pack, operation, group)
    node.meta["val"] = pack.meta["val"]  # type: ignore[union-attr]


@breaks("reduction", when(lambda ctx: ctx.sync != "keep", tags("gradient")))
def a_clipped_gradient(gm: GraphModule, ctx: Context, node: Node) -> None:
    instead(node, aten.clamp.default, -1.0, 1.0)


@breaks("reduction", when(lambda ctx: ctx.sync != "keep" and ctx.stage, _reductions))
def a_gradient_of_another_dtype(gm: GraphModule, ctx: Context, n: int) -> None:
    i = _extras(gm, ctx) + n
    value = outputs_of(gm)[i]
    give(gm, i, like(value, edit.CAST, value, torch.float64, tag=Tag("gradient", "x")))
