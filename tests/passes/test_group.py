"""group: one collective per group over its flat buffer, in the place of symbolic nodes."""

from __future__ import annotations

import itertools
from typing import Any

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
    up_to,
)
from zerofx.passes import edit, gather, group, reduce


def test_all_weights_of_a_group_are_views_of_one_gathered_buffer() -> None:
    gm, ctx = mlp_forward(2, layers="a")
    apply(gm, ctx, gather)
    applied = apply(gm, ctx, group)
    assert applied.edits == 2
    FileCheck().check(
        "all_gather_into_tensor_default = torch.ops._c10d_functional.all_gather_into_tensor.default(shard_a, 2, 'pg')"
    ).check_next(
        "wait_tensor_default = torch.ops._c10d_functional.wait_tensor.default(all_gather_into_tensor_default)"
    ).check_next("torch.ops.aten.as_strided.default(wait_tensor_default, [8, 8], [8, 1], 0)").check_next(
        "torch.ops.aten.as_strided.default(wait_tensor_default, [8], [1], 64)"
    ).check_next("addmm.default(as_strided_default_1, x, as_strided_default)").check_not("unshard").run(gm.code)
    assert_documented(applied.inserted, {"all_gather": {1}, "wait": {1}, "weight": {1}})


def test_each_group_is_gathered_where_it_was_brought() -> None:
    gm, ctx = mlp_forward(2, layers="ab")
    apply(gm, ctx, *up_to(group))
    a, b = (["all_gather " + g, "wait " + g, "weight " + g, "weight " + g, "addmm", "relu"] for g in "ab")
    assert events(gm) == a + b


def test_gradients_are_packed_in_slot_order_and_reduced_where_the_last_one_is_produced() -> None:
    s = Sketch("backward")
    layout = s.group("a", w=(4, 8), b=(32,), v=(4, 8), rest=(5,))
    dy = s.input("tangents_1", 4, 8)
    dv = s.call(aten.neg.default, dy)
    db = s.call(aten.sum.dim_IntList, s.call(aten.view.default, dv, [1, 32]), [0])
    dw = s.call(aten.abs.default, dy)
    gm, ctx = s.done(dw, db, dv, s.call(aten.relu.default, dy), gradients={0: "w", 1: "b", 2: "v"})
    apply(gm, ctx, reduce)
    applied = apply(gm, ctx, group)
    assert applied.edits == 3
    FileCheck().check("abs_1 =").check_next("reshape.default(abs_1, [-1])").check_next(
        "reshape.default(sum_1, [-1])"
    ).check_next("reshape.default(neg, [-1])").check_next("full.default([32], 0.0, dtype = torch.float32").check_next(
        "cat.default([reshape_default, reshape_default_1, reshape_default_2, full_default])"
    ).check_next("reduce_scatter_tensor.default(cat_default, 'sum', 2, 'pg')").check_next(
        "wait_tensor.default(reduce_scatter_tensor_default)"
    ).check_next("mul.Tensor(wait_tensor_default, 0.5)").check_next("relu =").check(
        "return (None, None, None, relu, mul_tensor)"
    ).check_not("reduce_grad").run(gm.code)
    assert_documented(applied.inserted, {"pack": {4}, "reduce_scatter": {4}, "wait_grad": {4}, "gradient": {4}})
    (reduction,) = ctx.found.reductions
    assert reduction.layout is layout and [slot.name for slot in reduction.slots] == ["w", "b", "v"]


def test_groups_are_returned_in_the_order_in_which_they_are_complete() -> None:
    gm, ctx = mlp_backward(2)
    apply(gm, ctx, *up_to(group))
    assert [reduction.layout.name for reduction in ctx.found.reductions] == ["c", "b", "a"]
    assert events(gm, "reduce_scatter") == ["reduce_scatter c", "reduce_scatter b", "reduce_scatter a"]
    FileCheck().check("return (None, None, None, None, None, None, mm_4, mul_tensor, mul_tensor_1, mul_tensor_2)").run(
        gm.code
    )


def test_a_group_is_complete_with_its_last_gradient_even_if_its_first_came_early() -> None:
    s = Sketch("backward")
    s.group("a", a1=(8,), a2=(8,))
    s.group("b", b=(8,))
    dy = s.input("tangents_1", 8)
    grads = [s.call(op, dy) for op in (aten.neg.default, aten.abs.default, aten.relu.default)]
    gm, ctx = s.done(*grads, gradients={0: "a1", 1: "b", 2: "a2"})
    apply(gm, ctx, reduce, group)
    assert events(gm, "reduce_scatter") == ["reduce_scatter b", "reduce_scatter a"]
    assert [reduction.layout.name for reduction in ctx.found.reductions] == ["b", "a"]
    FileCheck().check("neg =").check_next("abs_1 =").check("reduce_scatter_tensor").check("relu =").check(
        "reduce_scatter_tensor"
    ).run(gm.code)


