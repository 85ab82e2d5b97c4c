"""all_reduce: stage 0 averages gradients over the ranks, bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.fx import GraphModule, Node
from torch.testing import FileCheck

from tests.passes.captured import MODELS, Pair
from tests.passes.graphs import (
    Numbers,
    Pass,
    Sketch,
    apply,
    assert_documented,
    assert_left_alone,
    aten,
    events,
    mlp_backward,
    mlp_forward,
    run,
)
from tests.passes.test_pipeline_numerics import check_close, run_both
from tests.slow import quick_if
from tests.workers import Workers
from zerofx import _torch
from zerofx.compiler.rewriting import copy_graph
from zerofx.passes import (
    Context,
    ParameterRef,
    VerificationError,
    all_reduce,
    edit,
    pipeline,
    prefetch,
    rematerialize,
    save_parameters,
    verify,
)
from zerofx.passes.context import Found

BUCKETS = ("group", "parameter", "all")
COLLECTIVE = ("all_reduce", "wait_grad")

bf16 = torch.bfloat16


def averaged(ctx: Context, outputs: list[Any]) -> dict[str, torch.Tensor]:
    """The extra outputs by parameter."""
    extra = outputs[len(outputs) - len(ctx.found.reductions) :]
    found = {}
    for reduction, value in zip(ctx.found.reductions, extra, strict=True):
        (slot,) = reduction.slots
        assert slot.name not in found and value.shape == slot.shape
        found[slot.name] = value
    return found


def plain(ctx: Context, outputs: list[Any]) -> dict[str, torch.Tensor]:
    """The gradients among the outputs of a graph that no pass has touched."""
    return {ref.slot.name: outputs[i] for i, ref in ctx.gradients.items()}


def test_a_group_is_averaged_right_behind_its_last_gradient() -> None:
    gm, ctx = mlp_backward(2, layers="a", stage=0)
    applied = apply(gm, ctx, all_reduce)
    assert applied.edits == 2
    FileCheck().check("sum_1 = torch.ops.aten.sum.dim_IntList(tangents_1, [0])").check_next(
        "mul_tensor = torch.ops.aten.mul.Tensor(mm_1, 0.5)"
    ).check_next("mul_tensor_1 = torch.ops.aten.mul.Tensor(sum_1, 0.5)").check_next(
        "reshape_default = torch.ops.aten.reshape.default(mul_tensor, [-1])"
    ).check_next("reshape_default_1 = torch.ops.aten.reshape.default(mul_tensor_1, [-1])").check_next(
        "cat_default = torch.ops.aten.cat.default([reshape_default, reshape_default_1])"
    ).check_next(
        "all_reduce_default = torch.ops._c10d_functional.all_reduce.default(cat_default, 'sum', 'pg')"
    ).check_next("wait_tensor.default(all_reduce_default)").check_next(
        "as_strided.default(wait_tensor_default, [8, 8], [8, 1], 0)"
    ).check_next("as_strided.default(wait_tensor_default, [8], [1], 64)").check_next(
        "return (None, None, mm, as_strided_default, as_strided_default_1)"
    ).run(gm.code)
    assert_documented(applied.inserted, {"pack": {5}, "all_reduce": {5}, "wait_grad": {5}, "gradient": {5}})
    assert [[slot.name for slot in reduction.slots] for reduction in ctx.found.reductions] == [["aw"], ["ab"]]


def bucket(name: str, n: int) -> list[str]:
    """What averages ``n`` gradients."""
    packs = 2 * n + (n > 1)  # one alone is packed as it is
    return [*[f"pack {name}"] * packs, f"all_reduce {name}", f"wait_grad {name}", *[f"gradient {name}"] * n]


def test_buckets_of_groups_are_averaged_between_the_layers() -> None:
    gm, ctx = mlp_backward(2, layers="ab", stage=0, buckets="group")
    apply(gm, ctx, all_reduce)
    layer = ["t", "mm", "t", "mm", "sum"]
    assert events(gm) == [*layer, *bucket("b", 2), *layer, *bucket("a", 2)]


def test_a_bucket_per_parameter_is_averaged_right_behind_the_gradient() -> None:
    gm, ctx = mlp_backward(2, layers="ab", stage=0, buckets="parameter")
    applied = apply(gm, ctx, all_reduce)
    assert events(gm) == [
        *("t", "mm", "t", "mm", *bucket("bw", 1), "sum", *bucket("bb", 1)),
        *("t", "mm", "t", "mm", *bucket("aw", 1), "sum", *bucket("ab", 1)),
    ]
    producers = {4, 5, 9, 10}
    assert_documented(applied.inserted, dict.fromkeys(("pack", "all_reduce", "wait_grad", "gradient"), producers))


def test_one_bucket_for_all_is_averaged_behind_the_last_gradient() -> None:
    gm, ctx = mlp_backward(2, layers="ab", stage=0, buckets="all")
    apply(gm, ctx, all_reduce)
    layer = ["t", "mm", "t", "mm", "sum"]
    assert events(gm) == [*layer, *layer, *bucket("all float32", 4)]


@pytest.mark.parametrize("buckets", BUCKETS)
def test_gradients_leave_as_extra_outputs_in_the_order_of_the_reductions(buckets: str) -> None:
    gm, ctx = mlp_backward(1, layers="ab", stage=0, buckets=buckets)
    numbers = Numbers.random(gm, ctx)
    before = run(gm, ctx, numbers)
    assert apply(gm, ctx, all_reduce).edits == 4
    after = run(gm, ctx, numbers)
    assert after[:4] == [None] * 4
    torch.testing.assert_close(after[4], before[4], rtol=0, atol=0)  # the input's gradient is no parameter's
    assert list(averaged(ctx, after)) == ["bw", "bb", "aw", "ab"]
    torch.testing.assert_close(averaged(ctx, after), plain(ctx, before), rtol=0, atol=0)


def test_a_group_is_complete_with_its_last_gradient_even_if_its_first_came_early() -> None:
    s = Sketch("backward", stage=0)
    s.group("a", a1=(8,), a2=(8,))
    s.group("b", b=(8,))
    dy = s.input("tangents_1", 8)
    grads = [s.call(op, dy) for op in (aten.neg.default, aten.abs.default, aten.relu.default)]
    gm, ctx = s.done(*grads, gradients={0: "a1", 1: "b", 2: "a2"})
    apply(gm, ctx, all_reduce)
    assert events(gm) == ["neg", "abs", *bucket("b", 1), "relu", *bucket("a", 2)]
    assert [reduction.slots[0].name for reduction in ctx.found.reductions] == ["a1", "b", "a2"]


def test_a_parameter_without_gradient_is_skipped() -> None:
    s = Sketch("backward", stage=0)
    s.group("a", w=(8, 8), unused=(8,))
    gm, ctx = s.done(None, neg(s, s.input("tangents_1", 8, 8)), None, gradients={0: "unused", 1: "w"})
    assert apply(gm, ctx, all_reduce).edits == 1
    FileCheck().check("return (None, None, None, as_strided_default)").run(gm.code)
    assert [reduction.slots[0].name for reduction in ctx.found.reductions] == ["w"]


def branch() -> tuple[GraphModule, Context]:
    """A graph that has gradients of two of a group's three parameters, and last the one that comes first there."""
    s = Sketch("backward", stage=0)
    s.group("a", first=(8, 8), unused=(4,), last=(8, 8))
    dy = s.input("tangents_1", 8, 8)
    gm, ctx = s.done(neg(s, dy), s.call(aten.abs.default, dy), gradients={0: "last", 1: "first"})
    (layout,) = {ref.layout for ref in ctx.gradients.values()}
    ctx.trained = tuple(ParameterRef(layout, slot) for slot in layout.slots)
    ctx.before = copy_graph(gm)
    return gm, ctx


