"""compress: codes around the collectives of whole groups."""

from __future__ import annotations

import torch
from torch.fx import GraphModule
from torch.testing import FileCheck

from tests.passes.graphs import apply, assert_documented, assert_left_alone, events, mlp_backward, mlp_forward, up_to
from zerofx.model.wire import Wire
from zerofx.passes import Context, compress, step

BEFORE = up_to(step)
INT8 = Wire("int8", "int4", block=32)


def calls(gm: GraphModule) -> str:
    return "\n".join(f"{n.name} = {n.target}{n.args}" for n in gm.graph.nodes if n.op == "call_function")


def test_a_shard_is_written_before_its_gather_and_read_behind_the_wait() -> None:
    gm, ctx = mlp_forward(layers="ab", wire=INT8)
    found = apply(gm, ctx, *BEFORE, compress)
    assert found.edits == 2
    FileCheck().check("encode").check("(shard_a, 1, 'int8/32'").check("all_gather_into_tensor").check(
        "(encode_default, 2, 'pg')"
    ).run(calls(gm))
    assert [e for e in events(gm, "encode", "all_gather", "wait", "decode", "discard") if e.endswith(" a")] == [
        "encode a",
        "all_gather a",
        "wait a",
        "decode a",
        "discard a",
    ]
    FileCheck().check("wait_tensor_default").check("decode_default").check("as_strided").check("decode_default").run(
        calls(gm)
    )
    assert_documented(found.inserted)


def test_gradients_are_exchanged_in_codes_and_summed_with_the_pack_itself() -> None:
    gm, ctx = mlp_backward(layers="ab", wire=INT8)
    found = apply(gm, ctx, *BEFORE, compress)
    of_b = [
        e for e in events(gm, "pack", "encode", "reduce_scatter", "wait_grad", "decode", "gradient") if e[-1] == "b"
    ]
    assert of_b[-6:] == ["pack b", "encode b", "reduce_scatter b", "wait_grad b", "decode b", "gradient b"]
    FileCheck().check("sum_coded").check("'int4/32?'").check("mul.Tensor").run(calls(gm))
    assert_documented(found.inserted)


def test_an_average_keeps_the_dtype_of_its_group() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        gm, ctx = mlp_backward(layers="a", wire=INT8, reduce_dtype=dtype)
        apply(gm, ctx, *BEFORE, compress)
        *_, gradient = gm.graph.output_node().args[0]
        assert gradient.meta["val"].dtype == torch.float32


def test_the_buffers_have_the_sizes_of_rows() -> None:
    gm, ctx = mlp_forward(layers="a", wire=Wire("int8", block=32))
    apply(gm, ctx, *BEFORE, compress)
    sizes = {n.meta["zerofx"].kind: n.meta["val"] for n in gm.graph.nodes if "zerofx" in n.meta}
    layout = ctx.shards[0]
    assert sizes["encode"].dtype == sizes["wait"].dtype == torch.uint8
    assert sizes["wait"].numel() == 2 * sizes["encode"].numel()
    assert sizes["decode"].shape == (layout.numel,) and sizes["decode"].dtype == torch.float32


def left_alone(gm: GraphModule, ctx: Context) -> None:
    apply(gm, ctx, *BEFORE)
    assert_left_alone(gm, ctx, compress)


def test_graphs_without_collectives_or_codes_are_left_alone() -> None:
    left_alone(*mlp_forward())
    left_alone(*mlp_backward())
    left_alone(*mlp_forward(world_size=1, wire=INT8))
    left_alone(*mlp_backward(world_size=1, wire=INT8))
    left_alone(*mlp_forward(wire=Wire(gradients="int8")))
    left_alone(*mlp_forward(stage=2, wire=INT8))


def test_what_is_as_short_already_travels_as_it_is() -> None:
    left_alone(*mlp_backward(wire=Wire(gradients="bf16"), reduce_dtype=torch.bfloat16))
