"""Gathers start ahead of their use, within a budget of live bytes; reductions are waited for after the next one.

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
    reduce C; wait                reduce C           and is followed by the next one, with no gap between them
                                  wait for B
                                  wait for C

Forward and backward alike: the next gather stands before the current group's wait, and thereby before the current
group's reduction.

**The budget.** Each start is hoisted, in order, to the earliest segment (`schedule`) that keeps every segment's live
bytes within ``ctx.memory_budget``, never ahead of the start before it. Without a number the budget is the least one
that lets every gather start two groups ahead, for a link that waits for the next start idles.

**In backward no gather starts more than two groups ahead**, whatever the budget: two fill the link, and with more the
reductions would stand behind them, whose gradients take memory meanwhile. (Where a budget had held gathers back until
what was kept was gone, they came in a burst of six: more memory, and a slower step.) What is small beside the largest
may, see below. Of shards that come from the host one group ahead is the most, in forward as well (`schedule.soonest`).

**Gradients in flight.** Each reduction is waited for as late as leaves the packed gradients that are in flight within
twice the bytes of the largest: room for one that travels and for the next to start after it. Of small groups that is
several. The wait stands before the packing that would go beyond that.

**As backward starts**, everything that forward saved is still there, and the bytes of a step are at their peak. So over
the first quarter of the reductions, at most the bytes of the largest one are in flight. The pass does not ask how much
forward saved, because that differs between ranks.

**Small beside large.** An embedding or a head is often as large as many blocks. Small groups should not wait for it. So
the budgets above grow by a quarter of its bytes. Where it dies in a segment, gathers of no more than that quarter start
behind its last reader. They stand ahead of the reduction of its gradient, because they would queue behind that::

    use H                                   use H
    reduce H          the link is busy      start A
    start A           until H is through    reduce H
    wait B            ─────▶                wait B
    use B                                   use B
    wait A            idle                  wait A

**Turns.** What is recomputed may read weights ahead of the group's turn (`zerofx.passes.schedule`), for some shapes and
not for others. A start that would stand before such a wait stands before the turn instead, if a reduction
starts between the two. So gathers and reductions take one order, that of the gradients.

**What a feature sends** before the first wait may be little, and needed first: gathers start after it then
(`zerofx.passes.kinds`).

Sound because a start reads nothing but a shard, which is there from the beginning (the cast or the part of it that
`narrow` made moves along), and a wait is moved only later, never past a reader. Deterministic: it looks at the order of
gradients and at bytes, which are the same on every rank.

Requires ``group``. Provides ``ctx.found.gathered_bytes``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from torch.fx import Graph, GraphModule, Node

from zerofx.passes import edit
from zerofx.passes.context import Context
from zerofx.passes.kinds import ahead_of_gathers
from zerofx.passes.schedule import (
    Gather,
    TooLittle,
    budget_of,
    find_gathers,
    live_bytes,
    room_in_flight,
    small_change,
    soonest,
)
from zerofx.passes.travel import communicates


def prefetch(gm: GraphModule, ctx: Context) -> int:
    """Move the starts of gathers up and the waits of reductions down; returns how many places changed."""
    (gathers, held), before = find_gathers(gm.graph, ctx), list(gm.graph.nodes)
    if gathers or held:
        budget = budget_of(gathers, held, ctx)
        starts, live = _schedule(gathers, held, budget, ctx)
        ctx.found.gathered_bytes = max(live)
        _hoist(gm.graph, gathers, starts, _early(gm.graph, gathers, held, starts, live, budget))
    _sink_waits(gm.graph)
    return edit.finish(gm, sum(old is not new for old, new in zip(before, gm.graph.nodes, strict=True)))


def _schedule(gathers: list[Gather], held: list[Gather], budget: float, ctx: Context) -> tuple[list[int], list[int]]:
    """For each gather the segment it starts in; and the bytes live in each segment."""
    starts = [i + 1 for i in range(len(gathers))]
    live = live_bytes(gathers, starts, held)
    if gathers and max(live) > budget:
        group = gathers[max(0, live.index(max(live)) - 1)].group
        elsewhere = f" beside the {ctx.elsewhere.held:,} that other graphs keep" if ctx.elsewhere.held else ""
        least = max(live) + ctx.elsewhere.held
        raise TooLittle(
            f"memory_budget={ctx.memory_budget:,} is too small: group {group!r} alone needs {max(live):,} gathered "
            f"bytes at once{elsewhere}, before anything is prefetched. Raise it to at least "
            f"{least:,}, or make smaller groups (groups=).",
            least,
        )
    first = soonest(gathers, held, ctx)
    for i, gather in enumerate(gathers):
        floor = max(first[i], starts[i - 1] if i else 0)
        while starts[i] > floor and live[starts[i] - 1] + gather.nbytes <= budget:
            starts[i] -= 1
            live[starts[i]] += gather.nbytes
    return starts, live


def _early(
    graph: Graph,
    gathers: list[Gather],
    held: list[Gather],
    starts: list[int],
    live: list[int],
    budget: float,
) -> dict[int, Node]:
    """Segments whose gathers are small beside a buffer that dies in the segment before, and its last reader."""
    order, change = edit.positions(graph), small_change(g.nbytes for g in [*gathers, *held])
    dying: dict[int, list[Gather]] = {}
    for gather in [*gathers, *held]:
        dying.setdefault(gather.last + 1, []).append(gather)
    sizes: dict[int, int] = {}
    for gather, start in zip(gathers, starts, strict=True):
        sizes[start] = sizes.get(start, 0) + gather.nbytes
    early = {}
    for segment in sizes.keys() & dying.keys():
        small = sizes[segment] <= change < max(g.nbytes for g in dying[segment])
        if small and live[segment] <= budget:
            last = (gather.end for gather in dying[segment])
            early[segment] = max((node for node in last if node is not None), key=order.__getitem__)
    return early


def _hoist(graph: Graph, gathers: list[Gather], starts: list[int], early: dict[int, Node]) -> None:
    top = edit.last_placeholder(graph)
    for node in edit.tagged(graph, *ahead_of_gathers(), "wait"):
        if node.meta["zerofx"].kind == "wait":
            break
        top = node
    assert top is not None
    order, between = edit.positions(graph), _between(graph, gathers)
    behind = {0: top} | early
    last = {start: order[node] for start, node in behind.items()}
    for gather, start in zip(gathers, starts, strict=True):
        own = order[gather.waits[0]]
        for node in _starts(gather):
            if start in behind and last[start] < own:
                behind[start].append(node)
                behind[start] = node
            else:
                place = gathers[start - 1].turn if between(gathers[start - 1]) else gathers[start - 1].waits[0]
                (place if order[place] < own else gather.waits[0]).prepend(node)


def _between(graph: Graph, gathers: list[Gather]) -> Callable[[Gather], bool]:
    """Whether between a gather's wait and its turn a reduction starts, or another gather's buffer is read last."""
    order = edit.positions(graph)
    ends, starts = {gather.end for gather in gathers}, set(edit.tagged(graph, "all_gather"))
    events = [order[n] for n in graph.nodes if n in ends or (communicates(n.target) and n not in starts)]
    return lambda gather: bisect_left(events, order[gather.waits[0]]) < bisect_left(events, order[gather.turn])


def _starts(gather: Gather) -> list[Node]:
    return [node for wait in gather.waits for start in wait.all_input_nodes for node in _from_shard(start)]


def _from_shard(node: Node) -> list[Node]:
    """``node``, after what `narrow` put between it and the shard."""
    sources = [source for source in node.all_input_nodes if source.meta["zerofx"].kind == "narrow"]
    return [*(before for source in sources for before in _from_shard(source)), node]


def _sink_waits(graph: Graph) -> None:
    packs: dict[str, Node] = {}
    for node in edit.tagged(graph, "pack"):
        packs.setdefault(node.meta["zerofx"].group, node)
    behind = edit.by_group(edit.tagged(graph, "wait_grad", "gradient"))
    groups = [wait.meta["zerofx"].group for wait in edit.tagged(graph, "wait_grad")]
    sizes = [behind[group][0].args[0].args[0].meta["val"].nbytes for group in groups]  # type: ignore[union-attr]
    oldest = flying = 0
    for group, nbytes, room in zip(groups, sizes, room_in_flight(sizes), strict=True):
        while flying and flying + nbytes > room:
            for node in behind[groups[oldest]]:
                packs[group].prepend(node)
            flying -= sizes[oldest]
            oldest += 1
        flying += nbytes
    for group in groups[oldest:]:
        for node in behind[group]:
            graph.output_node().prepend(node)
