"""narrow: a group of which some weights are used as they are is gathered twice, most of it in 16 bits."""

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
    run,
    up_to,
)
from tests.workers import Workers
from zerofx.passes import Context, discard, edit, gather, group, lower, narrow, prefetch

LOW, WIDE = torch.bfloat16, torch.float32
LAYERS: dict[str, dict[str, tuple[int, ...]]] = {  # "n…" are norms, "w…" matrices
    "norm first": {"n": (64,), "w": (64, 64)},
    "norms on every rank": {"n": (64,), "w": (64, 64), "v": (64, 64), "nn": (64,)},
    "a norm that straddles two ranks": {"w": (64, 64), "n": (128,), "v": (64, 64)},
    "norms of odd sizes": {"n": (5,), "w": (64, 64), "nn": (33,), "v": (64, 64), "nnn": ()},
    "an empty norm": {"w": (64, 64), "n": (0, 3), "v": (64, 64), "nn": (7,)},
    "nothing but an empty norm": {"w": (64, 64), "n": (0, 3)},
}
shapes = pytest.mark.parametrize("shapes", LAYERS.values(), ids=LAYERS)


def cast(s: Sketch, x: Node, dtype: torch.dtype = LOW) -> Node:
    return s.call(aten._to_copy.default, x, dtype=dtype)


def neg(s: Sketch, x: Node) -> Node:
    return s.call(aten.neg.default, x)


def uses(shapes: dict[str, tuple[int, ...]], **context: Any) -> tuple[GraphModule, Context]:
    """Each weight used by itself: a norm as it is, a matrix in 16 bits."""
    s = Sketch(**context)
    weights = s.parameters("a", **shapes)
    return s.done(*(neg(s, w if w.name.startswith("n") else cast(s, w)) for w in weights))


def blocks(layers: str = "a", **context: Any) -> tuple[GraphModule, Context]:
    """``x = mm(low(x * n + m), low(w))``, once per layer, in a group of ``n, w, m``."""
    s = Sketch(**context)
    x = s.input("x", 4, 64)
    for name in layers:
        n, w, m = s.parameters(name, **{f"{name}n": (64,), f"{name}w": (64, 64), f"{name}m": (64,)})
        h = cast(s, s.call(aten.add.Tensor, s.call(aten.mul.Tensor, x, n), m))
        x = s.call(aten.mm.default, h, cast(s, w))
    return s.done(x)


def test_weights_used_as_they_are_get_a_gather_of_their_own() -> None:
    gm, ctx = uses(LAYERS["norm first"])
    apply(gm, ctx, gather)
    applied = apply(gm, ctx, narrow)
    assert applied.edits == 1
    FileCheck().check("def forward(self, shard_a)").check_next(
        "slice_tensor = torch.ops.aten.slice.Tensor(shard_a, 0, 0, 64)"
    ).check_next(
        "convert_element_type_default = torch.ops.prims.convert_element_type.default(shard_a, torch.bfloat16)"
    ).check_next("unshard_default = torch.ops.zerofx.unshard.default(slice_tensor, [64], 0, 2, 'pg')").check_next(
        "unshard.default(convert_element_type_default, [64, 64], 64, 2, 'pg')"
    ).check_next("neg.default(unshard_default)").check_next("neg.default(unshard_default_1)").run(gm.code)
    assert_documented(applied.inserted, {"narrow": {1}})
    dtypes = [node.meta["val"].dtype for node in edit.tagged(gm.graph, "unshard")]
    assert dtypes == [WIDE, LOW]
    applied = apply(gm, ctx, group)
    FileCheck().check_count("all_gather_into_tensor.default(", 2, exactly=True).run(gm.code)
    assert events(gm)[2:8] == [*["all_gather a", "wait a", "weight a"] * 2]
    assert_documented(applied.inserted)


def test_several_ranges_of_the_shard_travel_end_to_end() -> None:
    gm, ctx = uses(LAYERS["norms on every rank"])  # n: rank 0, from 0 on; nn: rank 1, at its shard's end
    apply(gm, ctx, gather, narrow)
    FileCheck().check("slice_tensor = torch.ops.aten.slice.Tensor(shard_a, 0, 0, 64)").check_next(
        "slice_tensor_1 = torch.ops.aten.slice.Tensor(shard_a, 0, 4096, 4160)"
    ).check_next("cat_default = torch.ops.aten.cat.default([slice_tensor, slice_tensor_1])").check(
        "unshard.default(cat_default, [64], 0, 2, 'pg')"
    ).check("unshard.default(cat_default, [64], 192, 2, 'pg')").run(gm.code)


