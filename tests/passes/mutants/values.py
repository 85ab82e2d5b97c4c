"""Writes, and values that are computed from something else than before: the rules "write" and "value"."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.fx import GraphModule, Node

from tests.passes.mutants import (
    aten,
    breaks,
    bypass,
    c10d,
    exchange,
    group_of,
    instead,
    like,
    numel,
    outputs_of,
    readers,
    set_arg,
    tagged,
    tags,
    when,
)
from zerofx import _torch
from zerofx.passes import Context, edit

# ---- write ----------------------------------------------------------------------------------------------------------


def _calls(gm: GraphModule, *targets: object) -> list[Node]:
    """The model's own, of ``targets``, whose order is not pinned."""
    return [n for n in gm.graph.nodes if n.target in targets and "zerofx" not in n.meta]


def _writes(gm: GraphModule, ctx: Context) -> list[Node]:
    """The model's own writes, to its buffers."""
    return _calls(gm, aten.copy_.default)


def _write_at_the_end(gm: GraphModule, target: object, *args: object) -> None:
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.call_function(target, args).meta["val"] = args[0].meta["val"]  # type: ignore[arg-type, attr-defined]


@breaks("write", when(lambda ctx: ctx.stage, tags("weight")))
def a_write_to_a_weight(gm: GraphModule, ctx: Context, weight: Node) -> None:
    like(weight, aten.zero_.default, weight)


@breaks("write", lambda gm, ctx: [w for w in tagged(gm, "weight") if w.meta["val"].dim() == 2])
def a_write_to_a_view_of_a_weight(gm: GraphModule, ctx: Context, weight: Node) -> None:
    view = like(weight, aten.t.default, weight)
    like(view, aten.mul_.Tensor, view, 2.0)


@breaks("write", tags("wait", "refresh", "gathered"))
def a_write_to_a_whole_group(gm: GraphModule, ctx: Context, node: Node) -> None:
    like(node, aten.zero_.default, node)


@breaks("write", tags("shard"))
def a_write_to_a_shard(gm: GraphModule, ctx: Context, node: Node) -> None:
    like(node, aten.zero_.default, node)


def _sent_in_place(gm: GraphModule, ctx: Context) -> list[Node]:
    starts = tags("reduce_scatter", pinned=False)(gm, ctx)
    return [start for start in starts if start.args[0].target is aten.reshape.default]  # type: ignore[union-attr]


@breaks("write", _sent_in_place)
def a_gradient_that_is_read_while_it_travels(gm: GraphModule, ctx: Context, start: Node) -> None:
    (gradient, _) = start.args[0].args  # type: ignore[union-attr]
    like(start, aten.relu.default, gradient)


def _inputs(gm: GraphModule, ctx: Context) -> list[Node]:
    found = [x for x in gm.graph.find_nodes(op="placeholder") if "zerofx" not in x.meta and x.users]
    return [x for x in found if isinstance(x.meta["val"], torch.Tensor) and x not in outputs_of(gm)]


@breaks("write", _inputs)
def a_write_to_an_input(gm: GraphModule, ctx: Context, node: Node) -> None:
    _write_at_the_end(gm, aten.zero_.default, node)


@breaks("write", tags("kept"))
def a_write_to_a_kept_gradient(gm: GraphModule, ctx: Context, node: Node) -> None:
    """The sum of both is made in its memory."""
    _write_at_the_end(gm, aten.add_.Tensor, node, node)


def _saved(gm: GraphModule, ctx: Context) -> list[Node]:
    """Activations that forward saves."""
    found = [outputs_of(gm)[i] for i in sorted(ctx.saved)]
    return [x for x in found if isinstance(x, Node) and x.op == "call_function" and "zerofx" not in x.meta]


@breaks("value", _saved)
def a_write_to_a_saved_activation(gm: GraphModule, ctx: Context, node: Node) -> None:
    _write_at_the_end(gm, aten.relu_.default, node)


@breaks("write", _writes)
def a_write_that_is_dropped(gm: GraphModule, ctx: Context, node: Node) -> None:
    gm.graph.erase_node(node)


@breaks("write", _writes)
def a_write_that_is_done_twice(gm: GraphModule, ctx: Context, node: Node) -> None:
    like(node, node.target, *node.args)


