"""narrow: casts of weights move in front of the gather; where the replica is narrow already, they go away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.fx import GraphModule, Node
from torch.testing import FileCheck

from tests.passes.graphs import (
    Numbers,
    Sketch,
    apply,
    assert_documented,
    assert_left_alone,
    aten,
    events,
    mlp_backward,
    mlp_forward,
    run,
    up_to,
)
from tests.workers import Workers
from zerofx.passes import Context, discard, edit, gather, group, lower, narrow, prefetch

Cast = Callable[[Sketch, Node, torch.dtype], Node]

CASTS: dict[str, Cast] = {
    "_to_copy": lambda s, x, dtype: s.call(aten._to_copy.default, x, dtype=dtype),
    "convert_element_type": lambda s, x, dtype: s.call(edit.CAST, x, dtype),
}


def low(s: Sketch, x: Node, dtype: torch.dtype = torch.bfloat16) -> Node:
    return CASTS["_to_copy"](s, x, dtype)


def autocast_forward(
    world_size: int = 2, layers: str = "a", cast: Cast = low, **context: Any
) -> tuple[GraphModule, Context]:
    """``x = relu(addmm(b16, x, w16))``, once per layer, with each weight cast right before it is used."""
    s = Sketch(world_size=world_size, **context)
    x = s.input("x", 4, 8, dtype=torch.bfloat16)
    for name in layers:
        w, b = s.parameters(name, **{f"{name}w": (8, 8), f"{name}b": (8,)})
        w16, b16 = cast(s, w, torch.bfloat16), cast(s, b, torch.bfloat16)
        x = s.call(aten.relu.default, s.call(aten.addmm.default, b16, x, w16))
    return s.done(x)


def with_replicas(gm: GraphModule, ctx: Context) -> Numbers:
    """Values for a graph that no pass has touched, its replicas in ``layout.weight_dtype`` included.

    What the flat buffers hold was rounded before, so that the graph computes the same from either.
    """
    numbers = Numbers.random(gm, ctx)
    for layout, flat in numbers.flats.items():
        replica = flat.to(layout.weight_dtype)
        numbers.inputs[f"replica_{layout.name}"] = replica
        numbers.flats[layout] = replica.to(layout.dtype)
    return numbers


@pytest.mark.parametrize("cast", CASTS)
def test_the_casts_of_a_whole_group_move_in_front_of_the_gather(cast: str) -> None:
    gm, ctx = autocast_forward(cast=CASTS[cast])
    apply(gm, ctx, gather)
    applied = apply(gm, ctx, narrow)
    assert applied.edits == 2
    FileCheck().check("def forward(self, x, shard_a)").check_next(
        "convert_element_type_default = torch.ops.prims.convert_element_type.default(shard_a, torch.bfloat16)"
    ).check_next("unshard.default(convert_element_type_default, [8, 8], 0, 2, 'pg')").check_next(
        "unshard.default(convert_element_type_default, [8], 64, 2, 'pg')"
    ).check_next("addmm.default(unshard_default_1, x, unshard_default)").check_next("relu").run(gm.code)
    assert_documented(applied.inserted, {"narrow": {1}})
    shard = gm.graph.find_nodes(op="placeholder")[-1]
    assert shard.meta["val"].dtype == torch.float32  # what the rank holds stays as it is
    assert {node.meta["val"].dtype for node in edit.tagged(gm.graph, "unshard")} == {torch.bfloat16}


def test_half_the_bytes_are_gathered() -> None:
    moved = {}
    for passes in ((gather, group), (gather, narrow, group)):
        gm, ctx = autocast_forward()
        apply(gm, ctx, *passes)
        values = [node.meta["val"] for node in edit.tagged(gm.graph, "all_gather", "wait")]
        assert len(values) == 2 and len({value.nbytes for value in values}) == 1
        moved[values[0].dtype] = values[0].nbytes
    assert moved == {torch.float32: 512, torch.bfloat16: 256}  # 72 elements, padded to 128


def test_two_casts_of_one_weight_both_go() -> None:
    s = Sketch(world_size=1)
    x = s.input("x", 8, 8, dtype=torch.bfloat16)
    (w,) = s.parameters("a", w=(8, 8))
    y = s.call(aten.mm.default, s.call(aten.mm.default, x, low(s, w)), low(s, w))
    gm, ctx = s.done(y)
    numbers = Numbers.random(gm, ctx)
    expected = run(gm, ctx, numbers)
    assert apply(gm, ctx, gather, narrow).edits == 2
    assert events(gm) == ["narrow a", "unshard a", "mm", "mm"]
    torch.testing.assert_close(run(gm, ctx, numbers), expected, rtol=0, atol=0)


def test_a_weight_that_the_graph_does_not_use_has_no_say() -> None:
    s = Sketch()
    x = s.input("x", 4, 8, dtype=torch.bfloat16)
    w, _ = s.parameters("a", w=(8, 8), b=(8,))
    gm, ctx = s.done(s.call(aten.mm.default, x, low(s, w)))
    assert apply(gm, ctx, gather, narrow).edits == 1
    assert events(gm) == ["narrow a", "unshard a", "mm"]


def test_each_group_is_seen_to_by_itself() -> None:
    s = Sketch()
    x = s.input("x", 4, 8, dtype=torch.bfloat16)
    (norm,) = s.parameters("norm", norm=(8,))
    (w,) = s.parameters("h", w=(8, 8))
    x = low(s, s.call(aten.mul.Tensor, x, norm))
    gm, ctx = s.done(s.call(aten.mm.default, x, low(s, w)))
    assert apply(gm, ctx, gather, narrow).edits == 1
    assert events(gm) == ["unshard norm", "mul", "_to_copy", "narrow h", "unshard h", "mm"]


Use = Callable[[Sketch, Node, Node], list[Node]]

LEFT_ALONE: dict[str, tuple[torch.dtype, Use]] = {
    "one weight is used as it is": (torch.float32, lambda s, w, b: [neg(s, low(s, w)), neg(s, b)]),
    "one weight is used both ways": (torch.float32, lambda s, w, b: [neg(s, low(s, w)), neg(s, w), neg(s, low(s, b))]),
    "a weight is returned": (torch.float32, lambda s, w, b: [neg(s, low(s, w)), b]),
    "two dtypes in one group": (
        torch.float32,
        lambda s, w, b: [neg(s, low(s, w)), neg(s, low(s, b, torch.float16))],
    ),
    "two dtypes of one weight": (
        torch.float32,
        lambda s, w, b: [neg(s, low(s, w)), neg(s, low(s, w, torch.float16))],
    ),
    "a wider dtype": (torch.bfloat16, lambda s, w, b: [neg(s, low(s, x, torch.float32)) for x in (w, b)]),
    "a dtype as wide": (torch.bfloat16, lambda s, w, b: [neg(s, low(s, x, torch.float16)) for x in (w, b)]),
    "a cast is returned": (torch.float32, lambda s, w, b: [neg(s, low(s, w)), low(s, b)]),
    "a cast of a view": (torch.float32, lambda s, w, b: [neg(s, low(s, s.call(aten.t.default, w)))]),
    "a cast that also lays out anew": (
        torch.float32,
        lambda s, w, b: [
            neg(s, s.call(aten._to_copy.default, w, dtype=torch.bfloat16, memory_format=torch.contiguous_format))
        ],
    ),
}


def neg(s: Sketch, x: Node) -> Node:
    return s.call(aten.neg.default, x)


@pytest.mark.parametrize("why", LEFT_ALONE)
def test_a_group_is_left_alone_where(why: str) -> None:
    dtype, use = LEFT_ALONE[why]
    s = Sketch()
    w, b = s.parameters("a", dtype, w=(8, 8), b=(8,))
    gm, ctx = s.done(*use(s, w, b))
    apply(gm, ctx, gather)
    assert "unshard a" in events(gm)
    assert_left_alone(gm, ctx, narrow)


def test_a_group_is_left_alone_where_a_view_of_a_cast_is_returned() -> None:
    s = Sketch()
    (w,) = s.parameters("a", w=(8, 8))
    gm, ctx = s.done(s.call(aten.t.default, low(s, w)))
    apply(gm, ctx, gather)
    assert_left_alone(gm, ctx, narrow)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("graph", [mlp_forward, mlp_backward])
def test_a_graph_without_casts_is_left_alone(graph, stage: int) -> None:
    assert_left_alone(*graph(2, stage=stage), narrow)
    gm, ctx = graph(2, stage=stage)
    apply(gm, ctx, gather)
    assert_left_alone(gm, ctx, narrow)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_narrow_replica_is_not_widened_for_a_cast_back(stage: int) -> None:
    gm, ctx = autocast_forward(stage=stage, param_dtype=torch.bfloat16)
    numbers = with_replicas(gm, ctx)
    expected = run(gm, ctx, numbers)
    apply(gm, ctx, gather)
    assert sorted(events(gm, "unshard", "widen")) == ["unshard a"] * 2 + ["widen a"] * 2
    applied = apply(gm, ctx, narrow)
    assert (applied.edits, applied.inserted) == (2, [])
    assert events(gm) == ["unshard a", "unshard a", "addmm", "relu"]
    torch.testing.assert_close(run(gm, ctx, numbers), expected, rtol=0, atol=0)
    apply(gm, ctx, group)
    assert events(gm) == ["refresh a", "weight a", "weight a", "addmm", "relu"]
    assert {node.meta["val"].dtype for node in edit.tagged(gm.graph, "refresh", "weight")} == {torch.bfloat16}
    torch.testing.assert_close(run(gm, ctx, numbers), expected, rtol=0, atol=0)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("other", ["no cast", "a cast to another dtype", "an output"])
def test_any_other_use_of_a_narrow_replica_keeps_its_widening(other: str, stage: int) -> None:
    s = Sketch(stage=stage, param_dtype=torch.bfloat16)
    (w,) = s.parameters("a", w=(8, 8))
    first = neg(s, low(s, w))
    second = {
        "no cast": lambda: s.call(aten.abs.default, w),
        "a cast to another dtype": lambda: s.call(aten.abs.default, low(s, w, torch.float16)),
        "an output": lambda: w,
    }[other]()
    gm, ctx = s.done(first, second)
    numbers = with_replicas(gm, ctx)
    expected = run(gm, ctx, numbers)
    assert apply(gm, ctx, gather, narrow).edits == 1
    use = {"no cast": ["abs"], "a cast to another dtype": ["_to_copy", "abs"], "an output": []}[other]
    assert events(gm) == ["unshard a", "widen a", "neg", *use]
    torch.testing.assert_close(run(gm, ctx, numbers), expected, rtol=0, atol=0)


@pytest.mark.parametrize("stage", [1, 2])
def test_the_casts_of_a_replica_as_wide_as_the_parameters_stay(stage: int) -> None:
    gm, ctx = autocast_forward(stage=stage)  # as torch.autocast has it: there is nothing to gather less of
    apply(gm, ctx, gather)
    assert_left_alone(gm, ctx, narrow)
    assert events(gm) == ["unshard a", "unshard a", "_to_copy", "_to_copy", "addmm", "relu"]


@pytest.mark.parametrize("stage", [1, 2])
def test_a_returned_cast_is_no_view_of_the_replica(stage: int) -> None:
    s = Sketch(stage=stage, param_dtype=torch.bfloat16)
    (w,) = s.parameters("a", w=(8, 8))
    gm, ctx = s.done(low(s, w))
    numbers = with_replicas(gm, ctx)
    apply(gm, ctx, gather, narrow, group)
    (returned,) = run(gm, ctx, numbers)
    held = returned.clone()
    numbers.inputs["replica_a"].zero_()  # as the refresh after the next optimizer step writes to it
    torch.testing.assert_close(returned, held, rtol=0, atol=0)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_backward_gathers_narrowly_what_forward_would_have_saved_as_a_cast(stage: int) -> None:
    def forward() -> tuple[GraphModule, Context, Node]:
        s = Sketch(world_size=1, stage=stage, param_dtype=torch.bfloat16)
        x = s.input("x", 4, 8, dtype=torch.bfloat16)
        (w,) = s.parameters("a", w=(8, 8))
        w16 = low(s, w)
        t = s.call(aten.permute.default, w16, [1, 0])
        return *s.done(s.call(aten.mm.default, x, w16), x, t, saved=[1, 2]), t

    gm, ctx, saved = forward()
    s = Sketch("backward", world_size=1, stage=stage, param_dtype=torch.bfloat16, handover=ctx.handover)
    s.mode = saved.meta["val"].fake_mode
    t = s.input(saved.name, 8, 8, dtype=torch.bfloat16)
    dy = s.input("tangents_1", 4, 8, dtype=torch.bfloat16)
    bw, bctx = s.done(s.call(aten.mm.default, dy, t))
    numbers = with_replicas(gm, ctx)
    _, _, value = run(gm, ctx, numbers)
    numbers.inputs |= {saved.name: value, "tangents_1": torch.randn(4, 8).bfloat16()}
    expected = run(bw, bctx, numbers)
    before = up_to(narrow)[:-1]
    apply(gm, ctx, *before)
    apply(bw, bctx, *before)
    assert events(bw, "rebuild") == ["rebuild a"] * 2  # the cast and the permutation
    assert apply(bw, bctx, narrow).edits == 1
    assert events(bw) == [*(["narrow a"] if stage == 3 else []), "unshard a", "rebuild a", "mm"]
    torch.testing.assert_close(run(bw, bctx, numbers), expected, rtol=0, atol=0)


def test_a_cast_starts_ahead_together_with_its_gather() -> None:
    gm, ctx = autocast_forward(layers="abcd")
    apply(gm, ctx, *up_to(prefetch))
    start = {layer: [f"narrow {layer}", f"all_gather {layer}"] for layer in "abcd"}
    use = {layer: [f"wait {layer}", *[f"weight {layer}"] * 2, "addmm", "relu"] for layer in "abcd"}
    assert events(gm) == [
        *(*start["a"], *start["b"], *start["c"], *use["a"]),
        *(*start["d"], *use["b"], *use["c"], *use["d"]),
    ]
    assert ctx.found.gathered_bytes == 3 * 256  # as travelled, not as held


def test_the_first_cast_moves_to_the_top_with_its_gather() -> None:
    s = Sketch()
    x = s.call(aten.relu.default, s.input("x", 4, 8, dtype=torch.bfloat16))
    (w,) = s.parameters("a", w=(8, 8))
    gm, ctx = s.done(s.call(aten.mm.default, x, low(s, w)))
    apply(gm, ctx, *up_to(prefetch))
    assert events(gm) == ["narrow a", "all_gather a", "relu", "wait a", "weight a", "mm"]


def test_a_budget_counts_what_is_gathered() -> None:
    gm, ctx = autocast_forward(layers="abc", memory_budget=3 * 256)
    apply(gm, ctx, *up_to(prefetch))
    starts = [f"{kind} {layer}" for layer in "abc" for kind in ("narrow", "all_gather")]
    assert events(gm)[:7] == [*starts, "wait a"]


def test_the_narrow_buffer_is_discarded_behind_its_last_use() -> None:
    gm, ctx = autocast_forward(layers="ab")
    assert apply(gm, ctx, *up_to(discard)).edits == 2
    schedule = events(gm)
    for layer in "ab":
        at = schedule.index(f"discard {layer}")
        assert schedule[at - 1] == "addmm" and schedule[at + 1] == "relu"


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_the_buffer_that_a_gather_fills_is_narrow_too(backend: str) -> None:
    gm, ctx = autocast_forward(backend=backend)
    apply(gm, ctx, *up_to(lower))
    nodes = edit.tagged(gm.graph, "all_gather", "wait")
    assert [node.meta["zerofx"].kind for node in nodes] == ["all_gather", "wait"]
    assert {node.meta["val"].dtype for node in nodes} == {torch.bfloat16}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_one_rank_the_numbers_stay(cast: str, dtype: torch.dtype) -> None:
    s = Sketch(world_size=1)
    x = s.input("x", 4, 8, dtype=dtype)
    w, b = s.parameters("a", w=(8, 8), b=(8,))
    low_w, low_b = (CASTS[cast](s, p, dtype) for p in (w, b))
    gm, ctx = s.done(s.call(aten.addmm.default, low_b, x, low_w), neg(s, low_b))
    numbers = Numbers.random(gm, ctx)
    expected = run(gm, ctx, numbers)
    for pass_ in up_to(lower):
        assert (apply(gm, ctx, pass_).edits > 0) == (pass_ in (gather, narrow, group))
        torch.testing.assert_close(run(gm, ctx, numbers), expected, rtol=0, atol=0)


def run_on_ranks(backend: str) -> None:
    """Bit by bit what the graph computed from the whole weights, after every pass."""
    process_group, rank = dist.group.WORLD.group_name, dist.get_rank()
    gm, ctx = autocast_forward(layers="abc", process_group=process_group, backend=backend)
    numbers = Numbers.random(gm, ctx)
    expected = run(gm, ctx, numbers)
    for pass_ in up_to(lower):
        apply(gm, ctx, pass_)
        got = run(gm, ctx, numbers, rank)
        assert all(torch.equal(value, want) for value, want in zip(got, expected, strict=True)), pass_.__name__
    assert events(gm, "narrow") == ["narrow a", "narrow b", "narrow c"]


@pytest.mark.parametrize("backend", ["gloo", "another"])
def test_on_two_ranks_the_numbers_stay(workers2: Workers, backend: str) -> None:
    workers2.run(run_on_ranks, backend)


def gather_as(dtype: torch.dtype) -> bool:
    s = Sketch(process_group=dist.group.WORLD.group_name)
    (w,) = s.parameters("a", w=(16, 16))
    gm, ctx = s.done(neg(s, low(s, low(s, w, dtype), torch.float32)))
    numbers = Numbers.random(gm, ctx)
    expected = run(gm, ctx, numbers)
    apply(gm, ctx, *up_to(lower))
    return torch.equal(run(gm, ctx, numbers, dist.get_rank())[0], expected[0])


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        torch.int8,
        torch.int16,
    ],
)
def test_on_two_ranks_weights_arrive_whatever_they_are_cast_to(workers2: Workers, dtype: torch.dtype) -> None:
    assert workers2.run(gather_as, dtype) == [True, True]


@pytest.mark.parametrize("world_size", [1, 2, 7, 64])
def test_shapes_hold_at_any_world_size(fake_world, world_size: int) -> None:
    fake_world(world_size)
    shapes = {"scalar": (), "empty": (0, 3), "vector": (5,), "matrix": (7, 3)}
    s = Sketch(world_size=world_size, process_group=dist.group.WORLD.group_name)
    gm, ctx = s.done(*(neg(s, low(s, p)) for p in s.parameters("a", **shapes)))
    numbers = Numbers.random(gm, ctx)
    assert apply(gm, ctx, gather, narrow).edits == 4
    for pass_ in (None, group):
        if pass_ is not None:
            apply(gm, ctx, pass_)
        outputs = run(gm, ctx, numbers)  # compares every shape and dtype with meta["val"]
        assert [(tuple(x.shape), x.dtype) for x in outputs] == [(shape, torch.bfloat16) for shape in shapes.values()]
