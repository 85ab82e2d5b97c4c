"""gather: parameters are brought by unshard nodes, inputs become shards."""

from __future__ import annotations

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
    mlp_forward,
    run,
)
from zerofx.passes import edit, gather


def test_each_group_is_brought_in_front_of_its_first_use() -> None:
    gm, ctx = mlp_forward(2, layers="ab")
    applied = apply(gm, ctx, gather)
    assert applied.edits == 4
    FileCheck().check("def forward(self, x, shard_a, shard_b)").check_next(
        "unshard_default = torch.ops.zerofx.unshard.default(shard_a, [8, 8], 0, 2, 'pg')"
    ).check_next("unshard_default_1 = torch.ops.zerofx.unshard.default(shard_a, [8], 64, 2, 'pg')").check_next(
        "addmm.default(unshard_default_1, x, unshard_default)"
    ).check_next("relu").check_next("unshard.default(shard_b, [8, 8], 0").check_next(
        "unshard.default(shard_b, [8], 64"
    ).check_next("addmm.default").check_next("relu").run(gm.code)
    assert_documented(applied.inserted, {"unshard": {1, 3}})
    assert [layout.name for layout in ctx.found.shards] == ["a", "b"]


def test_all_of_a_group_comes_where_the_first_of_it_is_used_and_shards_in_order_of_use() -> None:
    s = Sketch()
    w1, w2 = s.parameters("h.0", w1=(8, 8), w2=(8, 8))
    (v,) = s.parameters("head", v=(8, 8))
    x = s.input("x", 4, 8)
    x = s.call(aten.mm.default, x, v)
    x = s.call(aten.mm.default, x, w2)  # the second of the group comes first
    gm, ctx = s.done(s.call(aten.mm.default, x, w1))
    apply(gm, ctx, gather)
    FileCheck().check("def forward(self, x, shard_head, shard_h_0)").run(gm.code)
    assert events(gm) == ["unshard head", "mm", "unshard h.0", "unshard h.0", "mm", "mm"]
    assert [layout.name for layout in ctx.found.shards] == ["head", "h.0"]


@pytest.mark.parametrize("placeholders", [1, 2])
def test_a_parameter_with_two_uses_is_brought_once(placeholders: int) -> None:
    s = Sketch(world_size=1)
    x = s.input("x", 4, 8)
    (w,) = s.parameters("a", w=(8, 8))
    again = w if placeholders == 1 else s.parameter("w", "tied")  # AOTAutograd may hand one tensor in twice
    x = s.call(aten.mm.default, x, w)
    gm, ctx = s.done(s.call(aten.mm.default, x, s.call(aten.t.default, again)))
    numbers = Numbers.random(gm, ctx)
    expected = run(gm, ctx, numbers)
    assert apply(gm, ctx, gather).edits == placeholders
    assert events(gm) == ["unshard a", "mm", "t", "mm"]
    torch.testing.assert_close(run(gm, ctx, numbers), expected, rtol=0, atol=0)


def test_a_saved_parameter_is_left_to_the_caller() -> None:
    s = Sketch()
    x = s.input("x", 4, 8)
    w, unused = s.parameters("a", w=(8, 8), unused=(8,))
    gm, ctx = s.done(s.call(aten.mm.default, x, w), x, w, unused, saved=[1, 2, 3])
    assert apply(gm, ctx, gather).edits == 2
    FileCheck().check_count("unshard.default(", 1, exactly=True).check("return (mm, x, None, None)").run(gm.code)
    assert {i: ref.slot.name for i, ref in ctx.found.saved_parameters.items()} == {2: "w", 3: "unused"}


def test_a_parameter_that_the_user_gets_is_brought_for_the_output() -> None:
    s = Sketch(world_size=1)
    w, b = s.parameters("a", w=(8, 8), b=(8,))
    gm, ctx = s.done(w, b, b, saved=[2])
    numbers = Numbers.random(gm, ctx)
    expected = run(gm, ctx, numbers)
    apply(gm, ctx, gather)
    FileCheck().check("return (unshard_default, unshard_default_1, None)").run(gm.code)
    assert list(ctx.found.saved_parameters) == [2]
    torch.testing.assert_close(run(gm, ctx, numbers)[:2], expected[:2], rtol=0, atol=0)