def test_a_gradient_that_is_all_of_its_group_is_reduced_from_where_it_is() -> None:
    s = Sketch("backward")
    s.group("a", w=(8, 32))
    dw = s.call(aten.permute.default, s.call(aten.neg.default, s.input("tangents_1", 32, 8)), [1, 0])
    gm, ctx = s.done(dw, gradients={0: "w"})
    apply(gm, ctx, reduce, group)
    FileCheck().check("reshape.default(permute, [-1])").check_next(
        "reduce_scatter_tensor.default(reshape_default, 'sum', 2, 'pg')"
    ).check_not("aten.cat").run(gm.code)
    assert events(gm, "pack", "reduce_scatter", "wait_grad") == ["pack a", "reduce_scatter a", "wait_grad a"]


@pytest.mark.parametrize("why", ["read again", "another view is read", "an input", "padding", "two of them"])
def test_a_gradient_that_others_read_or_that_is_not_all_of_its_group_is_packed(why: str) -> None:
    s = Sketch("backward", world_size=3 if why == "padding" else 2)
    s.group("a", w=(8, 32), **({"v": (64,)} if why == "two of them" else {}))
    dy = s.input("tangents_1", 32, 8)
    base = dy if why == "an input" else s.call(aten.neg.default, dy)
    dw = s.call(aten.view.default, base, [8, 32])
    outputs, names = [dw], {0: "w"}
    if why == "read again":
        outputs.append(s.call(aten.relu.default, dw))
    if why == "another view is read":
        outputs.append(s.call(aten.relu.default, s.call(aten.permute.default, base, [1, 0])))
    if why == "two of them":
        outputs.append(s.call(aten.relu.default, s.input("tangents_2", 64)))
        names[1] = "v"
    gm, ctx = s.done(*outputs, gradients=names)
    apply(gm, ctx, reduce, group)
    FileCheck().check("cat_default = ").check_next("reduce_scatter_tensor.default(cat_default, 'sum'").run(gm.code)


@pytest.mark.parametrize("shape", [(8, 32), (7, 9)])
def test_packed_or_not_a_lone_gradient_is_the_same(shape: tuple[int, int]) -> None:
    s = Sketch("backward", world_size=1)
    s.group("a", w=shape)
    dw = s.call(aten.permute.default, s.call(aten.neg.default, s.input("tangents_1", *shape[::-1])), [1, 0])
    gm, ctx = s.done(dw, gradients={0: "w"})
    numbers = Numbers.random(gm, ctx)
    expected = gradients(ctx, run(gm, ctx, numbers))
    apply(gm, ctx, reduce, group)
    torch.testing.assert_close(gradients(ctx, run(gm, ctx, numbers)), expected, rtol=0, atol=0)


SHAPES = {"w": (4, 8), "b": (5,), "scalar": (), "v": (3, 3)}


@pytest.mark.parametrize("present", [p for n in range(1, 5) for p in itertools.combinations(SHAPES, n)])
def test_parameters_without_gradient_count_as_zeros(present: tuple[str, ...]) -> None:
    s = Sketch("backward", world_size=1)
    s.group("a", **SHAPES)
    grads = [s.call(aten.neg.default, s.input(f"d{name}", *SHAPES[name])) for name in present]
    gm, ctx = s.done(*grads, gradients=dict(enumerate(present)))
    numbers = Numbers.random(gm, ctx)
    expected = gradients(ctx, run(gm, ctx, numbers))
    apply(gm, ctx, reduce, group)
    torch.testing.assert_close(gradients(ctx, run(gm, ctx, numbers)), expected, rtol=0, atol=0)
    assert [slot.name for slot in ctx.found.reductions[0].slots] == list(present)


def test_two_gradients_of_one_parameter_add_up() -> None:
    s = Sketch("backward", world_size=1)
    s.group("a", w=(4, 8))
    dy = s.input("tangents_1", 4, 8)
    grads = s.call(aten.neg.default, dy), s.call(aten.abs.default, dy)
    gm, ctx = s.done(*grads, gradients={0: "w", 1: "w"})  # a tied weight that came in twice
    numbers = Numbers.random(gm, ctx)
    expected = gradients(ctx, run(gm, ctx, numbers))
    apply(gm, ctx, reduce, group)
    torch.testing.assert_close(gradients(ctx, run(gm, ctx, numbers)), expected, rtol=0, atol=0)


