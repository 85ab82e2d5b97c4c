"""Hand the graph to its executor: spell the collectives as the backend does them best, drop what it does by itself.

**Reduce-scatter on gloo.** Gloo's reduce-scatter is an all-reduce underneath and sends twice the bytes it must. An
all-to-all moves just the parts, and summing them here is deterministic and fuses with the scaling::

    sums = reduce_scatter_tensor(pack, "sum", M, pg)     others = zerofx.all_to_all_pairwise(pack, M, pg)
    shard = wait_tensor(sums) * (1 / M)           ─────▶ others = wait_tensor(others).view(M - 1, S)
                                                         sums = zerofx.own_part(pack, M, pg) + others.sum(0)
                                                         shard = sums * (1 / M)

**All-gather on gloo.** PyTorch routes ``all_gather_into_tensor`` to gloo's coalesced all-gather, which corrupts the
heap while another collective is in flight (seen in torch 2.11, 2.13 and 2.15; docs/gloo.md has a program that
shows it), and gloo's plain all-gather goes through a second buffer. A pairwise exchange is sound, writes where it
should and fills both directions of a link (passes/ops.py)::

    start = all_gather_into_tensor(shard, M, pg)  ─────▶ start = zerofx.all_gather_pairwise(shard, M, pg)

**All-reduce** (stage 0, and over replicas) needs no second buffer: it reduces in place what was packed, or summed, for
it.

**Order for Inductor.** Inductor schedules by data dependence; its fusions pull a wait up to the first kernel that reads
a part of what it waits for, and it recomputes cheap values of weights in later kernels rather than store them. What
must not move against each other is therefore made a dependence::

    use A;  discard A
    start C             ─────▶   start C, after every use of A:  no more is live than the budget allows
    wait B                       wait B, after start C:          the next gather is under way by then

    start B             ─────▶   reduce C, after start B; start D, after reduce C: one order of collectives, the graph's
    reduce C;  start D

    start own           ─────▶   start own, after the start before it; the next start after start own (a user's pass)

    step A              ─────▶   step A, after every use of A, and after the start of the reduction before it; the next
    reduce C                     reduction after step A: the same order of collectives on every rank

    reduce B                     sum C over the replicas, after reduce B; the next reduction after that; and the wait
    sum C over the replicas      for B after the sum: both links are under way by then

    use a; release a             reload C, after every use of a; each reload, and each wait for one, after the one
    reload C;  wait B   ─────▶   before it, and a wait for one with the gather that it stands before; offloads too

    use a                        reload c, after every use of a, and after the wait for b: what forward saved comes back
    wait b;  reload c   ─────▶   as the graph has it, and never more of it at a time

A value that is computed from A and read after ``start C`` is stored before it is first read, so that no later kernel
goes back to A. The discard marks are taken out: Inductor frees a buffer after its last reader, which is where they
stand. The eager executor runs the graph as it reads, marks included.

Last of the passes. Sound because both sides compute the sum over ranks: the others in rank order, then one's own.
"""

from __future__ import annotations

from collections import defaultdict
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from zerofx._torch import OpOverload, pin_order
from zerofx.passes import edit
from zerofx.passes.context import Context, Tag
from zerofx.passes.kinds import travelling
from zerofx.passes.travel import GATHERS, Call, Travel, communicates

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional


def lower(gm: GraphModule, ctx: Context) -> int:
    """Make the graph ready for ``ctx.executor`` and ``ctx.backend``; returns how many nodes were replaced."""
    edits, coded = 0, set(edit.tagged(gm.graph, "quantize"))
    for node in edit.tagged(gm.graph, "all_reduce"):
        if node.args[0].target is _aten.cat.default:  # type: ignore[union-attr]
            node.target = _c10d.all_reduce_.default
            edits += 1
    for node in edit.tagged(gm.graph, "reduce_scatter", *travelling("scatter")):
        if node.args[0] not in coded:  # an exchange of codes is spelled already
            edits += _spell_reduction(gm, node, ctx.travel)
    for node in edit.tagged(gm.graph, "sum_replicas"):
        if node.args[0] in coded:
            edits += node.target in GATHERS and _spell_gather(gm, node, ctx.travel)
        elif node.target is not _c10d.all_reduce.default:
            edits += _spell_reduction(gm, node, ctx.travel)
        elif node.args[0].target is not _aten.reshape.default:  # type: ignore[union-attr]  # memory of its own
            node.target = _c10d.all_reduce_.default
            edits += 1
    for node in edit.tagged(gm.graph, "all_gather", *travelling("gather")):
        edits += _spell_gather(gm, node, ctx.travel)
    if ctx.executor == "inductor":
        after = _order(gm, ctx)
        for node in edit.tagged(gm.graph, "discard"):
            gm.graph.erase_node(node)
        pin_order(gm, after)
        edits += len(after)
    return edit.finish(gm, edits)


