"""AdamW on a flat shard: one launch, every byte read and written once, no word from the host.

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
==========  =========================  =================================================  ================

bfloat16 moments (8 bytes less) are rounded *stochastically*: up with the probability of what is cut off, so that the
mean is exact. Rounded to nearest, a second moment would stand still, since (1 − beta2) · g² is less than half a unit
in its last place. The random bits are Philox's (Salmon et al. 2011): key ``seed``, counter the element's position.

**Nothing or all.** Where ``control`` says found_inf, every program returns before it reads a tile.

**The same bits everywhere.** Division and square root are IEEE's, and multiplications are not fused with additions:
a GPU computes what Triton's interpreter computes, whatever Triton's defaults. Memory, not arithmetic, is the limit.

There is no autotuning: it would run the update several times on live state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from zerofx.kernels.segments import ALIGNMENT, BLOCK, CONTROL_COLUMNS, HYPER_COLUMNS

_ALIGNMENT = tl.constexpr(ALIGNMENT)
_PHILOX_ROUNDS = tl.constexpr(7)  # the fewest that pass the tests of randomness, by its paper
_OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}

_PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOMENT_DTYPES = (torch.float32, torch.bfloat16)


def adamw(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    tiles: torch.Tensor,
    hyper: torch.Tensor,
    control: torch.Tensor,
    *,
    master: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    block: int = BLOCK,
) -> None:
    """One AdamW step on the elements of ``param`` that lie in ``tiles``, in place; the others stay as they are.

    1-D and contiguous, all of one length, on one device: ``param`` float32, bfloat16 or float16; ``grad`` float32 or
    param's dtype; ``exp_avg`` and ``exp_avg_sq`` both float32 or both bfloat16; ``master`` None, float32, or int16
    beside a bfloat16 param. ``tiles`` (int64 [T, 3]), ``hyper`` (float64 [R, 8]) and ``control`` (float32 [4]) are
    described in ``segments.py``; their numbers lie on the device and are not checked. bfloat16 moments need ``seed``,
    an int64 tensor of one element that differs from step to step and from shard to shard; one seed, one result.
    ``block`` is how many elements a program works on at once.

    Raises TypeError for dtypes, and ValueError for shapes, other than these.
    """
    _check_dtypes(param, grad, exp_avg, exp_avg_sq, master, seed)
    _check_shapes(param, grad, exp_avg, exp_avg_sq, master, tiles, hyper, control)
    if not tiles.shape[0]:
        return
    with torch.cuda.device_of(param):
        _adamw[(tiles.shape[0],)](
            param, grad, exp_avg, exp_avg_sq, master, tiles, hyper, control, seed, BLOCK=block, **_OPTIONS
        )


def _check_dtypes(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    master: torch.Tensor | None,
    seed: torch.Tensor | None,
) -> None:
    if param.dtype not in _PARAM_DTYPES:
        raise TypeError(f"param is float32, bfloat16 or float16, not {param.dtype}")
    if grad.dtype not in (torch.float32, param.dtype):
        raise TypeError(f"grad is float32 or {param.dtype} as param, not {grad.dtype}")
    if exp_avg.dtype not in _MOMENT_DTYPES or exp_avg_sq.dtype is not exp_avg.dtype:
        raise TypeError(f"moments are both float32 or both bfloat16, not {exp_avg.dtype} and {exp_avg_sq.dtype}")
    if master is not None:
        wanted = {torch.bfloat16: (torch.float32, torch.int16), torch.float16: (torch.float32,)}.get(param.dtype, ())
        if master.dtype not in wanted:
            raise TypeError(f"a {param.dtype} param takes no {master.dtype} master")
    if (seed is None) != (exp_avg.dtype is torch.float32):
        raise TypeError("bfloat16 moments need a seed, float32 moments none")
    if seed is not None and (seed.dtype is not torch.int64 or seed.numel() != 1):
        raise TypeError(f"seed is one int64, not {seed.numel()} of {seed.dtype}")


def _check_shapes(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    master: torch.Tensor | None,
    tiles: torch.Tensor,
    hyper: torch.Tensor,
    control: torch.Tensor,
) -> None:
    for flat in (param, grad, exp_avg, exp_avg_sq, master):
        if flat is not None and (flat.shape != (param.numel(),) or not flat.is_contiguous()):
            raise ValueError(f"expected {param.numel()} contiguous elements in one dimension, got {list(flat.shape)}")
    tables = [
        ("tiles", tiles, torch.int64, (tiles.shape[0], 3)),
        ("hyper", hyper, torch.float64, (hyper.shape[0], len(HYPER_COLUMNS))),
        ("control", control, torch.float32, (len(CONTROL_COLUMNS),)),
    ]
    for name, table, dtype, shape in tables:
        if table.dtype is not dtype or table.shape != shape or not table.is_contiguous():
            raise ValueError(f"{name} is contiguous {dtype} {list(shape)}, not {table.dtype} {list(table.shape)}")


@triton.jit
def _adamw(
    param: tl.tensor,
    grad: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    master: tl.tensor | None,
    tiles: tl.tensor,
    hyper: tl.tensor,
    control: tl.tensor,
    seed: tl.tensor | None,
    BLOCK: tl.constexpr,
) -> None:
    if tl.load(control + 1) != 0:
        return
    tile = tiles + 3 * tl.program_id(0).to(tl.int64)
    at = tl.load(tile)
    left = tl.load(tile + 1)
    coefficients = _coefficients(hyper + 8 * tl.load(tile + 2), tl.load(control))
    while left > 0:
        at = tl.multiple_of(at, _ALIGNMENT)
        if left >= BLOCK:  # without a mask: only so are loads and stores 16 bytes wide
            _update(param, grad, exp_avg, exp_avg_sq, master, seed, at, None, coefficients, BLOCK)
        else:
            _update(param, grad, exp_avg, exp_avg_sq, master, seed, at, left, coefficients, BLOCK)
        at += BLOCK
        left -= BLOCK


@triton.jit
def _coefficients(hyper: tl.tensor, factor: tl.tensor) -> tl.tuple:
    """What a row comes to, worked out in float64 and rounded once."""
    lr = tl.load(hyper)
    beta1 = tl.load(hyper + 1)
    beta2 = tl.load(hyper + 2)
    step_size = lr / tl.load(hyper + 5)
    return (
        (factor * tl.load(hyper + 7)).to(tl.float32),
        (lr * tl.load(hyper + 4)).to(tl.float32),
        beta1.to(tl.float32),
        (1 - beta1).to(tl.float32),
        beta2.to(tl.float32),
        (1 - beta2).to(tl.float32),
        step_size.to(tl.float32),
        tl.load(hyper + 6).to(tl.float32),
        tl.load(hyper + 3).to(tl.float32),
    )


@triton.jit
def _update(
    param: tl.tensor,
    grad: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    master: tl.tensor | None,
    seed: tl.tensor | None,
    at: tl.tensor,
    left: tl.tensor | None,
    coefficients: tl.tuple,
    BLOCK: tl.constexpr,
) -> None:
    """The ``BLOCK`` elements from ``at``, or the ``left`` first of them."""
    factor, decay, beta1, rest1, beta2, rest2, step_size, root2, eps = coefficients
    lanes = tl.arange(0, BLOCK)
    mask = None if left is None else lanes < left

    g = tl.load(grad + at + lanes, mask=mask).to(tl.float32) * factor
    m = tl.load(exp_avg + at + lanes, mask=mask).to(tl.float32)
    v = tl.load(exp_avg_sq + at + lanes, mask=mask).to(tl.float32)
    p = _load_master(param + at + lanes, master, at + lanes, mask)

    p -= decay * p  # not p · (1 − decay): that would lose the low digits of decay
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    p -= tl.div_rn(step_size * m, tl.div_rn(tl.sqrt_rn(v), root2) + eps)

    _store_master(param + at + lanes, master, at + lanes, p, mask)
    if seed is None:
        tl.store(exp_avg + at + lanes, m, mask=mask)
        tl.store(exp_avg_sq + at + lanes, v, mask=mask)
    else:
        bits = _random_bits(tl.load(seed), at, BLOCK)
        tl.store(exp_avg + at + lanes, _to_bfloat16(m, bits & 0xFFFF), mask=mask)
        tl.store(exp_avg_sq + at + lanes, _to_bfloat16(v, bits >> 16), mask=mask)


@triton.jit
def _load_master(param: tl.tensor, master: tl.tensor | None, at: tl.tensor, mask: tl.tensor | None) -> tl.tensor:
    p = tl.load(param, mask=mask)
    if master is None:
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
        bits = p.to(tl.int32, bitcast=True)
        remainder = bits.to(tl.int16)
        tl.store(master + at, remainder, mask=mask)
        weight = ((bits - remainder.to(tl.int32)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        if master is not None:
            tl.store(master + at, p, mask=mask)
        if param.dtype.element_ty == tl.bfloat16:
            bits = p.to(tl.uint32, bitcast=True)
            weight = _to_bfloat16(p, 0x7FFF + ((bits >> 16) & 1))  # to nearest, ties to even
        else:
            weight = p.to(param.dtype.element_ty)
    tl.store(param, weight, mask=mask)


@triton.jit
def _to_bfloat16(x: tl.tensor, add: tl.tensor) -> tl.tensor:
    """The upper half of ``x``'s bits, after ``add`` has been added to the whole: what rounds up is the carry.

    Not ``x.to(tl.bfloat16)``, which cuts off in Triton's interpreter.
    """
    bits = x.to(tl.uint32, bitcast=True) + add
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _random_bits(seed: tl.tensor | None, at: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """32 random bits for each of the ``BLOCK`` elements from ``at``; a Philox call yields those of four elements."""
    fours = at // 4 + tl.arange(0, BLOCK // 4)
    a, b, c, d = tl.randint4x(seed, fours, _PHILOX_ROUNDS)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [BLOCK]).to(tl.uint32, bitcast=True)