def test_a_parameter_without_use_is_not_brought_and_its_group_neither() -> None:
    s = Sketch()
    x = s.input("x", 4, 8)
    s.parameters("a", w=(8, 8))
    gm, ctx = s.done(s.call(aten.relu.default, x))
    assert apply(gm, ctx, gather).edits == 1
    assert "unshard" not in gm.code and "shard_a" not in gm.code
    assert not ctx.found.shards


def test_a_graph_without_parameters_is_left_alone() -> None:
    s = Sketch()
    gm, ctx = s.done(s.call(aten.relu.default, s.input("x", 4, 8)))
    assert_left_alone(gm, ctx, gather)


def test_a_graph_of_parameters_alone_can_be_gathered() -> None:
    s = Sketch(world_size=1)
    (w,) = s.parameters("a", w=(8, 8))
    gm, ctx = s.done(s.call(aten.relu.default, w))
    numbers = Numbers.random(gm, ctx)
    expected = run(gm, ctx, numbers)
    apply(gm, ctx, gather)
    torch.testing.assert_close(run(gm, ctx, numbers), expected, rtol=0, atol=0)


@pytest.mark.parametrize("how", ["copy_", "through a list", "through a keyword", "through a view"])
def test_a_write_to_a_parameter_is_refused_by_name(how: str) -> None:
    s = Sketch()
    x = s.input("x", 8, 8)
    (w,) = s.parameters("a", weight=(8, 8))
    if how == "copy_":
        s.call(aten.copy_.default, w, x)
    elif how == "through a list":
        s.call(aten._foreach_mul_.Scalar, [w], 2.0)
    elif how == "through a keyword":
        s.call(aten.add.out, x, x, out=w)
    else:
        s.call(aten.copy_.default, s.call(aten.t.default, w), x)
    gm, ctx = s.done(x)
    with pytest.raises(RuntimeError, match=r"writes to the parameter 'weight'.*torch\.no_grad"):
        apply(gm, ctx, gather)


def test_a_write_to_another_tensor_is_not_refused() -> None:
    s = Sketch()
    x = s.input("x", 8, 8)
    (w,) = s.parameters("a", w=(8, 8))
    s.call(aten.copy_.default, x, w)
    gm, ctx = s.done(x)
    assert apply(gm, ctx, gather).edits == 1