def _order(gm: GraphModule, ctx: Context) -> dict[Node, list[Node]]:
    """Node -> nodes that must come before it, besides those it reads (and, if it reads them, be stored first)."""
    after: dict[Node, list[Node]] = defaultdict(list)
    order, nodes = edit.positions(gm.graph), list(gm.graph.nodes)
    dead: list[Node] = []
    started: list[Node] = []  # since the last wait
    previous: list[Node] = []
    reduced: list[Node] = []  # the reduction that started last, if that was after the last gather
    waited, ahead = "", started  # the group that was waited for last, and what was under way by then
    reductions = ("reduce_scatter",) if edit.tagged(gm.graph, "all_gather") else ()  # alone they need no order
    apart = travelling()
    carried = ("reload", "wait_reload")
    for node in edit.tagged(gm.graph, "all_gather", "wait", "wait_hop", "discard", *carried, *apart, *reductions):
        kind = node.meta["zerofx"].kind
        if kind == "discard":
            dead.append(node.args[0])  # type: ignore[arg-type]
        elif kind == "reduce_scatter":
            after[node] += previous
            reduced = [node]
        elif kind in carried:
            for buffer in dead:
                _follow(after, node, buffer, order, nodes)
            after[node] += previous + reduced
        elif kind in apart:
            after[node] += previous
            previous = [*previous, node]
        elif kind == "wait_hop":
            after[node] += [start for start in previous if start is not node.args[0]]
        elif kind == "all_gather":
            for buffer in dead:
                _follow(after, node, buffer, order, nodes)
            after[node] += previous + reduced
            dead, previous, reduced = [], [node], []
            started.append(node)
        else:
            if node.meta["zerofx"].group != waited:
                waited, ahead, started = node.meta["zerofx"].group, started, []
            after[node] += [start for start in ahead if start is not node.args[0]]
    _order_sums(gm, after)
    waits = [(kind, f"wait_{kind}") for kind in ("reload", "offload", "offload_activation", "reload_activation")]
    for kinds in waits:
        for before, node in pairwise(edit.tagged(gm.graph, *kinds)):
            after[node] += [before] * (before not in node.all_input_nodes)
    _order_behind_readers(gm, after, "reload_activation", "wait_reload_activation", order, nodes)
    _order_steps(gm, after, order, nodes)
    if ctx.own_kinds:
        _order_own(gm, ctx, after)
    _order_foreign(gm, after, order, nodes)
    return {node: list(dict.fromkeys(first)) for node, first in after.items() if first}


def _order_sums(gm: GraphModule, after: dict[Node, list[Node]]) -> None:
    """Sums over replicas and reductions take turns as the graph reads; each wait follows what starts before it."""
    kinds = ("reduce_scatter", "sum_replicas", "wait_grad", "wait_replicas")
    previous: list[Node] = []
    for node in edit.tagged(gm.graph, *kinds) if edit.tagged(gm.graph, "sum_replicas") else ():
        after[node] += [start for start in previous if start is not node.args[0]]
        if not node.meta["zerofx"].kind.startswith("wait"):
            previous = [node]


def _order_steps(gm: GraphModule, after: dict[Node, list[Node]], order: dict[Node, int], nodes: list[Node]) -> None:
    """Updates follow the readers of what they write, and take turns with reductions as the graph reads."""
    memory: dict[str, list[Node]] = defaultdict(list)
    for node in edit.tagged(gm.graph, "shard", "replica", "refresh", "wait", "gathered"):
        memory[node.meta["zerofx"].group].append(node)
    previous: list[Node] = []
    steps = edit.tagged(gm.graph, "step")
    for node in edit.tagged(gm.graph, "step", "ahead", "reduce_scatter") if steps else ():
        tag = node.meta["zerofx"]
        after[node] += previous
        previous = [node]
        for buffer in memory[tag.group] if tag.kind == "step" else ():
            _follow(after, node, buffer, order, nodes)


def _order_own(gm: GraphModule, ctx: Context, after: dict[Node, list[Node]]) -> None:
    """Collectives of a user's passes take turns with all others; who reads a gradient comes before its update."""
    own, previous = set(edit.tagged(gm.graph, *ctx.own_kinds)), None
    for node in gm.graph.nodes:
        if not communicates(node.target) and node.target is not torch.ops.zerofx.refresh.default:
            continue
        if previous is not None and (node in own or previous in own):
            after[node].append(previous)
        previous = node
    for node in edit.tagged(gm.graph, "step"):
        after[node] += [user for user in node.args[0].users if user in own]  # type: ignore[union-attr]


def _order_foreign(gm: GraphModule, after: dict[Node, list[Node]], order: dict[Node, int], nodes: list[Node]) -> None:
    """Beside other ranks' collectives, the model's own or gathers of saved parts, all take turns as the graph reads.

    Each of these gathers follows the readers of what is gone.
    """
    starts, previous = edit.tagged(gm.graph, "gather_saved"), None
    started = [n for n in nodes if communicates(n.target) or n.target is torch.ops.zerofx.refresh.default]
    if not starts and all("zerofx" in node.meta for node in started):
        return
    for node in started:
        after[node] += [previous] if previous is not None else []
        previous = node
    _order_behind_readers(gm, after, "gather_saved", "wait_saved", order, nodes)


