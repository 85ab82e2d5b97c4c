"""recompute_dequantized: what follows from frozen, quantized weights alone is recomputed; all else is left alone."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from tests.passes.graphs import Sketch, aten
from zerofx._torch import must_save
from zerofx.passes import recompute_dequantized


def marked(gm: GraphModule) -> list[str]:
    return [n.name for n in gm.graph.nodes if n.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE]


def joint(dtype: torch.dtype = torch.int8, *, trained: bool = False, read: bool = True) -> tuple[GraphModule, Any]:
    """``y = mm(x, codes.to(f32) * scale)`` and, where it is ``read``, the gradient of ``x``."""
    s = Sketch()
    (codes,) = s.parameters("codes", dtype=dtype, frozen=not trained, codes=(8, 4))
    (scale,) = s.parameters("scale", frozen=True, scale=(1, 4))
    x, dy = s.input("x", 3, 8), s.input("tangents_1", 3, 4)
    wide = s.call(aten._to_copy.default, codes, dtype=torch.float32)
    w = s.call(aten.mul.Tensor, wide, scale)
    y = s.call(aten.mm.default, x, w)
    dx = s.call(aten.mm.default, dy, s.call(aten.t.default, w)) if read else dy
    return s.done(y, dx)


def test_backward_dequantizes_once_more() -> None:
    gm, ctx = joint()
    assert recompute_dequantized(gm, ctx.parameters) == 3
    assert marked(gm) == ["_to_copy", "mul", "t"]


def test_floats_of_8_bits_are_quantized() -> None:
    gm, ctx = joint(torch.float8_e4m3fn)
    assert recompute_dequantized(gm, ctx.parameters) == 3


def test_what_backward_does_not_read_is_left_alone() -> None:
    gm, ctx = joint(read=False)
    assert recompute_dequantized(gm, ctx.parameters) == 0


def test_weights_that_are_not_quantized_or_are_trained_are_left_alone() -> None:
    for gm, ctx in (joint(torch.float32), joint(torch.bfloat16, trained=True)):
        assert recompute_dequantized(gm, ctx.parameters) == 0
        assert marked(gm) == []


def test_products_and_what_reads_activations_are_left_alone() -> None:
    s = Sketch()
    (codes,) = s.parameters("codes", dtype=torch.uint8, frozen=True, codes=(8, 8))
    (low,) = s.parameters("low", frozen=True, low=(8, 8))
    x, dy = s.input("x", 8, 8), s.input("tangents_1", 8, 8)
    wide = s.call(aten._to_copy.default, codes, dtype=torch.float32)
    product = s.call(aten.mm.default, wide, low)
    with_input = s.call(aten.mul.Tensor, wide, x)
    dx = s.call(aten.mul.Tensor, s.call(aten.mul.Tensor, dy, product), with_input)
    gm, ctx = s.done(with_input, dx)
    assert recompute_dequantized(gm, ctx.parameters) == 0


def test_what_somebody_has_marked_stays_as_it_is() -> None:
    gm, ctx = joint()
    (mul,) = (n for n in gm.graph.nodes if n.target is aten.mul.Tensor)
    must_save(mul)
    recompute_dequantized(gm, ctx.parameters)
    assert mul.meta["recompute"] is CheckpointPolicy.MUST_SAVE
    assert "mul" not in marked(gm)