@pytest.mark.parametrize("world_size", [1, 2, 7, 64])
def test_shapes_hold_at_any_world_size(fake_world, world_size: int) -> None:
    fake_world(world_size)
    s = Sketch(world_size=world_size, process_group=dist.group.WORLD.group_name)
    params = s.parameters("a", scalar=(), empty=(0, 3), vector=(5,), matrix=(7, 3), half=(2, 2))
    gm, ctx = s.done(*(s.call(aten.relu.default, p) for p in params))
    numbers = Numbers.random(gm, ctx)
    before = [value.shape for value in run(gm, ctx, numbers)]
    apply(gm, ctx, gather)
    assert [value.shape for value in run(gm, ctx, numbers)] == before
    (shard,) = gm.graph.find_nodes(op="placeholder")
    assert shard.meta["val"].shape == (ctx.found.shards[0].numel // world_size,)


@pytest.mark.parametrize("names", [("a", "a#2"), ("h.0", "h_0"), ("layer-1", "layer+1"), ("0", "x")])
def test_any_two_group_names_make_good_placeholders(names: tuple[str, str]) -> None:
    s = Sketch(world_size=1)
    x = s.input("shard_x", 8, 8)
    (w,) = s.parameters(names[0], w=(8, 8))
    (h,) = s.parameters(names[1], torch.bfloat16, h=(8, 8))  # "a#2" is how plan_groups names what differs in dtype
    gm, ctx = s.done(s.call(aten.add.Tensor, s.call(aten.add.Tensor, w, h), x))
    numbers = Numbers.random(gm, ctx)
    expected = run(gm, ctx, numbers)
    apply(gm, ctx, gather)
    _, *shards = gm.graph.find_nodes(op="placeholder")
    assert [node.meta["val"].dtype for node in shards] == [torch.float32, torch.bfloat16]
    torch.testing.assert_close(run(gm, ctx, numbers), expected, rtol=0, atol=0)


@pytest.mark.parametrize("whole", [{"stage": 1}, {"stage": 2}, {"stage": 3, "in_common": True}])
def test_whole_weights_are_brought_from_a_replica_and_no_rank_is_asked(whole: dict[str, Any]) -> None:
    gm, ctx = mlp_forward(2, layers="ab", **whole)
    numbers = Numbers.random(gm, ctx)
    expected = run(gm, ctx, numbers)
    applied = apply(gm, ctx, gather)
    assert applied.edits == 4
    FileCheck().check("def forward(self, x, replica_a, replica_b)").check_next(
        "unshard.default(replica_a, [8, 8], 0, 1, 'pg')"
    ).check_next("unshard.default(replica_a, [8], 64, 1, 'pg')").check_next("addmm").check_next("relu").check_next(
        "unshard.default(replica_b, [8, 8], 0, 1, 'pg')"
    ).run(gm.code)
    assert_documented(applied.inserted, {"unshard": {1, 3}})
    _, *replicas = gm.graph.find_nodes(op="placeholder")
    assert replicas == edit.tagged(gm.graph, "replica")
    assert [node.meta["val"].shape for node in replicas] == [(layout.numel,) for layout in ctx.found.shards]
    numbers.inputs |= {f"replica_{layout.name}": flat for layout, flat in numbers.flats.items()}
    # At world size 2, without a process group: a collective would fail.
    torch.testing.assert_close(run(gm, ctx, numbers), expected, rtol=0, atol=0)


@pytest.mark.parametrize("whole", [{"stage": 1}, {"stage": 2}, {"stage": 3, "in_common": True}])
def test_a_replica_in_another_dtype_is_widened_behind_each_weight(whole: dict[str, Any]) -> None:
    gm, ctx = mlp_forward(2, layers="a", **whole, param_dtype=torch.bfloat16)
    numbers = Numbers.random(gm, ctx)
    ((layout, flat),) = numbers.flats.items()
    numbers.inputs["replica_a"] = flat.bfloat16()
    numbers.flats[layout] = flat.bfloat16().float()
    expected = run(gm, ctx, numbers)
    applied = apply(gm, ctx, gather)
    assert events(gm) == ["unshard a", "widen a", "unshard a", "widen a", "addmm", "relu"]
    assert_documented(applied.inserted, {"unshard": {1}, "widen": {1}})
    (replica,) = edit.tagged(gm.graph, "replica")
    assert replica.meta["val"].dtype == torch.bfloat16 and replica.meta["val"].shape == (layout.numel,)
    torch.testing.assert_close(run(gm, ctx, numbers), expected, rtol=0, atol=0)


def test_a_replica_in_the_parameters_dtype_is_not_cast() -> None:
    gm, ctx = mlp_forward(2, layers="a", stage=2, param_dtype=torch.float32)
    apply(gm, ctx, gather)
    assert events(gm) == ["unshard a", "unshard a", "addmm", "relu"]


def test_shards_keep_the_parameters_dtype_whatever_weights_compute_in() -> None:
    gm, ctx = mlp_forward(2, layers="a", stage=3, param_dtype=torch.bfloat16)
    apply(gm, ctx, gather)
    (shard,) = edit.tagged(gm.graph, "shard")
    assert shard.meta["val"].dtype == torch.float32 and shard.meta["val"].shape == (ctx.found.shards[0].shard_numel,)
    assert events(gm) == ["unshard a", "unshard a", "addmm", "relu"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_saved_parameters_are_left_to_the_caller_in_every_stage(stage: int) -> None:
    s = Sketch(stage=stage)
    x = s.input("x", 4, 8)
    (w,) = s.parameters("a", w=(8, 8))
    gm, ctx = s.done(s.call(aten.mm.default, x, w), w, saved=[1])
    apply(gm, ctx, gather)
    FileCheck().check("return (mm, None)").run(gm.code)
    assert {i: ref.slot.name for i, ref in ctx.found.saved_parameters.items()} == {1: "w"}