def test_what_other_ranks_alone_may_use_has_zeros_at_its_place() -> None:
    gm, ctx = branch()
    assert apply(gm, ctx, all_reduce).edits == 3
    FileCheck().check("full.default([4], 0.0").check(
        "cat.default([reshape_default, full_default, reshape_default_1])"
    ).check("as_strided.default(wait_tensor_default, [8, 8], [8, 1], 0)").check(
        "as_strided.default(wait_tensor_default, [4], [1], 64)"
    ).check("as_strided.default(wait_tensor_default, [8, 8], [8, 1], 68)").run(gm.code)
    assert [reduction.slots[0].name for reduction in ctx.found.reductions] == ["last", "first", "unused"]
    assert verify(gm, ctx) == 0


@pytest.mark.parametrize("sync, buckets", [("keep", "group"), ("reduce", "parameter")])
def test_no_zeros_are_made_where_gradients_are_kept_or_reduced_by_themselves(sync: Any, buckets: Any) -> None:
    gm, ctx = branch()
    ctx.sync, ctx.buckets = sync, buckets
    assert apply(gm, ctx, all_reduce).edits == 2
    FileCheck().check_not("full.default").run(gm.code)
    assert verify(gm, ctx) == 0


def test_verify_refuses_a_bucket_that_leaves_out_what_other_ranks_use() -> None:
    gm, ctx = branch()
    trained, ctx.trained = ctx.trained, ()
    apply(gm, ctx, all_reduce)
    ctx.trained = trained
    with pytest.raises(VerificationError, match="nothing stands for the gradient of 'unused'"):
        verify(gm, ctx)


