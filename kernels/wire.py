"""Numbers on the wire: a code for each element, and one float32 scale for each *block* of neighbours.

::

    n elements     x x x x x x x x │ x x x x x x x x │ ...     a scale is its block's largest |x| / the largest code
    one row        [ codes of all blocks │ scales of all blocks ]       uint8, `Code.nbytes` of them

============  =====================  ======================  ===================================================
code          bits of an element     an element reads as     off by at most, for a block whose largest |x| is a
============  =====================  ======================  ===================================================
``"bf16"``    16, and no scale       x, rounded              |x| / 256
``"fp8"``     8                      code · scale            |x| / 16, or a / 448 / 1024 near zero (e4m3)
``"int8"``    8                      code · scale            a / 254
``"int4"``    4                      code · scale            a / 14
============  =====================  ======================  ===================================================

With blocks of 256, an element of int8 takes 8.125 bits, one of int4 4.125. Two codes of int4 share a byte: element i of
a block has the lower half of byte i, element i + L/2 the upper half.

**Rounded to nearest, or stochastically**: up with the probability of what is cut off, so that the mean over many steps
is exact. Then the error is at most twice the table's. The random bits are a hash of the element's position and its
block's scale. So they need no state, every device draws the same ones, and a run that is resumed repeats itself.

**What is not finite** makes all of its block read as not finite: the scale is what infects it. A block with nothing
above ``TINY`` reads as zeros.

Symmetric codes, so that zero is zero. The largest element comes back to within one rounding. The same formulas run in
Triton (``quantize.py``), bit for bit. Blocks and their scales: Dettmers et al. 2022; on the wire: ZeRO++ (Wang et al.
2023).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from zerofx.kernels.code import LARGEST, TINY, Code
from zerofx.kernels.device import runs_triton


def encode(x: torch.Tensor, code: Code, out: torch.Tensor) -> None:
    """Write ``x``, [rows, n], to ``out``, uint8 [rows, at least ``code.nbytes(n)``]. n: whole blocks.

    A block that fills no whole number of bytes of `ALIGNMENT` leaves what is between as it was.
    """
    codes, scales = code.parts(out, x.shape[1])
    blocks = x.unflatten(1, (-1, code.block))
    if code.name == "bf16":
        codes.view(torch.bfloat16).copy_(blocks)
    elif runs_triton(x.device):
        _triton().encode(blocks, code, codes, scales)
    else:
        kind = x.dtype, code.block, code.name, code.stochastic
        if code.name == "fp8":
            found = _compiled(_encode_fp8, kind)(blocks)
        else:
            found = _compiled(_encode, kind)(blocks, LARGEST[code.name], code.name == "int4", code.stochastic)
        for part, value in zip((codes, scales), found):  # not in place: they are views of one memory in two dtypes
            part.copy_(value)


def decode(wire: torch.Tensor, code: Code, out: torch.Tensor) -> None:
    """Fill ``out``, [rows, n] of a floating dtype, from ``wire``, uint8 [rows, at least ``code.nbytes(n)``]."""
    _read(wire, code, out, add=False)


def add(wire: torch.Tensor, code: Code, out: torch.Tensor) -> None:
    """Add to ``out``, as in `decode`, what ``wire`` stands for."""
    _read(wire, code, out, add=True)


def subtract(wire: torch.Tensor, code: Code, out: torch.Tensor) -> None:
    """Take away from ``out``, float32 [rows, n], what ``wire`` stands for: what is left was cut off."""
    read = torch.empty_like(out)
    decode(wire, code, read)
    out.sub_(read)


def _read(wire: torch.Tensor, code: Code, out: torch.Tensor, add: bool) -> None:
    codes, scales = code.parts(wire, out.shape[1])
    blocks, kind = out.unflatten(1, (-1, code.block)), (out.dtype, code.block, code.name, add)
    if code.name == "bf16":
        value = codes.view(torch.bfloat16)
        blocks.add_(value) if add else blocks.copy_(value)
    elif runs_triton(out.device):
        _triton().decode(codes, scales, code, blocks, add)
    elif code.name == "fp8":
        _compiled(_decode_fp8, kind)(codes, scales, blocks, add)
    else:
        _compiled(_decode, kind)(codes, scales, blocks, code.name == "int4", add)


# ---- the formulas ---------------------------------------------------------------------------------------------------


def _encode(x: torch.Tensor, largest: float, halves: bool, stochastic: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """``x``: [rows, blocks, L]. Codes, uint8 [rows, blocks, L, or L/2 in ``halves``], and scales [rows, blocks, 1].

    A code is put together as a float: from that to int8 Inductor has a vectorized conversion, from an int32 it has not.
    """
    x = x.float()
    scale = _scales(x, largest)
    inverse = torch.where(scale > 0, scale.reciprocal(), 0.0)
    half = x.shape[2] // 2 if halves else x.shape[2]
    parts = []
    for start in range(0, x.shape[2], half):
        scaled = x[..., start : start + half] * inverse
        if stochastic:
            rounded = (scaled + _uniform(x.shape, start, half, scale)).floor()
        else:
            rounded = scaled.round()
        parts.append(torch.where(scaled == scaled, rounded, 0.0).clamp(-largest, largest))
    signed = parts[0]
    if halves:
        signed = torch.where(signed < 0, signed + 16, signed) + parts[1] * 16
    return signed.to(torch.int8).view(torch.uint8), scale


def _decode(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, halves: bool, add: bool) -> None:
    if halves:
        wide = codes.to(torch.int32)
        signed = torch.cat([wide << 28, wide << 24], dim=-1) >> 28
    else:
        signed = codes.view(torch.int8)
    value = signed.float() * scales
    out.copy_(out + value if add else value)


def _scales(x: torch.Tensor, largest: float) -> torch.Tensor:
    most = x.abs().amax(dim=-1, keepdim=True)
    return torch.where(most < TINY, 0.0, most) * (1 / largest)


def _uniform(shape: torch.Size, start: int, length: int, scale: torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1), 24 bits each: an integer hash (lowbias32, C. Wellons 2018) of position and scale.

    For elements ``start`` to ``start + length`` of each block of ``shape``.
    """
    rows, blocks, lanes = (torch.arange(n, dtype=torch.int32, device=scale.device) for n in (*shape[:2], length))
    position = (rows[:, None, None] * shape[1] + blocks[:, None]) * shape[2] + (lanes + start)
    bits = _hash(position ^ _hash(scale.view(torch.int32)))
    return (bits & 0xFFFFFF).float() * 2.0**-24


