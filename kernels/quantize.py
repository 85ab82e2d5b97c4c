"""Codes on the wire in Triton: `zerofx.kernels.wire`'s formulas for int8, int4 and fp8, the same bits.

::

    encode    a program reads TILE blocks, finds their scales, writes codes and scales: each byte read and written once
    decode    a program reads TILE blocks of codes and their scales, and writes numbers, or adds to them

A block of int4 is read in two halves, since byte i holds elements i and i + L/2; so every load and store is of
neighbours. Scales are found as integers: a maximum of floats loses NaN. Division is IEEE's, and nothing is fused: a GPU
computes what Triton's interpreter and the CPU compute. So is fp8 made of integers: Triton converts to it on sm_89 and
later alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from zerofx.kernels.adamw import to_bfloat16
from zerofx.kernels.code import LARGEST, TINY, Code
from zerofx.kernels.device import device_of

TILE = 8
"""Blocks that a program sees to; of 256 elements, 64 for each of its threads."""

_TINY = tl.constexpr(TINY)
_OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}


def encode(x: torch.Tensor, code: Code, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """``x``: [rows, blocks, L]; ``codes``: uint8 [rows, blocks, L or L/2]; ``scales``: float32 [rows, blocks, 1].

    Within a row, blocks lie one after the other in all three.
    """
    rows, blocks, _ = x.shape
    with device_of(x):
        _encode[(triton.cdiv(blocks, TILE), rows)](
            x,
            codes,
            scales,
            *(t.stride(0) for t in (x, codes, scales)),
            blocks,
            LARGEST[code.name],
            1 / LARGEST[code.name],
            STOCHASTIC=code.stochastic,
            **_shape(code),
            **_OPTIONS,
        )


def decode(codes: torch.Tensor, scales: torch.Tensor, code: Code, out: torch.Tensor, add: bool) -> None:
    """Shapes as in `encode`, ``out`` like its ``x``. ``add``: to what is there, in float32."""
    rows, blocks, _ = out.shape
    with device_of(out):
        _decode[(triton.cdiv(blocks, TILE), rows)](
            codes,
            scales,
            out,
            *(t.stride(0) for t in (codes, scales, out)),
            blocks,
            ADD=add,
            **_shape(code),
            **_OPTIONS,
        )


def _shape(code: Code) -> dict[str, int | bool]:
    """LENGTH: bytes of a block's codes. LANES: the power of two that a GPU works on instead."""
    length = code.block // 2 if code.name == "int4" else code.block
    lanes = triton.next_power_of_2(length)
    return {"LENGTH": length, "LANES": lanes, "HALVES": code.name == "int4", "FP8": code.name == "fp8", "TILE": TILE}


