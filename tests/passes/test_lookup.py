"""lookup: of a table that is only looked up, rows travel instead of the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
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
    run,
    up_to,
)
from tests.workers import Workers
from zerofx.features.lookups.lookup import lookup
from zerofx.passes import Context, edit, gather, group, narrow, prefetch, reduce

LOW = torch.bfloat16
FIRST = (gather, narrow, reduce)


def forward(
    world_size: int = 2, length: int = 64, width: int = 8, cast: torch.dtype | None = None, **context: Any
) -> tuple[GraphModule, Context]:
    """``relu(table[ids] @ w)``; the table is a group of its own."""
    s = Sketch(world_size=world_size, **{"lookups": True, **context})
    ids = s.input("ids", 2, 3, dtype=torch.int64)
    (table,) = s.parameters("t", table=(length, width))
    (w,) = s.parameters("a", w=(width, 4))
    if cast is not None:
        table, w = s.call(edit.CAST, table, cast), s.call(edit.CAST, w, cast)
    y = s.call(aten.embedding.default, table, ids, 1)
    y = s.call(aten.view.default, y, [6, width])
    return s.done(s.call(aten.relu.default, s.call(aten.mm.default, y, w)))


def backward(
    world_size: int = 2, length: int = 64, width: int = 8, by_frequency: bool = False, **context: Any
) -> tuple[GraphModule, Context]:
    """The gradients of a table and of a weight that was read behind it; row 1 is the padding's."""
    s = Sketch("backward", world_size=world_size, **{"lookups": True, **context})
    ids, x = s.input("ids", 2, 3, dtype=torch.int64), s.input("x", 2, 3, width)
    s.group("t", table=(length, width))
    s.group("a", w=(2, 3, width))
    dy = s.call(aten.neg.default, x)
    dw = s.call(aten.mul.Tensor, dy, x)
    dt = s.call(aten.embedding_dense_backward.default, dy, ids, length, 1, by_frequency)
    return s.done(dt, dw, x, gradients={0: "table", 1: "w"})


def test_rows_are_picked_from_the_shard_and_exchanged() -> None:
    gm, ctx = forward()
    apply(gm, ctx, *FIRST)
    applied = apply(gm, ctx, lookup)
    assert applied.edits == 1
    FileCheck().check("reshape.default(ids, [-1])").check_next(
        "all_gather_into_tensor.default(reshape_default, 2, 'pg')"
    ).check_next("wait_tensor_default = torch.ops._c10d_functional.wait_tensor.default(all_gather").check_next(
        "own_rows.default(shard_t, wait_tensor_default, 0, 64, 8, 'pg')"
    ).check_next("reduce_scatter_tensor.default(own_rows_default, 'sum', 2, 'pg')").check_next(
        "wait_tensor_default_1 = torch.ops._c10d_functional.wait_tensor.default(reduce_scatter"
    ).check_next("view_default = torch.ops.aten.view.default(wait_tensor_default_1, [2, 3, 8])").check_next(
        "view = torch.ops.aten.view.default(view_default, [6, 8])"
    ).check_not("embedding").run(gm.code)
    lines = {kind: {1} for kind in ("ask", "asked", "rows", "answer", "answered")}
    assert_documented(applied.inserted, lines)


def test_rows_gradients_are_told_and_added_up_at_the_end() -> None:
    gm, ctx = backward()
    apply(gm, ctx, *FIRST)
    applied = apply(gm, ctx, lookup)
    assert applied.edits == 1
    FileCheck().check("reshape.default(ids, [-1])").check_next("all_gather_into_tensor.default(").check_next(
        "reshape.default(neg, [-1])"
    ).check_next("all_gather_into_tensor.default(").check_count("wait_tensor.default(", 2).check_next(
        "sum_rows.default(wait_tensor_default_1, wait_tensor_default, 0, 64, 8, 1, 256, 'pg')"
    ).check_next("mul.Tensor(sum_rows_default, 0.5)").check_next("return").check_not("embedding").run(gm.code)
    lines = {kind: {3} for kind in ("ask", "asked", "rows", "give", "given", "gradient")}
    assert_documented(applied.inserted, lines)


def test_the_other_gradients_are_reduced_as_ever() -> None:
    gm, ctx = backward()
    apply(gm, ctx, *up_to(group))
    assert [reduction.layout.name for reduction in ctx.found.reductions] == ["a", "t"]
    assert events(gm, "reduce_scatter", "wait_grad") == ["reduce_scatter a", "wait_grad a"]


def test_gathers_start_behind_what_is_asked_of_tables() -> None:
    gm, ctx = forward()
    apply(gm, ctx, *up_to(prefetch))
    kinds = "ask", "asked", "answer", "answered", "all_gather", "wait"
    assert events(gm, *kinds) == ["ask t", "asked t", "answer t", "all_gather a", "answered t", "wait a"]


def test_rows_are_cast_rather_than_the_shard() -> None:
    gm, ctx = forward(cast=LOW)
    apply(gm, ctx, *FIRST, lookup)
    FileCheck().check("own_rows.default(shard_t").check_next("convert_element_type.default(own_rows").check_next(
        "reduce_scatter_tensor.default(convert"
    ).check_not("convert_element_type.default(shard_t").run(gm.code)


def read_otherwise() -> tuple[GraphModule, Context]:
    s = Sketch(lookups=True)
    ids = s.input("ids", 6, dtype=torch.int64)
    (table,) = s.parameters("t", table=(64, 8))
    return s.done(s.call(aten.mm.default, s.call(aten.embedding.default, table, ids), s.call(aten.t.default, table)))


def beside_others() -> tuple[GraphModule, Context]:
    s = Sketch(lookups=True)
    ids = s.input("ids", 6, dtype=torch.int64)
    table, scale = s.parameters("t", table=(64, 8), scale=(8,))
    return s.done(s.call(aten.mul.Tensor, s.call(aten.embedding.default, table, ids), scale))


