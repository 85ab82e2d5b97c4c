"""A gather over all ranks has two hops: a shard crosses the rows of a mesh once, and then a row gathers.

::

    shard B: placeholder                       part B: placeholder          1/(R S) of the group
                                               hop B = all_gather(part B, R, column)
    start A's gather in the row                wait for A's shard; start A's gather in the row
                                    ─────▶     hop C = all_gather(part C, R, column)
    start B's gather in the row                shard B = wait(hop B)        1/S of it
    wait A; use A                              start B's gather in the row
                                               wait A; use A

A rank keeps a part of what its column has together. The parts of a column lie side by side, so what the first hop
brings is the shard that the row gathers from. Each first hop starts before the wait for the one before: one is
under way, and the next is there when that is over. So both links work at once, and a rank holds two shards more.

Over the slow link each host gets a byte once, and not once for each of its ranks: ``(R - 1)/R N/S`` per rank instead of
``(R - 1)/R N``. Gradients go the same way back (`replicate`). The idea is as old as clusters; MiCS (Zhang et al. 2022)
has it for these gathers.

Where a cast is all that stands between a part and its gather (`narrow`), the cast is before the first hop, and the
bytes on the slow link are those of the narrower dtype. Where `narrow` takes pieces of the shard, the first hop brings
it as it is.

Sound because the parts of a shard, end to end, are the shard, and a cast of each is a cast of all.

Requires `MeshFacts.two_hops`; runs after `prefetch`. Where backward gathers in a row what forward left there
(`secondary_shard`), that is a shard, and has no first hop.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node

from zerofx.features.meshes.facts import mesh_of
from zerofx.passes import edit
from zerofx.passes.context import Context, Tag
from zerofx.passes.kinds import NodeKind

_c10d = torch.ops._c10d_functional


def two_hop_gather(gm: GraphModule, ctx: Context) -> int:
    """Bring each shard from the parts of its column; returns how many."""
    if not mesh_of(ctx).two_hops:
        return 0
    graph = gm.graph
    behind = edit.last_placeholder(graph)
    waits = [_hop(graph, shard, behind, ctx) for shard in edit.tagged(graph, "shard")]
    order = edit.positions(graph)
    waits.sort(key=lambda wait: min(order[reader] for reader in wait.users))
    for before, wait in zip([None, *waits], waits):
        reader = min(wait.users, key=order.__getitem__)
        reader.prepend(wait)
        (start,) = wait.all_input_nodes
        for node in (*start.all_input_nodes, start):
            if node.op != "placeholder":
                (before or wait).prepend(node)
    return edit.finish(gm, len(waits))


def _hop(graph: Graph, shard: Node, inputs: Node | None, ctx: Context) -> Node:
    """The first hop of one group, of which ``shard`` becomes the part, after all ``inputs``; returns its wait."""
    users, group = list(shard.users), shard.meta["zerofx"].group
    alone = len(users) == 1 and edit.is_kind(users[0], "narrow") and edit.is_cast(users[0])
    sent = users[0] if alone else shard
    readers = list(sent.users)
    for node in dict.fromkeys((shard, sent)):
        node.meta["val"] = node.meta["val"].new_empty(node.meta["val"].numel() // ctx.replicas)
    with graph.inserting_after(sent if alone else inputs):
        args = (sent, ctx.replicas, ctx.replica_group)
        start = edit.insert(graph, _c10d.all_gather_into_tensor.default, args, tag=Tag("hop", group), near=readers[0])
    with graph.inserting_after(start):
        wait = edit.insert(graph, _c10d.wait_tensor.default, (start,), tag=Tag("wait_hop", group), near=readers[0])
    for reader in readers:
        reader.replace_input_with(sent, wait)
    return wait


NODE_KINDS = {
    "hop": NodeKind(
        "the start of the gather between hosts of a shard's parts",
        travels="gather",
        sized=True,
        about="brings",
        verb="hop",
        total="gathers of shards from other rows:",
        counts_as="weights",
        stands="before the wait for the shard before it: one is under way, and the next is there after that",
    ),
    "wait_hop": NodeKind("the shard when it has come"),
}