@triton.jit(do_not_specialize=["blocks"])
def _encode(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    x_stride: tl.int64,
    codes_stride: tl.int64,
    scales_stride: tl.int64,
    blocks: int,
    largest: float,
    step: float,
    STOCHASTIC: tl.constexpr,
    LENGTH: tl.constexpr,
    LANES: tl.constexpr,
    HALVES: tl.constexpr,
    FP8: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """``step``: one over ``largest``; constants as `_shape` makes them. Strides: of ``int``, Triton makes 32 bits."""
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    lanes = tl.arange(0, LANES)
    here = block < blocks
    inside = here[:, None]
    if LANES != LENGTH:
        inside &= (lanes < LENGTH)[None, :]
    length = LENGTH * 2 if HALVES else LENGTH
    first = row * x_stride + block[:, None].to(tl.int64) * length + lanes[None, :]
    low = tl.load(x + first, mask=inside, other=0).to(tl.float32)
    most = _most(low)
    high = low
    if HALVES:
        high = tl.load(x + first + LENGTH, mask=inside, other=0).to(tl.float32)
        most = tl.maximum(most, _most(high))
    most_float = most.to(tl.float32, bitcast=True)
    scale = tl.where(most_float < _TINY, 0.0, most_float) * step
    tl.store(scales + row * scales_stride + block, scale, mask=here)
    inverse = tl.where(scale > 0, tl.div_rn(tl.full([TILE], 1.0, tl.float32), scale), 0.0)
    position = (row.to(tl.int32) * blocks + block)[:, None] * length + lanes[None, :]
    key = _hash(scale.to(tl.int32, bitcast=True))[:, None]
    if FP8:
        byte = _to_fp8(low * inverse[:, None], largest)
    else:
        byte = _code(low * inverse[:, None], largest, position ^ key, STOCHASTIC)
    if HALVES:
        upper = _code(high * inverse[:, None], largest, (position + LENGTH) ^ key, STOCHASTIC)
        byte = (byte & 15) | ((upper & 15) << 4)
    at = row * codes_stride + block[:, None].to(tl.int64) * LENGTH + lanes[None, :]
    tl.store(codes + at, (byte & 255).to(tl.uint8), mask=inside)


@triton.jit
def _most(x: tl.tensor) -> tl.tensor:
    """The largest magnitude of each row, as the bits of a float: of magnitudes, integers have the order of floats."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)


@triton.jit
def _code(scaled: tl.tensor, largest: float, key: tl.tensor, STOCHASTIC: tl.constexpr) -> tl.tensor:
    if STOCHASTIC:
        rounded = tl.floor(scaled + (_hash(key) & 0xFFFFFF).to(tl.float32) * (1.0 / 16777216))
    else:
        rounded = _to_nearest(scaled)
    rounded = tl.where(scaled == scaled, rounded, 0.0)
    return tl.minimum(tl.maximum(rounded, -largest), largest).to(tl.int32)


@triton.jit
def _to_nearest(x: tl.tensor) -> tl.tensor:
    """Ties to even, by adding and taking away what leaves no room for a fraction; |x| is below 2^22."""
    magic = 12582912.0  # 1.5 · 2^23
    return (x + magic) - magic


@triton.jit
def _to_fp8(scaled: tl.tensor, largest: float) -> tl.tensor:
    """The byte of e4m3: sign, 4 bits of exponent, 3 of mantissa. To nearest, ties to even; NaN as zero."""
    bits = scaled.to(tl.int32, bitcast=True)
    magnitude = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), largest)
    cut = magnitude.to(tl.int32, bitcast=True)
    normal = ((cut + 0x7FFFF + ((cut >> 20) & 1)) >> 20) - 960  # 20 bits of mantissa less, the bias 7 and not 127
    small = _to_nearest(magnitude * 512).to(tl.int32)  # what is below 2^-6 is a multiple of 2^-9
    code = tl.where(magnitude < 0.015625, small, normal) | ((bits >> 24) & 128)
    return tl.where(scaled == scaled, code, 0)


@triton.jit
def _from_fp8(byte: tl.tensor) -> tl.tensor:
    code = byte & 127
    small = (code.to(tl.float32) * (1.0 / 512)).to(tl.int32, bitcast=True)
    bits = tl.where(code < 8, small, (code + 960) << 20)
    bits = tl.where(code == 127, 0x7FC00000, bits)  # NaN
    return (bits | ((byte & 128) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _hash(x: tl.tensor) -> tl.tensor:
    """As `wire`'s, on int32."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -2073254261
    return x ^ ((x >> 16) & 0xFFFF)


@triton.jit(do_not_specialize=["blocks"])
def _decode(
    codes: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    codes_stride: tl.int64,
    scales_stride: tl.int64,
    out_stride: tl.int64,
    blocks: int,
    ADD: tl.constexpr,
    LENGTH: tl.constexpr,
    LANES: tl.constexpr,
    HALVES: tl.constexpr,
    FP8: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    lanes = tl.arange(0, LANES)
    here = block < blocks
    inside = here[:, None]
    if LANES != LENGTH:
        inside &= (lanes < LENGTH)[None, :]
    length = LENGTH * 2 if HALVES else LENGTH
    at = row * codes_stride + block[:, None].to(tl.int64) * LENGTH + lanes[None, :]
    byte = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales + row * scales_stride + block, mask=here, other=0)[:, None]
    to = out + row * out_stride + block[:, None].to(tl.int64) * length + lanes[None, :]
    if HALVES:
        _write(to, ((byte << 28) >> 28).to(tl.float32) * scale, inside, ADD)
        _write(to + LENGTH, ((byte << 24) >> 28).to(tl.float32) * scale, inside, ADD)
    elif FP8:
        _write(to, _from_fp8(byte) * scale, inside, ADD)
    else:
        _write(to, ((byte << 24) >> 24).to(tl.float32) * scale, inside, ADD)


@triton.jit
def _write(to: tl.tensor, value: tl.tensor, inside: tl.tensor, ADD: tl.constexpr) -> None:
    if ADD:
        value = tl.load(to, mask=inside) + value
    if to.dtype.element_ty == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        tl.store(to, to_bfloat16(value, 0x7FFF + ((bits >> 16) & 1)), mask=inside)  # to nearest, ties to even
    else:
        tl.store(to, value.to(to.dtype.element_ty), mask=inside)
