"""offload_activations: what forward saves leaves after its last use, two at a time, and comes back before its first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from tests.passes.elsewhere import Elsewhere
from tests.passes.graphs import Sketch, apply, assert_documented, assert_left_alone, aten, events
from zerofx.features.offload.facts import ActivationChoice, offloaded
from zerofx.features.offload.offload_activations import offload_activations, order_of
from zerofx.features.offload.operators import carrying, new_handle
from zerofx.passes import Context, edit, lower, rematerialize, verify
from zerofx.passes.context import Handover

Pair = tuple[tuple[GraphModule, Context], tuple[GraphModule, Context]]


def chain(letters: str = "abcd", smallest: int = 1, **context: Any) -> Pair:
    """Forward: a = exp(x), b = exp(a), ...; what backward reads is saved, and read in the opposite order."""
    shared: dict[str, Any] = {
        "stage": 0,
        "activation_choice": ActivationChoice(smallest),
        "handover": Handover(),
        **context,
    }
    forward = Sketch("forward", **shared)
    x, made = forward.input("x", 4, 8), []
    for _ in letters:
        x = forward.call(aten.exp.default, x)
        made.append(x)
    there = forward.done(forward.call(aten.sum.default, x), *made, saved=range(1, len(made) + 1))
    backward = Sketch("backward", **shared)
    backward.mode = forward.mode
    given = [backward.input(node.name, 4, 8) for node in made]
    dy = backward.call(aten.expand.default, backward.input("tangents_1"), [4, 8])
    for node in reversed(given):
        dy = backward.call(aten.mul.Tensor, dy, node)
    return there, backward.done(dy)


def through(graph: tuple[GraphModule, Context]) -> tuple[GraphModule, Context]:
    gm, ctx = graph
    ctx.before = GraphModule(gm, gm.graph.__deepcopy__())
    apply(gm, ctx, rematerialize, offload_activations)
    return graph


def test_what_is_saved_leaves_behind_its_last_use_and_two_are_on_their_way() -> None:
    there, _ = chain()
    gm, _ = through(there)
    assert events(gm, "offload_activation", "wait_offload_activation") == [
        *(
            "offload_activation exp",
            "offload_activation exp_1",
            "wait_offload_activation exp",
            "offload_activation exp_2",
            "wait_offload_activation exp_1",
            "offload_activation exp_3",
        ),
        *("wait_offload_activation exp_2", "wait_offload_activation exp_3"),
    ]
    nodes = list(gm.graph.nodes)
    (last,) = (node for node in nodes if node.name == "exp_1")
    assert edit.is_kind(last.next, "offload_activation")  # `exp` is not read any more


def test_what_comes_back_is_on_its_way_while_others_are_used() -> None:
    there, (gm, ctx) = chain()
    through(there)
    through((gm, ctx))
    assert events(gm, "reload_activation", "wait_reload_activation") == [
        *(
            "reload_activation exp_3",
            "reload_activation exp_2",
            "wait_reload_activation exp_3",
            "reload_activation exp_1",
            "wait_reload_activation exp_2",
            "reload_activation exp",
        ),
        *("wait_reload_activation exp_1", "wait_reload_activation exp"),
    ]


@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_the_numbers_are_those_of_what_left(executor: str) -> None:
    x, dy = torch.randn(4, 8), torch.ones(())
    there, back = chain("abcdefg")
    wanted = back[0](*there[0](x)[1:], dy)
    there, back = chain("abcdefg", executor=executor)
    here = Elsewhere({})
    for graph in (there, back):
        gm, ctx = through(graph)
        apply(gm, ctx, lower)
        verify(gm, ctx)
    with carrying(here):
        saved = there[0](x)[1:]
        assert all(handle.untyped_storage().nbytes() == 4 and handle.shape == (4, 8) for handle in saved)
        found = back[0](*saved, dy)
    assert all(a.equal(b) for a, b in zip(found, wanted, strict=True))
    assert here.most["activations"] == 2 and not here.flying["activations"]


def test_for_inductor_a_tensor_comes_back_when_all_have_read_what_came_before_it_and_is_gone() -> None:
    """Else all of them could come at the beginning of backward: nothing but their handles is an input of theirs."""
    there, (gm, ctx) = chain("abcdef", executor="inductor")
    through(there)
    through((gm, ctx))
    gone = {
        start.name: [use.name for use in gm.graph.nodes if use.target is aten.mul.Tensor and use < start]
        for start in edit.tagged(gm.graph, "reload_activation")
    }
    assert [len(uses) for uses in gone.values()] == [0, 0, 0, 1, 2, 3]
    apply(gm, ctx, lower)
    starts = edit.tagged(gm.graph, "reload_activation")
    for start, uses in zip(starts, gone.values(), strict=True):
        before = {str(dep) for dep in start.args[0]} if "control_deps" in str(start.target) else set()
        assert set(uses[-1:]) <= before, (start, uses, before)


def views(saved_size: bool) -> tuple[GraphModule, Context]:
    """Two views of one product are saved, one by a size that is known when the graph runs."""
    s = Sketch("forward", stage=0, activation_choice=ActivationChoice(1))
    product = s.call(aten.mul.Tensor, s.input("x", 4, 8), 2)
    size = s.call(aten.sym_size.int, product, 0)
    left, right = (s.call(aten.slice.Tensor, product, 1, i, i + 4) for i in (0, 4))
    right = s.call(aten.view.default, s.call(aten.clone.default, right), [size, 4])
    more = s.call(aten.view.default, product, [size, 8])
    outputs = [s.call(aten.sum.default, right), left, more, *([size] if saved_size else [])]
    return s.done(*outputs, saved=range(1, len(outputs)))


def test_of_several_views_what_they_look_at_leaves_once() -> None:
    gm, ctx = through(views(saved_size=True))
    assert events(gm, "offload_activation") == ["offload_activation mul"]
    assert [len(left.steps) for left in offloaded(ctx).values()] == [1, 1]
    assert len({left.place for left in offloaded(ctx).values()}) == 1


def test_a_view_of_a_size_that_backward_does_not_know_stays() -> None:
    gm, ctx = views(saved_size=False)
    assert_left_alone(gm, ctx, offload_activations)


@pytest.mark.parametrize("case", ["small", "an input", "returned", "gaps", "written", "not asked for"])
def test_what_cannot_leave_stays(case: str) -> None:
    s = Sketch(
        "forward",
        stage=0,
        activation_choice=ActivationChoice(256 if case == "small" else 1, frozenset() if "ask" in case else None),
    )
    x = s.input("x", 4, 8)
    value: Node = s.call(aten.mul.Tensor, x, 2)
    if case == "an input":
        value = s.call(aten.view.default, x, [8, 4])
    elif case == "gaps":
        value = s.call(aten.new_empty_strided.default, x, [4, 8], [16, 1])
    returned = s.call(aten.view.default, value, [32]) if case == "returned" else s.call(aten.sum.default, value)
    if case == "written":
        s.call(aten.zero_.default, value)
    gm, ctx = s.done(returned, value, saved=[1])
    assert_left_alone(gm, ctx, offload_activations)


def test_it_leaves_graphs_alone_of_which_nothing_is_to_leave() -> None:
    for gm, ctx in chain(activation_choice=None):
        assert_left_alone(gm, ctx, offload_activations)


def test_new_nodes_say_what_they_are_for() -> None:
    for gm, ctx in chain():
        assert_documented(apply(gm, ctx, offload_activations).inserted)


@pytest.mark.parametrize("stride", [(48, 16, 4, 1), (48, 1, 12, 3), (1, 2, 6, 24), (48, 12, 3, 1)])
def test_strides_are_an_order_of_dimensions_if_there_are_no_gaps(stride: tuple[int, ...]) -> None:
    value = torch.empty_strided((2, 3, 4, 4), stride)
    order = order_of(value)
    if order is not None:
        made = torch.empty_permuted(value.shape, order)
        assert made.stride() == stride
    assert (order is None) == (stride in ((48, 12, 3, 1),))


def test_a_handle_looks_like_what_it_stands_for() -> None:
    handle = new_handle(torch.ones(3, 4, dtype=torch.bool))
    assert (handle.shape, handle.dtype, handle.untyped_storage().nbytes()) == ((3, 4), torch.bool, 1)


def test_without_a_carrier_nobody_knows_where_it_goes() -> None:
    (gm, ctx), _ = chain("a")
    through((gm, ctx))
    with pytest.raises(RuntimeError, match="saved tensor 0 outside of a graph"):
        gm(torch.ones(4, 8))
