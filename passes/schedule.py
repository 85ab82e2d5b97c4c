"""Gathered buffers over time, and how many bytes there may be: what `keep` and `prefetch` plan with.

The waits of gathers cut a graph into *segments*; segment 0 lies before the first wait. A gather that starts in a
segment stands where that begins. Its buffer is live from there to the end of the segment of its last use, and a
segment's live bytes are those of all buffers live in it::

    start A    start B  wait A  use A    start C  wait B  use B    wait C  use C
    |-- 0 --|  |--------- 1 --------|    |--------- 2 --------|    |---- 3 ----|
    A ###############################
    B          ###############################################
    C                                    #######################################

Where `narrow` made two gathers of a group, they start together and are waited for one after the other; here they count
as one. What forward left gathered for backward (`keep`) is live from the beginning.

**In backward** a segment begins with the first reader of a group's weights that computes a gradient: with the group's
*turn*. What a partitioner has recomputed may read them a little earlier (`zerofx.passes.save_ahead`), on one rank and
not on another, whose batch is of another shape. Gradients are the module's own, in the order of autograd::

    wait B ; recompute with B ; reduce C ; a gradient with B       the turn of B begins after ``reduce C``

With ``memory_budget`` what counts is what is there: segments begin with waits then.

All of it follows from that order and from bytes, which are the same on every rank.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from torch.fx import Graph, Node

from zerofx._torch import saving_is_decided
from zerofx.passes import edit
from zerofx.passes.context import Context


class TooLittle(ValueError):
    """A budget for gathered weights in which one group after the other has no room; ``least`` has."""

    def __init__(self, message: str, least: int) -> None:
        super().__init__(message)
        self.least = least


@dataclass
class Gather:
    """One group's gathered buffers.

    Attributes:
        waits: for them.
        nbytes: of the buffers.
        last: the segment of the last use; the last of all where a buffer leaves the graph.
        turn: what begins segment i + 1, of gather i: the first of the waits, or where the group's turn begins.
        end: the last use itself; None where a buffer leaves the graph.
    """

    waits: list[Node]
    nbytes: int
    last: int
    turn: Node
    end: Node | None

    @property
    def group(self) -> str:
        return self.waits[0].meta["zerofx"].group


def find_gathers(graph: Graph, ctx: Context | None = None) -> tuple[list[Gather], list[Gather]]:
    """The gathers of a graph in the order of their waits; and the buffers that came with its inputs (last use only).

    ``ctx``: of a backward without a budget, segments begin with turns.
    """
    order, by_group = edit.positions(graph), edit.by_group(edit.tagged(graph, "wait"))
    held = [[node] for node in edit.tagged(graph, "gathered")]
    every = [*by_group.values(), *held]
    spans = {waits[0]: (waits[0], _end(waits, order)) for waits in every}
    if ctx is not None and ctx.phase == "backward" and ctx.memory_budget is None:
        late = edit.behind_tangents(graph)
        own = {waits[0]: _for_gradients(waits, late, order) or spans[waits[0]] for waits in every}
        begins = [order[own[waits[0]][0]] for waits in by_group.values()]
        spans = own if all(a < b for a, b in pairwise(begins)) else spans
    opens = [order[spans[waits[0]][0]] for waits in by_group.values()]

    def describe(waits: list[Node]) -> Gather:
        values, (turn, end) = [_read_of(wait).meta["val"] for wait in waits], spans[waits[0]]
        nbytes = sum(value.numel() * value.dtype.itemsize for value in values)
        last = len(order) if end is None else order[end]
        return Gather(waits, nbytes, bisect_right(opens, last), turn, end)

    return [describe(waits) for waits in by_group.values()], [describe(waits) for waits in held]


def _read_of(wait: Node) -> Node:
    """The gathered buffer: what ``wait`` yields, or what is read of the codes that it yields (`compress`)."""
    return next((user for user in wait.users if edit.is_kind(user, "dequantize")), wait)


def _end(waits: list[Node], order: dict[Node, int]) -> Node | None:
    """The last reader of what ``waits`` are for; None where it leaves the graph."""
    ends = [edit.last_use(_read_of(wait), order) for wait in waits]
    return None if None in ends else max(ends, key=order.__getitem__)  # type: ignore[arg-type]


def _for_gradients(waits: list[Node], late: set[Node], order: dict[Node, int]) -> tuple[Node, Node | None] | None:
    """The first and the last reader that computes a gradient, or was marked to be recomputed; None: there is none."""
    own, todo = set(), [_read_of(wait) for wait in waits]
    while todo:
        for user in todo.pop().users:
            if edit.is_view_or_cast(user):
                todo.append(user)
            elif user in late or saving_is_decided(user):
                own.add(user)
    if not own:
        return None
    end = _end(waits, order)
    return min(own, key=order.__getitem__), end and max(own, key=order.__getitem__)


def groups_ahead(graph: Graph) -> dict[Node, int]:
    """For each start of a gather, how many other groups are waited for between it and its own wait."""
    order, (gathers, _) = edit.positions(graph), find_gathers(graph)
    opens = [order[gather.waits[0]] for gather in gathers]
    starts = {wait.args[0]: i for i, gather in enumerate(gathers) for wait in gather.waits}
    return {start: i - bisect_right(opens, order[start]) for start, i in starts.items()}  # type: ignore[index, misc]


def ahead(gathers: list[Gather], groups: int = 1) -> list[int]:
    """The segment in which each gather starts, if each starts that many groups ahead of its use."""
    return [max(0, i + 1 - groups) for i in range(len(gathers))]


def soonest(gathers: list[Gather], held: list[Gather], ctx: Context) -> list[int]:
    """The first segment in which each gather may start, whatever the budget.

    In backward that is two groups ahead of its use: reductions queue behind gathers. What is small beside the largest
    holds nothing up. Where the shard comes to the device first (`Context.reloaded`) it is one group, in forward, too:
    the computing stream waits for the shard where the gather starts. What could compute meanwhile stands after it::

        start A, B, C    computing begins when                  start A, B    when two have come
        wait A; use A    three copies are through     ─────▶    wait A; use A
        wait B; use B                                           start C       its copy went on beside A
                                                                wait B; use B
    """
    change = small_change(gather.nbytes for gather in [*gathers, *held])
    bound, one, two = ctx.phase == "backward", ahead(gathers, 1), ahead(gathers, 2)
    return [
        one[i] if gather.group in ctx.reloaded else two[i] if bound and gather.nbytes > change else 0
        for i, gather in enumerate(gathers)
    ]


def small_change(sizes: Iterable[int]) -> int:
    """The bytes that small groups may have beside the largest of ``sizes``: a quarter of it.

    A large group, an embedding say, keeps the link busy or the processor waiting for as long as many blocks take. It is
    to hold up none of those that are small beside it; where all groups are of one size, nothing is.
    """
    return max(sizes, default=0) // 4


def budget_of(gathers: list[Gather], held: list[Gather], ctx: Context) -> float:
    """The most gathered bytes there may be. Without a number what two groups ahead take, and `small_change`."""
    if ctx.memory_budget is not None:
        return ctx.memory_budget - ctx.elsewhere.held
    change = small_change(gather.nbytes for gather in [*gathers, *held])
    return max(live_bytes(gathers, ahead(gathers, 2), held)) + change


def room_in_flight(sizes: list[int]) -> list[int]:
    """The most packed bytes in flight together with each of a backward's reductions, which have ``sizes``.

    Twice what the largest has; over the first quarter, where nearly all is there that forward saved and a step's bytes
    are at their peak, what it has, and `small_change`.
    """
    crowded, largest = len(sizes) // 4 + 1, max(sizes, default=0)
    return [largest + small_change(sizes) if i < crowded else 2 * largest for i in range(len(sizes))]


def live_bytes(gathers: list[Gather], starts: list[int], held: list[Gather]) -> list[int]:
    """Bytes live in each segment, when gather i starts in segment ``starts[i]``."""
    live = [0] * (len(gathers) + 2)
    for gather, start in zip([*gathers, *held], [*starts, *(0 for _ in held)], strict=True):
        live[start] += gather.nbytes
        live[gather.last + 1] -= gather.nbytes
    for i in range(1, len(live)):
        live[i] += live[i - 1]
    return live[:-1]
