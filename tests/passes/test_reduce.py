"""reduce: one symbolic reduction behind the producer of each gradient, and shards instead of gradients returned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.fx import GraphModule
from torch.testing import FileCheck

from tests.passes.graphs import (
    Numbers,
    Sketch,
    apply,
    assert_documented,
    assert_left_alone,
    aten,
    events,
    gradients,
    mlp_backward,
    mlp_forward,
    run,
)
from zerofx.passes import PIPELINE, Context, edit, gather, reduce


def test_a_reduction_stands_right_behind_each_gradients_producer() -> None:
    gm, ctx = mlp_backward(2, layers="a")
    applied = apply(gm, ctx, reduce)
    assert applied.edits == 2
    FileCheck().check("mm = torch.ops.aten.mm.default(tangents_1, t)").check_next("t_1 =").check_next(
        "mm_1 = torch.ops.aten.mm.default(t_1, tangents_1)"
    ).check_next("reduce_grad_default = torch.ops.zerofx.reduce_grad.default(mm_1, 0, 64, 2, 'pg')").check_next(
        "sum_1 = torch.ops.aten.sum.dim_IntList(tangents_1, [0])"
    ).check_next("reduce_grad_default_1 = torch.ops.zerofx.reduce_grad.default(sum_1, 64, 64, 2, 'pg')").check_next(
        "return (None, None, mm, reduce_grad_default, reduce_grad_default_1)"
    ).run(gm.code)
    assert_documented(applied.inserted, {"reduce_grad": {4, 5}})
    assert [[slot.name for slot in reduction.slots] for reduction in ctx.found.reductions] == [["aw"], ["ab"]]


def test_the_shards_of_a_group_add_up_to_its_gradient() -> None:
    gm, ctx = mlp_backward(1)
    numbers = Numbers.random(gm, ctx)
    before = run(gm, ctx, numbers)
    expected = gradients(ctx, before)
    apply(gm, ctx, reduce)
    after = run(gm, ctx, numbers)
    assert after[:6] == [None] * 6
    torch.testing.assert_close(after[6], before[6], rtol=0, atol=0)  # the input's gradient is no parameter's
    torch.testing.assert_close(gradients(ctx, after), expected, rtol=0, atol=0)


def test_a_gradient_is_zero_outside_of_its_parameter() -> None:
    gm, ctx = mlp_backward(1, layers="a")
    numbers = Numbers.random(gm, ctx)
    apply(gm, ctx, reduce)
    *_, weight, bias = run(gm, ctx, numbers)
    assert weight[:64].all() and not weight[64:].any()
    assert bias[64:72].all() and not bias[:64].any() and not bias[72:].any()


def test_a_parameter_without_gradient_is_skipped() -> None:
    s = Sketch("backward")
    s.group("a", w=(8, 8), unused=(8,))
    dy = s.input("tangents_1", 8, 8)
    gm, ctx = s.done(None, s.call(aten.neg.default, dy), None, gradients={0: "unused", 1: "w"})
    assert apply(gm, ctx, reduce).edits == 1
    FileCheck().check("return (None, None, None, reduce_grad_default)").run(gm.code)
    assert [reduction.slots[0].name for reduction in ctx.found.reductions] == ["w"]


def test_a_gradient_that_comes_in_from_outside_is_reduced_behind_all_inputs() -> None:
    s = Sketch("backward", world_size=1)
    s.group("a", w=(8, 8))
    dy, x = s.input("tangents_1", 8, 8), s.input("x", 8, 8)
    gm, ctx = s.done(dy, s.call(aten.neg.default, x), gradients={0: "w"})
    numbers = Numbers.random(gm, ctx)
    expected = gradients(ctx, run(gm, ctx, numbers))
    applied = apply(gm, ctx, reduce)
    assert events(gm) == ["reduce_grad a", "neg"]
    assert_documented(applied.inserted)
    torch.testing.assert_close(gradients(ctx, run(gm, ctx, numbers)), expected, rtol=0, atol=0)


def test_one_node_may_be_the_gradient_of_two_parameters() -> None:
    s = Sketch("backward", world_size=1)
    s.group("a", w=(8, 8))
    s.group("b", v=(8, 8))
    dy = s.call(aten.neg.default, s.input("tangents_1", 8, 8))
    gm, ctx = s.done(dy, dy, dy, gradients={0: "w", 2: "v"})  # and the input's own
    numbers = Numbers.random(gm, ctx)
    before = run(gm, ctx, numbers)
    expected = gradients(ctx, before)
    assert apply(gm, ctx, reduce).edits == 2
    after = run(gm, ctx, numbers)
    torch.testing.assert_close(gradients(ctx, after), expected, rtol=0, atol=0)
    torch.testing.assert_close(after[1], before[1], rtol=0, atol=0)


def test_a_gradient_may_be_laid_out_in_another_order() -> None:
    s = Sketch("backward", world_size=1)
    s.group("a", w=(4, 8))
    gm, ctx = s.done(s.call(aten.t.default, s.input("tangents_1", 8, 4)), gradients={0: "w"})
    numbers = Numbers.random(gm, ctx)
    expected = gradients(ctx, run(gm, ctx, numbers))
    apply(gm, ctx, reduce)
    torch.testing.assert_close(gradients(ctx, run(gm, ctx, numbers)), expected, rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [1, 2, 7, 64])
def test_shapes_hold_at_any_world_size(fake_world, world_size: int) -> None:
    fake_world(world_size)
    shapes = {"scalar": (), "empty": (0, 3), "vector": (5,), "matrix": (7, 3)}
    s = Sketch("backward", world_size=world_size, process_group=dist.group.WORLD.group_name)
    layout = s.group("a", **shapes)
    grads = [s.input(f"d{name}", *shape) for name, shape in shapes.items()]
    gm, ctx = s.done(*grads, gradients=dict(enumerate(shapes)))
    numbers = Numbers.random(gm, ctx)
    assert apply(gm, ctx, reduce).edits == 4
    outputs = run(gm, ctx, numbers)
    assert [None if x is None else x.shape for x in outputs] == [None] * 4 + [(layout.shard_numel,)] * 4


def test_a_graph_without_gradients_is_left_alone() -> None:
    assert_left_alone(*mlp_forward(2), reduce)
    s = Sketch("backward")
    gm, ctx = s.done(s.call(aten.neg.default, s.input("tangents_1", 8, 8)), None)
    assert_left_alone(gm, ctx, reduce)


def test_gather_and_reduce_do_not_disturb_each_other() -> None:
    one, ctx = mlp_backward(2)
    apply(one, ctx, gather, reduce)
    other, ctx = mlp_backward(2)
    apply(other, ctx, reduce, gather)
    assert events(one) == events(other)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_kept_gradients_leave_whole_and_unreduced(world_size: int, stage: int) -> None:
    gm, ctx = mlp_backward(world_size, layers="ab", stage=stage, sync="keep")
    numbers = Numbers.random(gm, ctx)
    before = run(gm, ctx, numbers)
    applied = apply(gm, ctx, reduce)
    assert (applied.edits, applied.inserted) == (4, [])
    FileCheck().check("return (None, None, None, None, mm_2, mm_1, sum_1, mm_3, sum_2)").run(gm.code)
    assert [[slot.name for slot in reduction.slots] for reduction in ctx.found.reductions] == [
        ["bw"],
        ["bb"],
        ["aw"],
        ["ab"],
    ]
    assert not ctx.found.kept
    torch.testing.assert_close(run(gm, ctx, numbers)[5:], before[:4], rtol=0, atol=0)


def test_no_pass_reduces_what_is_kept() -> None:
    gm, ctx = mlp_backward(2, sync="keep")
    apply(gm, ctx, *PIPELINE)
    assert events(gm, "all_gather") and not events(gm, "pack", "reduce_scatter", "wait_grad", "gradient")
    names = [f"{layer}{kind}" for layer in "cba" for kind in "wb"]
    assert [[slot.name for slot in reduction.slots] for reduction in ctx.found.reductions] == [[name] for name in names]


@pytest.mark.parametrize("stage", [2, 3])
def test_what_was_kept_comes_in_behind_all_inputs_and_is_reduced_with_the_rest(stage: int) -> None:
    gm, ctx = mlp_backward(1, layers="ab", stage=stage, sync="merge")
    numbers = Numbers.random(gm, ctx)
    expected = gradients(ctx, run(gm, ctx, numbers))
    apply(gm, ctx, gather)
    inputs = gm.graph.find_nodes(op="placeholder")
    applied = apply(gm, ctx, reduce)
    names = ["bw", "bb", "aw", "ab"]
    assert [ref.slot.name for ref in ctx.found.kept] == names
    kept = edit.tagged(gm.graph, "kept")
    assert gm.graph.find_nodes(op="placeholder") == [*inputs, *kept]
    assert [node.name for node in kept] == [f"kept_{name}" for name in names]
    numbers.inputs |= {f"replica_{layout.name}": flat for layout, flat in numbers.flats.items()}
    for node, ref in zip(kept, ctx.found.kept, strict=True):
        value = numbers.inputs[node.name] = torch.randn(ref.slot.shape)
        ref.layout.view(expected[ref.layout], ref.slot).add_(value)
    torch.testing.assert_close(gradients(ctx, run(gm, ctx, numbers)), expected, rtol=0, atol=0)
    assert_documented(applied.inserted)


def test_what_was_kept_is_added_between_the_producer_and_the_reduction() -> None:
    gm, ctx = mlp_backward(2, layers="a", sync="merge")
    applied = apply(gm, ctx, reduce)
    assert events(gm) == ["t", "mm", "t", "mm", "prepare a", "reduce_grad a", "sum", "prepare a", "reduce_grad a"]
    assert_documented(applied.inserted, {"prepare": {4, 5}, "reduce_grad": {4, 5}})


def test_a_gradient_that_comes_in_from_outside_is_merged_behind_all_inputs() -> None:
    s = Sketch("backward", world_size=1, sync="merge")
    s.group("a", w=(8, 8))
    s.group("b", v=(8, 8))
    dy = s.input("tangents_1", 8, 8)
    gm, ctx = s.done(dy, dy, s.call(aten.neg.default, dy), gradients={0: "w", 1: "v"})
    numbers = Numbers.random(gm, ctx)
    before = run(gm, ctx, numbers)
    apply(gm, ctx, reduce)
    kept = {"kept_w": torch.randn(8, 8), "kept_v": torch.randn(8, 8)}
    numbers.inputs |= kept
    *others, w, v = run(gm, ctx, numbers)
    torch.testing.assert_close([w[:64], v[:64]], [(before[0] + x).reshape(-1) for x in kept.values()], rtol=0, atol=0)
    torch.testing.assert_close(others[2], before[2], rtol=0, atol=0)  # the input's gradient has no part in it


def low_and_high(*casts: torch.dtype, **context: Any) -> tuple[GraphModule, Context]:
    """A gradient that backward computed in 16 bits and took through ``casts``, and one that it computed in 32."""
    s = Sketch("backward", world_size=1, **context)
    s.group("a", w=(4, 8), v=(4, 8))
    dw = s.call(aten.neg.default, s.input("low", 4, 8, dtype=torch.bfloat16))
    for dtype in casts:
        dw = s.call(aten._to_copy.default, dw, dtype=dtype)
    return s.done(dw, s.call(aten.exp.default, s.input("high", 4, 8)), gradients={0: "w", 1: "v"})


@pytest.mark.parametrize("casts", [[torch.float32], [torch.float64], [torch.float32, torch.float64]])
def test_the_cast_that_widened_a_gradient_is_left_out_and_one_is_inserted_otherwise(casts: list[torch.dtype]) -> None:
    gm, ctx = low_and_high(*casts, reduce_dtype=torch.bfloat16)
    numbers = Numbers.random(gm, ctx)
    low, high = run(gm, ctx, numbers)
    applied = apply(gm, ctx, reduce)
    assert applied.edits == 2
    assert events(gm) == ["neg", "reduce_grad a", "exp", "prepare a", "reduce_grad a"]
    assert_documented(applied.inserted)
    assert {node.meta["val"].dtype for node in edit.tagged(gm.graph, "reduce_grad")} == {torch.bfloat16}
    *_, w, v = run(gm, ctx, numbers)
    torch.testing.assert_close([w[:32], v[32:64]], [x.bfloat16().reshape(-1) for x in (low, high)], rtol=0, atol=0)


def test_a_widening_cast_that_something_else_reads_stays() -> None:
    s = Sketch("backward", reduce_dtype=torch.bfloat16)
    s.group("a", w=(4, 8))
    neg = s.call(aten.neg.default, s.input("low", 4, 8, dtype=torch.bfloat16))
    wide = s.call(aten._to_copy.default, neg, dtype=torch.float32)
    gm, ctx = s.done(wide, s.call(aten.exp.default, wide), gradients={0: "w"})
    apply(gm, ctx, reduce)
    assert events(gm) == ["neg", "reduce_grad a", "_to_copy", "exp"]


def test_a_cast_that_loses_digits_is_not_left_out() -> None:
    s = Sketch("backward", world_size=1, reduce_dtype=torch.float32)
    s.group("a", torch.bfloat16, w=(4, 8))
    high = s.call(aten.exp.default, s.input("high", 4, 8))
    gm, ctx = s.done(s.call(aten._to_copy.default, high, dtype=torch.bfloat16), gradients={0: "w"})
    numbers = Numbers.random(gm, ctx)
    (grad,) = run(gm, ctx, numbers)
    apply(gm, ctx, reduce)
    assert events(gm) == ["exp", "_to_copy", "prepare a", "reduce_grad a"]
    *_, w = run(gm, ctx, numbers)
    torch.testing.assert_close(w[:32], grad.float().reshape(-1), rtol=0, atol=0)


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_a_gradient_in_the_dtype_asked_for_is_not_cast(reduce_dtype: torch.dtype | None) -> None:
    gm, ctx = mlp_backward(2, layers="a", reduce_dtype=reduce_dtype)
    apply(gm, ctx, reduce)
    assert events(gm) == ["t", "mm", "t", "mm", "reduce_grad a", "sum", "reduce_grad a"]


def test_gradients_are_kept_and_merged_in_the_dtype_they_are_reduced_in() -> None:
    gm, ctx = low_and_high(torch.float32, sync="keep", reduce_dtype=torch.bfloat16)
    apply(gm, ctx, reduce)
    assert [node.meta["val"].dtype for node in edit.output_values(gm.graph)[2:]] == [torch.bfloat16] * 2
    gm, ctx = low_and_high(torch.float32, sync="merge", reduce_dtype=torch.bfloat16)
    apply(gm, ctx, reduce)
    assert events(gm) == ["neg", "prepare a", "reduce_grad a", "exp", "prepare a", "prepare a", "reduce_grad a"]
    assert [node.meta["val"].dtype for node in edit.tagged(gm.graph, "kept")] == [torch.bfloat16] * 2


def test_a_graph_without_gradients_keeps_what_nobody_reads() -> None:
    s = Sketch(reduce_dtype=torch.bfloat16)
    x = s.input("x", 4)
    s.call(aten.neg.default, x)
    gm, ctx = s.done(s.call(aten.relu.default, x))
    assert apply(gm, ctx, reduce).edits == 0
    assert events(gm) == ["neg", "relu"]