@breaks("write", lambda gm, ctx: list(pairwise(_writes(gm, ctx))))
def two_writes_in_another_order(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    pair[1].append(pair[0])


@breaks("write", lambda gm, ctx: list(pairwise(_writes(gm, ctx))))
def two_writes_to_each_others_memory(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    exchange(*pair)


@breaks("write", lambda gm, ctx: list(pairwise(_writes(gm, ctx))))
def a_buffer_that_is_given_the_others_value(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    order = edit.positions(gm.graph)
    for node in pair:
        gm.graph.output_node().prepend(node)
    assert order[pair[0]] < order[pair[1]]
    exchange(*pair, 1)


@breaks("write", _writes)
def a_write_that_adds_where_it_was_to_replace(gm: GraphModule, ctx: Context, node: Node) -> None:
    node.target = aten.add_.Tensor


@breaks("write", lambda gm, ctx: [n for n in tagged(gm, "all_reduce") if n.target is c10d.all_reduce_.default])
def a_reduction_in_place_of_what_others_read(gm: GraphModule, ctx: Context, node: Node) -> None:
    like(node.args[0], aten.neg.default, node.args[0])


@breaks("write", lambda gm, ctx: [n for n in tagged(gm, "all_reduce") if n.target is c10d.all_reduce.default])
def a_reduction_in_place_of_a_gradient(gm: GraphModule, ctx: Context, node: Node) -> None:
    """Where there is one, `all_reduce` packs nothing: what it is given may be a view of what the model has."""
    node.target = c10d.all_reduce_.default


# ---- value ----------------------------------------------------------------------------------------------------------

_weights = tags("weight", pinned=False)


def _equal_weights(gm: GraphModule, ctx: Context) -> list[tuple[Node, Node]]:
    """Parts of one buffer, of one shape, that the model reads."""
    weights = [w for w in _weights(gm, ctx) if w.users and readers(w)]
    return [(a, b) for i, a in enumerate(weights) for b in weights[i + 1 :] if a.args[:3] == b.args[:3]]


@breaks("value", _equal_weights)
def two_weights_of_one_shape(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    """Taken for each other: both are parts of the buffer where the layout has a parameter."""
    exchange(*pair, 3)


def _layers(gm: GraphModule, ctx: Context) -> list[tuple[Node, Node]]:
    """The same weight of two layers."""
    weights = [w for w in _weights(gm, ctx) if w.users and readers(w) and group_of(w).startswith("blocks")]
    order = edit.positions(gm.graph)
    pairs = [(a, b) for i, a in enumerate(weights) for b in weights[i + 1 :] if a.args[1:] == b.args[1:]]
    return [(a, b) for a, b in pairs if group_of(a) != group_of(b) and order[b.args[0]] < order[readers(b)[0]]]


@breaks("value", when(lambda ctx: ctx.stage == 3 and ctx.executor == "inductor", _layers))
def the_weight_of_the_layer_before(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    set_arg(pair[1], 0, pair[0].args[0])


@breaks("value", when(lambda ctx: ctx.stage == 3, lambda gm, ctx: _alike(tagged(gm, "wait"))))
def each_waits_for_the_others_gather(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    order = edit.positions(gm.graph)
    first, second = (Wait(gm, node) for node in pair)
    ctx.memory_budget = float("inf")
    here, there = first.start, second.start
    if order[there] > order[pair[0]]:
        pair[0].prepend(there)
    first.set(there)
    second.set(here)


class Wait:
    """The start that a wait waits for, however the wait is spelled."""

    def __init__(self, gm: GraphModule, node: Node) -> None:
        self.node, pinned = node, _torch.pinned(node)
        self.place = 0 if pinned is None else 2

    @property
    def start(self) -> Node:
        return self.node.args[self.place]  # type: ignore[return-value]

    def set(self, start: Node) -> None:
        set_arg(self.node, self.place, start)


def _alike(nodes: list[Node]) -> list[tuple[Node, Node]]:
    """Neighbours of two layers, of one size and dtype, not pinned."""
    free = [n for n in nodes if _torch.pinned(n) is None]
    pairs = [(a, b) for a, b in pairwise(free) if group_of(a) != group_of(b)]
    return [(a, b) for a, b in pairs if (numel(a), a.meta["val"].dtype) == (numel(b), b.meta["val"].dtype)]


def _equal_shards(gm: GraphModule, ctx: Context) -> list[int]:
    names = [n for n in gm.graph.nodes if n.op == "call_function"]
    return [i for i, (a, b) in enumerate(pairwise(ctx.found.shards)) if a.numel == b.numel and names]


@breaks(
    "value",
    when(lambda ctx: ctx.found.shards and ctx.found.shards[0].requires_grad and ctx.phase == "forward", _equal_shards),
)
def two_shards_of_one_size(gm: GraphModule, ctx: Context, place: int) -> None:
    """Promised in another order than they are read: each layer computes with the other's weights."""
    ctx.found.shards[place : place + 2] = reversed(ctx.found.shards[place : place + 2])


def _equal_parts(gm: GraphModule, ctx: Context) -> list[tuple[Node, int, int]]:
    """Packs, and two gradients of one shape in each."""
    found = []
    for cat in [x for x in tagged(gm, "pack") if x.target is aten.cat.default]:
        parts = list(cat.args[0])
        grads = [i for i, p in enumerate(parts) if p.target is aten.reshape.default]
        shapes = {i: tuple(parts[i].args[0].meta["val"].shape) for i in grads}
        found += [(cat, i, j) for i in grads for j in grads if i < j and shapes[i] == shapes[j]]
    return found


@breaks("value", _equal_parts)
def two_gradients_of_one_shape(gm: GraphModule, ctx: Context, place: tuple[Node, int, int]) -> None:
    cat, i, j = place
    parts = list(cat.args[0])  # type: ignore[arg-type]
    parts[i], parts[j] = parts[j], parts[i]
    set_arg(cat, 0, parts)


def _packed(gm: GraphModule, ctx: Context) -> list[Node]:
    """Gradients in packs that are scaled after they were reduced."""
    after = any(x.target is aten.mul.Tensor for x in tagged(gm, "gradient"))
    return [x for x in tagged(gm, "pack") if x.target is aten.reshape.default] if after else []


@breaks("value", _packed)
def a_gradient_that_is_scaled_before_too(gm: GraphModule, ctx: Context, flat: Node) -> None:
    set_arg(flat, 0, like(flat.args[0], aten.mul.Tensor, flat.args[0], 0.5))


def _equal_groups(gm: GraphModule, ctx: Context) -> list[int]:
    pairs = enumerate(pairwise(ctx.found.reductions))
    same = [n for n, (a, b) in pairs if a.layout.numel == b.layout.numel and len(a.slots) == len(b.slots)]
    return same if ctx.stage and ctx.sync != "keep" else []


@breaks("value", _equal_groups)
def the_gradients_of_two_layers(gm: GraphModule, ctx: Context, n: int) -> None:
    """Returned in another order than was promised."""
    outputs = outputs_of(gm)
    i = len(outputs) - len(ctx.found.reductions) + n
    outputs[i], outputs[i + 1] = outputs[i + 1], outputs[i]
    edit.set_output_values(gm.graph, outputs)


def _equal_kept(gm: GraphModule, ctx: Context) -> list[tuple[Node, Node]]:
    kept = tagged(gm, "kept")
    return [(a, b) for a, b in pairwise(kept) if a.meta["val"].shape == b.meta["val"].shape]


@breaks("value", _equal_kept)
def two_kept_gradients_of_one_shape(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    (a,), (b,) = (list(node.users) for node in pair)
    exchange(a, b, 1)


def _sums(gm: GraphModule, ctx: Context) -> list[Node]:
    """Of a gradient and what was kept of it."""
    return [x for x in tagged(gm, "prepare") if x.target is aten.add.Tensor]


@breaks("value", _sums)
def what_was_kept_is_forgotten(gm: GraphModule, ctx: Context, node: Node) -> None:
    bypass(node, node.args[0])  # type: ignore[arg-type]


@breaks("value", _sums)
def what_was_kept_counts_twice(gm: GraphModule, ctx: Context, node: Node) -> None:
    instead(node, aten.add.Tensor, node.args[1])


@breaks("value", _sums)
def the_last_gradient_is_forgotten(gm: GraphModule, ctx: Context, node: Node) -> None:
    bypass(node, node.args[1])  # type: ignore[arg-type]


@breaks("value", lambda gm, ctx: [n for n in tagged(gm, "rebuild") if n.users])
def a_rebuilt_view_of_nothing(gm: GraphModule, ctx: Context, node: Node) -> None:
    """The weight is read as it lies, where forward would have saved it turned."""
    bypass(node)


def _narrowed(gm: GraphModule, ctx: Context) -> list[Node]:
    return [n for n in tagged(gm, "narrow") if n.target is edit.CAST and n.users]


@breaks("value", _narrowed)
def weights_of_another_low_precision(gm: GraphModule, ctx: Context, node: Node) -> None:
    """As many bits, shorter in range: to float16, and from there to what was asked for."""
    low = like(node.args[0], edit.CAST, node.args[0], torch.float16, tag=node.meta["zerofx"])
    set_arg(node, 0, low)


def _equal_saved(gm: GraphModule, ctx: Context) -> list[tuple[int, int]]:
    """Saved activations of one shape, that backward can tell apart by their places alone."""
    outputs = outputs_of(gm)
    saved = [i for i in sorted(ctx.saved) if isinstance(outputs[i], Node) and outputs[i].op == "call_function"]
    saved = [i for i in saved if "zerofx" not in outputs[i].meta]
    return [
        (i, j)
        for i, j in pairwise(saved)
        if outputs[i] is not outputs[j] and outputs[i].meta["val"].shape == outputs[j].meta["val"].shape
    ]


@breaks("value", _equal_saved)
def two_activations_change_places(gm: GraphModule, ctx: Context, pair: tuple[int, int]) -> None:
    outputs = outputs_of(gm)
    i, j = pair
    outputs[i], outputs[j] = outputs[j], outputs[i]
    edit.set_output_values(gm.graph, outputs)


def _equal_gathered(gm: GraphModule, ctx: Context) -> list[tuple[Node, Node]]:
    return _alike(tagged(gm, "gathered"))


@breaks("value", _equal_gathered)
def two_gathered_groups_of_one_size(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    i, j = (ctx.found.gathered.index(group_of(node)) for node in pair)
    ctx.found.gathered[i], ctx.found.gathered[j] = ctx.found.gathered[j], ctx.found.gathered[i]


@breaks("value", lambda gm, ctx: _calls(gm, aten.tanh.default, aten.sub.Tensor))
def another_operator(gm: GraphModule, ctx: Context, node: Node) -> None:
    node.target = {aten.tanh.default: aten.sin.default, aten.sub.Tensor: aten.div.Tensor}[node.target]


@breaks("value", lambda gm, ctx: _calls(gm, aten.native_layer_norm.default))
def another_constant(gm: GraphModule, ctx: Context, node: Node) -> None:
    set_arg(node, 4, 2 * node.args[4])  # type: ignore[operator]


def _rounds(gm: GraphModule, ctx: Context) -> list[Node]:
    """Activations of a dtype that can be narrowed."""
    return [n for n in _calls(gm, aten.tanh.default) if n.meta["val"].dtype == torch.float32]


@breaks("value", _rounds)
def an_activation_that_loses_bits(gm: GraphModule, ctx: Context, node: Node) -> None:
    low = instead(node, edit.CAST, torch.bfloat16)
    instead(low, edit.CAST, torch.float32)


@breaks("value", lambda gm, ctx: list(pairwise(_calls(gm, aten.native_dropout.default))))
def random_numbers_in_another_order(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    """The second call draws first: each has the other's numbers."""
    first, second = pair
    source = second.args[0]
    set_arg(second, 0, first.args[0])
    first.prepend(second)
    set_arg(second, 0, first.args[0])
    assert source is not None


@breaks(
    "value", when(lambda ctx: ctx.stage != 3 or ctx.executor == "eager", lambda gm, ctx: _calls(gm, aten.add.Tensor))
)
def a_residual_that_is_left_out(gm: GraphModule, ctx: Context, node: Node) -> None:
    set_arg(node, 0, node.args[1])
