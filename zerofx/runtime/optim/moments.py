"""Moments in 8 bits, in an optimizer's state and on their way in and out of it.

====================  ==========================================  ===========================================
                      of a parameter with blocks                  of any other
====================  ==========================================  ===========================================
has them              4096 elements or more, not float64, and     --
                      no rank's boundary cuts a block
                      (`GroupLayout.keeps_blocks_whole`): the
                      same on every rank
``optimizer.state``   "exp_avg_codes" (int8), "exp_avg_sq_codes"  "exp_avg", "exp_avg_sq", float32 (float64
                      (uint8), of the parameter's shape;          if the parameter is)
                      "exp_avg_scales", "exp_avg_sq_scales",
                      float32 [blocks on this rank]
``state_dict()``      "exp_avg", "exp_avg_sq", float32            the same
====================  ==========================================  ===========================================

So a ``state_dict`` fits any optimizer, world size and grouping, and is made without a collective; it takes the memory
of float32 moments while it lives. Loading rounds to nearest: what was codes before is the same codes again
(`kernels.blockwise`).
"""

from __future__ import annotations

from typing import Any

import torch

from zerofx.kernels import blockwise
from zerofx.runtime.optim.spans import Member, Span, in_memory_order
from zerofx.runtime.state.parameter import ShardedTensor

MOMENTS = ("exp_avg", "exp_avg_sq")
_CODES = {"exp_avg_codes": torch.int8, "exp_avg_sq_codes": torch.uint8}
_SCALES = ("exp_avg_scales", "exp_avg_sq_scales")


def zeros(span: Span, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Flat buffers for the moments of ``span``: in 8 bits if it has blocks, else of ``dtype``."""
    if not span.blocks:
        return {name: span.zeros(span.numel, dtype) for name in MOMENTS}
    state = {name: span.zeros(span.numel, codes) for name, codes in _CODES.items()}
    return state | {name: span.zeros(blockwise.blocks_in(span.numel), torch.float32) for name in _SCALES}


def clear(span: Span, member: Member) -> None:
    """The state of ``member`` is new: no moments, and masters that are its weights. All of it is resident."""
    for name, flat in span.state.items():
        part = member.part(flat, name)
        part.copy_(member.part(span.weights())) if name == "master" else part.zero_()


def operands(
    state: dict[str, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """Both moments as the kernels take them, and the scales of codes."""
    if "exp_avg" in state:
        return state["exp_avg"], state["exp_avg_sq"], None
    return state["exp_avg_codes"], state["exp_avg_sq_codes"], (state["exp_avg_scales"], state["exp_avg_sq_scales"])


def in_float32(state: dict[str, Any]) -> dict[str, Any]:
    """A parameter's state with float32 moments for codes and scales; as it is where there are none."""
    if "exp_avg_codes" not in state:
        return state
    codes = state["exp_avg_codes"]
    flat = {name: state[name] for name in _SCALES} | {name: _flat(state[name]) for name in _CODES}
    kept = {name: value for name, value in state.items() if name not in flat}
    return kept | {
        name: codes.like(part) if isinstance(codes, ShardedTensor) else part.as_strided(codes.shape, codes.stride())
        for name, part in zip(MOMENTS, blockwise.dequantize(flat), strict=True)
    }


def in_codes(exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> dict[str, torch.Tensor]:
    """Two whole or two sharded moments as codes and scales of this rank's part: all 1-D, in the memory's order."""
    return blockwise.quantize(_flat(exp_avg), _flat(exp_avg_sq))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local if isinstance(tensor, ShardedTensor) else in_memory_order(tensor)