def test_a_weight_that_straddles_two_ranks_is_a_view_from_the_end_of_one_part_into_the_next() -> None:
    gm, ctx = uses(LAYERS["a norm that straddles two ranks"])
    apply(gm, ctx, gather, narrow)
    FileCheck().check("slice.Tensor(shard_a, 0, 0, 64)").check_next("slice.Tensor(shard_a, 0, 4096, 4160)").check(
        "unshard.default(cat_default, [128], 64, 2, 'pg')"
    ).run(gm.code)


def test_little_more_than_half_the_bytes_are_gathered() -> None:
    moved = []
    for passes in ((gather, group), (gather, narrow, group)):
        gm, ctx = blocks()
        apply(gm, ctx, *passes)
        moved.append([node.meta["val"].nbytes for node in edit.tagged(gm.graph, "all_gather")])
    assert moved == [[16896], [1024, 8448]]


Use = Callable[[Sketch, Node], list[Node]]

WIDE_USES: dict[str, Use] = {
    "both ways": lambda s, n: [neg(s, n), neg(s, cast(s, n))],
    "in two low dtypes": lambda s, n: [neg(s, cast(s, n)), neg(s, cast(s, n, torch.float16))],
    "in a wider dtype": lambda s, n: [neg(s, cast(s, n, torch.float64))],
    "by the caller": lambda s, n: [n],
    "as a cast by the caller": lambda s, n: [cast(s, n)],
    "as a view of a cast by the caller": lambda s, n: [s.call(aten.view.default, cast(s, n), [8, 8])],
    "through a view": lambda s, n: [cast(s, s.call(aten.view.default, n, [8, 8]))],
}


def norm_used(use: Use) -> tuple[GraphModule, Context]:
    s = Sketch()
    n, w = s.parameters("a", n=(64,), w=(64, 64))
    return s.done(*use(s, n), neg(s, cast(s, w)))


@pytest.mark.parametrize("used", WIDE_USES)
def test_a_weight_counts_as_wide_that_is_used(used: str) -> None:
    gm, ctx = norm_used(WIDE_USES[used])
    kept = gm.code.count("_to_copy.default(") - 1
    assert apply(gm, ctx, gather, narrow).edits == 1  # the matrix' cast
    assert gm.code.count("_to_copy.default(") == kept
    found = {str(node.args[1]): node.meta["val"].dtype for node in edit.tagged(gm.graph, "unshard")}
    assert found == {"[64]": WIDE, "[64, 64]": LOW}


def test_a_returned_wide_weight_holds_on_to_its_own_buffer_only() -> None:
    gm, ctx = norm_used(WIDE_USES["by the caller"])
    apply(gm, ctx, *up_to(discard))
    (mark,) = edit.tagged(gm.graph, "discard")
    assert mark.args[0].meta["val"].dtype == LOW


@pytest.mark.parametrize(
    ("world_size", "shapes"),
    [
        (1, {"n": (64,), "w": (64, 64)}),  # nothing is gathered
        (2, {"n": (64, 64), "w": (64, 64)}),
        (2, {"n": (64,), "w": (64, 2)}),  # 64 of 96 elements of a shard
        (64, {"n": (64,), "w": (64, 64)}),  # 64 of 128
        (2, {"w": (8, 8), "n": (16, 64), "v": (8, 8)}),
    ],
)
def test_a_group_is_left_alone_where_two_gathers_do_not_pay(
    world_size: int, shapes: dict[str, tuple[int, ...]]
) -> None:
    gm, ctx = uses(shapes, world_size=world_size)
    apply(gm, ctx, gather)
    assert_left_alone(gm, ctx, narrow)


def test_a_group_with_casts_to_two_dtypes_is_left_alone() -> None:
    s = Sketch()
    n, w, v = s.parameters("a", n=(64,), w=(64, 64), v=(64, 64))
    gm, ctx = s.done(neg(s, n), neg(s, cast(s, w)), neg(s, cast(s, v, torch.float16)))
    apply(gm, ctx, gather)
    assert_left_alone(gm, ctx, narrow)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_replica_is_read_as_it_is(stage: int) -> None:
    gm, ctx = blocks(stage=stage)
    apply(gm, ctx, gather)
    assert_left_alone(gm, ctx, narrow)


def starts(layer: str) -> list[str]:
    """Ranges and shard first, as they are read."""
    return [*[f"narrow {layer}"] * 3, f"all_gather {layer}", f"narrow {layer}", f"all_gather {layer}"]


