"""Weights that live elsewhere come to the device ahead of their gather, two shards at a time.

::

    start A = all_gather(shard_A)                 reload A
    wait A                                        reload B                  B is on its way
    use A                                         a = wait_reload(A)
    start B = all_gather(shard_B)                 start A = all_gather(a)
    wait B                        ─────▶          release a
    use B                                         wait A
                                                  use A                    while A computes
                                                  reload C
                                                  b = wait_reload(B)
                                                  start B = all_gather(b)
                                                  ...

A shard is waited for where it is first read, and stands there until it was sent; its reload stands before the wait
for the shard before it. So two are on their way at most, however many groups there are: one that is needed now, and the
next. What casts or cuts the shard before it is gathered (`narrow`), or picks rows of it (`lookup`), reads what was
reloaded. With one rank there is no gather: weights are views of what was reloaded, until their last use.

The shard's placeholder stays. It says which group is meant, and what shape its weights have; nobody reads it.

Sound because a shard does not change while a graph reads it: what updates it in backward (`step`) comes after that.

Groups of `OffloadFacts.weights` in stage 3. Requires ``group``; runs before `discard`, which sees to the end of
what was reloaded, and after what moves or inserts gathers. The idea of reloading ahead is ZeRO-Infinity's (Rajbhandari
et al. 2021), whose hooks look at the order of the step before.
"""

from __future__ import annotations

from torch.fx import Graph, GraphModule, Node

from zerofx.features.offload.facts import offload_of
from zerofx.features.offload.operators import RELOAD, WAIT_RELOAD
from zerofx.passes import edit
from zerofx.passes.context import Context, Tag
from zerofx.passes.kinds import NodeKind


def reload_weights(gm: GraphModule, ctx: Context) -> int:
    """Insert a reload and a wait for each shard that lives elsewhere; returns how many nodes were inserted."""
    graph, order = gm.graph, edit.positions(gm.graph)
    shards = [n for n in edit.tagged(graph, "shard") if n.meta["zerofx"].group in offload_of(ctx).weights and n.users]
    firsts = {shard: min(shard.users, key=order.__getitem__) for shard in shards}
    shards.sort(key=lambda shard: order[firsts[shard]])
    start: Node | None = None
    for i, shard in enumerate(shards):
        first, readers = firsts[shard], list(shard.users)
        start = start or _start(graph, shard, first, first)
        following = shards[i + 1] if i + 1 < len(shards) else None
        ahead = _start(graph, following, first, firsts[following]) if following is not None else None
        tag = Tag("wait_reload", shard.meta["zerofx"].group)
        with graph.inserting_before(first):
            here = edit.insert(graph, WAIT_RELOAD, (start, shard, tag.group), tag=tag, near=first)
        for reader in readers:
            if reader is not start:
                reader.replace_input_with(shard, here)
        start = ahead
    return edit.finish(gm, 2 * len(shards))


def _start(graph: Graph, shard: Node, before: Node, near: Node) -> Node:
    tag = Tag("reload", shard.meta["zerofx"].group)
    with graph.inserting_before(before):
        return edit.insert(graph, RELOAD, (shard, tag.group), tag=tag, near=near)


NODE_KINDS = {
    "reload": NodeKind(
        "the start of the copy of a shard to the device",
        sized=True,
        about="brings",
        transfer=True,
        verb="reload",
        of=0,
        total="shards are reloaded:",
        counts_as="weights",
        stands="before the wait for the shard before it: two are on their way at most",
    ),
    "wait_reload": NodeKind(
        "the shard when it has come",
        about="brings",
        transfer=True,
        verb="reloaded",
        stands="where the shard is first read",
    ),
}
