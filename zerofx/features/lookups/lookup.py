"""Rows travel instead of a table that is only looked up: as many rows as all ranks ask for.

A rank cannot know which rows the others want, so each rank tells all others. Each picks what its shard has of these
rows, and puts zeros for the rest. The sum over ranks gives every rank the rows that it asked for::

    w = zerofx.unshard(shard, [V, d], 0, M, pg)     all = wait(all_gather(ids.reshape(-1), M, pg))
    y = embedding(w, ids)                   ─────▶  rows = zerofx.own_rows(shard, all, 0, V, d, pg)
                                                    sums = wait(reduce_scatter(rows, "sum", M, pg))
                                                    y = sums.view(*ids.shape, d)

Backward tells all ranks the gradients of its rows, and each adds up those of its shard::

    dw = embedding_dense_backward(dy, ids, V, …)    all = wait(all_gather(ids.reshape(-1), M, pg))
    rw = zerofx.reduce_grad(dw, 0, S, M, pg) ─────▶ given = wait(all_gather(dy.reshape(-1), M, pg))
    return rw                                       shard = zerofx.sum_rows(given, all, 0, V, d, …) * (1 / M)
                                                    return shard

With T indices on each of M ranks, a rank receives (M - 1) T d elements instead of (M - 1)/M V d, and as many in
backward. The pass does this where M T rows, with their indices, are fewer bytes than the V rows of the table. Forward
needs an embedding first and backward has its gradient last, so nothing computes while a table travels. No buffer of its
size is held.

The graph asks for rows as soon as the indices are there, and ahead of other gathers, which would hold it up
(`prefetch`). It waits for the rows' gradients at its end.

Sound because a row is looked up as it is, whoever does it: all ranks but those that have it say zero. The rows'
gradients are added up in the order of ranks, and of indices, rather than by each rank first: the same sum, rounded
otherwise; and in the layout's ``gradient_dtype``, if there is one. Sizes follow from the shape of the indices, which
**has to be the same on all ranks**: so it is done if asked for (`LookupFacts`), and not where a size is a symbol.

Runs between ``reduce`` and ``group``. Leaves groups alone of which anything else is read, and gradients that are kept
(`zerofx.no_sync`). Row-wise exchange is how recommendation models shard their tables (Naumov et al. 2019).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from zerofx.features.lookups.facts import lookups_of
from zerofx.features.lookups.operators import OWN_ROWS, SUM_ROWS
from zerofx.model.layout import GroupLayout
from zerofx.passes import edit
from zerofx.passes.context import Context, Tag
from zerofx.passes.group import averaged

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional


def lookup(gm: GraphModule, ctx: Context) -> int:
    """Exchange rows instead of tables, and their gradients; returns how many tables and gradients stay at home."""
    if not lookups_of(ctx).on or not ctx.gathers:
        return 0
    layouts = {layout.name: layout for layout in ctx.found.shards}
    weights = edit.by_group(edit.tagged(gm.graph, "unshard"))
    edits = sum(_look_up(gm.graph, ctx, layouts[name], nodes) for name, nodes in weights.items())
    if ctx.sync == "reduce":
        layouts = {reduction.layout.name: reduction.layout for reduction in ctx.found.reductions}
        gradients = edit.by_group(edit.tagged(gm.graph, "reduce_grad"))
        edits += sum(_add_up(gm.graph, layouts[name], nodes) for name, nodes in gradients.items())
    return edit.finish(gm, edits)


# ---------------------------------------------------------------------------------------------------- rows


def _look_up(graph: Graph, ctx: Context, layout: GroupLayout, weights: list[Node]) -> int:
    """Exchange the rows of a group, if it is nothing but tables, and looked up; returns how many tables it had."""
    uses = [user for weight in weights for user in weight.users]
    if not all(_is_lookup(user, weight) for weight in weights for user in weight.users):
        return 0
    sizes = [(use.args[1].meta["val"], weights[0].meta["val"].dtype, use.meta["val"].shape[-1]) for use in uses]  # type: ignore[union-attr]
    if not _pays(layout, sizes):
        return 0
    for weight in weights:
        sources = weight.all_input_nodes
        for use in list(weight.users):
            _exchange(graph, ctx.process_group, use, weight)
        graph.erase_node(weight)
        for source in sources:
            if not source.users and source.meta["zerofx"].kind == "narrow":
                graph.erase_node(source)
    return len(weights)


def _is_lookup(node: Node, weight: Node) -> bool:
    """Whether ``node`` looks up rows of ``weight``, which would come from the whole of a shard."""
    (buffer,) = weight.all_input_nodes
    whole = buffer.meta["zerofx"].kind == "shard" or (edit.is_cast(buffer) and _shard(buffer).op == "placeholder")
    return whole and node.target is _aten.embedding.default and node.args[0] is weight and node.args[1] is not weight


def _shard(buffer: Node) -> Node:
    return buffer.all_input_nodes[0] if edit.is_cast(buffer) else buffer


def _exchange(graph: Graph, process_group: str, use: Node, weight: Node) -> None:
    args: tuple[Any, ...] = weight.args
    buffer, (length, width), offset, ranks, _ = args
    indices, dtype = use.args[1], weight.meta["val"].dtype
    assert isinstance(indices, Node)
    group, shard = weight.meta["zerofx"].group, _shard(buffer)

    def add(kind: str, target: Any, *args: Any) -> Node:
        return edit.insert(graph, target, args, tag=Tag(kind, group), near=use)

    with graph.inserting_before(edit.after_inputs(indices).next):
        everyones = _tell(add, "ask", indices, ranks, process_group)
        everyones = add("asked", _c10d.wait_tensor.default, everyones)
        rows = add("rows", OWN_ROWS, shard, everyones, offset, length, width, process_group)
        if dtype != shard.meta["val"].dtype:
            rows = add("rows", edit.CAST, rows, dtype)
        start = add("answer", _c10d.reduce_scatter_tensor.default, rows, "sum", ranks, process_group)
    with graph.inserting_before(use):
        sums = add("answered", _c10d.wait_tensor.default, start)
        found = add("rows", _aten.view.default, sums, [*indices.meta["val"].shape, width])
    use.replace_all_uses_with(found)
    graph.erase_node(use)


def _tell(add: Any, kind: str, value: Node, ranks: Any, process_group: str) -> Node:
    """Start to tell all ranks ``value``, flat."""
    flat = add("rows", _aten.reshape.default, value, [-1])
    return add(kind, _c10d.all_gather_into_tensor.default, flat, ranks, process_group)


def _pays(layout: GroupLayout, sizes: list[tuple[torch.Tensor, torch.dtype, int]]) -> bool:
    """Whether all ranks' rows are fewer bytes than the table: by indices, the rows' dtype, and elements in a row."""
    if layout.world_size == 1 or not all(isinstance(indices.numel(), int) for indices, _, _ in sizes):
        return False
    row_bytes = sum(i.numel() * (i.dtype.itemsize + dtype.itemsize * width) for i, dtype, width in sizes)
    return layout.world_size * row_bytes < layout.numel * max(dtype.itemsize for _, dtype, _ in sizes)


# ----------------------------------------------------------------------------------------------- gradients


def _add_up(graph: Graph, layout: GroupLayout, reductions: list[Node]) -> int:
    """Tell the rows' gradients instead of reducing the group's, if that is one table's; returns how many there were."""
    if len(reductions) != 1 or len(layout.slots) != 1:
        return 0
    (reduction,), (slot,) = reductions, layout.slots
    producer = dense = reduction.args[0]
    while edit.is_cast(producer) and len(producer.users) == 1:  # type: ignore[arg-type, union-attr]
        (producer,) = producer.all_input_nodes  # type: ignore[union-attr]
    assert isinstance(producer, Node) and isinstance(dense, Node)
    if producer.target is not _aten.embedding_dense_backward.default or len(producer.users) != 1:
        return 0
    grads, indices, length, padding_idx, by_frequency = producer.args
    if by_frequency or not _pays(layout, [(indices.meta["val"], dense.meta["val"].dtype, slot.shape[1])]):  # type: ignore[union-attr]
        return 0
    _, offset, shard_numel, ranks, process_group = reduction.args

    def add(kind: str, target: Any, *args: Any) -> Node:
        return edit.insert(graph, target, args, tag=Tag(kind, layout.name), near=producer)

    with graph.inserting_before(reduction):
        starts = [_tell(add, "ask", indices, ranks, process_group), _tell(add, "give", grads, ranks, process_group)]  # type: ignore[arg-type]
    with graph.inserting_before(graph.output_node()):
        everyones, given = (add(kind, _c10d.wait_tensor.default, s) for kind, s in zip(("asked", "given"), starts))
        if given.meta["val"].dtype != dense.meta["val"].dtype:
            given = add("rows", edit.CAST, given, dense.meta["val"].dtype)
        table = (everyones, offset, length, slot.shape[1], padding_idx, shard_numel, process_group)
        sums = add("rows", SUM_ROWS, given, *table)
        reduction.replace_all_uses_with(averaged(add, sums, layout))
    graph.erase_node(reduction)
    while dense is not grads and not dense.users:
        (source, *_) = dense.all_input_nodes
        graph.erase_node(dense)
        dense = source
    return 1