def test_verify_refuses_a_bucket_in_another_order() -> None:
    gm, ctx = branch()
    apply(gm, ctx, all_reduce)
    (cat,) = (node for node in gm.graph.nodes if node.target is aten.cat.default)
    last, first, _ = edit.output_values(gm.graph)[-3:]
    cat.args = (list(reversed(cat.args[0])),)
    last.args, first.args = first.args, last.args
    with pytest.raises(VerificationError, match="in the order of groups, and of places there") as caught:
        verify(gm, ctx)
    assert caught.value.rule == "reduction"


def neg(s: Sketch, x: Node) -> Node:
    return s.call(aten.neg.default, x)


@pytest.mark.parametrize("buckets", BUCKETS)
def test_with_one_rank_no_collective_is_issued(buckets: str) -> None:
    gm, ctx = mlp_backward(1, stage=0, buckets=buckets)
    apply(gm, ctx, all_reduce)
    assert "_c10d_functional" not in gm.code
    assert not events(gm, *COLLECTIVE) and "mul" not in gm.code  # an average over one is the gradient itself


@pytest.mark.parametrize("buckets", BUCKETS)
@pytest.mark.parametrize("shared", ["another parameter", "an output", "an input"])
def test_with_one_rank_a_gradient_shares_no_memory_with_anything_else(shared: str, buckets: str) -> None:
    s = Sketch("backward", world_size=1, stage=0, buckets=buckets)
    s.group("a", w=(8, 8))
    s.group("b", v=(8, 8))
    dy = s.input("tangents_1", 8, 8)
    dw = dy if shared == "an input" else neg(s, dy)
    dv = dw if shared == "another parameter" else s.call(aten.abs.default, dy)
    gm, ctx = s.done(dw, dv, dw if shared == "an output" else None, gradients={0: "w", 1: "v"})
    numbers = Numbers.random(gm, ctx)
    apply(gm, ctx, all_reduce)
    outputs = run(gm, ctx, numbers)
    others = {"input": numbers.inputs["tangents_1"], **averaged(ctx, outputs)}
    if outputs[2] is not None:
        others["output"] = outputs[2]
    held = {name: value.clone() for name, value in others.items()}
    for name in "wv":
        others[name].add_(1.0)  # as the next backward adds to .grad
        held[name] += 1.0
        torch.testing.assert_close(others, held, rtol=0, atol=0)


