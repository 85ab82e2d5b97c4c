"""Activations that leave or come back wrongly: the rule "activation"."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from tests.passes.mutants import aten, breaks, exchange, give, inner, like, outputs_of, set_arg, tags, when
from tests.passes.mutants.carried import _loose, _pairs, _plain, _start_of, _threes, _turns
from zerofx.features.offload.facts import OffloadFacts
from zerofx.features.offload.operators import (
    OFFLOAD_ACTIVATION,
    RELOAD_ACTIVATION,
    WAIT_OFFLOAD_ACTIVATION,
    WAIT_RELOAD_ACTIVATION,
)
from zerofx.passes import Context, Tag, edit
from zerofx.passes.proof.meaning import Op

_starts, _handles = tags("offload_activation"), tags("wait_offload_activation")
_reloads, _arrivals = tags("reload_activation"), tags("wait_reload_activation")


def _give_for(gm: GraphModule, handle: Node, value: Node) -> None:
    for i, x in enumerate(outputs_of(gm)):
        if x is handle:
            give(gm, i, value)


def _wait_of(start: Node) -> Node:
    return next(user for user in start.users if edit.is_kind(user, "wait_offload_activation", "wait_reload_activation"))


@breaks("activation", _handles)
def a_saved_tensor_that_leaves_and_stays(gm: GraphModule, ctx: Context, handle: Node) -> None:
    _give_for(gm, handle, Op.of(handle).args[1])


@breaks("activation", _handles)
def a_ticket_that_is_saved(gm: GraphModule, ctx: Context, handle: Node) -> None:
    _give_for(gm, handle, _start_of(handle))


@breaks("activation", _pairs(_handles))
def handles_in_each_others_place(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    swapped = dict(zip(pair, reversed(pair), strict=True))
    outputs = [swapped.get(x, x) if isinstance(x, Node) else x for x in outputs_of(gm)]
    edit.set_output_values(gm.graph, outputs)


@breaks("activation", _starts)
def a_tensor_that_leaves_twice(gm: GraphModule, ctx: Context, start: Node) -> None:
    like(start, OFFLOAD_ACTIVATION, *Op.of(start).args, tag=start.meta["zerofx"])


@breaks("activation", _handles)
def a_tensor_that_is_waited_for_twice(gm: GraphModule, ctx: Context, handle: Node) -> None:
    like(handle, WAIT_OFFLOAD_ACTIVATION, *Op.of(handle).args, tag=handle.meta["zerofx"])


@breaks("activation", _plain(_pairs(_handles)))
def a_wait_for_another_tensor(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    set_arg(pair[1], 0, pair[0].args[0])


@breaks("activation", _plain(_handles))
def a_tensor_that_nobody_waits_for(gm: GraphModule, ctx: Context, handle: Node) -> None:
    _give_for(gm, handle, handle.args[1])  # type: ignore[arg-type]
    gm.graph.erase_node(handle)


@breaks("activation", _handles)
def a_handle_that_is_read(gm: GraphModule, ctx: Context, handle: Node) -> None:
    like(handle, aten.neg.default, handle)


@breaks("activation", _plain(_starts))
def a_tensor_that_is_written_to_while_it_leaves(gm: GraphModule, ctx: Context, start: Node) -> None:
    like(start, aten.zero_.default, start.args[0])


@breaks("activation", _plain(_threes(_starts)))
def three_tensors_on_their_way_at_once(gm: GraphModule, ctx: Context, starts: tuple[Node, ...]) -> None:
    for start in starts[:2]:
        gm.graph.output_node().prepend(_wait_of(start))


@breaks(
    "activation",
    when(
        lambda ctx: ctx.facts(OffloadFacts).activations is None and ctx.phase == "forward",
        lambda gm, ctx: _computed(gm, ctx),
    ),
)
def a_tensor_that_nobody_asked_to_leave(gm: GraphModule, ctx: Context, saved: Node) -> None:
    like(saved, OFFLOAD_ACTIVATION, saved, [0], 0, tag=Tag("offload_activation", saved.name))


def _computed(gm: GraphModule, ctx: Context) -> list[Node]:
    values = [x for i, x in enumerate(outputs_of(gm)) if i in ctx.saved and isinstance(x, Node)]
    return [x for x in values if x.op == "call_function" and "zerofx" not in x.meta]


@breaks("activation", _plain(_pairs(_starts)))
def a_tensor_under_the_number_of_another(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    exchange(*pair, 2)
    exchange(_wait_of(pair[0]), _wait_of(pair[1]), 3)


@breaks("activation", _turns("offload_activation", "wait_offload_activation"))
def an_offload_out_of_turn(gm: GraphModule, ctx: Context, place: tuple[Node, Node]) -> None:
    _loose(*place)


# ---- back -----------------------------------------------------------------------------------------------------------


@breaks("activation", _reloads)
def a_tensor_that_is_brought_twice(gm: GraphModule, ctx: Context, start: Node) -> None:
    like(start, RELOAD_ACTIVATION, *Op.of(start).args, tag=start.meta["zerofx"])


@breaks("activation", _arrivals)
def a_tensor_that_arrives_twice(gm: GraphModule, ctx: Context, here: Node) -> None:
    like(here, WAIT_RELOAD_ACTIVATION, *Op.of(here).args, tag=here.meta["zerofx"])


@breaks("activation", _plain(_arrivals))
def a_handle_in_the_place_of_what_comes(gm: GraphModule, ctx: Context, here: Node) -> None:
    next(iter(here.users)).replace_input_with(here, here.args[1])  # type: ignore[arg-type]


@breaks("activation", _plain(_pairs(_reloads)))
def handles_taken_for_each_other(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    exchange(*pair)
    exchange(_wait_of(pair[0]), _wait_of(pair[1]), 1)


@breaks("activation", _arrivals)
def dimensions_in_another_order(gm: GraphModule, ctx: Context, here: Node) -> None:
    for node, i in ((_start_of(here), 1), (here, 2)):
        call = inner(gm, node)
        set_arg(call, i, [*call.args[i], -1])  # type: ignore[misc]


@breaks("activation", _plain(_threes(_reloads)))
def three_tensors_on_their_way_back_at_once(gm: GraphModule, ctx: Context, starts: tuple[Node, ...]) -> None:
    for start in starts[1:]:
        starts[0].append(start)


@breaks("activation", _turns("reload_activation", "wait_reload_activation"))
def a_reload_out_of_turn(gm: GraphModule, ctx: Context, place: tuple[Node, Node]) -> None:
    _loose(*place)
