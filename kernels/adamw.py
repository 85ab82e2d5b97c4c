"""AdamW on flat runs: one launch for all of a kind, every byte read and written once, no word from the host.

Per element, in float32 registers (Loshchilov & Hutter 2019; the order of operations is torch's fused AdamW's)::

    g  ←  grad · factor · sign                     unscaled, clipped
    p  ←  p − (lr · weight_decay) · p
    m  ←  beta1 · m + (1 − beta1) · g
    v  ←  beta2 · v + (1 − beta2) · g · g
    p  ←  p − (lr / bias_correction1) · m / (sqrt(v) / sqrt_bias_correction2 + eps)

Where the float32 p lives, and what a step moves with float32 moments and gradients of the weight's dtype:

==========  =========================  =================================================  ================
param       master                     p                                                  bytes r + w
==========  =========================  =================================================  ================
float32     none                       param                                              16 + 12 = 28
bf16, fp16  none                       param, rounded to nearest                          12 + 10 = 22
bf16, fp16  float32                    master; param is its copy, rounded to nearest      14 + 14 = 28
bf16        int16, the *remainder*     both together, see ``split.py``                    14 + 12 = 26
float64     none                       param; registers and moments are float64, too      32 + 24 = 56
==========  =========================  =================================================  ================

bfloat16 moments (8 bytes less) are rounded *stochastically*: up with the probability of what is cut off, so that the
mean is exact. Rounded to nearest, a second moment would stand still, since (1 − beta2) · g² is less than half a unit
in its last place. The random bits are Philox's (Salmon et al. 2011): key ``seed``, counter the element's position.

Moments in 8 bits (12 bytes less, and 1/16 for scales) are the codes of `blockwise`, and computed as there, bit for bit.
A block of 256 is what one warp holds, 8 elements in a thread, so its scale is found without leaving the warp; codes are
read and written 8 bytes at a time, all else 16.

**Nothing or all.** Where ``control`` says found_inf, every program returns before it reads a tile.

**The same bits everywhere.** Division and square root are IEEE's, and multiplications are not fused with additions:
a GPU computes what Triton's interpreter computes, whatever Triton's defaults. Memory, not arithmetic, is the limit.

There is no autotuning: it would run the update several times on live state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from zerofx.kernels import blockwise
from zerofx.kernels.device import device_of
from zerofx.kernels.runs import RUN_COLUMNS, TRITON, Kind, buffer_at
from zerofx.kernels.segments import ALIGNMENT, BLOCK, CONTROL_COLUMNS, HYPER_COLUMNS, TILE_COLUMNS

_ALIGNMENT = tl.constexpr(ALIGNMENT)
_BLOCKWISE = tl.constexpr(blockwise.BLOCK)
_FIRST = tl.constexpr(blockwise.LARGEST_FIRST)
_SECOND = tl.constexpr(blockwise.LARGEST_SECOND)
_TINY = tl.constexpr(blockwise.TINY)
_MARGIN = tl.constexpr(blockwise.MARGIN)
_RUN = tl.constexpr(len(RUN_COLUMNS))
_PHILOX_ROUNDS = tl.constexpr(7)  # the fewest that pass the tests of randomness, by its paper
_OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}


def adamw(
    kind: Kind,
    runs: torch.Tensor,
    tiles: torch.Tensor,
    hyper: torch.Tensor,
    control: torch.Tensor,
    seeds: torch.Tensor | None = None,
    *,
    block: int = BLOCK,
) -> None:
    """One AdamW step on the elements of ``runs`` that lie in ``tiles``, in place; the others stay as they are.

    ``runs`` (int64 [N, 9]) is described in ``runs.py``, and all of them are of ``kind``; ``tiles`` (int64 [T, 4]),
    ``hyper`` (float64 [R, 8]) and ``control`` (float32 [4]) in ``segments.py``. Their numbers lie on the device and are
    not checked. Moments of less than 32 bits need ``seeds``, int64 [S], which differ from step to step. ``block`` is
    how many elements a program works on at once. Where moments are codes, it and the tiles' starts are multiples of
    256.

    Raises TypeError for seeds, and ValueError for tables or a block, other than these.
    """
    _check(kind, runs, tiles, hyper, control, seeds, block)
    if not tiles.shape[0]:
        return
    with device_of(tiles):
        _adamw[(tiles.shape[0],)](runs, tiles, hyper, control, seeds, **constants(kind), BLOCK=block, **_OPTIONS)


def constants(kind: Kind) -> dict[str, object]:
    """What the kernel is compiled for."""
    dtypes = {"PARAM": kind.param, "GRAD": kind.grad, "MOMENTS": kind.moments, "MASTER": kind.master}
    return {name: TRITON[dtype] for name, dtype in dtypes.items()} | {"ALIGNED": kind.aligned}


def _check(
    kind: Kind,
    runs: torch.Tensor,
    tiles: torch.Tensor,
    hyper: torch.Tensor,
    control: torch.Tensor,
    seeds: torch.Tensor | None,
    block: int,
) -> None:
    if kind.seeded and seeds is None:
        raise TypeError("moments of less than 32 bits need seeds")
    if seeds is not None and (seeds.dtype is not torch.int64 or seeds.dim() != 1):
        raise TypeError(f"seeds are int64 in one dimension, not {seeds.dtype} {list(seeds.shape)}")
    if kind.moments is torch.int8 and block % blockwise.BLOCK:
        raise ValueError(f"block={block} is a multiple of {blockwise.BLOCK} where moments are codes")
    tables = [
        ("runs", runs, torch.int64, (runs.shape[0], len(RUN_COLUMNS))),
        ("tiles", tiles, torch.int64, (tiles.shape[0], len(TILE_COLUMNS))),
        ("hyper", hyper, torch.float64, (hyper.shape[0], len(HYPER_COLUMNS))),
        ("control", control, torch.float32, (len(CONTROL_COLUMNS),)),
    ]
    for name, table, dtype, shape in tables:
        if table.dtype is not dtype or table.shape != shape or not table.is_contiguous():
            raise ValueError(f"{name} is contiguous {dtype} {list(shape)}, not {table.dtype} {list(table.shape)}")


@triton.jit
def _adamw(
    runs: tl.tensor,
    tiles: tl.tensor,
    hyper: tl.tensor,
    control: tl.tensor,
    seeds: tl.tensor | None,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    MOMENTS: tl.constexpr,
    MASTER: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    if tl.load(control + 1) != 0:
        return
    CODES: tl.constexpr = MOMENTS.is_int8()
    DTYPE: tl.constexpr = tl.float64 if PARAM.is_fp64() else tl.float32
    tile = tiles + 4 * tl.program_id(0).to(tl.int64)
    at = tl.load(tile)
    left = tl.load(tile + 1)
    coefficients = _coefficients(hyper + 8 * tl.load(tile + 2), tl.load(control), DTYPE)
    run = runs + _RUN * tl.load(tile + 3)
    param = buffer_at(run, PARAM, ALIGNED)
    grad = buffer_at(run + 1, GRAD, ALIGNED)
    exp_avg = buffer_at(run + 2, MOMENTS, ALIGNED)
    exp_avg_sq = buffer_at(run + 3, tl.uint8 if CODES else MOMENTS, ALIGNED)
    master = None if MASTER is None else buffer_at(run + 6, MASTER, ALIGNED)
    while left > 0:
        at = tl.multiple_of(at, _BLOCKWISE if CODES else _ALIGNMENT)
        if left >= BLOCK:  # without a mask: only so are loads and stores 16 bytes wide
            _update(
                param, grad, exp_avg, exp_avg_sq, master,
                run, seeds, at, None, coefficients, ALIGNED, BLOCK,
            )  # fmt: skip
        else:
            _update(
                param, grad, exp_avg, exp_avg_sq, master,
                run, seeds, at, left, coefficients, ALIGNED, BLOCK,
            )  # fmt: skip
        at += BLOCK
        left -= BLOCK


@triton.jit
def _coefficients(hyper: tl.tensor, factor: tl.tensor, DTYPE: tl.constexpr) -> tl.tuple:
    """What a row comes to, worked out in float64 and rounded once, to ``DTYPE``."""
    lr = tl.load(hyper)
    beta1 = tl.load(hyper + 1)
    beta2 = tl.load(hyper + 2)
    step_size = lr / tl.load(hyper + 5)
    return (
        (factor * tl.load(hyper + 7)).to(DTYPE),
        (lr * tl.load(hyper + 4)).to(DTYPE),
        beta1.to(DTYPE),
        (1 - beta1).to(DTYPE),
        beta2.to(DTYPE),
        (1 - beta2).to(DTYPE),
        step_size.to(DTYPE),
        tl.load(hyper + 6).to(DTYPE),
        tl.load(hyper + 3).to(DTYPE),
    )


@triton.jit
def _update(
    param: tl.tensor,
    grad: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    master: tl.tensor | None,
    run: tl.tensor,
    seeds: tl.tensor | None,
    at: tl.tensor,
    left: tl.tensor | None,
    coefficients: tl.tuple,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The ``BLOCK`` elements from ``at``, or the ``left`` first of them."""
    factor = coefficients[0]
    lanes = tl.arange(0, BLOCK)
    mask = None if left is None else lanes < left

    g = tl.load(grad + at + lanes, mask=mask).to(factor.dtype) * factor
    m = tl.load(exp_avg + at + lanes, mask=mask).to(factor.dtype)
    v = tl.load(exp_avg_sq + at + lanes, mask=mask).to(factor.dtype)
    CODES: tl.constexpr = exp_avg.dtype.element_ty == tl.int8
    if CODES:
        m = _decode(m, buffer_at(run + 4, tl.float32, False), at, left, _FIRST, BLOCK)
        v = _decode(v, buffer_at(run + 5, tl.float32, False), at, left, _SECOND, BLOCK)
        v = v * v
    p = _load_master(param + at + lanes, master, at + lanes, mask)

    p, m, v, root = _new_values(p, m, v, g, coefficients)

    EXACT: tl.constexpr = exp_avg.dtype.element_ty == tl.float32 or exp_avg.dtype.element_ty == tl.float64
    if EXACT:
        tl.store(exp_avg + at + lanes, m, mask=mask)
        tl.store(exp_avg_sq + at + lanes, v, mask=mask)
    elif not CODES:
        bits = _random_bits(run, seeds, at, BLOCK)
        tl.store(exp_avg + at + lanes, to_bfloat16(m, bits & 0xFFFF), mask=mask)
        tl.store(exp_avg_sq + at + lanes, to_bfloat16(v, bits >> 16), mask=mask)
    else:
        if mask is not None:  # what is loaded where the mask is off may be anything
            m = tl.where(mask, m, 0.0)
            root = tl.where(mask, root, 0.0)
        bits = _random_bits(run, seeds, at, BLOCK)
        code = _encode(tl.abs(m), bits & 0xFFFF, buffer_at(run + 4, tl.float32, False), at, left, _FIRST, BLOCK)
        tl.store(exp_avg + at + lanes, tl.where(m < 0, -code, code).to(tl.int32).to(tl.int8), mask=mask)
        code = _encode(root, bits >> 16, buffer_at(run + 5, tl.float32, False), at, left, _SECOND, BLOCK)
        code = tl.where(root > 0, tl.maximum(code, 1), code)
        tl.store(exp_avg_sq + at + lanes, code.to(tl.int32).to(tl.uint8), mask=mask)
        if master is not None:  # addresses once more: there are no registers to keep them in
            param = buffer_at(run, param.dtype.element_ty, ALIGNED)
            master = buffer_at(run + 6, master.dtype.element_ty, ALIGNED)
    # Last: earlier, ptxas spills 8 bytes of codes' kernels.
    _store_master(param + at + lanes, master, at + lanes, p, mask)


