"""Gathered buffers that live too long, too short, or too many at once: the rules "discard" and "budget"."""

from __future__ import annotations

from itertools import pairwise

from torch.fx import GraphModule, Node

from tests.passes.mutants import (
    aten,
    breaks,
    bytes_of,
    c10d,
    exchange,
    give,
    group_of,
    instead,
    like,
    numel,
    readers,
    set_arg,
    tagged,
    tags,
    when,
)
from zerofx.passes import Context, Tag, edit
from zerofx.passes.context import Elsewhere
from zerofx.passes.ops import discard as discard_storage
from zerofx.passes.ops import release

# ---- discard --------------------------------------------------------------------------------------------------------

_marks = tags("discard")


def _mark(gm: GraphModule, buffer: Node, before: Node | None = None) -> None:
    with gm.graph.inserting_before(before or gm.graph.output_node()):
        gm.graph.call_function(discard_storage, (buffer,))


def _mark_of(buffer: Node) -> Node | None:
    return next((u for u in buffer.users if u.target in (discard_storage, release)), None)


@breaks("discard", _marks)
def a_dropped_discard(gm: GraphModule, ctx: Context, mark: Node) -> None:
    gm.graph.erase_node(mark)


@breaks("discard", _marks)
def a_second_discard(gm: GraphModule, ctx: Context, mark: Node) -> None:
    with gm.graph.inserting_after(mark):
        gm.graph.call_function(mark.target, mark.args)


@breaks("discard", _marks)
def a_discard_before_the_first_use(gm: GraphModule, ctx: Context, mark: Node) -> None:
    edit.after_inputs(mark.args[0]).append(mark)


def _read_through_a_view(gm: GraphModule, ctx: Context) -> list[tuple[Node, Node]]:
    """Discards, and the last weight of the buffer: the view is made, and not read yet."""
    weights = {w.args[0]: w for w in tagged(gm, "weight")}
    return [(mark, weights[mark.args[0]]) for mark in _marks(gm, ctx) if readers(weights[mark.args[0]])]


@breaks("discard", _read_through_a_view)
def a_discard_once_all_views_are_made(gm: GraphModule, ctx: Context, place: tuple[Node, Node]) -> None:
    place[1].append(place[0])


def _several_readers(gm: GraphModule, ctx: Context) -> list[tuple[Node, Node]]:
    """Discards, and the first of several kernels that read the buffer."""
    found = []
    order = edit.positions(gm.graph)
    for mark in _marks(gm, ctx):
        weights = [w for w in mark.args[0].users if w.meta["zerofx"].kind == "weight"]
        reads = sorted((r for w in weights for r in w.users), key=order.__getitem__)
        kernels = [r for r in reads if not edit.may_alias(r)]
        if len(kernels) > 1 and order[kernels[0]] > max(order[w] for w in weights) and reads[-1] is not kernels[0]:
            found.append((mark, kernels[0]))
    return found


@breaks("discard", _several_readers)
def a_discard_after_the_first_of_several_readers(gm: GraphModule, ctx: Context, place: tuple[Node, Node]) -> None:
    place[1].append(place[0])


def _kernels_between(gm: GraphModule, ctx: Context) -> list[tuple[Node, Node]]:
    """Discards, and the next one, with something of the model's between."""
    order = edit.positions(gm.graph)
    nodes = list(gm.graph.nodes)
    pairs = pairwise(_marks(gm, ctx))
    return [(a, b) for a, b in pairs if any("zerofx" not in n.meta for n in nodes[order[a] + 1 : order[b]])]