@pytest.mark.parametrize("buckets", BUCKETS)
@pytest.mark.parametrize("layout", ["transposed", "expanded", "strided"])
def test_a_gradient_may_be_laid_out_in_any_way(layout: str, buckets: str) -> None:
    s = Sketch("backward", world_size=1, stage=0, buckets=buckets)
    s.group("a", w=(4, 8), b=(8,))
    if layout == "transposed":
        grad = s.call(aten.t.default, s.input("tangents_1", 8, 4))
    elif layout == "expanded":
        grad = s.call(aten.expand.default, s.input("tangents_1", 1, 8), [4, 8])
    else:
        grad = s.call(aten.slice.Tensor, s.input("tangents_1", 4, 16), 1, 0, 16, 2)
    gm, ctx = s.done(grad, s.call(aten.select.int, grad, 0, 1), gradients={0: "w", 1: "b"})
    numbers = Numbers.random(gm, ctx)
    expected = plain(ctx, run(gm, ctx, numbers))
    apply(gm, ctx, all_reduce)
    got = averaged(ctx, run(gm, ctx, numbers))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert all(value.is_contiguous() for value in got.values())


@pytest.mark.parametrize("sync", ["reduce", "keep"])
def test_two_gradients_of_one_parameter_add_up(sync: str) -> None:
    s = Sketch("backward", world_size=1, stage=0, sync=sync)
    s.group("a", w=(4, 8))
    dy = s.input("tangents_1", 4, 8)
    gm, ctx = s.done(neg(s, dy), s.call(aten.exp.default, dy), gradients={0: "w", 1: "w"})  # see test_group.py
    numbers = Numbers.random(gm, ctx)
    first, second = run(gm, ctx, numbers)
    apply(gm, ctx, all_reduce)
    extra = run(gm, ctx, numbers)[2:]
    torch.testing.assert_close(sum(extra), first + second, rtol=0, atol=0)


def in_half(**context: Any) -> tuple[GraphModule, Context]:
    """A gradient that backward computed in 16 bits and widened, and one that it computed in 32."""
    s = Sketch("backward", stage=0, **context)
    s.group("a", w=(4, 8), v=(4, 8))
    dw = neg(s, s.input("low", 4, 8, dtype=bf16))
    dv = s.call(aten.exp.default, s.input("high", 4, 8))
    return s.done(s.call(aten._to_copy.default, dw, dtype=torch.float32), dv, gradients={0: "w", 1: "v"})


def test_gradients_are_reduced_in_the_dtype_asked_for_and_returned_in_the_parameters() -> None:
    gm, ctx = in_half(reduce_dtype=bf16)
    applied = apply(gm, ctx, all_reduce)
    assert applied.edits == 2
    FileCheck().check("neg = ").check_not("_to_copy").check("exp = ").check_next(
        "convert_element_type_default = torch.ops.prims.convert_element_type.default(exp, torch.bfloat16)"
    ).check_next("reshape.default(neg, [-1])").check_next("reshape.default(convert_element_type_default, [-1])").check(
        "wait_tensor_default = "
    ).check_next("convert_element_type.default(wait_tensor_default, torch.float32)").check_next(
        "mul.Tensor(convert_element_type_default_1, 0.5)"  # 1/M in the wide dtype: nothing is rounded twice
    ).run(gm.code)
    assert {n.meta["val"].dtype for n in edit.tagged(gm.graph, "pack", *COLLECTIVE)} == {bf16}
    assert {n.meta["val"].dtype for n in edit.tagged(gm.graph, "gradient")} == {torch.float32}
    assert_documented(applied.inserted)


@pytest.mark.parametrize("buckets", BUCKETS)
def test_what_was_computed_in_that_dtype_is_not_rounded_and_the_rest_once(buckets: str) -> None:
    gm, ctx = in_half(world_size=1, reduce_dtype=bf16, buckets=buckets)
    numbers = Numbers.random(gm, ctx)
    expected = plain(ctx, run(gm, ctx, numbers))
    apply(gm, ctx, all_reduce)
    got = averaged(ctx, run(gm, ctx, numbers))
    torch.testing.assert_close(got, {"w": expected["w"], "v": expected["v"].to(bf16).float()}, rtol=0, atol=0)


