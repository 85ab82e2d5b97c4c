"""What `verify` checks over the whole of a graph: when gathered buffers live, and in which order collectives run.

Live bytes are counted from the start of each gather to the buffer's last reader, node by node.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise

from torch.fx import Node

from zerofx._torch import OpOverload
from zerofx.passes import edit
from zerofx.passes.context import Context
from zerofx.passes.kinds import PICKING
from zerofx.passes.ops import discard as discard_storage
from zerofx.passes.ops import release
from zerofx.passes.proof.meaning import Op
from zerofx.passes.proof.refusal import refuse
from zerofx.passes.travel import GATHERS


@dataclass
class Buffer:
    """A gathered buffer.

    Attributes:
        node: the wait that yields it, or the input that brings it.
        start: of the gather; the input itself.
        last: the place of its last reader, views of it included.
        readers: all of these.
        ends: the places of its discards.
        escapes: whether the graph returns it, or a view of it.
        wait: for the gather, where that yields codes and ``node`` is what is read of them.
    """

    node: Node
    start: Node
    group: str
    nbytes: int
    last: int
    readers: list[Node] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    escapes: bool = False
    wait: Node | None = None

    def read(self, node: Node, place: int) -> None:
        """``node`` reads it."""
        if self.ends:
            refuse(
                "discard", node, f"it reads {self.node.name!r}, which was discarded", "the discard after it", self.group
            )
        self.last = place
        self.readers.append(node)


def check_sorted(order: dict[Node, int]) -> None:
    """The rule "order", of all values: each is computed before it is read. The other rules take that for granted."""
    for node, place in order.items():
        late = next((read for read in node.all_input_nodes if order[read] > place), None)
        if late is not None:
            refuse("order", node, f"it reads {late.name!r}, which is computed after it", "a value before its readers")


def check_read(buffers: list[Buffer]) -> None:
    """The rule "gather", of buffers: what is gathered is read."""
    for buffer in buffers:
        if buffer.start is not buffer.node and not buffer.readers and not buffer.escapes:
            refuse("gather", buffer.start, "nothing reads what it brings", "no gather", buffer.group)


def check_discards(buffers: list[Buffer], nodes: list[Node], ctx: Context) -> None:
    """The rule "discard"."""
    for buffer in buffers:
        wanted = int(
            ctx.executor == "eager" and not buffer.escapes and (buffer.start is not buffer.node or bool(buffer.readers))
        )
        if len(buffer.ends) != wanted:
            found = f"{buffer.node.name!r} is discarded {len(buffer.ends)} times"
            refuse("discard", buffer.node, found, f"{wanted} times", buffer.group)
        for end in buffer.ends:
            between = [n for n in nodes[buffer.last + 1 : end] if n.target not in (discard_storage, release)]
            if between:
                found = f"{buffer.node.name!r} outlives its last reader, {nodes[buffer.last].name!r}"
                refuse("discard", nodes[end], found, "the discard right after it", buffer.group)


def check_live_bytes(buffers: list[Buffer], order: dict[Node, int], ctx: Context) -> None:
    """The rule "budget"."""
    waits: dict[str, int] = {}
    for buffer in buffers:
        if buffer.start is not buffer.node:
            waits[buffer.group] = min(order[buffer.node], waits.get(buffer.group, len(order)))
    opens = sorted(waits.values())
    sizes: dict[Node | str, int] = {}  # two gathers of a group count as one; what the inputs brought, by itself
    for buffer in buffers:
        which = buffer.node if buffer.start is buffer.node else buffer.group
        sizes[which] = sizes.get(which, 0) + buffer.nbytes
    quarter = max(sizes.values(), default=0) // 4  # of the largest group: for those that are small beside it
    if ctx.memory_budget is not None:
        budget = ctx.memory_budget - ctx.elsewhere.held
    else:
        budget = _two_ahead(buffers, waits, opens) + quarter

    changes: list[tuple[int, int, int, Buffer]] = []
    for i, buffer in enumerate(buffers):
        start = -1 if buffer.start is buffer.node else order[buffer.start]
        changes.append((start, i, buffer.nbytes, buffer))
        if not buffer.escapes:
            changes.append((buffer.last, i, -buffer.nbytes, buffer))
    live = 0
    for _, _, change, buffer in sorted(changes, key=lambda c: (c[0], -c[2], c[1])):
        live += change
        if change > 0 and live > budget:
            found = f"{live:,} gathered bytes are live when it starts"
            refuse("budget", buffer.start, found, f"{int(budget):,} at most", buffer.group)


def _two_ahead(buffers: list[Buffer], waits: dict[str, int], opens: list[int]) -> int:
    """The bytes that starting each group two groups ahead takes, if each buffer goes after its last reader."""
    live = [0] * (len(opens) + 2)
    for buffer in buffers:
        first = bisect_right(opens, waits[buffer.group]) - 2 if buffer.start is not buffer.node else 0
        live[max(0, first)] += buffer.nbytes
        live[bisect_right(opens, buffer.last) + 1] -= buffer.nbytes
    for i in range(1, len(live)):
        live[i] += live[i - 1]
    return max(live)


def check_order(waits: dict[Node, list[Node]], ops: dict[Node, Op], order: dict[Node, int], ctx: Context) -> None:
    """The rule "order", of the graph as it reads: of each kind, and on each link, first started is first waited for.

    Inputs that are still coming are waited for in their own order, but for shards of tables: their rows are picked
    ahead of the layers, wherever the table stands.
    """

    def kind(start: Node) -> str:
        if start not in ops:  # it is gathered by who brings it, as inputs come
            readers = [op for wait in waits[start] for user in wait.users if wait in (op := ops[user]).inputs]
            return "refresh of a table" if all(map(_picks, readers)) else "refresh"
        kind = "gather" if ops[start].target in GATHERS else "reduction"
        return kind + " between replicas" * ctx.is_of_replicas(ops[start].args)

    kinds = {start: kind(start) for start in waits}
    for one in sorted(set(kinds.values())):
        same = sorted((start for start in waits if kinds[start] == one), key=order.__getitem__)
        for first, second in pairwise(same):
            if order[waits[second][0]] < order[waits[first][0]]:
                tag = second.meta.get("zerofx")
                found = f"it starts after {first.name!r}, which is waited for later"
                refuse("order", second, found, "first started, first waited for", tag.group if tag else None)


def _picks(op: Op) -> bool:
    return isinstance(op.target, OpOverload) and op.target._schema.name.rpartition("::")[2] in PICKING


def check_pinned(buffers: list[Buffer], ops: dict[Node, Op], order: dict[Node, int], apart: set[Node]) -> None:
    """The rule "order", where the executor schedules by dependence alone.

    Each gather follows the one before it, and whatever reads a buffer that is to be gone by then: such a reader is a
    kernel that the gather follows, or computed inside of such kernels only, or stored before it is first read. What
    stands ``apart`` starts between the same gathers as the graph reads. A wait follows the gathers that start before
    it.
    """
    _check_waits(buffers, ops)
    gathers, followed = {b.start for b in buffers}, set[Node]()
    previous: list[Node] = []  # the gather that started last, and what stands apart since
    pending = sorted((b for b in buffers if not b.escapes), key=lambda b: -b.last)
    for node, start in ops.items():
        if node not in apart and (node not in gathers or start.target not in GATHERS):
            continue
        loose = next((before for before in previous if before not in start.after), None)
        if loose is not None:
            refuse("order", node, f"nothing keeps it after {loose.name!r}", "a dependence on it")
        if node in apart:
            previous.append(node)
            continue
        previous = [node]
        followed.update(start.after)
        while pending and pending[-1].last < order[node]:
            buffer = pending.pop()
            reader = loose_reader(buffer, ops, order[node], order, followed)
            if reader is not None:
                found = f"{reader.name!r} may read {buffer.node.name!r} after it started"
                refuse("order", node, found, "a dependence on all readers of what is gone", buffer.group)


def _check_waits(buffers: list[Buffer], ops: dict[Node, Op]) -> None:
    gathered = {b.wait or b.node: b for b in buffers if b.start is not b.node}
    starts = {b.start for b in gathered.values()}
    waited, ahead, started = "", [], []  # the group that was waited for last, and what was under way by then
    for node, op in ops.items():
        if node in starts:
            started.append(node)
        elif node in gathered:
            buffer = gathered[node]
            if buffer.group != waited:
                waited, ahead, started = buffer.group, started, []
            loose = next((start for start in ahead if start is not buffer.start and start not in op.after), None)
            if loose is not None:
                found = f"nothing keeps it after {loose.name!r}"
                refuse("order", node, found, "the next gather under way by then", buffer.group)


def loose_reader(
    buffer: Buffer, ops: dict[Node, Op], place: int, order: dict[Node, int], followed: set[Node]
) -> Node | None:
    """What may read ``buffer`` after what stands at ``place`` in the order, and follows ``followed``."""
    views = {buffer.node, *(n for n in buffer.readers if ops[n].shares_memory())}
    todo, seen = [n for n in buffer.readers if n not in views], set(views)
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        readers = [user for user in node.users if user not in ops or node in ops[user].inputs]
        kernel, late = edit.is_kernel(ops[node]), any(order[user] > place for user in readers)  # type: ignore[arg-type]
        if node in followed:  # it is done by then; but what is not stored is computed once more, in a later reader
            first = min(readers, key=order.__getitem__, default=None)
            if kernel or not late or first not in ops or node in ops[first].after:
                continue
            return node
        if kernel or late:
            return node
        todo += readers
    return None
