"""Weights travel in the dtype they compute in: casts move before the gather.

Under `zerofx.MixedPrecision` or ``torch.autocast`` a graph casts float32 weights to 16 bits before it uses them. Where
every use of a whole group is such a cast, the shard is cast instead, and half the bytes are gathered::

    w = zerofx.unshard(shard, …)                       low = cast(shard, bfloat16)
    b = zerofx.unshard(shard, …)                       w = zerofx.unshard(low, …)
    w16 = cast(w, bfloat16)               ─────▶       b = zerofx.unshard(low, …)
    b16 = cast(b, bfloat16)                            y = addmm(b, x, w)
    y = addmm(b16, x, w16)

A group may also have *wide* weights, used as they are (of a normalisation under autocast). They are gathered a second
time, from the ranges of the shard in which any rank has a part of them (`zerofx.model.layout.excerpt`), if both gathers
together move fewer bytes than the one did::

    g = zerofx.unshard(shard, [64], 0, …)              low = cast(shard, bfloat16)
    w = zerofx.unshard(shard, [64, 64], 64, …)         part = slice(shard, 0, 64)      several ranges: cat of slices
    w16 = cast(w, bfloat16)               ─────▶       g = zerofx.unshard(part, [64], 0, …)
    y = mm(mul(x, g), w16)                             w = zerofx.unshard(low, [64, 64], 64, …)
                                                       y = mm(mul(x, g), w)

In stages 1 and 2 under `zerofx.MixedPrecision` replicas have 16 bits already, and `gather` put a cast to 32 bits
after each; it cancels against the cast back.

Sound because a cast works element by element, so it may be done before or after the pieces are put together; because
widening a float and narrowing it again gives the same float; and because the ranges hold every wide weight, whole, in
all ranks' shards together. Ranges and bytes follow from the graph and the layout, so every rank decides alike and
sends as much. A cast that the model returns stays, for it would become a view of the gathered buffer or of the
replica; its weight counts as wide. A group with casts to several dtypes is left alone.

Runs between ``gather`` and ``group``. Requires ``ctx.found.shards``.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node

from zerofx.model.layout import GroupLayout, Slot, excerpt
from zerofx.passes import edit
from zerofx.passes.context import Context, Tag

_aten = torch.ops.aten
_TRAVEL = (torch.bfloat16, torch.float16, torch.float32)
"""What every backend can move."""


def narrow(gm: GraphModule, ctx: Context) -> int:
    """Cast shards instead of weights; returns how many casts of weights went away."""
    edits = _cancel_widening(gm.graph)
    layouts = {layout.name: layout for layout in ctx.found.shards}
    by_shard: dict[Node, list[Node]] = {}
    for node in edit.tagged(gm.graph, "unshard"):
        by_shard.setdefault(node.args[0], []).append(node)  # type: ignore[arg-type]
    for shard, weights in by_shard.items():
        tag = shard.meta["zerofx"]
        if tag.kind == "shard":
            edits += _narrow_group(gm.graph, layouts[tag.group], shard, weights)
    return edit.finish(gm, edits)


def _cancel_widening(graph: Graph) -> int:
    edits = 0
    for wide in edit.tagged(graph, "widen"):
        (weight,) = wide.all_input_nodes
        for user in list(wide.users):
            if edit.is_cast(user, weight.meta["val"].dtype) and not edit.escapes(user):
                user.replace_all_uses_with(weight)
                graph.erase_node(user)
                edits += 1
        if not wide.users:
            graph.erase_node(wide)
    return edits


def _narrow_group(graph: Graph, layout: GroupLayout, shard: Node, weights: list[Node]) -> int:
    dtype_of = {weight: dtype for weight in weights if (dtype := _low_dtype(weight)) is not None}
    if len(set(dtype_of.values())) != 1:
        return 0
    dtype = next(iter(dtype_of.values()))
    wide = sorted((w for w in weights if w not in dtype_of), key=lambda w: (_slot(w).offset, _slot(w).end))
    ranges, part = excerpt(layout, map(_slot, wide))
    if wide and (layout.world_size == 1 or part.nbytes + layout.numel * dtype.itemsize >= layout.nbytes):
        return 0
    with graph.inserting_before(weights[0]):
        if wide:
            source = _take(graph, shard, ranges, near=wide[0])
            for weight, slot in zip(wide, part.slots, strict=True):
                weight.args = (source, weight.args[1], slot.offset, *weight.args[3:])
        tag, near = Tag("narrow", layout.name), next(iter(dtype_of))
        low = edit.insert(graph, edit.CAST, (shard, dtype), tag=tag, near=near)
    return sum(_read_cast(weight, low) for weight in dtype_of)


def _low_dtype(weight: Node) -> torch.dtype | None:
    """The narrower dtype that every use of ``weight`` casts it to; None for a wide one."""
    if not all(edit.is_cast(user) and not edit.escapes(user) for user in weight.users):
        return None  # used as it is; or a cast outlives the graph, and the gathered buffer must not
    dtypes = {user.meta["val"].dtype for user in weight.users}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    return dtype if dtype in _TRAVEL and dtype.itemsize < weight.meta["val"].dtype.itemsize else None


def _slot(weight: Node) -> Slot:
    _, shape, offset, *_ = weight.args
    return Slot("", tuple(shape), offset)  # type: ignore[arg-type]


def _take(graph: Graph, shard: Node, ranges: list[range], near: Node) -> Node:
    """The ``ranges`` of ``shard``, end to end."""
    tag = Tag("narrow", shard.meta["zerofx"].group)
    args = [(shard, 0, r.start, r.stop) for r in ranges]
    pieces = [edit.insert(graph, _aten.slice.Tensor, a, tag=tag, near=near) for a in args]
    return pieces[0] if len(pieces) == 1 else edit.insert(graph, _aten.cat.default, (pieces,), tag=tag, near=near)


def _read_cast(weight: Node, low: Node) -> int:
    """Bring ``weight`` from the cast shard; returns how many casts of it went away."""
    weight.args = (low, *weight.args[1:])
    weight.meta["val"] = weight.meta["val"].to(low.meta["val"].dtype)
    casts = list(weight.users)
    for cast in casts:
        cast.replace_all_uses_with(weight)
        cast.graph.erase_node(cast)
    return len(casts)