def two_dtypes(**context: Any) -> tuple[GraphModule, Context]:
    s = Sketch("backward", stage=0, **context)
    s.group("a", w=(4, 8), b=(8,))
    s.group("a#2", bf16, low_w=(4, 8), low_b=(8,))
    high, low = s.input("high", 4, 8), s.input("low", 4, 8, dtype=bf16)
    dws = [neg(s, x) for x in (high, low)]
    dbs = [s.call(aten.sum.dim_IntList, x, [0]) for x in (high, low)]
    names = {0: "w", 1: "low_w", 2: "b", 3: "low_b"}
    return s.done(*dws, *dbs, gradients=names)


@pytest.mark.parametrize("buckets", ["group", "all"])
def test_gradients_of_two_dtypes_are_reduced_one_dtype_at_a_time(buckets: str) -> None:
    gm, ctx = two_dtypes(buckets=buckets)
    apply(gm, ctx, all_reduce)
    names = {"group": ["a", "a#2"], "all": ["all float32", "all bfloat16"]}[buckets]
    assert [node.meta["zerofx"].group for node in edit.tagged(gm.graph, "all_reduce")] == names
    for name, dtype in zip(names, (torch.float32, bf16), strict=True):
        nodes = [node for node in gm.graph.nodes if "zerofx" in node.meta and node.meta["zerofx"].group == name]
        assert {node.meta["val"].dtype for node in nodes} == {dtype}
        (start,) = (node for node in nodes if node.meta["zerofx"].kind == "all_reduce")
        assert start.meta["val"].numel() == 4 * 8 + 8


@pytest.mark.parametrize("buckets", BUCKETS)
def test_every_gradient_has_its_parameters_dtype(buckets: str) -> None:
    gm, ctx = two_dtypes(world_size=1, buckets=buckets)
    numbers = Numbers.random(gm, ctx)
    expected = plain(ctx, run(gm, ctx, numbers))
    apply(gm, ctx, all_reduce)
    torch.testing.assert_close(averaged(ctx, run(gm, ctx, numbers)), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "buckets",
    [
        "group",
        "parameter",
        "all",
    ],
)
def test_every_gradient_has_its_parameters_dtype_when_all_are_reduced_in_one(buckets: str) -> None:
    gm, ctx = two_dtypes(buckets=buckets, reduce_dtype=bf16)
    apply(gm, ctx, all_reduce)
    extra = edit.output_values(gm.graph)[4:]
    dtypes = {r.slots[0].name: node.meta["val"].dtype for r, node in zip(ctx.found.reductions, extra, strict=True)}
    assert dtypes == {"w": torch.float32, "b": torch.float32, "low_w": bf16, "low_b": bf16}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("buckets", BUCKETS)
def test_kept_gradients_leave_whole_and_unreduced(buckets: str, world_size: int) -> None:
    gm, ctx = mlp_backward(world_size, layers="ab", stage=0, buckets=buckets, sync="keep")
    numbers = Numbers.random(gm, ctx)
    before = run(gm, ctx, numbers)
    applied = apply(gm, ctx, all_reduce)
    assert (applied.edits, applied.inserted) == (4, [])
    FileCheck().check("return (None, None, None, None, mm_2, mm_1, sum_1, mm_3, sum_2)").run(gm.code)
    assert not ctx.found.kept
    torch.testing.assert_close(averaged(ctx, run(gm, ctx, numbers)), plain(ctx, before), rtol=0, atol=0)


def test_gradients_are_kept_in_the_dtype_they_are_reduced_in() -> None:
    gm, ctx = in_half(sync="keep", reduce_dtype=bf16)
    apply(gm, ctx, all_reduce)
    FileCheck().check("return (None, None, neg, convert_element_type_default)").run(gm.code)
    assert events(gm) == ["neg", "exp", "prepare a"]