@pytest.mark.parametrize("order", list(itertools.permutations(["empty", "w", "none"])))
def test_empty_parameters_take_part_and_change_nothing(order: tuple[str, ...]) -> None:
    shapes = {"empty": (0, 3), "w": (4, 8), "none": (0,)}
    s = Sketch("backward", world_size=1)
    s.group("a", **shapes)
    grads = [s.call(aten.neg.default, s.input(f"d{name}", *shapes[name])) for name in order]
    gm, ctx = s.done(*grads, gradients=dict(enumerate(order)))
    numbers = Numbers.random(gm, ctx)
    expected = gradients(ctx, run(gm, ctx, numbers))
    apply(gm, ctx, reduce, group)
    torch.testing.assert_close(gradients(ctx, run(gm, ctx, numbers)), expected, rtol=0, atol=0)
    assert [slot.name for slot in ctx.found.reductions[0].slots] == ["empty", "w", "none"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_padding_has_the_dtype_of_the_group(dtype: torch.dtype) -> None:
    s = Sketch("backward")
    s.group("a", dtype, w=(4, 8))
    gm, ctx = s.done(s.call(aten.neg.default, s.input("tangents_1", 4, 8, dtype=dtype)), gradients={0: "w"})
    apply(gm, ctx, reduce, group)
    assert {node.meta["val"].dtype for node in gm.graph.nodes if "zerofx" in node.meta} == {dtype}


@pytest.mark.parametrize("graph", [mlp_forward, mlp_backward])
def test_with_one_rank_no_collective_is_issued_and_the_numbers_stay(graph) -> None:
    gm, ctx = graph(1)
    numbers = Numbers.random(gm, ctx)
    before = run(gm, ctx, numbers)
    expected = gradients(ctx, before)
    apply(gm, ctx, gather, reduce, group)
    assert "_c10d_functional" not in gm.code and "zerofx" not in gm.code
    after = run(gm, ctx, numbers)
    torch.testing.assert_close(gradients(ctx, after), expected, rtol=0, atol=0)
    for value, want in zip(after, before):
        assert value is None or torch.equal(value, want)


@pytest.mark.parametrize("world_size", [1, 2, 7, 64])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (7, 3)])
def test_groups_of_one_parameter_hold_their_shapes_at_any_world_size(
    fake_world, world_size: int, shape: tuple[int, ...]
) -> None:
    fake_world(world_size)
    s = Sketch("backward", world_size=world_size, process_group=dist.group.WORLD.group_name)
    (w,) = s.parameters("a", w=shape)
    product = s.call(aten.mul.Tensor, w, s.input("tangents_1", *shape))
    gm, ctx = s.done(product, product, gradients={0: "w"})
    apply(gm, ctx, gather, reduce, group)
    numbers = Numbers.random(gm, ctx)
    _, dx, shard = run(gm, ctx, numbers)  # compares every shape with meta["val"]
    assert dx.shape == shape and shard.shape == (ctx.found.shards[0].shard_numel,)
    assert len(events(gm, "all_gather", "reduce_scatter")) == (0 if world_size == 1 else 2)


def test_a_graph_without_symbolic_nodes_is_left_alone() -> None:
    assert_left_alone(*mlp_forward(2), group)
    assert_left_alone(*mlp_backward(2), group)


@pytest.mark.parametrize("whole", [{"stage": 1}, {"stage": 2}, {"stage": 3, "in_common": True}])
def test_a_replicas_refresh_is_waited_for_in_front_of_its_first_use(whole: dict[str, Any]) -> None:
    gm, ctx = mlp_forward(2, layers="ab", **whole)
    numbers = Numbers.random(gm, ctx)
    expected = run(gm, ctx, numbers)
    apply(gm, ctx, gather)
    applied = apply(gm, ctx, group)
    assert applied.edits == 4
    FileCheck().check("def forward(self, x, replica_a, replica_b)").check_next(
        "wait_tensor_default = torch.ops._c10d_functional.wait_tensor.default(replica_a)"
    ).check_next("torch.ops.aten.as_strided.default(wait_tensor_default, [8, 8], [8, 1], 0)").check_next(
        "torch.ops.aten.as_strided.default(wait_tensor_default, [8], [1], 64)"
    ).check_next("addmm.default(as_strided_default_1, x, as_strided_default)").check_next("relu =").check_next(
        "wait_tensor.default(replica_b)"
    ).check_not("all_gather").run(gm.code)
    assert_documented(applied.inserted, {"refresh": {1, 3}, "weight": {1, 3}})
    numbers.inputs |= {f"replica_{layout.name}": flat for layout, flat in numbers.flats.items()}
    torch.testing.assert_close(run(gm, ctx, numbers), expected, rtol=0, atol=0)


@pytest.mark.parametrize("whole", [{"stage": 1}, {"stage": 2}, {"stage": 3, "in_common": True}])
def test_on_one_rank_a_replica_needs_no_refresh(whole: dict[str, Any]) -> None:
    gm, ctx = mlp_forward(1, **whole)
    apply(gm, ctx, gather, group)
    assert not events(gm, "refresh") and "_c10d_functional" not in gm.code


