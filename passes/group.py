"""One collective per group: the symbolic nodes of `gather` and `reduce` fused over the group's flat buffer.

Weights become views of one gathered buffer; gradients are packed into one flat buffer and reduced at once::

    w = zerofx.unshard(shard, [16, 8], 0, …)              full = all_gather_into_tensor(shard, M, pg)
    b = zerofx.unshard(shard, [16], 128, …)       ─────▶  full = wait_tensor(full)
                                                          w = as_strided(full, [16, 8], [8, 1], 0)
                                                          b = as_strided(full, [16], [1], 128)

    rw = zerofx.reduce_grad(dw, 0, S, …)                  pack = cat([dw.view(-1), db.view(-1), zeros])
    rb = zerofx.reduce_grad(db, 128, S, …)        ─────▶  sums = reduce_scatter_tensor(pack, "sum", M, pg)
                                                          shard = wait_tensor(sums) * (1 / M)

A gradient that is all of its group needs no packing: it is reduced from where it is, if nobody else reads it. Otherwise
Inductor might let another kernel write over it while it travels::

    rw = zerofx.reduce_grad(dw, 0, S, …)          ─────▶  sums = reduce_scatter_tensor(dw.view(-1), "sum", M, pg)

A model's own ``as_strided`` of a parameter counts from where memory begins, and that is the buffer's now::

    v = as_strided(w, [2, 3], [6, 1], 5)          ─────▶  v = as_strided(w, [2, 3], [6, 1], 5 + w's offset)

In stages 1 and 2, and with ``one_copy``, there is nothing to gather: the flat buffer is an input, the replica. The
caller started to refresh it before the graph; it is waited for (``wait_tensor(replica)``) where the gather would stand.

There is one gather for all unshard nodes that read one buffer (the shard, or what `narrow` made of it: its cast, and a
part that stays wide), and it stands where the first of them stood; the reduction stands where the last of its group's
gradients is produced. From here on collectives are PyTorch's own functional ones, which every reader and profiler
knows. With one rank no collective is issued: the shard is the flat buffer.

Sound because the all-gather of all shards is the flat buffer by construction (layout.py), and that of all excerpts is
the excerpt's; and because the reduction of a sum of disjoint flat buffers is the sum of their reductions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from zerofx.model.layout import GroupLayout, Slot
from zerofx.passes import edit
from zerofx.passes.context import Context, Reduction, Tag

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional


def group(gm: GraphModule, ctx: Context) -> int:
    """Fuse all symbolic nodes, group by group; returns how many symbolic nodes were replaced."""
    graph, order = gm.graph, edit.positions(gm.graph)
    layouts = {layout.name: layout for layout in ctx.found.shards}
    layouts |= {reduction.layout.name: reduction.layout for reduction in ctx.found.reductions}
    unshards, reduces = edit.tagged(graph, "unshard"), edit.tagged(graph, "reduce_grad")
    by_buffer: dict[Any, list[Node]] = {}
    for node in unshards:
        by_buffer.setdefault(node.args[0], []).append(node)
    for nodes in by_buffer.values():
        _fuse_gather(graph, ctx, layouts[nodes[0].meta["zerofx"].group], nodes)
    if reduces:
        _fuse_reductions(graph, ctx, layouts, edit.by_group(reduces), order)
    return edit.finish(gm, len(unshards) + len(reduces))


def _fuse_gather(graph: Graph, ctx: Context, layout: GroupLayout, nodes: list[Node]) -> None:
    shard = nodes[0].args[0]

    def add(kind: str, target: Callable, *args: object, near: Node = nodes[0]) -> Node:
        return edit.insert(graph, target, args, tag=Tag(kind, layout.name), near=near)

    with graph.inserting_before(nodes[0]):
        full = shard
        if layout.world_size > 1 and not ctx.gathers:
            full = add("refresh", _c10d.wait_tensor.default, shard)
        elif layout.world_size > 1:
            start = add(
                "all_gather",
                _c10d.all_gather_into_tensor.default,
                shard,
                layout.world_size,
                ctx.process_group,
            )
            full = add("wait", _c10d.wait_tensor.default, start)
        for node in nodes:
            _, shape, offset, *_ = node.args
            slot = Slot("", tuple(shape), offset)  # type: ignore[arg-type]
            weight = add(
                "weight", _aten.as_strided.default, full, list(slot.shape), list(slot.stride), offset, near=node
            )
            _move_strided(node, slot)
            node.replace_all_uses_with(weight)
    for node in nodes:
        graph.erase_node(node)


def _move_strided(weight: Node, slot: Slot) -> None:
    """What looks at a weight through ``as_strided`` finds it at its ``slot`` in the buffer."""
    nbytes = slot.offset * weight.meta["val"].dtype.itemsize
    for view in edit.aliases(weight):
        if view.target is edit.AS_STRIDED:
            source, size, stride, *_ = view.args
            begins = edit.strided_from(view)
            if isinstance(begins, Node):
                raise NotImplementedError(
                    f"{view.format_node()}: as_strided of a parameter from an element that is known when the graph "
                    "runs alone. Use a number, or parameter.reshape(-1)[start:] and a view of that without an offset."
                )
            view.args = (source, size, stride, begins + nbytes // source.meta["val"].dtype.itemsize)  # type: ignore[union-attr]
            view.kwargs = {}


def _fuse_reductions(
    graph: Graph,
    ctx: Context,
    layouts: dict[str, GroupLayout],
    nodes_of: dict[str, list[Node]],
    order: dict[Node, int],
) -> None:
    outputs = edit.output_values(graph)
    n_outputs = len(outputs) - len(ctx.found.reductions)
    found = dict(zip(outputs[n_outputs:], ctx.found.reductions, strict=True))
    slot_of = {node: found.pop(node).slots[0] for nodes in nodes_of.values() for node in nodes}
    outputs = outputs[:n_outputs]
    ctx.found.reductions.clear()
    for name, nodes in sorted(nodes_of.items(), key=lambda item: max(order[n] for n in item[1])):
        layout, last = layouts[name], max(nodes, key=order.__getitem__)
        grads: dict[Slot, list[Any]] = {}
        for node in nodes:
            grads.setdefault(slot_of[node], []).append(node.args[0])
        with graph.inserting_before(last):
            outputs.append(_fuse_reduction(graph, ctx, layout, grads, near=last))
        ctx.found.reductions.append(Reduction(layout, tuple(slot for slot in layout.slots if slot in grads)))
    edit.set_output_values(graph, [*outputs, *found])  # a pass before this one has added up the rest
    ctx.found.reductions += found.values()
    for nodes in nodes_of.values():
        for node in nodes:
            graph.erase_node(node)


def _fuse_reduction(graph: Graph, ctx: Context, layout: GroupLayout, grads: dict[Slot, list[Any]], near: Node) -> Node:
    def add(kind: str, target: Callable, *args: object, **kwargs: object) -> Node:
        return edit.insert(graph, target, args, tag=Tag(kind, layout.name), near=near, **kwargs)

    def zeros(n: int) -> Node:
        value = near.meta["val"]
        return add("pack", _aten.full.default, [n], 0.0, dtype=value.dtype, device=value.device, pin_memory=False)

    parts, end = [], 0
    for slot in layout.slots:
        if slot not in grads or slot.numel == 0:
            continue
        if slot.offset > end:
            parts.append(zeros(slot.offset - end))
        grad = functools.reduce(functools.partial(add, "pack", _aten.add.Tensor), grads[slot])
        parts.append(add("pack", _aten.reshape.default, grad, [-1]))
        end = slot.end
    if layout.numel > end:
        parts.append(zeros(layout.numel - end))
    flat = parts[0] if _is_all(layout, grads) else add("pack", _aten.cat.default, parts)
    dtype = flat.meta["val"].dtype
    if layout.world_size == 1:
        return flat if dtype == layout.dtype else add("gradient", edit.CAST, flat, layout.dtype)
    sums = add(
        "reduce_scatter",
        _c10d.reduce_scatter_tensor.default,
        flat,
        "sum",
        layout.world_size,
        ctx.reduce_group,
    )
    return averaged(add, add("wait_grad", _c10d.wait_tensor.default, sums), layout)


def averaged(add: Callable[..., Node], sums: Node, layout: GroupLayout, ranks: int | None = None) -> Node:
    """The average gradient that ``sums`` is the sum over ``ranks`` of; ``add(kind, target, *args)`` inserts a node.

    ``ranks``: by default those of the layout.

    A sum over ranks is up to M times what its average is: scaled in the wider of both dtypes, or it overflows.
    """
    if sums.meta["val"].dtype.itemsize < layout.dtype.itemsize:
        sums = add("gradient", edit.CAST, sums, layout.dtype)
    average = add("gradient", _aten.mul.Tensor, sums, 1.0 / (ranks or layout.world_size))
    return average if average.meta["val"].dtype == layout.dtype else add("gradient", edit.CAST, average, layout.dtype)


def _is_all(layout: GroupLayout, grads: dict[Slot, list[Any]]) -> bool:
    """Whether one gradient is all of the group, in memory that nobody else reads."""
    (grad, *others) = (each for several in grads.values() for each in several)
    if others or grad.meta["val"].numel() != layout.numel:
        return False
    readers = {n for n in grad.users if "zerofx" not in n.meta or n.meta["zerofx"].kind not in ("reduce_grad", "pack")}
    while grad.op == "call_function" and not readers:
        if not edit.may_alias(grad):
            return True
        if len(sources := edit.sources(grad)) != 1:
            return False
        readers = sources[0].users.keys() - {grad}
        (grad,) = sources
    return False