@pytest.mark.parametrize("buckets", BUCKETS)
def test_what_was_kept_comes_in_last_and_is_reduced_with_the_rest(buckets: str) -> None:
    gm, ctx = mlp_backward(1, layers="ab", stage=0, buckets=buckets, sync="merge")
    numbers = Numbers.random(gm, ctx)
    expected = plain(ctx, run(gm, ctx, numbers))
    inputs = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    applied = apply(gm, ctx, all_reduce)
    names = ["bw", "bb", "aw", "ab"]
    assert [ref.slot.name for ref in ctx.found.kept] == names
    *old, kw, kb, kw2, kb2 = gm.graph.find_nodes(op="placeholder")
    assert [node.name for node in old] == inputs
    assert [node.name for node in (kw, kb, kw2, kb2)] == [f"kept_{name}" for name in names]
    assert edit.tagged(gm.graph, "kept") == [kw, kb, kw2, kb2]
    assert_documented(node for node in applied.inserted if node.meta["zerofx"].kind == "prepare")
    kept = {name: torch.randn(ref.slot.shape) for name, ref in zip(names, ctx.found.kept, strict=True)}
    numbers.inputs |= {f"kept_{name}": value for name, value in kept.items()}
    expected = {name: grad + kept[name] for name, grad in expected.items()}
    torch.testing.assert_close(averaged(ctx, run(gm, ctx, numbers)), expected, rtol=0, atol=0)


def test_what_was_kept_is_added_before_a_bucket_is_packed() -> None:
    gm, ctx = mlp_backward(2, layers="a", stage=0, sync="merge")
    apply(gm, ctx, all_reduce)
    assert events(gm) == ["t", "mm", "t", "mm", "prepare a", "sum", "prepare a", *bucket("a", 2)]


def test_a_bucket_is_waited_for_in_front_of_the_packing_of_the_one_after_the_next() -> None:
    gm, ctx = mlp_backward(2, stage=0)
    apply(gm, ctx, all_reduce)
    assert apply(gm, ctx, prefetch).inserted == []
    produced = ["t", "mm", "t", "mm", "sum"]
    packed = {name: [*[f"pack {name}"] * 5, f"all_reduce {name}"] for name in "abc"}
    waited = {name: [f"wait_grad {name}", *[f"gradient {name}"] * 2] for name in "abc"}
    assert events(gm) == [
        *(*produced, *packed["c"]),
        *(*produced, *packed["b"]),  # travels during the next layer's backward
        *(*produced, *waited["c"], *packed["a"], *waited["b"], *waited["a"]),
    ]
    assert ctx.found.gathered_bytes == 0
    assert_left_alone(gm, ctx, prefetch)


def test_a_bucket_per_parameter_is_waited_for_behind_the_next_gradient() -> None:
    gm, ctx = mlp_backward(2, layers="a", stage=0, buckets="parameter")
    apply(gm, ctx, all_reduce, prefetch)
    assert events(gm)[3:] == [
        *("mm", "pack aw", "pack aw", "all_reduce aw", "sum", "pack ab", "pack ab", "all_reduce ab"),
        *("wait_grad aw", "gradient aw", "wait_grad ab", "gradient ab"),
    ]


@pytest.mark.parametrize("reduce_dtype", [None, bf16])
@pytest.mark.parametrize("buckets", BUCKETS)
def test_forward_graphs_and_those_without_gradients_are_left_alone(buckets: str, reduce_dtype) -> None:
    context = {"stage": 0, "buckets": buckets, "reduce_dtype": reduce_dtype}
    assert_left_alone(*mlp_forward(2, **context), all_reduce)
    s = Sketch("backward", **context)
    gm, ctx = s.done(neg(s, s.input("tangents_1", 8, 8)), None)
    assert_left_alone(gm, ctx, all_reduce)
    assert not ctx.found.reductions


@pytest.mark.parametrize("executor", ["eager", "inductor"])
@pytest.mark.parametrize("buckets", BUCKETS)
def test_what_was_packed_is_reduced_in_place(buckets: str, executor: str) -> None:
    gm, ctx = mlp_backward(2, stage=0, executor=executor, buckets=buckets)
    *passes, lower, _ = pipeline(0)
    apply(gm, ctx, *passes)
    packed = 0 if buckets == "parameter" else len(events(gm, "all_reduce"))  # one alone may be anybody's
    before = events(gm)
    assert apply(gm, ctx, lower).edits == packed
    assert gm.code.count("all_reduce_.default(cat_default") == packed and events(gm) == before


@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_in_a_forward_graph_nothing_is_left_to_lower(executor: str) -> None:
    gm, ctx = mlp_forward(2, stage=0, executor=executor)
    *passes, lower, _ = pipeline(0)
    apply(gm, ctx, *passes)
    assert_left_alone(gm, ctx, lower)