@triton.jit
def _new_values(p: tl.tensor, m: tl.tensor, v: tl.tensor, g: tl.tensor, coefficients: tl.tuple) -> tl.tuple:
    """The new ``p``, ``m`` and ``v``, and the root of ``v``: Loshchilov and Hutter (2019), algorithm 2."""
    _, decay, beta1, rest1, beta2, rest2, step_size, root2, eps = coefficients
    p -= decay * p  # not p · (1 − decay): that would lose the low digits of decay
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    if v.dtype == tl.float64:  # IEEE's as they are
        root = tl.sqrt(v)
        p -= step_size * m / (root / root2 + eps)
    else:
        root = tl.sqrt_rn(v)
        p -= tl.div_rn(step_size * m, tl.div_rn(root, root2) + eps)
    return p, m, v, root


@triton.jit
def _decode(
    code: tl.tensor,
    scales: tl.tensor,
    at: tl.tensor,
    left: tl.tensor | None,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """What float32 ``code`` stands for: `blockwise.decode`."""
    blocks = tl.arange(0, BLOCK // _BLOCKWISE)
    mask = None if left is None else blocks * _BLOCKWISE < left
    scale = tl.load(scales + at // _BLOCKWISE + blocks, mask=mask)
    return code * tl.abs(code) * (1 / (LARGEST * LARGEST)) * _spread(scale, BLOCK)


@triton.jit
def _encode(
    x: tl.tensor,
    bits: tl.tensor,
    scales: tl.tensor,
    at: tl.tensor,
    left: tl.tensor | None,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The codes, in float32, of ``x``, which is not negative, rounded by 16 random bits; stores the scales as well.

    As `blockwise.scales_of` and `blockwise.encode_*` do it. The maximum is one of integers: of floats it loses NaN.
    """
    blocks = tl.arange(0, BLOCK // _BLOCKWISE)
    largest = tl.max(tl.reshape(x.to(tl.int32, bitcast=True), [BLOCK // _BLOCKWISE, _BLOCKWISE]), axis=1)
    scale = largest.to(tl.float32, bitcast=True)
    scale = tl.where(scale < _TINY, 0.0, scale)
    mask = None if left is None else blocks * _BLOCKWISE < left
    tl.store(scales + at // _BLOCKWISE + blocks, scale, mask=mask)

    SQUARE: tl.constexpr = LARGEST * LARGEST
    some = scale > 0
    inverse = tl.div_rn(tl.zeros_like(scale) + 1.0, tl.where(some, scale, 1.0))
    factor = tl.where(some, inverse * (SQUARE * _MARGIN), 0.0)
    square = x * _spread(factor, BLOCK)
    square = tl.where(square < SQUARE, square, SQUARE * 1.0)
    code = tl.floor(tl.sqrt_rn(square))
    u = bits.to(tl.int32).to(tl.float32) * (1 / 65536)
    return code + tl.where(u * (2 * code + 1) < square - code * code, 1.0, 0.0)


@triton.jit
def _spread(scale: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Each block's number for all of its elements."""
    return tl.reshape(tl.broadcast_to(scale[:, None], [BLOCK // _BLOCKWISE, _BLOCKWISE]), [BLOCK])


@triton.jit
def _load_master(param: tl.tensor, master: tl.tensor | None, at: tl.tensor, mask: tl.tensor | None) -> tl.tensor:
    p = tl.load(param, mask=mask)
    if master is None:
        if p.dtype != tl.float64:
            p = p.to(tl.float32)
    elif master.dtype.element_ty == tl.float32:
        p = tl.load(master + at, mask=mask)
    else:
        high = p.to(tl.int16, bitcast=True).to(tl.int32) << 16
        p = (high + tl.load(master + at, mask=mask).to(tl.int32)).to(tl.float32, bitcast=True)
    return p


@triton.jit
def _store_master(
    param: tl.tensor, master: tl.tensor | None, at: tl.tensor, p: tl.tensor, mask: tl.tensor | None
) -> None:
    if master is not None and master.dtype.element_ty == tl.int16:
        bits = tl.where(p == p, p.to(tl.int32, bitcast=True), 0x7FC00000)  # of other NaNs, a carry would make zeros
        remainder = bits.to(tl.int16)
        tl.store(master + at, remainder, mask=mask)
        weight = ((bits - remainder.to(tl.int32)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        if master is not None:
            tl.store(master + at, p, mask=mask)
        if param.dtype.element_ty == tl.bfloat16:
            bits = p.to(tl.uint32, bitcast=True)
            weight = to_bfloat16(p, 0x7FFF + ((bits >> 16) & 1))  # to nearest, ties to even
        else:
            weight = p.to(param.dtype.element_ty)
    tl.store(param, weight, mask=mask)


@triton.jit
def to_bfloat16(x: tl.tensor, add: tl.tensor) -> tl.tensor:
    """The upper half of ``x``'s bits, after ``add`` has been added to the whole: what rounds up is the carry.

    NaN stays NaN: a GPU's own, 0x7fffffff, would be carried to minus zero. Not ``x.to(tl.bfloat16)``, which cuts off in
    Triton's interpreter.
    """
    bits = x.to(tl.uint32, bitcast=True) + add
    return tl.where(x == x, bits >> 16, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _random_bits(run: tl.tensor, seeds: tl.tensor, at: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """32 random bits for each of the ``BLOCK`` elements from ``at``; a Philox call yields those of four elements.

    Position and seed are read here, and not where addresses are: so many registers are not free all along.
    """
    fours = (tl.load(run + 7) + at) // 4 + tl.arange(0, BLOCK // 4)
    a, b, c, d = tl.randint4x(tl.load(seeds + tl.load(run + 8)), fours, _PHILOX_ROUNDS)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [BLOCK]).to(tl.uint32, bitcast=True)