def use(layer: str) -> list[str]:
    return [f"wait {layer}", *[f"weight {layer}"] * 2, f"wait {layer}", f"weight {layer}", *COMPUTE]


COMPUTE = ["mul", "add", "_to_copy", "mm"]


def test_both_gathers_start_two_groups_ahead() -> None:
    gm, ctx = blocks("abcd")
    apply(gm, ctx, *up_to(prefetch))
    a, b, c, d = "abcd"
    assert events(gm) == [*starts(a), *starts(b), *starts(c), *use(a), *starts(d), *use(b), *use(c), *use(d)]
    assert ctx.found.gathered_bytes == 3 * (8448 + 1024)


def test_a_budget_counts_both_gathers() -> None:
    for layers, budget in enumerate((9472, 2 * 9472, 3 * 9472), start=1):
        gm, ctx = blocks("abc", memory_budget=budget)
        apply(gm, ctx, *up_to(prefetch))
        assert ctx.found.gathered_bytes == budget
        first = events(gm).index("wait a")
        assert events(gm)[:first] == [event for layer in "abc"[:layers] for event in starts(layer)]
    gm, ctx = blocks("abc", memory_budget=9471)
    with pytest.raises(ValueError, match=r"'a' alone needs 9,472 "):
        apply(gm, ctx, *up_to(prefetch))


def test_each_gathered_buffer_is_discarded_behind_its_own_last_use() -> None:
    gm, ctx = blocks()
    assert apply(gm, ctx, *up_to(discard)).edits == 2
    assert events(gm)[-6:] == ["mul", "add", "discard a", "_to_copy", "mm", "discard a"]


def test_inductor_waits_for_neither_gather_before_the_next_group_is_under_way() -> None:
    gm, ctx = blocks("ab", executor="inductor", backend="nccl")
    apply(gm, ctx, *up_to(lower))
    order = edit.positions(gm.graph)
    ahead = {node for node in edit.tagged(gm.graph, "all_gather") if node.meta["zerofx"].group == "b"}
    waits = [node for node in edit.tagged(gm.graph, "wait") if node.meta["zerofx"].group == "a"]
    assert len(ahead) == len(waits) == 2
    for wait in waits:
        assert ahead <= set(wait.args[0])  # what control_deps lets go first
        assert all(order[start] < order[wait] for start in ahead)


def run_on_ranks(backend: str) -> None:
    """Bit by bit what the graphs computed from the whole weights, after every pass."""
    rank = dist.get_rank()
    context = {
        "world_size": dist.get_world_size(),
        "process_group": dist.group.WORLD.group_name,
        "backend": backend,
    }
    graphs = [(shapes, lambda shapes=shapes: uses(shapes, **context)) for shapes in LAYERS.values()]
    for what, make in [*graphs, ("blocks", lambda: blocks("abc", **context))]:
        gm, ctx = make()
        numbers = Numbers.random(gm, ctx)
        expected = run(gm, ctx, numbers)
        for pass_ in up_to(lower):
            apply(gm, ctx, pass_)
            got = run(gm, ctx, numbers, rank)
            assert all(map(torch.equal, got, expected)), (what, pass_.__name__)
        assert {node.meta["val"].dtype for node in edit.tagged(gm.graph, "all_gather")} == {LOW, WIDE}, what


@pytest.mark.parametrize("backend", ["gloo", "another"])
def test_on_two_ranks_the_numbers_stay(workers2: Workers, backend: str) -> None:
    workers2.run(run_on_ranks, backend)


def test_on_three_ranks_the_numbers_stay(workers3: Workers) -> None:
    workers3.run(run_on_ranks, "gloo")


@shapes
@pytest.mark.parametrize("world_size", [1, 2, 7, 64])
def test_shapes_hold_at_any_world_size(fake_world, world_size: int, shapes: dict[str, tuple[int, ...]]) -> None:
    fake_world(world_size)
    shapes = {name: (512, 64) if len(shape) == 2 and shape[0] else shape for name, shape in shapes.items()}
    gm, ctx = uses(shapes, world_size=world_size, process_group=dist.group.WORLD.group_name)
    numbers = Numbers.random(gm, ctx)
    for pass_ in up_to(lower):
        apply(gm, ctx, pass_)
        outputs = run(gm, ctx, numbers)  # compares every shape and dtype with meta["val"]
        assert [tuple(x.shape) for x in outputs] == list(shapes.values())
    assert len(edit.tagged(gm.graph, "all_gather")) == (2 if world_size > 1 else 0)