AVERAGING = tuple(pass_ for pass_ in pipeline(0) if pass_ not in (rematerialize, save_parameters))
"""The passes of stage 0 that are about gradients; the others have tests of their own."""


@pytest.mark.parametrize("world_size", [1, 2, 7, 64])
@pytest.mark.parametrize("buckets", BUCKETS)
def test_shapes_hold_at_any_world_size(fake_world, buckets: str, world_size: int) -> None:
    fake_world(world_size)
    shapes = {"scalar": (), "empty": (0, 3), "vector": (5,), "matrix": (7, 3)}
    process_group = dist.group.WORLD.group_name
    s = Sketch("backward", world_size=world_size, process_group=process_group, stage=0, buckets=buckets)
    s.group("a", **shapes)
    grads = [s.input(f"d{name}", *shape) for name, shape in shapes.items()]
    gm, ctx = s.done(*grads, gradients=dict(enumerate(shapes)))
    numbers = Numbers.random(gm, ctx)
    for pass_ in AVERAGING:
        apply(gm, ctx, pass_)
        outputs = run(gm, ctx, numbers)  # compares every shape with meta["val"]
        assert outputs[:4] == [None] * 4 and list(averaged(ctx, outputs)) == list(shapes)
    n = {"group": 1, "parameter": 4, "all": 1}[buckets]
    assert len(events(gm, "all_reduce")) == (0 if world_size == 1 else n)


def both_graphs(
    pair: Pair,
) -> tuple[Callable[[Pass], Any], Callable[[], tuple[torch.Tensor, dict[str, torch.Tensor]]], Any]:
    """Stage 0's counterpart of `Pair.walk`: what applies a pass to both graphs, and what runs them.

    Running gives the loss and the gradients, by parameter. The last of the three are the kept gradients to merge.
    """
    forward, ctx = pair.get("forward")
    backward, bctx = pair.get("backward")
    names = {_torch.input_index(n): n.name for n in forward.graph.find_nodes(op="placeholder")}
    inputs = {names[i]: value for i, value in pair.inputs.items() if i in names}
    received = [n.name for n in backward.graph.find_nodes(op="placeholder")]
    kept: dict[str, torch.Tensor] = {}
    apply(forward, ctx, save_parameters)

    def take(pass_: Pass) -> None:
        code = forward.code
        assert apply(forward, ctx, pass_).edits == 0 and forward.code == code  # every rank holds all weights
        apply(backward, bctx, pass_)

    def results() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        returned = run(forward, ctx, Numbers(inputs, pair.flats))
        (loss,) = (value for i, value in enumerate(returned) if i not in ctx.saved)
        for i, ref in ctx.found.saved_parameters.items():  # the caller puts it there
            returned[i] = ref.layout.view(pair.flats[ref.layout], ref.slot)
        saved = [returned[i] for i in sorted(ctx.saved)]
        numbers = Numbers(dict(zip(received, [*saved, torch.ones(())], strict=True)), pair.flats)
        for ref, node in zip(bctx.found.kept, edit.tagged(backward.graph, "kept"), strict=True):
            numbers.inputs[node.name] = kept[ref.slot.name]
        outputs = run(backward, bctx, numbers)
        return loss, averaged(bctx, outputs) if bctx.found.reductions else plain(bctx, outputs)

    return take, results, kept


