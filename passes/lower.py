"""Hand the graph to its executor: spell the collectives as the backend does them best, drop what it does by itself.

**Reduce-scatter on gloo.** Gloo's reduce-scatter is an all-reduce underneath and sends twice the bytes it must. An
all-to-all moves just the parts, and summing them here is deterministic and fuses with the scaling::

    sums = reduce_scatter_tensor(pack, "sum", M, pg)     parts = all_to_all_single(pack, [S]*M, [S]*M, pg)
    shard = wait_tensor(sums) * (1 / M)           ─────▶ parts = wait_tensor(parts).view(M, S)
                                                         shard = parts.sum(0) * (1 / M)

**Order for Inductor.** Inductor schedules by data dependence, and its fusions pull a wait up to the first kernel that
reads a part of what it waits for. What must not move against each other is therefore made a dependence::

    discard A                                            (the last reader of A)
    start C             ─────▶   start C, after it:      no more is live than the budget allows
    wait B                       wait B, after start C:  the next gather is under way when this one is waited for

The discard marks are taken out: Inductor frees a buffer after its last reader, which is where they stand. The eager
executor runs the graph as it reads, marks included.

Last of the passes. Sound because both sides compute the sum over ranks, in rank order.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from zerofx._torch import pin_order
from zerofx.passes import edit
from zerofx.passes.context import Context, Tag

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional


def lower(gm: GraphModule, ctx: Context) -> int:
    """Make the graph ready for ``ctx.executor`` and ``ctx.backend``; returns how many nodes were replaced."""
    edits = 0
    if ctx.backend == "gloo":
        for node in edit.tagged(gm.graph, "reduce_scatter"):
            _as_all_to_all(gm, node)
            edits += 1
    if ctx.executor == "inductor":
        after = _order(gm)
        for node in edit.tagged(gm.graph, "discard"):
            gm.graph.erase_node(node)
        pin_order(gm, after)
        edits += len(after)
    return edit.finish(gm, edits)


def _order(gm: GraphModule) -> dict[Node, list[Node]]:
    """Node -> nodes that must come before it, besides those it reads."""
    after: dict[Node, list[Node]] = {}
    order = edit.positions(gm.graph)
    read: list[Node] = []
    started: list[Node] = []
    for node in edit.tagged(gm.graph, "all_gather", "wait", "discard"):
        kind = node.meta["zerofx"].kind
        if kind == "discard":
            last = edit.last_use(node.args[0], order, ignore=node)  # type: ignore[arg-type]
            read.append(last)  # type: ignore[arg-type]
        elif kind == "all_gather":
            if read:
                after[node] = read
            read, started = [], [*started, node]
        else:
            others = [start for start in started if start is not node.args[0]]
            if others:
                after[node] = others
            started = []
    return after


def _as_all_to_all(gm: GraphModule, node: Node) -> None:
    graph, group = gm.graph, node.meta["zerofx"].group
    pack, _, world_size, process_group = node.args
    (wait,) = node.users
    part = wait.meta["val"].numel()
    with graph.inserting_before(node):
        sizes = [part] * world_size  # type: ignore[operator]
        args = (pack, sizes, sizes, process_group)
        tag = Tag("reduce_scatter", group)
        exchange = edit.insert(graph, _c10d.all_to_all_single.default, args, tag=tag, near=node)
    node.replace_all_uses_with(exchange)
    graph.erase_node(node)
    wait.meta["val"] = exchange.meta["val"]
    (gradient,) = wait.users
    with graph.inserting_before(gradient):
        tag = Tag("gradient", group)
        parts = edit.insert(graph, _aten.view.default, (wait, [world_size, part]), tag=tag, near=node)
        sums = edit.insert(graph, _aten.sum.dim_IntList, (parts, [0]), tag=tag, near=node)
    gradient.replace_input_with(wait, sums)
