"""Within the budget, the last groups of forward stay gathered for backward, which needs them first.

::

    forward      wait A                                wait A
                 use A                                 use A
                 wait B                                wait B
                 use B                                 use B
                 return y, x, None (aw), None (bw)     return y, x, None (aw), B

    backward     start B                    ─────▶     B: placeholder
                 wait B                                use B
                 use B                                 start A
                 start A                               wait A
                 wait A                                use A
                 use A

The buffer travels in the place of one of the group's parameters among what forward saves. It belongs to that one
forward, as activations do, and is given back after its last reader in backward.

Every group costs as many bytes to gather as it holds, so the only question is for how long it holds them: the last ones
of forward are the first that backward is through with. As many of them are kept, last one first, as leave room

* in forward, for each gather to start two groups ahead, and
* in backward, whatever its order, for the two largest of the other groups to be gathered beside them: while backward is
  busy with what was kept there is nothing to reduce yet, and the link is theirs.

Where the budget has no room for two, it is one group in both. What that keeps within the bytes of prefetching one group
ahead is kept with every larger budget, too: a step never sends more because it may hold more.

Without a number the budget is what prefetching one group ahead takes anyway, and backward is taken to run in the
opposite order: the one gathered beside is forward's last of the others. What is kept then costs no memory, and leaves
what a second group ahead takes (`prefetch`) to backward's own gathers.

Sound because the buffer holds what a new gather would yield: parameters do not change between forward and backward
(that is checked when backward starts, as for any saved tensor). Deterministic: bytes and order alone.

Requires ``group``, and one ``ctx.handover`` of both graphs. Provides ``ctx.found.gathered``. Leaves groups alone that
backward does not need, and those that `narrow` gathers in two parts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace

from torch.fx import Graph, GraphModule, Node

from zerofx.passes import edit
from zerofx.passes.context import Context, Gathered, Tag
from zerofx.passes.schedule import Gather, ahead, find_gathers, live_bytes


def keep(gm: GraphModule, ctx: Context) -> int:
    """Leave groups gathered (forward), or use what was left (backward); returns how many."""
    if ctx.phase == "forward":
        return edit.finish(gm, _leave(gm.graph, ctx))
    if ctx.phase == "backward":
        return edit.finish(gm, sum(1 for _ in _take(gm.graph, ctx)))
    return 0


def _leave(graph: Graph, ctx: Context) -> int:
    gathers, _ = find_gathers(graph)
    if not gathers:
        return 0
    place: dict[str, int] = {}  # of the first saved parameter of each group
    for position, ref in ctx.found.saved_parameters.items():
        if position in ctx.found.saved_names:
            place.setdefault(ref.layout.name, position)
    candidates = [i for i, g in reversed(list(enumerate(gathers))) if g.group in place and len(g.waits) == 1]

    def too_many(n: int) -> bool:
        return not _fits(gathers, set(candidates[: n + 1]), set(place), ctx)

    n = bisect_left(range(len(candidates)), True, key=too_many)
    outputs = edit.output_values(graph)
    for i in candidates[:n]:
        (wait,), position = gathers[i].waits, place[gathers[i].group]
        outputs[position] = wait
        del ctx.found.saved_parameters[position]
        value = wait.meta["val"]
        ctx.handover.kept_gathered[gathers[i].group] = Gathered(
            position, ctx.found.saved_names[position], value.numel(), value.dtype
        )
    edit.set_output_values(graph, outputs)
    return n


def _fits(gathers: list[Gather], kept: set[int], needed: set[str], ctx: Context) -> bool:
    """Whether both graphs stay within the budget if these gathers are kept; ``needed`` are the groups backward uses."""
    rest = [g.nbytes for i, g in enumerate(gathers) if g.group in needed and i not in kept]
    if ctx.memory_budget is not None:
        rest.sort()
    held = [replace(g, last=len(gathers)) if i in kept else g for i, g in enumerate(gathers)]

    def need(groups: int) -> int:
        beside = max(ctx.elsewhere.largest, sum(rest[-groups:]))
        return max(*live_bytes(held, ahead(held, groups), []), beside + sum(gathers[i].nbytes for i in kept))

    one_ahead = max(live_bytes(gathers, ahead(gathers), []))
    budget = (one_ahead if ctx.memory_budget is None else ctx.memory_budget) - ctx.elsewhere.held
    return need(2) <= budget or need(1) <= min(budget, one_ahead)


def _take(graph: Graph, ctx: Context) -> Iterator[Node]:
    waits = edit.by_group(edit.tagged(graph, "wait"))
    buffer: Node | None = None
    for group, (wait, *more) in waits.items():
        value, kept = wait.meta["val"], ctx.handover.kept_gathered.get(group)
        if kept is None or kept.ranks > 1 or more or (value.numel(), value.dtype) != (kept.numel, kept.dtype):
            continue
        buffer = edit.placeholder(graph, f"gathered_{group}", value, Tag("gathered", group), last=buffer)
        wait.replace_all_uses_with(buffer)
        ctx.found.gathered.append(group)
        erase(graph, wait)
        yield buffer
    gathered = {node.meta["zerofx"].group for node in edit.tagged(graph, "shard", "replica")}
    ctx.found.shards[:] = [layout for layout in ctx.found.shards if layout.name in gathered]


def erase(graph: Graph, node: Node) -> None:
    """A node without readers, and what was there for it alone, up to the shard."""
    sources = node.all_input_nodes
    graph.erase_node(node)
    for source in sources:
        if not source.users and "zerofx" in source.meta:
            erase(graph, source)