@pytest.mark.parametrize("whole", [{"stage": 1}, {"stage": 2}, {"stage": 3, "in_common": True}])
def test_gradients_are_reduced_the_same_way_with_replicas(whole: dict[str, Any]) -> None:
    kinds = ("pack", "reduce_scatter", "wait_grad", "gradient")
    sharded, ctx = mlp_backward(2, stage=3)
    apply(sharded, ctx, *up_to(group))
    gm, ctx = mlp_backward(2, **whole)
    apply(gm, ctx, *up_to(group))
    assert events(gm, *kinds) == events(sharded, *kinds) != []
    assert events(gm, "refresh", "all_gather", "wait") == ["refresh c", "refresh b", "refresh a"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_low_precision_sums_are_widened_before_they_are_scaled(world_size: int) -> None:
    s = Sketch("backward", world_size=world_size, reduce_dtype=torch.bfloat16)
    layout = s.group("a", w=(4, 8), b=(5,))
    grads = s.input("dw", 4, 8), s.input("db", 5)
    gm, ctx = s.done(*grads, gradients={0: "w", 1: "b"})
    numbers = Numbers.random(gm, ctx)
    apply(gm, ctx, reduce, group)
    low = edit.tagged(gm.graph, "prepare", "pack", "reduce_scatter", "wait_grad")  # padding included
    assert {node.meta["val"].dtype for node in low} == {torch.bfloat16}
    high = [(node.target, node.meta["val"].dtype) for node in edit.tagged(gm.graph, "gradient")]
    scaled = [(aten.mul.Tensor, torch.float32)] if world_size > 1 else []
    assert high == [(edit.CAST, torch.float32), *scaled]
    if world_size == 1:
        (flat,) = run(gm, ctx, numbers)[2:]
        for slot, name in zip(layout.slots, ("dw", "db"), strict=True):
            rounded = numbers.inputs[name].bfloat16().float()
            torch.testing.assert_close(layout.view(flat, slot), rounded, rtol=0, atol=0)


def strided(offset: int | None) -> tuple[Any, Any]:
    """A graph that looks at its second weight through ``as_strided``, and through it at a view of that."""
    s = Sketch(world_size=1)
    _, w = s.parameters("a", v=(5,), w=(4, 6))
    begins = () if offset is None else (offset,)
    first = s.call(aten.as_strided.default, w, [2, 3], [6, 2], *begins)
    pairs = s.call(aten.view_as_complex.default, s.call(aten.view.default, w, [4, 3, 2]))
    second = s.call(aten.as_strided.default, pairs, [2, 2], [3, 1], 4)
    third = s.call(aten.as_strided.default, first, [3], [1], storage_offset=7)
    copied = s.call(aten.as_strided.default, s.call(aten.clone.default, w), [3], [1], 7)
    return s.done(*(s.call(aten.mul.Tensor, x, 2.0) for x in (first, second, third, copied)))


@pytest.mark.parametrize("offset", [None, 0, 5])
def test_as_strided_of_a_weight_counts_from_its_place_in_the_buffer(offset: int | None) -> None:
    gm, ctx = strided(offset)
    numbers = Numbers.random(gm, ctx)
    # As the caller has a parameter: in memory of its own.
    w = next(ref for ref in ctx.parameters.values() if ref.slot.name == "w")
    own = w.layout.view(numbers.flats[w.layout], w.slot).clone()
    expected = gm(torch.zeros(5), own)
    apply(gm, ctx, gather)
    apply(gm, ctx, group)
    at = 32  # v takes 5 elements, and w begins on the next multiple of 128 bytes
    FileCheck().check(f"as_strided.default(shard_a, [4, 6], [6, 1], {at})").check(
        f"as_strided.default(as_strided_default, [2, 3], [6, 2], {at + (offset or 0)})"
    ).check(f", [2, 2], [3, 1], {at // 2 + 4})").check(f", [3], [1], {at + 7})").check("clone, [3], [1], 7)").run(
        gm.code
    )
    torch.testing.assert_close(run(gm, ctx, numbers), list(expected), rtol=0, atol=0)


def test_as_strided_from_an_element_that_the_graph_computes_is_refused() -> None:
    s = Sketch()
    (w,) = s.parameters("a", w=(4, 6))
    start = s._add(s.graph.placeholder("start"), 3)
    gm, ctx = s.done(s.call(aten.relu.default, s.call(aten.as_strided.default, w, [3], [1], start)))
    apply(gm, ctx, gather)
    with pytest.raises(NotImplementedError, match=r"as_strided.*Use a number"):
        apply(gm, ctx, group)
