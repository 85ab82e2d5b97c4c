"""Each parameter is gathered by an unshard node before its layer's first use; the graph's inputs become shards.

Parameters of one group are gathered together, where the first of them is needed::

    primals_2, primals_3: placeholders            shard_h_0: placeholder
    y = addmm(primals_3, x, primals_2)    ─────▶  w = zerofx.unshard(shard_h_0, [16, 8], 0, M, pg)
    return y, x, primals_2                        b = zerofx.unshard(shard_h_0, [16], 128, M, pg)
                                                  y = addmm(b, x, w)
                                                  return y, x, None

In stages 1 and 2 each rank has a replica of the flat buffer, and with ``one_copy`` all have one in common. The input is
the replica then, and there is no one to ask: the node is an unshard over one rank. Where replicas have another dtype
than parameters (``layout.weight_dtype``), a cast to the parameter's dtype follows it, which `narrow` takes away again.

A parameter that forward saves for backward is an input that the caller holds anyway: its output becomes None and
``ctx.found.saved_parameters`` says so. The shards' placeholders come after all others, in the order of first use.

Sound because the unshard node computes exactly what the placeholder held, and a parameter does not change while
a graph runs; a graph that writes to one is refused.

Provides ``ctx.found.shards`` and ``ctx.found.saved_parameters``.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node

from zerofx._torch import OpOverload
from zerofx.model.layout import GroupLayout
from zerofx.passes import edit
from zerofx.passes.context import Context, ParameterRef, Tag
from zerofx.passes.save_parameters import save_parameters


def gather(gm: GraphModule, ctx: Context) -> int:
    """Replace parameter placeholders by shards and unshard nodes; returns how many parameters are gathered."""
    graph = gm.graph
    placeholders = [n for n in graph.find_nodes(op="placeholder") if n.name in ctx.parameters]
    for node in placeholders:
        _refuse_writes(node, ctx.parameters[node.name])
    save_parameters(gm, ctx)

    by_group: dict[GroupLayout, list[Node]] = {}
    order = edit.positions(graph)
    for node in sorted((n for n in placeholders if n.users), key=lambda n: min(order[u] for u in n.users)):
        by_group.setdefault(ctx.parameters[node.name].layout, []).append(node)
    last = edit.last_placeholder(graph)
    for layout, nodes in by_group.items():
        last = _gather_group(graph, ctx, layout, nodes, last)
    for node in placeholders:
        graph.erase_node(node)
    return edit.finish(gm, len(placeholders))


def _gather_group(graph: Graph, ctx: Context, layout: GroupLayout, nodes: list[Node], last: Node | None) -> Node:
    """Bring the parameters of one group; returns the placeholder of its buffer, which comes after ``last``."""
    sharded = ctx.gathers
    kind = "shard" if sharded else "replica"
    dtype = layout.dtype if sharded else layout.weight_dtype
    value = nodes[0].meta["val"].new_empty(layout.shard_numel if sharded else layout.numel, dtype=dtype)
    buffer = edit.placeholder(graph, f"{kind}_{layout.name}", value, Tag(kind, layout.name), last)
    ctx.found.shards.append(layout)

    first_use = min(min(n.users) for n in nodes)
    gathered: dict[ParameterRef, Node] = {}
    with graph.inserting_before(first_use):
        for node in nodes:
            ref = ctx.parameters[node.name]
            if ref not in gathered:
                slot, ranks = ref.slot, layout.world_size if sharded else 1
                args = (buffer, list(slot.shape), slot.offset, ranks, ctx.process_group)
                tag = Tag("unshard", layout.name)
                weight = edit.insert(graph, torch.ops.zerofx.unshard.default, args, tag=tag, near=first_use)
                if dtype != layout.dtype:
                    tag = Tag("widen", layout.name)
                    weight = edit.insert(graph, edit.CAST, (weight, layout.dtype), tag=tag, near=first_use)
                gathered[ref] = weight
            node.replace_all_uses_with(gathered[ref])
    return buffer


def _refuse_writes(node: Node, ref: ParameterRef) -> None:
    views = edit.aliases(node)
    for user in {user: None for view in views for user in view.users}:
        if isinstance(user.target, OpOverload) and any(view in edit.written_by(user) for view in views):
            raise RuntimeError(
                f"{user.target} writes to the parameter {ref.slot.name!r} inside compiled code. A sharded weight "
                "is gathered for reading only, the write would be lost: update it outside the compiled "
                "module, under torch.no_grad()."
            )
