"""Forward gathers over all ranks and leaves a part of each group, from which backward gathers over near ranks.

::

    forward      full = wait(all_gather(shard, M, all))         full = wait(all_gather(shard, M, all))
                 use full                                       part = clone(own_part(full, S, near))
                 return y, None (aw)                            use full
                                                                return y, part

    backward     start = all_gather(shard, M, all)   ─────▶     part: placeholder
                 full = wait(start)                             start = all_gather(part, S, near)
                 use full                                       full = wait(start)
                                                                use full

With two hops (`zerofx.features.meshes.two_hop_gather`) the part is what the first one brought, and nothing is copied.

The near ranks, those of one host say, have a part each, 1/S of the group. Together they have it whole: a second copy
inside of the host, from forward to backward. It takes 1/S of the weights in memory, and spares the slow link one of two
gathers. The part travels in the place of one of the group's parameters among what forward saves, as whole groups do
(`keep`), which are left alone.

Sound because the parts of a buffer, end to end, are the buffer, and parameters do not change between forward and
backward (that is checked when backward starts). The idea is ZeRO++'s hpZ (Wang et al. 2023).

Requires ``group`` and `MeshFacts.secondary_group`; runs after ``keep``. Leaves groups alone that backward does not
need, those that `narrow` gathers in two parts, and rows of tables (`lookup`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from zerofx.features.meshes.facts import mesh_of
from zerofx.passes import edit
from zerofx.passes.context import Context, Gathered, Tag
from zerofx.passes.keep import erase
from zerofx.passes.kinds import NodeKind

_aten, _zerofx = torch.ops.aten, torch.ops.zerofx


def secondary_shard(gm: GraphModule, ctx: Context) -> int:
    """Leave parts of gathered groups (forward), or gather them (backward); returns of how many groups."""
    if not mesh_of(ctx).secondary_group:
        return 0
    if ctx.phase == "forward":
        return edit.finish(gm, _leave(gm.graph, ctx))
    return edit.finish(gm, _gather(gm.graph, ctx)) if ctx.phase == "backward" else 0


def _leave(graph: Graph, ctx: Context) -> int:
    place: dict[str, int] = {}  # of the first saved parameter of each group
    for position, ref in ctx.found.saved_parameters.items():
        if position in ctx.found.saved_names:
            place.setdefault(ref.layout.name, position)
    outputs, left = edit.output_values(graph), 0
    for group, (wait, *more) in edit.by_group(edit.tagged(graph, "wait")).items():
        if more or group not in place or group in ctx.handover.kept_gathered:
            continue
        position, tag = place[group], Tag("secondary", group)

        def add(target: Any, *args: Any, wait: Node = wait, tag: Tag = tag) -> Node:
            return edit.insert(graph, target, args, tag=tag, near=wait)

        if mesh_of(ctx).two_hops:  # what the row gathers from is such a part
            (start,) = wait.all_input_nodes
            (part,) = start.all_input_nodes
            outputs[position] = part
        else:
            with graph.inserting_before(wait.next):
                part = add(
                    _zerofx.own_part.default,
                    wait,
                    mesh_of(ctx).secondary_ranks,
                    mesh_of(ctx).secondary_group,
                )
                outputs[position] = add(_aten.clone.default, part)
        value = part.meta["val"]
        name = ctx.found.saved_names[position]
        ctx.handover.kept_gathered[group] = Gathered(
            position, name, value.numel(), value.dtype, mesh_of(ctx).secondary_ranks
        )
        del ctx.found.saved_parameters[position]
        left += 1
    edit.set_output_values(graph, outputs)
    return left


def _gather(graph: Graph, ctx: Context) -> int:
    last, found = None, 0
    for group, (wait, *more) in edit.by_group(edit.tagged(graph, "wait")).items():
        kept, value = ctx.handover.kept_gathered.get(group), wait.meta["val"]
        if kept is None or more or (value.numel(), value.dtype) != (kept.numel * kept.ranks, kept.dtype):
            continue
        (start,) = wait.all_input_nodes
        (source,) = start.all_input_nodes
        tag = Tag("secondary", group)
        last = edit.placeholder(graph, f"near_{group}", value.new_empty(kept.numel), tag, last=last)
        start.args = (last, kept.ranks, mesh_of(ctx).secondary_group)
        ctx.found.gathered.append(group)
        if not source.users:
            erase(graph, source)
        found += 1
    brought = {node.meta["zerofx"].group for node in edit.tagged(graph, "shard", "replica")}
    ctx.found.shards[:] = [layout for layout in ctx.found.shards if layout.name in brought]
    return found


def _why_secondary(node: Node, ctx: Context) -> str:
    ranks = mesh_of(ctx).secondary_ranks
    if node.op == "placeholder":
        return f"among the inputs: forward left a part of the group, and {ranks} near ranks have it all"
    return f"right after the wait: of what {ranks} near ranks have together, backward gathers again"


NODE_KINDS = {
    "secondary": NodeKind(
        "this rank's part of a gathered group: what forward takes of it; the placeholder that brings it to backward",
        stands=_why_secondary,
    )
}
