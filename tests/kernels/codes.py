"""The kernel's encoder and decoder by themselves."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from zerofx.kernels.adamw import _decode, _encode
from zerofx.kernels.blockwise import blocks_in


def codes_of(
    x: torch.Tensor, bits: torch.Tensor, largest: int, block: int = 1024
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes of ``x`` (not negative) as float32, the scales, and what the codes are read as."""
    codes, decoded = torch.zeros_like(x), torch.zeros_like(x)
    scales = torch.zeros(blocks_in(x.numel()), device=x.device)
    grid = (triton.cdiv(x.numel(), block),)
    _codes[grid](x, bits, codes, scales, decoded, x.numel(), LARGEST=largest, BLOCK=block, enable_fp_fusion=False)
    return codes, scales, decoded


@triton.jit
def _codes(
    x: tl.tensor,
    bits: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    decoded: tl.tensor,
    numel: int,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0) * BLOCK
    lanes = at + tl.arange(0, BLOCK)
    mask = lanes < numel
    value = tl.load(x + lanes, mask=mask, other=0.0)
    code = _encode(value, tl.load(bits + lanes, mask=mask, other=0), scales, at, numel - at, LARGEST, BLOCK)
    tl.store(codes + lanes, code, mask=mask)
    tl.debug_barrier()
    tl.store(decoded + lanes, _decode(code, scales, at, numel - at, LARGEST, BLOCK), mask=mask)
