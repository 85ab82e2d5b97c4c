"""State that lives elsewhere, brought or taken away wrongly: the rules "reload" and "offload"."""

from __future__ import annotations

from itertools import pairwise

from torch.fx import GraphModule, Node

from tests.passes.mutants import (
    Places,
    aten,
    breaks,
    exchange,
    give,
    group_of,
    inner,
    like,
    outputs_of,
    set_arg,
    tagged,
    tags,
    when,
)
from zerofx import _torch
from zerofx.features.offload.facts import OffloadFacts
from zerofx.features.offload.operators import OFFLOAD, RELOAD, WAIT_OFFLOAD, WAIT_RELOAD
from zerofx.passes import Context, Tag, edit
from zerofx.passes.proof.meaning import Op

_reloads, _arrivals = tags("reload"), tags("wait_reload")
_offloads, _departures = tags("offload"), tags("wait_offload")


def _plain(places: Places) -> Places:
    """Where the executor keeps to the order of the graph, and no dependence is written down."""
    return when(lambda ctx: ctx.executor == "eager", places)


def _pairs(places: Places) -> Places:
    return lambda gm, ctx: list(pairwise(places(gm, ctx)))


def _threes(places: Places) -> Places:
    def found(gm: GraphModule, ctx: Context) -> list[tuple[Node, ...]]:
        nodes = places(gm, ctx)
        return list(zip(nodes, nodes[1:], nodes[2:]))

    return found


def _start_of(wait: Node) -> Node:
    return Op.of(wait).args[0]  # type: ignore[no-any-return]


def _returned(gm: GraphModule, old: Node, new: Node) -> None:
    give(gm, outputs_of(gm).index(old), new)


# ---- reload ---------------------------------------------------------------------------------------------------------


@breaks("reload", _plain(_arrivals))
def a_shard_that_is_read_where_it_lives(gm: GraphModule, ctx: Context, wait: Node) -> None:
    reader = next(user for user in wait.users if user.meta["zerofx"].kind != "discard")
    reader.replace_input_with(wait, wait.args[1])  # type: ignore[arg-type]


@breaks("reload", _plain(_arrivals))
def a_copy_of_a_shard_that_is_elsewhere(gm: GraphModule, ctx: Context, wait: Node) -> None:
    wait.target, wait.args = aten.clone.default, (wait.args[1],)


@breaks("reload", _reloads)
def a_write_to_a_shard_that_is_elsewhere(gm: GraphModule, ctx: Context, start: Node) -> None:
    like(start, aten.zero_.default, Op.of(start).args[0])


@breaks("reload", _reloads)
def a_shard_that_is_brought_twice(gm: GraphModule, ctx: Context, start: Node) -> None:
    like(start, RELOAD, *Op.of(start).args, tag=start.meta["zerofx"])


@breaks("reload", _reloads)
def a_ticket_that_is_read(gm: GraphModule, ctx: Context, start: Node) -> None:
    like(start, aten.neg.default, start)


@breaks("reload", _arrivals)
def a_shard_that_is_waited_for_twice(gm: GraphModule, ctx: Context, wait: Node) -> None:
    like(wait, WAIT_RELOAD, *Op.of(wait).args, tag=wait.meta["zerofx"])