def of_any_number() -> tuple[GraphModule, Context]:
    s = Sketch(lookups=True)
    with s.mode:
        s.mode.shape_env = ShapeEnv()
        ids = s.mode.from_tensor(torch.zeros(6, dtype=torch.int64))
        size = s.mode.shape_env.create_unbacked_symint()
        node = s.input("ids", 6, dtype=torch.int64)
        node.meta["val"] = ids.new_empty(size)
    (table,) = s.parameters("t", table=(64, 8))
    return s.done(s.call(aten.embedding.default, table, node))


def two_gradients() -> tuple[GraphModule, Context]:
    s = Sketch("backward", lookups=True)
    ids, x = s.input("ids", 6, dtype=torch.int64), s.input("x", 6, 8)
    s.group("t", table=(64, 8))
    parts = [s.call(aten.embedding_dense_backward.default, dy, ids, 64, -1, False) for dy in (x, x)]
    return s.done(s.call(aten.add.Tensor, *parts), gradients={0: "table"})


@pytest.mark.parametrize(
    "graph",
    [
        lambda: forward(lookups=False),
        lambda: forward(length=8),  # 2 x 6 rows, and their indices, are no fewer bytes
        lambda: forward(world_size=1),
        lambda: forward(stage=2),
        lambda: forward(in_common=True),
        read_otherwise,
        beside_others,
        of_any_number,
        lambda: backward(lookups=False),
        lambda: backward(length=8),
        lambda: backward(world_size=1),
        lambda: backward(sync="keep"),
        lambda: backward(sync="merge"),
        lambda: backward(by_frequency=True),
        two_gradients,
    ],
)
def test_it_leaves_alone(graph: Callable[[], tuple[GraphModule, Context]]) -> None:
    gm, ctx = graph()
    apply(gm, ctx, *FIRST)
    assert_left_alone(gm, ctx, lookup)


# ------------------------------------------------------------------ numbers

SHAPES = [(64, 8), (61, 5), (97, 3), (41, 31)]  # the last three: no rank's shard begins where a row does


def rows_of_a_rank(shape: tuple[int, int], cast: torch.dtype | None) -> tuple[int, list[torch.Tensor]]:
    world, rank = dist.get_world_size(), dist.get_rank()
    gm, ctx = forward(world, *shape, cast, process_group=dist.group.WORLD.group_name)
    numbers = Numbers.random(gm, ctx)
    generator = torch.Generator().manual_seed(rank)
    numbers.inputs["ids"] = torch.randint(shape[0], (2, 3), generator=generator)
    before = run(gm, ctx, numbers)
    edits = apply(gm, ctx, *FIRST, lookup).edits
    return edits, [run(gm, ctx, numbers, rank)[0], before[0]]


@pytest.mark.parametrize("cast", [None, LOW])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_those_of_the_table_to_the_bit(make_workers, shape: tuple[int, int], cast: torch.dtype | None) -> None:
    for world_size in (2, 3):
        for edits, (found, wanted) in make_workers(world_size).run(rows_of_a_rank, shape, cast):
            assert edits == 1
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def gradient_of_a_rank(shape: tuple[int, int], reduce_dtype: torch.dtype | None) -> Any:
    """This rank's shard of the table's gradient, by `lookup`; and, summed in float64, what it is to be."""
    world, rank = dist.get_world_size(), dist.get_rank()
    gm, ctx = backward(world, *shape, process_group=dist.group.WORLD.group_name, reduce_dtype=reduce_dtype)
    table = ctx.gradients[0].layout
    numbers = Numbers.random(gm, ctx, seed=rank)
    generator = torch.Generator().manual_seed(rank)
    numbers.inputs["ids"] = torch.randint(shape[0], (2, 3), generator=generator)
    numbers.inputs["ids"][1, :2] = torch.tensor([numbers.inputs["ids"][0, 0], 1])  # one again, and the padding's
    whole = torch.zeros(table.numel, dtype=torch.float64)
    table.view(whole, table.slots[0]).copy_(run(gm, ctx, numbers)[0])
    dist.all_reduce(whole)
    wanted = whole.chunk(world)[rank] / world
    assert whole.any()
    edits = apply(gm, ctx, *FIRST, lookup).edits
    return edits, gradients(ctx, run(gm, ctx, numbers, rank), rank)[table], wanted


@pytest.mark.parametrize("reduce_dtype", [None, LOW])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_the_average_of_all_ranks(
    make_workers, shape: tuple[int, int], reduce_dtype: torch.dtype | None
) -> None:
    for world_size in (2, 3):
        for edits, found, wanted in make_workers(world_size).run(gradient_of_a_rank, shape, reduce_dtype):
            assert edits == 1
            tolerance = 0.02 if reduce_dtype else 1e-6
            torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)
            assert found.dtype == torch.float32


def out_of_range(index: int) -> str:
    """What a rank is told that gave valid indices, as another did not."""
    gm, ctx = forward(dist.get_world_size(), process_group=dist.group.WORLD.group_name)
    numbers = Numbers.random(gm, ctx)
    numbers.inputs["ids"] = torch.full((2, 3), index if dist.get_rank() == 1 else 0)
    apply(gm, ctx, *FIRST, lookup)
    with pytest.raises(IndexError) as raised:
        run(gm, ctx, numbers, dist.get_rank())
    return str(raised.value)


@pytest.mark.parametrize("index", [-1, 64])
def test_an_index_out_of_range_is_refused_on_every_rank(workers2: Workers, index: int) -> None:
    for said in workers2.run(out_of_range, index):
        assert "64 rows" in said and f"Found {index}." in said