@breaks("discard", _kernels_between)
def a_discard_one_group_late(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    pair[1].append(pair[0])


@breaks("discard", _kernels_between)
def two_discards_change_places(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    exchange(*pair)
    pair[0].target, pair[1].target = pair[1].target, pair[0].target


def _something_follows(gm: GraphModule, ctx: Context) -> list[Node]:
    order, nodes = edit.positions(gm.graph), list(gm.graph.nodes)
    return [
        mark
        for mark in _marks(gm, ctx)
        if any("zerofx" not in n.meta and n.op != "output" for n in nodes[order[mark] + 1 :])
    ]


@breaks("discard", _something_follows)
def a_discard_at_the_end(gm: GraphModule, ctx: Context, mark: Node) -> None:
    gm.graph.output_node().prepend(mark)


@breaks("discard", _marks)
def what_autograd_owns_is_freed(gm: GraphModule, ctx: Context, mark: Node) -> None:
    mark.target = release if mark.target is discard_storage else discard_storage


@breaks("discard", tags("weight"))
def a_weight_is_discarded(gm: GraphModule, ctx: Context, weight: Node) -> None:
    _mark(gm, weight)


@breaks("discard", tags("shard", "replica"))
def a_shard_is_discarded(gm: GraphModule, ctx: Context, shard: Node) -> None:
    _mark(gm, shard)


@breaks("discard", lambda gm, ctx: [n for n in gm.graph.nodes if n.target is aten.tanh.default])
def an_activation_is_discarded(gm: GraphModule, ctx: Context, node: Node) -> None:
    _mark(gm, node)


@breaks("discard", tags("wait_grad", "pack"))
def a_gradient_is_discarded(gm: GraphModule, ctx: Context, node: Node) -> None:
    _mark(gm, node)


@breaks("discard", lambda gm, ctx: [w for w in tagged(gm, "wait") if any(u.op == "output" for u in w.users)])
def what_is_kept_for_backward_is_discarded(gm: GraphModule, ctx: Context, wait: Node) -> None:
    _mark(gm, wait)


@breaks("discard", when(lambda ctx: ctx.executor == "inductor", tags("wait")))
def a_discard_that_inductor_does_by_itself(gm: GraphModule, ctx: Context, wait: Node) -> None:
    _mark(gm, wait)


@breaks("discard", lambda gm, ctx: [w for w in tagged(gm, "wait") if _mark_of(w)])
def a_gather_is_discarded_under_way(gm: GraphModule, ctx: Context, wait: Node) -> None:
    set_arg(_mark_of(wait), 0, wait.args[0])  # type: ignore[arg-type]


# ---- budget ---------------------------------------------------------------------------------------------------------


def _exactly(ctx: Context) -> None:
    """The budget is what the schedule takes."""
    ctx.memory_budget, ctx.elsewhere = ctx.found.gathered_bytes, Elsewhere(held=0)


def _moved_up(node: Node, place: Node) -> None:
    """Move a gather, and what `narrow` put in front of it, behind ``place``."""
    place.append(node)
    for source in [x for x in node.all_input_nodes if x.op == "call_function"]:
        _moved_up(source, place)


_as_it_reads = lambda ctx: ctx.executor == "eager"  # noqa: E731


def _many_gathers(gm: GraphModule, ctx: Context) -> list[Node]:
    """The inputs' end, where more is gathered than there ever is at once."""
    total = sum(map(bytes_of, tagged(gm, "wait", "gathered")))
    return [edit.last_placeholder(gm.graph)] if total > ctx.found.gathered_bytes > 0 else []  # type: ignore[list-item]


@breaks("budget", when(_as_it_reads, _many_gathers))
def all_gathers_at_once(gm: GraphModule, ctx: Context, top: Node) -> None:
    _exactly(ctx)
    for start in reversed(tagged(gm, "all_gather")):
        _moved_up(start, top)


def _blocks(gm: GraphModule, ctx: Context) -> list[tuple[Node, Node]]:
    """Gathers of a block, each with that two gathers before it."""
    if any(w.op == "output" for n in tagged(gm, "wait") for w in n.users) or tagged(gm, "gathered"):
        return []
    starts = [s for s in tagged(gm, "all_gather") if group_of(s).startswith("blocks")]
    if len({group_of(s) for s in starts}) < len(starts):
        return []
    return list(zip(starts, starts[2:]))


@breaks("budget", when(lambda ctx: _as_it_reads(ctx) and ctx.found.gathered_bytes < 20_000, _blocks))
def a_gather_starts_with_the_one_before_the_last(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    _exactly(ctx)
    _moved_up(pair[1], pair[0])


_buffers = tags("wait", "gathered")


@breaks("budget", _buffers)
def a_budget_below_one_group(gm: GraphModule, ctx: Context, buffer: Node) -> None:
    ctx.memory_budget, ctx.elsewhere = bytes_of(buffer) - 1, Elsewhere(held=0)


@breaks("budget", lambda gm, ctx: _buffers(gm, ctx)[:1])
def a_budget_of_nothing(gm: GraphModule, ctx: Context, buffer: Node) -> None:
    ctx.memory_budget = 0


@breaks("budget", when(_as_it_reads, lambda gm, ctx: _buffers(gm, ctx)[:1]))
def a_budget_one_byte_below_the_schedule(gm: GraphModule, ctx: Context, buffer: Node) -> None:
    _exactly(ctx)
    ctx.memory_budget = _most(gm) - 1


@breaks("budget", when(_as_it_reads, lambda gm, ctx: _buffers(gm, ctx)[:1]))
def other_graphs_hold_more(gm: GraphModule, ctx: Context, buffer: Node) -> None:
    ctx.memory_budget, ctx.elsewhere = _most(gm), Elsewhere(held=1)


def _most(gm: GraphModule) -> int:
    """The most gathered bytes that are live at once, counted by itself: from each start to the last reader."""
    order = edit.positions(gm.graph)
    most, live = 0, 0
    changes = []
    for buffer in tagged(gm, "wait", "gathered"):
        start = -1 if buffer.op == "placeholder" else order[buffer.all_input_nodes[-1]]
        if buffer.op != "placeholder":
            sources = [x for x in buffer.all_input_nodes if x.meta.get("zerofx", Tag("", "")).kind == "all_gather"]
            mine = [x for x in sources if group_of(x) == group_of(buffer) and numel(x) == numel(buffer)]
            start = min(order[x] for x in mine)
        last = edit.last_use(buffer, order)
        if last is not None and last.target in (discard_storage, release):
            last = max((u for a in edit.aliases(buffer) for u in a.users if u is not last), key=order.__getitem__)
        changes.append((start, 1, bytes_of(buffer)))
        if last is not None:
            changes.append((order[last], 0, -bytes_of(buffer)))
    for _, _, change in sorted(changes, key=lambda c: (c[0], -c[2])):
        live += change
        most = max(most, live)
    return most


def _kept(gm: GraphModule, ctx: Context) -> list[Node]:
    """Groups that forward leaves gathered, or backward was left."""
    left = [w for w in tagged(gm, "wait") if any(u.op == "output" for u in w.users)]
    return (left or tagged(gm, "gathered"))[-1:]


@breaks("budget", _kept)
def groups_are_kept_that_the_budget_has_no_room_for(gm: GraphModule, ctx: Context, buffer: Node) -> None:
    held = [w for w in tagged(gm, "wait") if any(u.op == "output" for u in w.users)] or tagged(gm, "gathered")
    ctx.memory_budget = sum(map(bytes_of, held)) - 1


def _not_kept(gm: GraphModule, ctx: Context) -> list[tuple[int, Node]]:
    """The first group of forward, and an output for it, where other groups are gathered later."""
    waits = [w for w in tagged(gm, "wait") if _mark_of(w)]
    if ctx.phase != "forward" or len({group_of(w) for w in waits}) < 3:
        return []
    saved = [(i, ref) for i, ref in sorted(ctx.found.saved_parameters.items()) if i in ctx.found.saved_names]
    return [(i, waits[0]) for i, ref in saved if ref.layout.name == group_of(waits[0])][:1]


@breaks("budget", when(_as_it_reads, _not_kept))
def the_first_group_is_kept(gm: GraphModule, ctx: Context, place: tuple[int, Node]) -> None:
    """Promised and given, but the last ones were counted with."""
    from zerofx.passes.context import Gathered

    position, wait = place
    gm.graph.erase_node(_mark_of(wait))  # type: ignore[arg-type]
    give(gm, position, wait)
    del ctx.found.saved_parameters[position]
    name = ctx.found.saved_names[position]
    ctx.handover.kept_gathered[group_of(wait)] = Gathered(position, name, numel(wait), wait.meta["val"].dtype)
    ctx.memory_budget = _most(gm) - 1


def _early(gm: GraphModule, ctx: Context) -> list[Node]:
    """The first group's last weight, read by a kernel, where other groups are gathered later."""
    waits = [w for w in tagged(gm, "wait") if _mark_of(w)]
    if len({group_of(w) for w in waits}) < 4:
        return []
    weights = [w for w in tagged(gm, "weight") if w.args[0] is waits[0]]
    return weights[-1:]


@breaks("budget", when(_as_it_reads, _early))
def a_last_reader_at_the_end(gm: GraphModule, ctx: Context, weight: Node) -> None:
    """The discard is right behind it, as it should be; so the buffer lives as long as the graph."""
    ctx.memory_budget = _most(gm)
    mark = _mark_of(weight.args[0])  # type: ignore[arg-type]
    reader = like(weight, aten.neg.default, weight)
    gm.graph.output_node().prepend(reader)
    gm.graph.output_node().prepend(mark)  # type: ignore[arg-type]
    if _most(gm) <= ctx.memory_budget:  # the other groups are small beside it
        ctx.memory_budget = _most(gm) - 1


def _narrowed(gm: GraphModule, ctx: Context) -> list[tuple[Node, Node, Node]]:
    """What `narrow` cast, its gather, and the wait for it."""
    casts = [n for n in tagged(gm, "narrow") if n.target is edit.CAST and n.args[0].op == "placeholder"]
    found = []
    for cast in casts:
        for start in cast.users:
            waits = [w for w in start.users if w.target is c10d.wait_tensor.default]
            found += [(cast, start, w) for w in waits if _mark_of(w)]
    return found


@breaks("budget", when(_as_it_reads, _narrowed))
def a_group_travels_wide(gm: GraphModule, ctx: Context, place: tuple[Node, Node, Node]) -> None:
    """Weights are cast behind the gather: the same numbers, twice the bytes."""
    cast, start, wait = place
    others = [s for s in ctx.found.shards if s.name == group_of(start)]
    ctx.memory_budget = max(_most(gm), 2 * bytes_of(wait) - 1)
    low, wide = cast.meta["val"].dtype, cast.args[0].meta["val"].dtype  # type: ignore[union-attr]
    set_arg(start, 0, cast.args[0])
    for node in (start, wait):
        node.meta["val"] = node.meta["val"].to(wide)
    for weight in [u for u in wait.users if u.meta["zerofx"].kind == "weight"]:
        weight.meta["val"] = weight.meta["val"].to(wide)
        instead(weight, edit.CAST, low)
    mark = _mark_of(wait)
    assert mark is not None and others
    weights = [u for u in wait.users if u is not mark]
    order = edit.positions(gm.graph)
    max((u for w in weights for u in w.users), key=order.__getitem__).append(mark)
    ctx.memory_budget = min(ctx.memory_budget, _most(gm) - 1)
