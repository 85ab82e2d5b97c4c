"""rematerialize: forward saves parameters, backward rebuilds what derives from them."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule, Node
from torch.testing import FileCheck

from tests.passes.captured import MODELS, capture
from tests.passes.graphs import Numbers, Sketch, apply, assert_documented, assert_left_alone, aten, run
from zerofx.passes import Context, rematerialize

Chain = Callable[[Sketch, Node], Node]


def forward(chain: Chain) -> tuple[GraphModule, Context]:
    """Returns a result, and saves the input and what ``chain`` makes of the weight."""
    s = Sketch()
    x = s.input("x", 4, 8)
    (w,) = s.parameters("a", w=(8, 8))
    value = chain(s, w)
    return s.done(s.call(aten.mm.default, x, w), x, value, saved=[1, 2])


def backward(forward: GraphModule, ctx: Context) -> tuple[GraphModule, Context]:
    """A backward that is handed what ``forward`` saved before any pass, and adds something to it."""
    s = Sketch("backward", handover=ctx.handover)
    s.mode = forward.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode
    saved = forward.graph.output_node().args[0][2]
    assert isinstance(saved, Node)
    value = saved.meta["val"]
    derived = s.input(saved.name, *value.shape, dtype=value.dtype)
    dy = s.input("tangents_1")
    return s.done(s.call(aten.add.Tensor, derived, dy), s.call(aten.sum.default, derived))


def chains() -> dict[str, Chain]:
    def split(s: Sketch, w: Node) -> Node:
        return s.call(operator.getitem, s.call(aten.split.Tensor, w, 4), 1)

    return {
        "permute": lambda s, w: s.call(aten.permute.default, w, [1, 0]),
        "t of t": lambda s, w: s.call(aten.t.default, s.call(aten.t.default, w)),
        "slice": lambda s, w: s.call(aten.slice.Tensor, w, 0, 2, 6),
        "select": lambda s, w: s.call(aten.select.int, w, 0, 3),
        "view": lambda s, w: s.call(aten.view.default, w, [4, 16]),
        "expand": lambda s, w: s.call(aten.expand.default, s.call(aten.unsqueeze.default, w, 0), [3, 8, 8]),
        "cast": lambda s, w: s.call(aten._to_copy.default, w, dtype=torch.bfloat16),
        "cast of permute": lambda s, w: s.call(
            torch.ops.prims.convert_element_type.default, s.call(aten.permute.default, w, [1, 0]), torch.float64
        ),
        "contiguous permute": lambda s, w: s.call(
            aten.clone.default, s.call(aten.t.default, w), memory_format=torch.contiguous_format
        ),
        "piece of a split": split,
        "complex numbers": lambda s, w: s.call(aten.view_as_complex.default, s.call(aten.view.default, w, [8, 4, 2])),
        "conjugates carried out": lambda s, w: s.call(
            aten._conj_physical.default, s.call(aten.view.dtype, w, torch.complex64)
        ),
        "diagonal": lambda s, w: s.call(aten.diagonal.default, w, 1),
        "windows": lambda s, w: s.call(aten.unfold.default, w, 1, 3, 2),
        "negative": lambda s, w: s.call(aten._neg_view.default, w),
        "copy of a view": lambda s, w: s.call(aten.permute_copy.default, w, [1, 0]),
        "elements of memory": lambda s, w: s.call(aten.as_strided.default, w, [2, 3], [8, 1], 5),
    }


@pytest.mark.parametrize("name", chains())
def test_whatever_derives_from_one_parameter_is_rebuilt_with_the_same_values(name: str) -> None:
    chain = chains()[name]
    gm, ctx = forward(chain)
    bw, bctx = backward(gm, ctx)
    numbers = Numbers.random(gm, ctx)
    result, x, derived = run(gm, ctx, numbers)
    saved = Numbers({bw.graph.find_nodes(op="placeholder")[0].name: derived, "tangents_1": torch.randn(())})
    expected = run(bw, bctx, saved)

    assert apply(gm, ctx, rematerialize).edits == 1
    torch.testing.assert_close(run(gm, ctx, numbers)[:2], [result, x], rtol=0, atol=0)
    (weight,) = (n for n in gm.graph.find_nodes(op="placeholder") if n.name in ctx.parameters)
    assert gm.graph.output_node().args[0][2] is weight

    rebuilt = apply(bw, bctx, rematerialize)
    assert rebuilt.edits == 1
    assert_documented(rebuilt.inserted, {"rebuild": {101}})
    torch.testing.assert_close(
        run(bw, bctx, Numbers(saved.inputs, numbers.flats)), expected, rtol=0, atol=0
    )  # from the flat buffer now


@pytest.mark.parametrize("saved", [True, False])
def test_a_view_with_a_size_of_this_call_is_rebuilt_where_forward_saves_that_size(saved: bool) -> None:
    def sized(s: Sketch) -> Node:
        return s._add(s.graph.placeholder("rows"), 3)

    s = Sketch()
    (w,) = s.parameters("a", w=(8, 8))
    rows = sized(s)
    value = s.call(aten.expand.default, s.call(aten.t.default, w), [rows, 8, 8])
    gm, ctx = s.done(s.call(aten.sum.default, value), value, *[rows] * saved, saved=[1, 2][: 1 + saved])
    assert apply(gm, ctx, rematerialize).edits == saved
    assert gm.graph.output_node().args[0][1] is (w if saved else value)

    s = Sketch("backward", handover=ctx.handover)
    s.mode = w.meta["val"].fake_mode
    expand = s.input("expand", 3, 8, 8)
    sizes = [sized(s)] * saved
    gm, ctx = s.done(s.call(aten.mul.Tensor, expand, 2.0), *sizes)
    if not saved:
        assert_left_alone(gm, ctx, rematerialize)
        return
    assert apply(gm, ctx, rematerialize).edits == 1
    assert ctx.parameters["expand"].slot.name == "w"
    weight = torch.randn(8, 8)
    doubled, n = gm(weight, 5)  # the size of another call
    torch.testing.assert_close(doubled, 2 * weight.t().expand(5, 8, 8), rtol=0, atol=0)
    assert n == 5


def test_forward_drops_what_was_made_for_saving_alone_and_keeps_what_it_uses() -> None:
    s = Sketch()
    x = s.input("x", 4, 8)
    (w,) = s.parameters("a", w=(16, 8))
    t = s.call(aten.permute.default, w, [1, 0])
    cast = s.call(aten._to_copy.default, t, dtype=torch.bfloat16)
    gm, ctx = s.done(s.call(aten.mm.default, x, t), x, cast, saved=[1, 2])
    assert apply(gm, ctx, rematerialize).edits == 1
    FileCheck().check("permute.default(w, [1, 0])").check_not("_to_copy").check_next("mm.default(x, permute)").check(
        "return (mm, x, w)"
    ).run(gm.code)


def test_backward_rebuilds_in_front_of_the_first_use() -> None:
    gm, ctx = forward(chains()["cast of permute"])
    apply(gm, ctx, rematerialize)
    s = Sketch("backward", handover=ctx.handover)
    s.mode = gm.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode
    dy = s.input("tangents_1", 4, 8, dtype=torch.float64)
    derived = s.input("convert_element_type", 8, 8, dtype=torch.float64)
    relu = s.call(aten.relu.default, dy)
    bw, bctx = s.done(s.call(aten.mm.default, relu, derived), s.call(aten.sum.default, derived))
    assert apply(bw, bctx, rematerialize).edits == 1
    FileCheck().check("def forward(self, tangents_1, convert_element_type)").check("relu =").check_next(
        "permute.default(convert_element_type, [1, 0])"
    ).check_next("convert_element_type.default(permute_default, torch.float64)").check_next(
        "mm.default(relu, convert_element_type_default)"
    ).check_next("sum.default(convert_element_type_default)").run(bw.code)
    ref = bctx.parameters["convert_element_type"]
    assert ref.slot.name == "w" and derived.meta["val"].dtype == ref.layout.dtype  # it brings the parameter now


def test_several_saved_values_of_one_parameter_are_all_replaced() -> None:
    s = Sketch()
    x = s.input("x", 4, 8)
    (w,) = s.parameters("a", w=(8, 8))
    t, h = s.call(aten.t.default, w), s.call(aten._to_copy.default, w, dtype=torch.bfloat16)
    gm, ctx = s.done(s.call(aten.mm.default, x, t), t, h, w, saved=[1, 2, 3])
    assert apply(gm, ctx, rematerialize).edits == 2
    FileCheck().check("return (mm, w, w, w)").run(gm.code)
    assert {name: recipe.parameter.slot.name for name, recipe in ctx.handover.recipes.items()} == {
        "t": "w",
        "_to_copy": "w",
    }


def test_what_the_user_gets_stays_while_the_same_node_is_no_longer_saved() -> None:
    s = Sketch()
    (w,) = s.parameters("a", w=(8, 8))
    t = s.call(aten.t.default, w)
    gm, ctx = s.done(t, t, saved=[1])
    assert apply(gm, ctx, rematerialize).edits == 1
    FileCheck().check("return (t, w)").run(gm.code)


def test_a_parameter_saved_as_it_is_is_left_alone_on_both_sides() -> None:
    s = Sketch()
    x = s.input("x", 4, 8)
    (w,) = s.parameters("a", w=(8, 8))
    gm, ctx = s.done(s.call(aten.mm.default, x, w), x, w, saved=[1, 2])
    assert_left_alone(gm, ctx, rematerialize)
    s = Sketch("backward", handover=ctx.handover)
    (w,) = s.parameters("a", w=(8, 8))
    bw, bctx = s.done(s.call(aten.mm.default, s.input("tangents_1", 4, 8), s.call(aten.t.default, w)))
    assert_left_alone(bw, bctx, rematerialize)


@pytest.mark.parametrize("target", ["activation", "product", "sum of two"])
def test_what_takes_more_than_views_and_casts_of_one_parameter_is_still_saved(target: str) -> None:
    s = Sketch()
    x = s.input("x", 8, 8)
    w, v = s.parameters("a", w=(8, 8), v=(8, 8))
    value = {
        "activation": lambda: s.call(aten.t.default, x),
        "product": lambda: s.call(aten.t.default, s.call(aten.mul.Tensor, w, 2.0)),
        "sum of two": lambda: s.call(aten.add.Tensor, w, v),
    }[target]()
    gm, ctx = s.done(s.call(aten.mm.default, x, w), value, saved=[1])
    assert_left_alone(gm, ctx, rematerialize)
    assert not ctx.handover.recipes


def test_inference_saves_nothing_and_is_left_alone() -> None:
    s = Sketch("inference")
    (w,) = s.parameters("a", w=(8, 8))
    gm, ctx = s.done(s.call(aten.t.default, w))
    assert_left_alone(gm, ctx, rematerialize)


@pytest.mark.parametrize("min_cut", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_of_real_graphs_nothing_is_saved_that_comes_from_parameters_alone(model: str, min_cut: bool) -> None:
    pair = capture(MODELS[model](), torch.randn(4, 5), world_size=2, min_cut=min_cut)
    gm, ctx = pair.get("forward")
    apply(gm, ctx, rematerialize)
    activations: set[Node] = set()
    for node in gm.graph.nodes:
        if (node.op == "placeholder" and node.name not in ctx.parameters) or activations & set(node.all_input_nodes):
            activations.add(node)
    for i in ctx.saved:
        saved = gm.graph.output_node().args[0][i]
        assert saved in activations or saved.name in ctx.parameters, f"{saved} holds a full weight"