def _order_behind_readers(
    gm: GraphModule, after: dict[Node, list[Node]], start: str, wait: str, order: dict[Node, int], nodes: list[Node]
) -> None:
    """Nodes of the kind ``start`` make buffers. Each follows the readers of those of these buffers that are gone."""
    dying = [(last, node) for node in edit.tagged(gm.graph, wait) if (last := edit.last_use(node, order))]
    dying.sort(key=lambda x: -order[x[0]])
    for node in edit.tagged(gm.graph, start):
        while dying and order[dying[-1][0]] < order[node]:
            _follow(after, node, dying.pop()[1], order, nodes)


def _follow(after: dict[Node, list[Node]], node: Node, buffer: Node, order: dict[Node, int], nodes: list[Node]) -> None:
    """``node`` comes when nothing reads ``buffer`` any more."""
    uses, stored = _uses_before(buffer, node, order, nodes)
    after[node] += uses
    for value in stored:
        first = min(value.users, key=order.__getitem__)
        if first.op != "output":
            after[first].append(value)


def _uses_before(buffer: Node, node: Node, order: dict[Node, int], nodes: list[Node]) -> tuple[list[Node], list[Node]]:
    """What must have run for ``buffer`` to be free at ``node``, and which of it must be stored.

    The first are the kernels that read ``buffer``, or values that Inductor may compute inside of the kernels that read
    them; the second are such values with a reader after ``node``.
    """
    uses, stored = [], []
    views = edit.aliases(buffer)
    todo = sorted({order[user] for view in views for user in view.users} - {order[view] for view in views})
    seen = set(todo)
    while todo:
        user = nodes[heappop(todo)]
        if user is node or user.meta.get("zerofx", Tag("", "")).kind == "discard":
            continue
        if edit.is_kernel(user):
            uses.append(user)
        elif any(order[reader] > order[node] for reader in user.users):
            uses.append(user)
            stored.append(user)
        else:
            for i in {order[reader] for reader in user.users} - seen:
                seen.add(i)
                heappush(todo, i)
    return uses, stored


def _spell_gather(gm: GraphModule, node: Node, travel: Travel) -> bool:
    """Start the gather ``node`` as buffers travel; returns whether anything changed."""
    (wait,) = node.users
    shard, world_size, process_group = node.args
    started = travel.gather(_inserting(gm, node), shard, cast(int, world_size), cast(str, process_group))
    changed = _take_the_place_of(node, started)
    readers = list(wait.users)
    found = travel.gathered(_inserting(gm, wait.next, tag=wait.meta["zerofx"], near=wait), wait)
    for reader in readers if found is not wait else ():
        reader.replace_input_with(wait, found)
    return changed or found is not wait


def _spell_reduction(gm: GraphModule, node: Node, travel: Travel) -> bool:
    """Start the reduction ``node`` as buffers travel, and sum what arrives; returns whether anything changed."""
    pack, (wait,) = node.args[0], node.users
    world_size, process_group = cast(int, node.args[2]), cast(str, node.args[3])
    gradient, *more = sorted(wait.users)  # or what a feature has summed; or what writes codes of it, and adds them up
    numel = wait.meta["val"].numel()
    started = travel.scatter(_inserting(gm, node), pack, world_size, process_group)
    wait.meta["val"] = started.meta["val"]
    # Of a low-precision gradient the sum over ranks is taken in the parameter's dtype, if that is wider: `gradient`
    # is the cast to it then, and what is added to a sum in that dtype is promoted to it.
    dtype = gradient.meta["val"].dtype
    wider = dtype if dtype.itemsize > wait.meta["val"].dtype.itemsize else None
    tag = gradient.meta["zerofx"]
    if tag.kind in ("sum_replicas", "quantize"):
        tag = Tag("gradient", tag.group)
    call = _inserting(gm, gradient, near=node, tag=tag)
    sums = travel.summed(call, pack, wait, numel, world_size, process_group, wider)
    changed = _take_the_place_of(node, started)
    if sums is not wait:
        for reader in (gradient, *more):
            reader.replace_input_with(wait, sums)
        if wider is not None:
            gradient.replace_all_uses_with(sums)
            gm.graph.erase_node(gradient)
    return changed or sums is not wait


def _inserting(gm: GraphModule, before: Node, near: Node | None = None, tag: Tag | None = None) -> Call:
    """A `Call` that inserts nodes before ``before``, with its tag."""

    def call(target: OpOverload, *args: Any, **kwargs: Any) -> Node:
        with gm.graph.inserting_before(before):
            return edit.insert(gm.graph, target, args, tag=tag or before.meta["zerofx"], near=near or before, **kwargs)

    return call


def _take_the_place_of(node: Node, started: Node) -> bool:
    """``started`` runs instead of ``node``; returns whether that is another call.

    Where nothing but the operator differs, ``node`` keeps its name.
    """
    if started.args == node.args and started.kwargs == node.kwargs:
        same = started.target is node.target
        node.target, node.meta["val"] = started.target, started.meta["val"]
        started.replace_all_uses_with(node)
        node.graph.erase_node(started)
        return not same
    node.replace_all_uses_with(started)
    node.graph.erase_node(node)
    return True
