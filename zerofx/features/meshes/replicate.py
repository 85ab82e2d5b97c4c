"""On a mesh of two dimensions each group's reduced gradient is summed over the replicas too, after the next reduction.

::

    start C's reduction                          start C's reduction
    wait for B's; b = its sum / S                start B's reduction
    start B's reduction           ─────▶         wait for C's;  start the sum of C over the replicas
    wait for C's; c = its sum / S                start A's reduction
    start A's reduction                          wait for B's;  start the sum of B over the replicas
    wait for A's; a = its sum / S                wait for A's;  start the sum of A over the replicas
    return c, b, a                               wait for C's sum; c = its sum / (R S)
                                                 wait for B's sum; b = ...
                                                 wait for A's sum; a = ...
                                                 return c, b, a

Two links are at work: the reduction of a group runs inside of a row of the mesh, on one host say, and the sum of a
shard runs along a column, between hosts. A wait for a reduction moves up to the start of the next one: no nearer, so
that the first link goes on, and no farther, so that the second one, which is the slower, gets its work early. The sums
are waited for where the graph ends. A shard in flight has the bytes of the gradient that it becomes, so this holds no
more memory. Where the graph updates weights (`step`), a sum is waited for after the start of the next one instead.

With one rank in a row nothing is reduced there, and the packed gradient is what is summed. Gradients that are kept
(`zerofx.no_sync`) are not summed.

**Where the replicas share the optimizer's work** (`MeshFacts.divides_between`), each rank gets a part of that sum, and
updates a part of its shard. What all of a column have updated comes back before the next forward, group by group, while
forward computes; the graph waits for it before the shard's first reader::

    start the sum of C over the replicas    ─────▶    start the reduction of C's shard over the replicas
    start C's gather                        ─────▶    wait for C's shard;  start C's gather

Sound because the sum over all ranks is the sum over columns of the sums over rows, and a scale may come last. All
replicas get one sum, bit by bit: an all-reduce computes each part of it in one place.

Requires ``group``; runs after ``prefetch``. With one replica it changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from zerofx.features.meshes.facts import mesh_of
from zerofx.passes import edit
from zerofx.passes.context import Context, Reduction, Tag
from zerofx.passes.group import averaged
from zerofx.passes.kinds import NodeKind

_c10d = torch.ops._c10d_functional


def replicate(gm: GraphModule, ctx: Context) -> int:
    """Sum every reduced gradient over the replicas; returns how many sums, and waits for shards, were put in."""
    if ctx.replicas == 1:
        return 0
    waits = _await_shards(gm.graph) if mesh_of(ctx).refreshes_shards else 0
    sums = _sum_all(gm.graph, ctx) if ctx.sync != "keep" and ctx.found.reductions else 0
    return edit.finish(gm, waits + sums)


def _await_shards(graph: Graph) -> int:
    """What was started before the graph is waited for before each shard's first reader."""
    order, shards = edit.positions(graph), edit.tagged(graph, "shard")
    for shard in shards:
        first = min(shard.users, key=order.__getitem__)
        with graph.inserting_before(first):
            tag = Tag("refresh", shard.meta["zerofx"].group)
            wait = edit.insert(graph, _c10d.wait_tensor.default, (shard,), tag=tag, near=first)
        for reader in [user for user in shard.users if user is not wait]:
            reader.replace_input_with(shard, wait)
    return len(shards)


def _sum_all(graph: Graph, ctx: Context) -> int:
    outputs = edit.output_values(graph)
    first = len(outputs) - len(ctx.found.reductions)
    _raise_waits(graph)
    order = edit.positions(graph)
    behind: list[list[Node]] = []
    starts: list[Node] = []
    found = sorted(
        zip(range(first, len(outputs)), ctx.found.reductions), key=lambda item: order[_sums_of(outputs[item[0]])]
    )
    for i, reduction in found:
        start, *rest = _sum(graph, ctx, reduction, outputs[i])
        starts.append(start)
        behind.append(rest)
        outputs[i] = rest[-1]
    edit.set_output_values(graph, outputs)
    _sink_waits(graph, starts, behind, at_end=not ctx.steps)
    return len(starts)


def _sums_of(gradient: Node) -> Node:
    """What ``gradient`` is the average of: where the nodes that scale and cast it begin."""
    while "zerofx" in gradient.meta and gradient.meta["zerofx"].kind == "gradient":
        gradient = gradient.args[0]  # type: ignore[assignment]
    return gradient


def _sum(graph: Graph, ctx: Context, reduction: Reduction, gradient: Node) -> list[Node]:
    """The sum of one gradient over the replicas, its wait, and what averages it, in the place of ``gradient``."""
    sums, layout = _sums_of(gradient), reduction.layout
    added: list[Node] = []

    def add(kind: str, target: Callable[..., Any], *args: Any) -> Node:
        with graph.inserting_after(added[-1] if added else edit.after_inputs(sums)):
            added.append(edit.insert(graph, target, args, tag=Tag(kind, layout.name), near=sums))
        return added[-1]

    if mesh_of(ctx).divides_between:
        scatter = _c10d.reduce_scatter_tensor.default
        start = add("sum_replicas", scatter, sums, "sum", ctx.replicas, ctx.replica_group)
    else:
        start = add("sum_replicas", _c10d.all_reduce.default, sums, "sum", ctx.replica_group)
    whole = add("wait_replicas", _c10d.wait_tensor.default, start)
    average = averaged(add, whole, layout, ctx.averaged_over(layout))
    gradient.replace_all_uses_with(average, delete_user_cb=lambda user: user not in added)
    while gradient is not sums:
        (source,) = gradient.all_input_nodes
        graph.erase_node(gradient)
        gradient = source
    return added


def _raise_waits(graph: Graph) -> None:
    """Each reduction is waited for right after the start of the next one."""
    starts, order = edit.tagged(graph, "reduce_scatter"), edit.positions(graph)
    for start, following in pairwise(starts):
        (wait,) = start.users
        if order[wait] > order[following]:
            following.append(wait)


def _sink_waits(graph: Graph, starts: list[Node], behind: list[list[Node]], *, at_end: bool) -> None:
    """Each sum is waited for, and averaged, at the end; or after the start of the next one."""
    for i, nodes in enumerate(behind):
        if at_end or i + 1 == len(starts):
            for node in nodes:
                graph.output_node().prepend(node)
            continue
        place = starts[i + 1]
        for node in nodes:
            place.append(node)
            place = node


def _why_sum(node: Node, ctx: Context) -> str:
    return f"right after the sum over a row: its shard goes to the {ctx.replicas} replicas' ranks"


def _why_wait(node: Node, ctx: Context) -> str:
    order = edit.positions(node.graph)
    if any(order[later] > order[node] for later in edit.tagged(node.graph, "sum_replicas")):
        return "after the start of the next sum: both are under way by then"
    return "at the end: until then both links and the processor are at work"


NODE_KINDS = {
    "sum_replicas": NodeKind(
        "the start of the sum of a reduced gradient over the replicas, or of this rank's part of it",
        verb="sum",
        sized=True,
        total="sums over replicas:",
        about="takes",
        counts_as="gradients",
        stands=_why_sum,
    ),
    "wait_replicas": NodeKind("the wait for it", verb="summed", stands=_why_wait),
}