@breaks("reload", _plain(_pairs(_arrivals)))
def a_wait_for_another_shard(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    first, second = pair
    set_arg(second, 0, first.args[0])


@breaks("reload", _plain(_pairs(_reloads)))
def two_shards_in_each_others_place(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    exchange(*pair)


@breaks("reload", _plain(_pairs(_reloads)))
def a_shard_under_the_name_of_another(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    exchange(*pair, 1)


@breaks("reload", _plain(_pairs(_arrivals)))
def a_wait_under_the_name_of_another(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    exchange(*pair, 2)


@breaks("reload", _plain(_threes(_reloads)))
def three_shards_on_their_way_at_once(gm: GraphModule, ctx: Context, starts: tuple[Node, ...]) -> None:
    for start in starts[1:]:
        starts[0].append(start)


@breaks("reload", _plain(_arrivals))
def a_shard_that_nobody_waits_for(gm: GraphModule, ctx: Context, wait: Node) -> None:
    """Another that stands apart is read in its place: the rest of the graph is as it was."""
    start = _start_of(wait)
    wait.replace_input_with(start, like(start, RELOAD, *start.args, tag=start.meta["zerofx"]))


@breaks("reload", _plain(_pairs(_reloads)))
def shards_that_start_in_another_order(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    """Each is waited for as before."""
    first, second = pair
    waits = {start: next(iter(start.users)) for start in pair}
    exchange(first, second, 0)
    exchange(first, second, 1)
    set_arg(waits[first], 0, second)
    set_arg(waits[second], 0, first)


def _turns(*kinds: str) -> Places:
    def found(gm: GraphModule, ctx: Context) -> list[tuple[Node, Node]]:
        return [(node, before) for before, node in pairwise(tagged(gm, *kinds)) if before in Op.of(node).after]

    return found


def _loose(node: Node, before: Node) -> None:
    set_arg(node, 0, tuple(x for x in node.args[0] if x is not before))  # type: ignore[union-attr]


@breaks("reload", _turns("reload", "wait_reload"))
def a_reload_out_of_turn(gm: GraphModule, ctx: Context, place: tuple[Node, Node]) -> None:
    _loose(*place)


def _gone(gm: GraphModule, ctx: Context) -> list[tuple[Node, Node]]:
    """Fetches, and the gather of a shard that is to be gone by then, which nothing else keeps them behind."""
    starts = [node for node in tagged(gm, "reload") if _torch.pinned(node) is not None]
    gathers = [[x for x in Op.of(node).after if edit.is_kind(x, "all_gather")] for node in starts]
    return [(node, found[-1]) for node, found in zip(starts, gathers, strict=True) if found]


@breaks("reload", _gone)
def a_reload_that_the_gather_before_it_may_come_after(gm: GraphModule, ctx: Context, place: tuple[Node, Node]) -> None:
    _loose(*place)


# ---- offload --------------------------------------------------------------------------------------------------------


@breaks("offload", _departures)
def a_gradient_that_stays(gm: GraphModule, ctx: Context, wait: Node) -> None:
    _returned(gm, wait, Op.of(wait).args[1])


@breaks("offload", _departures)
def a_ticket_that_is_returned(gm: GraphModule, ctx: Context, wait: Node) -> None:
    _returned(gm, wait, _start_of(wait))


@breaks("offload", _offloads)
def a_gradient_that_leaves_twice(gm: GraphModule, ctx: Context, start: Node) -> None:
    like(start, OFFLOAD, *Op.of(start).args, tag=start.meta["zerofx"])


@breaks("offload", _departures)
def a_gradient_that_is_waited_for_twice(gm: GraphModule, ctx: Context, wait: Node) -> None:
    like(wait, WAIT_OFFLOAD, *Op.of(wait).args, tag=wait.meta["zerofx"])


@breaks("offload", _plain(_offloads))
def a_second_gradient_that_nobody_returns(gm: GraphModule, ctx: Context, start: Node) -> None:
    wait = next(user for user in start.users if edit.is_kind(user, "wait_offload"))
    again = like(wait, OFFLOAD, *start.args, tag=start.meta["zerofx"])
    like(again, WAIT_OFFLOAD, again, *start.args, tag=wait.meta["zerofx"])


@breaks("offload", _plain(_pairs(_departures)))
def a_wait_for_another_gradient(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    set_arg(pair[1], 0, pair[0].args[0])


@breaks("offload", _pairs(_departures))
def gradients_in_each_others_place(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    outputs, swapped = outputs_of(gm), dict(zip(pair, reversed(pair), strict=True))
    edit.set_output_values(gm.graph, [swapped.get(x, x) if isinstance(x, Node) else x for x in outputs])


@breaks("offload", _departures)
def a_gradient_that_leaves_for_another_place(gm: GraphModule, ctx: Context, wait: Node) -> None:
    start = _start_of(wait)
    for node, i in ((start, 2), (wait, 3)):
        call = inner(gm, node)
        set_arg(call, i, call.args[i] + 1)  # type: ignore[operator]


@breaks("offload", _plain(_pairs(_departures)))
def a_gradient_under_the_name_of_another(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    wait, name = pair[0], group_of(pair[1])
    set_arg(_start_of(wait), 1, name)
    set_arg(wait, 2, name)


@breaks("offload", _plain(_pairs(_departures)))
def waits_under_each_others_names(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    exchange(*pair, 2)


@breaks("offload", _plain(_offloads))
def a_gradient_that_is_written_to_while_it_leaves(gm: GraphModule, ctx: Context, start: Node) -> None:
    like(start, aten.mul_.Tensor, start.args[0], 2.0)


@breaks("offload", _plain(_threes(_offloads)))
def three_gradients_on_their_way_at_once(gm: GraphModule, ctx: Context, starts: tuple[Node, ...]) -> None:
    for start in starts[:2]:
        wait = next(user for user in start.users if edit.is_kind(user, "wait_offload"))
        gm.graph.output_node().prepend(wait)


@breaks("offload", when(lambda ctx: not ctx.facts(OffloadFacts).gradients and ctx.stage, tags("gradient")))
def a_gradient_that_nobody_asked_to_leave(gm: GraphModule, ctx: Context, gradient: Node) -> None:
    group = group_of(gradient)
    like(gradient, OFFLOAD, gradient, group, 0, tag=Tag("offload", group))


@breaks("offload", _turns("offload", "wait_offload"))
def a_put_out_of_turn(gm: GraphModule, ctx: Context, place: tuple[Node, Node]) -> None:
    _loose(*place)
