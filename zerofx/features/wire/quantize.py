"""Weights and gradients travel in codes of fewer bits: `zerofx.model.wire.Wire`.

::

    start = all_gather_into_tensor(shard, M, pg)         row = zerofx.quantize(shard, 1, "int8/256", whole, pg)
    full = wait_tensor(start)                     ─────▶ start = all_gather_into_tensor(row, M, pg)
    w = as_strided(full, …)                              rows = wait_tensor(start)
    discard(full)                                        full = zerofx.dequantize(rows, M, S, "int8/256", …)
                                                         w = as_strided(full, …)
                                                         discard(full)

    sums = reduce_scatter_tensor(pack, "sum", M, pg)     rows = zerofx.quantize(pack, M, "int4/256?", whole, pg)
    sums = wait_tensor(sums)                      ─────▶ start = an exchange of rows (travel.py)
    shard = sums * (1 / M)                               others = wait_tensor(start)
                                                         sums = zerofx.sum_quantized(pack, others, S, …)
                                                         shard = sums * (1 / M)

What a rank reads of its own weights is what it has sent, so that all ranks compute with the same numbers. Its own part
of a gradient does not travel, and is added as it is. A reduction of codes is an exchange: a process group cannot add
them. The sum is of float32, and rounded no more than it would be without codes.

**Between the replicas of a mesh** (``Wire(between="nodes")``) the sum over a row is what travels in codes, and the
reduction in a row is left alone. All replicas hold the same shard, so all read all that was sent, their own part too,
and get one sum, bit by bit::

    total = all_reduce(sums, "sum", replicas)            row = zerofx.quantize(sums, 1, "int4/256?", whole, pg)
    total = wait_tensor(total)                    ─────▶ start = all_gather_into_tensor(row, R, replicas)
    shard = total * (1 / (R M))                          rows = wait_tensor(start)
                                                         total = zerofx.sum_replicas_quantized(rows, R, S, …)
                                                         shard = total * (1 / (R M))

Replicas that share the optimizer's work exchange codes, as the ranks above do. Where a gather has two hops (`hop`), the
first one is in codes, and the row gathers what was read of them.

With ``Wire(error_feedback=True)`` a pack is written by ``zerofx.quantize_with_rest`` (`feedback`).

Parts of a shard that `narrow` sends by themselves, and rows of tables (`lookup`), travel as they are: they are small.

Sound because encode and decode are given the same description, which follows from the layout and the option alone. The
numbers differ, by no more than the code's bound (`zerofx.kernels.wire`).

Requires ``group``; runs after all passes that ask how long a gathered buffer lives. Leaves the graph alone without
`WireFacts`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from zerofx.features.wire import error_feedback  # noqa: F401  # its operator
from zerofx.features.wire.facts import wire_of
from zerofx.features.wire.operators import flattened
from zerofx.kernels.code import Code
from zerofx.model.layout import GroupLayout
from zerofx.model.wire import Wire, sent_whole
from zerofx.passes import edit
from zerofx.passes.context import Context, Tag
from zerofx.passes.kinds import NodeKind

_zerofx, _c10d = torch.ops.zerofx, torch.ops._c10d_functional


def quantize(gm: GraphModule, ctx: Context) -> int:
    """Put codes around the collectives of whole groups; returns around how many."""
    inside, between, edits = wire_of(ctx).inside, wire_of(ctx).between, 0
    layouts = {layout.name: layout for layout in ctx.found.shards}
    layouts |= {ref.layout.name: ref.layout for ref in ctx.gradients.values()}
    for start in edit.tagged(gm.graph, "all_gather") if inside else ():
        edits += _gather(gm, start, layouts[start.meta["zerofx"].group], inside.weight_code)  # type: ignore[union-attr]
    for start in edit.tagged(gm.graph, "hop") if between else ():
        layout, within = layouts[start.meta["zerofx"].group], (ctx.replica_group, ctx.process_group)
        parts = replace(layout, world_size=layout.world_size * ctx.replicas)
        edits += _gather(gm, start, parts, between.weight_code, within)  # type: ignore[union-attr]
    starts = edit.tagged(gm.graph, "reduce_scatter") if inside else []
    starts += edit.tagged(gm.graph, "sum_replicas") if between else []
    for start in starts:
        way = _Way.of(ctx, start)
        if way.code is not None and way.code.shortens(start.args[0].meta["val"].dtype):  # type: ignore[union-attr]
            _reduce(gm, ctx, start, layouts[start.meta["zerofx"].group], way)
            edits += 1
    return edit.finish(gm, edits)


@dataclass(frozen=True)
class _Way:
    """How a sum of gradients travels.

    Attributes:
        code: what each is written in; None: it travels as it is.
        kind: of the node that starts it.
        ranks, process_group: whom it is summed over.
        within: the process group of a row, if this is between rows.
        divided: whether each rank gets a part of the sum; else all get all of it.
    """

    code: Code | None
    kind: str
    ranks: int
    process_group: str
    within: str = ""
    divided: bool = True

    @staticmethod
    def of(ctx: Context, start: Node) -> _Way:
        code, kind = cast(Wire, wire_of(ctx).wire).gradient_code, start.meta["zerofx"].kind
        if kind == "reduce_scatter":
            return _Way(code, kind, cast(int, start.args[2]), cast(str, start.args[3]))
        return _Way(code, kind, ctx.replicas, ctx.replica_group, ctx.process_group, wire_of(ctx).divides_between)


def _gather(gm: GraphModule, start: Node, layout: GroupLayout, code: Code | None, over: tuple[str, ...] = ()) -> bool:
    """Put a code around one gather; ``over``: along the column of a mesh, its process group and that of the row."""
    shard, (wait,) = cast(Node, start.args[0]), start.users
    value = shard.meta["val"]
    if code is None or value.numel() != layout.shard_numel or not code.shortens(value.dtype):
        return False
    whole, group = flattened(sent_whole(layout)), layout.name
    args: tuple[Any, ...] = (shard, 1, str(code), whole, *(over or (start.args[2],)))
    row = _insert(gm, start, _zerofx.quantize.default, args, Tag("quantize", group))
    for mark in [user for user in shard.users if edit.is_kind(user, "discard") and start.next is user]:
        row.append(mark)  # of a shard that was fetched: its codes are sent
    readers = list(wait.users)
    start.args = (row, *start.args[1:])
    _revalue(start, wait)
    args = (wait, start.args[1], layout.shard_numel, str(code), whole, value.dtype, *over)
    full = _insert(gm, wait.next, _zerofx.dequantize.default, args, Tag("dequantize", group), near=wait)
    for reader in readers:
        reader.replace_input_with(wait, full)
    return True


def _reduce(gm: GraphModule, ctx: Context, start: Node, layout: GroupLayout, way: _Way) -> None:
    pack, (wait,) = cast(Node, start.args[0]), start.users
    numel, group = pack.meta["val"].numel(), layout.name
    how: tuple[Any, ...] = (str(way.code), flattened(sent_whole(layout)))
    within = (way.within,) if way.within else ()
    args = (pack, way.ranks, *how, way.process_group) if way.divided else (pack, 1, *how, way.within)
    target = _zerofx.quantize.default
    if cast(Wire, wire_of(ctx).wire).error_feedback:
        target, args = _zerofx.quantize_with_rest.default, (*args, group)
    rows = _insert(gm, start, target, (*args, *within) if way.divided else args, Tag("quantize", group))

    def call(target: Callable, *args: Any) -> Node:
        return _insert(gm, start, target, args, Tag(way.kind, group))

    if way.divided:
        row = rows.meta["val"].numel() // way.ranks
        started = ctx.travel.exchange(call, rows, row, way.ranks, way.process_group)
        target, args = _zerofx.sum_quantized.default, (pack, wait, numel // way.ranks, *how, way.process_group, *within)
    else:
        started = call(_c10d.all_gather_into_tensor.default, rows, way.ranks, way.process_group)
        target, args = (
            _zerofx.sum_replicas_quantized.default,
            (wait, way.ranks, numel, *how, pack.meta["val"].dtype, way.within),
        )
    start.replace_all_uses_with(started)
    gm.graph.erase_node(start)
    _revalue(wait)
    (reader,) = wait.users
    sums = _insert(gm, wait.next, target, args, Tag("dequantize", group), near=wait)
    reader.replace_input_with(wait, sums)
    _average_in_float32(gm, reader, layout)


def _average_in_float32(gm: GraphModule, node: Node, layout: GroupLayout) -> None:
    """``node`` reads a sum that is of float32 now: casts to that go away, and the average has its group's dtype."""
    if node.target is edit.CAST and node.args[0].meta["val"].dtype == node.args[1]:  # type: ignore[union-attr]
        (scaled,) = node.users
        scaled.replace_input_with(node, cast(Node, node.args[0]))
        gm.graph.erase_node(node)
        node = scaled
    _revalue(node)
    dtypes = {user.args[1] for user in node.users if user.target is edit.CAST and "zerofx" in user.meta}
    if layout.dtype in ({node.meta["val"].dtype} | dtypes):
        return
    readers = list(node.users)
    narrow = _insert(gm, node.next, edit.CAST, (node, layout.dtype), Tag("gradient", layout.name), near=node)
    for reader in readers:
        reader.replace_input_with(node, narrow)


def _insert(
    gm: GraphModule, before: Node, target: Callable, args: tuple[Any, ...], tag: Tag, near: Node | None = None
) -> Node:
    with gm.graph.inserting_before(before):
        return edit.insert(gm.graph, target, args, tag=tag, near=near or before)


def _revalue(*nodes: Node) -> None:
    """Their fake values, of the inputs that they have now."""
    for node in nodes:
        args, kwargs = edit.values((node.args, node.kwargs))
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


NODE_KINDS = {
    "quantize": NodeKind("codes of a shard, or of a pack for each rank", verb="quantize", sized=True),
    "dequantize": NodeKind("what is read of all ranks' codes", verb="dequant", sized=True),
}
