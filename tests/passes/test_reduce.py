"""reduce: one symbolic reduction behind the producer of each gradient, and shards instead of gradients returned."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
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
from zerofx.passes import gather, reduce


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
    assert [[slot.name for slot in reduction.slots] for reduction in ctx.reductions] == [["aw"], ["ab"]]


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
    assert [reduction.slots[0].name for reduction in ctx.reductions] == ["w"]


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