def compare_on_ranks(model: str, min_cut: bool, contexts: list[dict[str, Any]]) -> None:
    """On each rank: its own loss, and the average of what all ranks computed."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    context = {"world_size": world_size, "process_group": dist.group.WORLD.group_name, "stage": 0}
    pair, loss, whole = run_both(model, min_cut, rank, **context)
    own, average = {}, {}
    for layout, flat in whole.items():
        total = flat.clone()
        dist.all_reduce(total)
        for slot in layout.slots:
            own[slot.name] = layout.view(flat, slot)
            average[slot.name] = layout.view(total, slot) / world_size
    for context in contexts:
        pair.context = replace(pair.context, **context, found=Found())
        take, results, kept = both_graphs(pair)
        kept |= own  # so that the sum is twice the gradient, exactly in any dtype
        _, before = results()
        assert before
        want = {name: own[name] for name in before}
        for pass_ in (None, *AVERAGING):
            if pass_ is not None:
                take(pass_)
                factor = {"reduce": 1, "merge": 2}.get(context["sync"])
                want = {name: own[name] if factor is None else factor * average[name] for name in before}
            name = pass_.__name__ if pass_ else "before"
            check_close(results(), (loss, want), f"rank {rank}, {context}, after {name}")


CONTEXTS: list[dict[str, Any]] = [
    *({"buckets": buckets, "sync": sync} for buckets in BUCKETS for sync in ("reduce", "keep", "merge")),
    {"buckets": "group", "sync": "reduce", "executor": "inductor"},
]


@quick_if(lambda model, min_cut: model in ("tied", "casts") and not min_cut)
@pytest.mark.parametrize("min_cut", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_on_two_ranks_each_pass_leaves_the_loss_and_the_average_gradient(
    workers2: Workers, model: str, min_cut: bool
) -> None:
    workers2.run(compare_on_ranks, model, min_cut, CONTEXTS if min_cut else CONTEXTS[:3])


def sum_small_and_large(reduce_dtype: torch.dtype | None) -> float:
    rank = dist.get_rank()
    s = Sketch("backward", stage=0, process_group=dist.group.WORLD.group_name, reduce_dtype=reduce_dtype)
    s.group("a", w=(8,), b=())
    gm, ctx = s.done(s.input("dw", 8), s.input("db"), gradients={0: "w", 1: "b"})
    apply(gm, ctx, *pipeline(0))
    numbers = Numbers({"dw": torch.full((8,), (1.0, 2.0**-9)[rank]), "db": torch.tensor(1.0 + rank)})
    *_, dw, db = run(gm, ctx, numbers)
    assert db.item() == 1.5 and dw.eq(dw[0]).all()
    return dw[0].item()


def test_on_two_ranks_the_sum_is_taken_in_the_dtype_asked_for(workers2: Workers) -> None:
    assert workers2.run(sum_small_and_large, None) == [0.5 + 2.0**-10] * 2
    assert workers2.run(sum_small_and_large, bf16) == [0.5] * 2  # 1 + 2**-9 has too many digits for 16 bits


def average_empty() -> list[tuple[int, ...]]:
    s = Sketch("backward", stage=0, buckets="parameter", process_group=dist.group.WORLD.group_name)
    s.group("a", empty=(0, 3), w=(4,))
    gm, ctx = s.done(s.input("dempty", 0, 3), s.input("dw", 4), gradients={0: "empty", 1: "w"})
    numbers = Numbers.random(gm, ctx)
    apply(gm, ctx, *pipeline(0))
    return [tuple(value.shape) for value in averaged(ctx, run(gm, ctx, numbers)).values()]


def test_on_two_ranks_an_empty_parameter_in_a_bucket_of_its_own_is_no_trouble(workers2: Workers) -> None:
    assert workers2.run(average_empty) == [[(0, 3), (4,)]] * 2


@pytest.mark.parametrize("order", list(permutations(["empty", "w", "none"])))
@pytest.mark.parametrize("buckets", BUCKETS)
def test_empty_parameters_take_part_and_change_nothing(buckets: str, order: tuple[str, ...]) -> None:
    shapes = {"empty": (0, 3), "w": (4, 8), "none": (0,)}
    s = Sketch("backward", world_size=1, stage=0, buckets=buckets)
    s.group("a", **shapes)
    grads = [neg(s, s.input(f"d{name}", *shapes[name])) for name in order]
    gm, ctx = s.done(*grads, gradients=dict(enumerate(order)))
    numbers = Numbers.random(gm, ctx)
    expected = plain(ctx, run(gm, ctx, numbers))
    apply(gm, ctx, all_reduce)
    torch.testing.assert_close(averaged(ctx, run(gm, ctx, numbers)), expected, rtol=0, atol=0)
