"""quantize: codes around the collectives of whole groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.testing import FileCheck

from tests.passes.facts import change
from tests.passes.graphs import apply, assert_documented, assert_left_alone, events, mlp_backward, mlp_forward, up_to
from tests.passes.mutants import bypass, inner, instead, set_arg, tagged, what_verify_misses
from zerofx.compiler.rewriting import copy_graph
from zerofx.features.step_in_backward.step import step
from zerofx.features.wire.quantize import quantize
from zerofx.model.wire import Wire
from zerofx.passes import PIPELINE, Context
from zerofx.passes.context import Meanings

BEFORE = up_to(step)
INT8 = Wire("int8", "int4", block=32)


def calls(gm: GraphModule) -> str:
    return "\n".join(f"{n.name} = {n.target}{n.args}" for n in gm.graph.nodes if n.op == "call_function")


def test_a_shard_is_written_before_its_gather_and_read_behind_the_wait() -> None:
    gm, ctx = mlp_forward(layers="ab", wire=INT8)
    found = apply(gm, ctx, *BEFORE, quantize)
    assert found.edits == 2
    FileCheck().check("quantize").check("(shard_a, 1, 'int8/32'").check("all_gather_into_tensor").check(
        "(quantize_default, 2, 'pg')"
    ).run(calls(gm))
    assert [e for e in events(gm, "quantize", "all_gather", "wait", "dequantize", "discard") if e.endswith(" a")] == [
        "quantize a",
        "all_gather a",
        "wait a",
        "dequantize a",
        "discard a",
    ]
    FileCheck().check("wait_tensor_default").check("dequantize_default").check("as_strided").check(
        "dequantize_default"
    ).run(calls(gm))
    assert_documented(found.inserted)


def test_gradients_are_exchanged_in_codes_and_summed_with_the_pack_itself() -> None:
    gm, ctx = mlp_backward(layers="ab", wire=INT8)
    found = apply(gm, ctx, *BEFORE, quantize)
    of_b = [
        e
        for e in events(gm, "pack", "quantize", "reduce_scatter", "wait_grad", "dequantize", "gradient")
        if e[-1] == "b"
    ]
    assert of_b[-6:] == ["pack b", "quantize b", "reduce_scatter b", "wait_grad b", "dequantize b", "gradient b"]
    FileCheck().check("sum_quantized").check("'int4/32?'").check("mul.Tensor").run(calls(gm))
    assert_documented(found.inserted)


def test_an_average_keeps_the_dtype_of_its_group() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        gm, ctx = mlp_backward(layers="a", wire=INT8, reduce_dtype=dtype)
        apply(gm, ctx, *BEFORE, quantize)
        *_, gradient = gm.graph.output_node().args[0]
        assert gradient.meta["val"].dtype == torch.float32


def test_the_buffers_have_the_sizes_of_rows() -> None:
    gm, ctx = mlp_forward(layers="a", wire=Wire("int8", block=32))
    apply(gm, ctx, *BEFORE, quantize)
    sizes = {n.meta["zerofx"].kind: n.meta["val"] for n in gm.graph.nodes if "zerofx" in n.meta}
    layout = ctx.found.shards[0]
    assert sizes["quantize"].dtype == sizes["wait"].dtype == torch.uint8
    assert sizes["wait"].numel() == 2 * sizes["quantize"].numel()
    assert sizes["dequantize"].shape == (layout.numel,) and sizes["dequantize"].dtype == torch.float32


def left_alone(gm: GraphModule, ctx: Context) -> None:
    apply(gm, ctx, *BEFORE)
    assert_left_alone(gm, ctx, quantize)


def test_graphs_without_collectives_or_codes_are_left_alone() -> None:
    left_alone(*mlp_forward())
    left_alone(*mlp_backward())
    left_alone(*mlp_forward(world_size=1, wire=INT8))
    left_alone(*mlp_backward(world_size=1, wire=INT8))
    left_alone(*mlp_forward(wire=Wire(gradients="int8")))
    left_alone(*mlp_forward(stage=2, wire=INT8))


def test_what_is_as_short_already_travels_as_it_is() -> None:
    left_alone(*mlp_backward(wire=Wire(gradients="bf16"), reduce_dtype=torch.bfloat16))


# ---- between the replicas of a mesh ---------------------------------------------------------------------------------

NODES: dict[str, Any] = {"second_group": "columns", "wire": Wire(None, "int4", block=32, between="nodes")}
ROWS = NODES | {"replicas": 3}
DIVIDED = NODES | {"replicas": 2, "divides_between": True}
c10d, zero = torch.ops._c10d_functional, torch.ops.zerofx


def test_the_sum_of_a_row_is_written_once_and_all_that_replicas_sent_is_added_up() -> None:
    gm, ctx = mlp_backward(layers="ab", **ROWS)
    found = apply(gm, ctx, *BEFORE, quantize)
    assert found.edits == 2
    assert_documented(found.inserted)
    for start in tagged(gm, "reduce_scatter"):
        assert start.target is c10d.reduce_scatter_tensor.default
    for start in tagged(gm, "sum_replicas"):
        assert (start.target, start.args[1:]) == (c10d.all_gather_into_tensor.default, (3, "columns"))
        row = start.args[0]
        assert row.args[1:3] == (1, "int4/32?") and row.args[0].meta["zerofx"].kind == "wait_grad"
        (wait,) = start.users
        (total,) = wait.users
        assert total.target is zero.sum_replicas_quantized.default and total.meta["val"].dtype == torch.float32
    assert [e[:-2] for e in events(gm, "quantize", "sum_replicas", "wait_replicas", "dequantize") if e[-1] == "b"] == [
        "quantize",
        "sum_replicas",
        "wait_replicas",
        "dequantize",
    ]


def test_replicas_that_share_the_optimizers_work_exchange_parts_of_a_sum() -> None:
    gm, ctx = mlp_backward(layers="ab", **DIVIDED)
    apply(gm, ctx, *BEFORE, quantize)
    for total in (n for n in tagged(gm, "dequantize") if n.target is zero.sum_quantized.default):
        sums, wait, numel, *_, group, within = total.args
        assert sums.meta["zerofx"].kind == "wait_grad" and wait.meta["zerofx"].kind == "wait_replicas"
        assert (2 * numel, group, within) == (sums.meta["val"].numel(), "columns", "pg")


def test_weights_of_several_rows_are_gathered_in_codes_and_near_ones_as_they_are() -> None:
    wire = Wire("int8", "int4", block=32, between="nodes")
    assert apply(*mlp_forward(wire=wire, crosses=True), *BEFORE, quantize).edits == 3
    left_alone(*mlp_forward(**{**ROWS, "wire": wire}))
    left_alone(*mlp_forward(wire=wire))
    left_alone(*mlp_backward(wire=wire))


def the_code_of_another_row(gm: GraphModule, ctx: Context) -> None:
    _set(_call(gm, "quantize"), -1, "columns")


def a_sum_that_is_written_twice(gm: GraphModule, ctx: Context) -> None:
    node = _node(gm, "quantize")
    instead(node, zero.quantize.default, *node.args[1:])


def codes_that_are_added_up(gm: GraphModule, ctx: Context) -> None:
    start = _node(gm, "sum_replicas")
    start.target, start.args = c10d.all_reduce.default, (start.args[0], "sum", "columns")


def codes_that_stay_in_the_row(gm: GraphModule, ctx: Context) -> None:
    _set(_call(gm, "sum_replicas"), -1, "pg")


def a_sum_of_one_replica_less(gm: GraphModule, ctx: Context) -> None:
    _set(_call(gm, "sum_replicas"), -2, ctx.replicas - 1)


def what_another_rank_of_the_row_has_sent(gm: GraphModule, ctx: Context) -> None:
    _set(_call(gm, "dequantize"), -1, "columns")


def codes_of_other_bits(gm: GraphModule, ctx: Context) -> None:
    call = _call(gm, "dequantize")
    _set(call, next(i for i, x in enumerate(call.args) if isinstance(x, str)), "int8/32")


def the_sum_of_a_row_in_place_of_all(gm: GraphModule, ctx: Context) -> None:
    bypass(_node(gm, "dequantize"), inner(gm, _node(gm, "quantize")).args[0])  # type: ignore[arg-type]


def a_row_that_travels_in_codes(gm: GraphModule, ctx: Context) -> None:
    change(ctx, wire=Wire(None, "int4", block=32), crosses=False)


BROKEN: dict[Callable[[GraphModule, Context], None], set[str]] = {
    the_code_of_another_row: {"group"},
    a_sum_that_is_written_twice: {"wire"},
    codes_that_are_added_up: {"wire"},
    codes_that_stay_in_the_row: {"group"},
    a_sum_of_one_replica_less: {"group"},
    what_another_rank_of_the_row_has_sent: {"group"},
    codes_of_other_bits: {"wire"},
    the_sum_of_a_row_in_place_of_all: {"reduction"},
    a_row_that_travels_in_codes: {"wire"},
}


@pytest.mark.parametrize("scheme", [ROWS, DIVIDED], ids=["all of a sum", "a part of it"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_what_breaks_a_rule_of_codes_between_replicas_is_found(scheme: Any, world_size: int, backend: str) -> None:
    gm, ctx = mlp_backward(world_size=world_size, backend=backend, **scheme)
    ctx.before, ctx.handover.meanings = copy_graph(gm), Meanings()
    apply(gm, ctx, *PIPELINE)
    mutants = BROKEN.items()
    if scheme is DIVIDED and backend == "nccl":  # an exchange says how much it sends each, not how many there are
        mutants = {mutant: rules for mutant, rules in mutants if mutant is not a_sum_of_one_replica_less}.items()
    missed = what_verify_misses(((gm, ctx), mutant, rules) for mutant, rules in mutants)
    assert not missed, "\n".join(missed)


def _node(gm: GraphModule, kind: str) -> Any:
    return next(n for n in tagged(gm, kind) if kind != "dequantize" or n.target is not zero.dequantize.default)


def _call(gm: GraphModule, kind: str) -> Any:
    return inner(gm, _node(gm, kind))


def _set(call: Any, i: int, value: Any) -> None:
    set_arg(call, i % len(call.args), value)
