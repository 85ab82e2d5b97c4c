"""Gathers start ahead of their use, within a budget of live bytes; reductions are waited for behind the next one.

::

    start A                       start A
    wait A                        start B          B travels
    use A                         wait A
    start B                       use A              while A computes
    wait B              ─────▶    start C
    use B                         wait B
    reduce B; wait                use B
    start C                       reduce B         the reduction travels
    wait C                        wait C
    use C                         use C              while C computes
    reduce C; wait                wait for B; reduce C
                                  wait for C

Forward and backward alike: the next gather stands before the current group's wait, and thereby before the current
group's reduction. At most one packed gradient is in flight: its wait stands before the next one is packed.

Where `narrow` made two gathers of a group, they start together and are waited for one after the other; below they
count as one.

**The budget.** The waits cut the graph into segments; a gathered buffer is live from the segment of its start to the
segment of its last use. Each start is hoisted, in order, to the earliest segment that keeps every segment's live
bytes within ``ctx.prefetch_bytes``, never ahead of the start before it. Without a number the budget is the least one
that lets every gather start one group ahead.

Sound because a start reads nothing but a shard, which is there from the beginning (the cast or the part of it that
`narrow` made moves along), and a wait is moved only later, never past a reader. Deterministic: it looks at the graph's
order and at bytes, which are the same on every rank.

Requires ``group``. Provides ``ctx.gathered_bytes``.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import zip_longest

from torch.fx import Graph, GraphModule, Node

from zerofx.passes import edit
from zerofx.passes.context import Context


@dataclass
class _Gather:
    waits: list[Node]
    """Of one group. The first opens the segment of its first use."""
    nbytes: int
    last: int
    """The segment of its last use."""


def prefetch(gm: GraphModule, ctx: Context) -> int:
    """Move the starts of gathers up and the waits of reductions down; returns how many places changed."""
    gathers, before = _gathers(gm.graph), list(gm.graph.nodes)
    if gathers:
        starts, ctx.gathered_bytes = _schedule(gathers, ctx.prefetch_bytes)
        _hoist(gm.graph, gathers, starts)
    _sink_waits(gm.graph)
    return edit.finish(gm, sum(old is not new for old, new in zip(before, gm.graph.nodes, strict=True)))


def _gathers(graph: Graph) -> list[_Gather]:
    order = edit.positions(graph)
    by_group: dict[str, list[Node]] = {}
    for wait in edit.tagged(graph, "wait"):
        by_group.setdefault(wait.meta["zerofx"].group, []).append(wait)
    opens = [order[waits[0]] for waits in by_group.values()]
    gathers = []
    for waits in by_group.values():
        ends = [order.get(edit.last_use(wait, order), len(order)) for wait in waits]  # type: ignore[arg-type]
        values = [wait.meta["val"] for wait in waits]
        nbytes = sum(value.numel() * value.dtype.itemsize for value in values)
        gathers.append(_Gather(waits, nbytes, last=bisect_right(opens, max(ends)) - 1))
    return gathers


def _schedule(gathers: list[_Gather], budget: int | None) -> tuple[list[int], int]:
    """For each gather the segment it starts in, and the most bytes live in any segment."""
    if budget is None:
        budget = max(_live(gathers, [max(0, i - 1) for i in range(len(gathers))]))
    starts = list(range(len(gathers)))
    live = _live(gathers, starts)
    if max(live) > budget:
        group = gathers[live.index(max(live))].waits[0].meta["zerofx"].group
        raise ValueError(
            f"prefetch_bytes={budget:,} is too small: group {group!r} alone needs {max(live):,} gathered "
            "bytes at once, before anything is prefetched. Raise it to at least that, or make smaller groups (groups=)."
        )
    for i, gather in enumerate(gathers):
        floor = starts[i - 1] if i else 0
        while starts[i] > floor and live[starts[i] - 1] + gather.nbytes <= budget:
            starts[i] -= 1
            live[starts[i]] += gather.nbytes
    return starts, max(live)


def _live(gathers: list[_Gather], starts: list[int]) -> list[int]:
    """Gathered bytes in each segment, when gather i starts in segment ``starts[i]``."""
    live = [0] * (len(gathers) + 1)
    for gather, start in zip(gathers, starts, strict=True):
        live[start] += gather.nbytes
        live[gather.last + 1] -= gather.nbytes
    for i in range(1, len(live)):
        live[i] += live[i - 1]
    return live[:-1]


def _hoist(graph: Graph, gathers: list[_Gather], starts: list[int]) -> None:
    top = edit.last_placeholder(graph)
    assert top is not None
    for node in _starts(gathers[0]):
        top.append(node)
        top = node
    for i, gather in enumerate(gathers[1:], start=1):
        for node in _starts(gather):
            gathers[starts[i]].waits[0].prepend(node)


def _starts(gather: _Gather) -> list[Node]:
    return [node for wait in gather.waits for start in wait.all_input_nodes for node in _from_shard(start)]


def _from_shard(node: Node) -> list[Node]:
    """``node``, behind what `narrow` put between it and the shard."""
    sources = [source for source in node.all_input_nodes if source.meta["zerofx"].kind == "narrow"]
    return [*(before for source in sources for before in _from_shard(source)), node]


def _sink_waits(graph: Graph) -> None:
    packs: dict[str, Node] = {}
    for node in edit.tagged(graph, "pack"):
        packs.setdefault(node.meta["zerofx"].group, node)
    behind: dict[str, list[Node]] = {}
    for node in edit.tagged(graph, "wait_grad", "gradient"):
        behind.setdefault(node.meta["zerofx"].group, []).append(node)
    waits = edit.tagged(graph, "wait_grad")
    for wait, following in zip_longest(waits, waits[1:]):
        anchor = packs[following.meta["zerofx"].group] if following else graph.output_node()
        for node in behind[wait.meta["zerofx"].group]:
            anchor.prepend(node)