def _hash(x: torch.Tensor) -> torch.Tensor:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32))):
        x = (x ^ ((x >> shift) & ((1 << (32 - shift)) - 1))) * factor
    return x ^ ((x >> 16) & 0xFFFF)


def _encode_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """With PyTorch's own conversion. NaN is coded as zero, whatever its sign and bits: the scale says it."""
    x = x.float()
    scale = _scales(x, LARGEST["fp8"])
    scaled = x * torch.where(scale > 0, scale.reciprocal(), 0.0)
    scaled = torch.where(scaled == scaled, scaled, 0.0)
    return scaled.clamp(-LARGEST["fp8"], LARGEST["fp8"]).to(torch.float8_e4m3fn).view(torch.uint8), scale


def _decode_fp8(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    value = codes.view(torch.float8_e4m3fn).float() * scales
    out.copy_(out + value if add else value)


@functools.cache
def _compiled(formula: Callable[..., Any], kind: tuple[Any, ...]) -> Callable[..., Any]:
    """A vectorized loop by Inductor: in plain PyTorch each of a dozen operations would go through memory.

    Each ``kind`` of arguments has code of its own. Dynamo compiles one code for eight kinds (``recompile_limit``), and
    runs it uncompiled from then on.
    """
    assert isinstance(formula, FunctionType)
    own = FunctionType(formula.__code__.replace(), formula.__globals__, formula.__name__)
    return torch.compile(own, dynamic=True)


def _triton() -> Any:
    from zerofx.kernels import quantize  # here, because it needs triton

    return quantize
