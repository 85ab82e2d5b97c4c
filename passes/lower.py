"""Hand the graph to its executor: spell the collectives as the backend does them best, drop what it does by itself.

**Reduce-scatter on gloo.** Gloo's reduce-scatter is an all-reduce underneath and sends twice the bytes it must. An
all-to-all moves just the parts, and summing them here is deterministic and fuses with the scaling::

    sums = reduce_scatter_tensor(pack, "sum", M, pg)     parts = all_to_all_single(pack, [S]*M, [S]*M, pg)
    shard = wait_tensor(sums) * (1 / M)           ─────▶ parts = wait_tensor(parts).view(M, S)
                                                         shard = parts.sum(0) * (1 / M)

**Discard marks for Inductor.** Inductor frees each buffer after its last reader, which is where the marks stand:
they are taken out. (The order of collectives is kept by the settings the graph is compiled with, see
``zerofx/_torch.py``.) The eager executor runs the graph as it reads, marks included.

Last of the passes. Sound because both sides compute the sum over ranks, in rank order.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

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
        for node in edit.tagged(gm.graph, "discard"):
            gm.graph.erase_node(node)
            edits += 1
    return edit.finish(gm, edits)


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
