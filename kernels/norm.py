"""The gradients' norm and what follows from it: two kernels around one all-reduce, and the host sees nothing.

::

    float32 gradients ── partial_sums ─▶ P sums of squares ─┐
    bfloat16 gradients ─ partial_sums ─▶ P sums of squares ─┴─ sum, all-reduce ─▶ total ─ finalize ─▶ control
                                                                                                    ─▶ steps, hyper

=====================  =====================================  ======================================
with                   if norm is finite and no found_inf     otherwise
=====================  =====================================  ======================================
norm                   sqrt(total) / scale                    the same
gradient factor        min(1, max_norm / (norm + 1e-6))       0
                       / scale
found_inf              0                                      1
steps                  t + 1                                  t
bias corrections       of t + 1                               unchanged
=====================  =====================================  ======================================

**Deterministic.** P is fixed whatever the size, each program adds its tiles in one order, and there are no atomics.

**Squares are summed in float64.** There the square of a float32 number is exact and none overflows or vanishes, so the
total is infinite or NaN if and only if a gradient is: a large gradient clips the step, it does not skip it.
``torch.nn.utils.clip_grad_norm_``, whose formula this is, squares in float32 and sees infinity from 1.8e19 on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from zerofx.kernels.device import device_of
from zerofx.kernels.runs import RUN_COLUMNS, TRITON, buffer_at
from zerofx.kernels.segments import ALIGNMENT, BLOCK, CONTROL_COLUMNS, HYPER_COLUMNS

PARTIAL_SUMS = 2048
"""Enough programs to fill any GPU's memory pipes, and sums that one program adds up."""

ROWS = 128
"""Rows of the tables that a program of `finalize` sees to: one for each thread, however many parameters there are."""

_ALIGNMENT = tl.constexpr(ALIGNMENT)
_RUN = tl.constexpr(len(RUN_COLUMNS))
_OPTIONS = {"num_stages": 1, "enable_fp_fusion": False}


def partial_sums(
    grad: torch.dtype,
    runs: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    *,
    aligned: bool = True,
    block: int = BLOCK,
) -> None:
    """Write the sum of squares of the gradients' elements in ``tiles`` to ``out``, in parts that add up to it.

    ``runs`` is int64 [N, 9] of ``runs.py``, of which only gradients are read, all of dtype ``grad``; ``tiles`` int64
    [T, 4] of :func:`make_tiles`, ``out`` float64 [P] with any P (``PARTIAL_SUMS``), all on one device. ``aligned``: of
    the gradients, see `zerofx.kernels.runs.Kind`. One that is inf or NaN makes its part inf or NaN.
    """
    _check("runs", runs, torch.int64, 2)
    _check("tiles", tiles, torch.int64, 2)
    _check("out", out, torch.float64, 1)
    if not grad.is_floating_point:
        raise TypeError(f"gradients must be floating, not {grad}")
    constants = {"GRAD": TRITON[grad], "ALIGNED": aligned, "BLOCK": block}
    with device_of(out):
        _partial_sums[(out.numel(),)](runs, tiles, tiles.shape[0], out, **constants, num_warps=4, **_OPTIONS)


def finalize(
    total: torch.Tensor,
    max_norm: float,
    scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    hyper: torch.Tensor,
    steps: torch.Tensor,
    control: torch.Tensor,
) -> None:
    """Decide from the sum of squares whether the step is taken, with what factor and what bias corrections.

    ``total`` (float64, one element) is the sum of squares of all gradients, still multiplied by the loss ``scale``
    (float32, one element; None: 1). ``found_inf`` (float32, one element; None: 0) skips the step too.
    ``max_norm=math.inf`` clips nothing. Writes ``control``, and where the step is taken ``steps`` and ``hyper``; the
    tables are described in ``segments.py``.
    """
    _check("total", total, torch.float64)
    _check("hyper", hyper, torch.float64, 2)
    _check("steps", steps, torch.float32, 1)
    _check("control", control, torch.float32, 1)
    if hyper.shape != (steps.numel(), len(HYPER_COLUMNS)) or control.shape != (len(CONTROL_COLUMNS),):
        shapes = [list(table.shape) for table in (hyper, steps, control)]
        raise ValueError(f"hyper, steps and control must be [R, 8], [R] and [4], not {shapes}")
    if not max_norm >= 0:
        raise ValueError(f"max_norm={max_norm} must not be negative; math.inf clips nothing")
    rows = steps.numel()
    with device_of(total):
        _finalize[(max(1, triton.cdiv(rows, ROWS)),)](
            total, float(max_norm), scale, found_inf, hyper, steps, control, rows, ROWS=ROWS, num_warps=4, **_OPTIONS
        )


@triton.jit(do_not_specialize=["n_tiles"])
def _partial_sums(
    runs: tl.tensor,
    tiles: tl.tensor,
    n_tiles: int,
    out: tl.tensor,
    GRAD: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    lanes = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float64)
    i = tl.program_id(0)
    while i < n_tiles:
        tile = tiles + 4 * tl.cast(i, tl.int64)
        grad = buffer_at(runs + _RUN * tl.load(tile + 3) + 1, GRAD, ALIGNED)
        at = grad + tl.multiple_of(tl.load(tile), _ALIGNMENT)
        left = tl.load(tile + 1)
        while left > 0:
            if left >= BLOCK:  # without a mask: only so are loads 16 bytes wide
                g = tl.load(at + lanes)
            else:
                g = tl.load(at + lanes, mask=lanes < left, other=0.0)
            g = g.to(tl.float64)
            squares += g * g
            at += BLOCK
            left -= BLOCK
        i += tl.num_programs(0)
    tl.store(out + tl.program_id(0), tl.sum(squares))


@triton.jit(do_not_specialize=["rows"])
def _finalize(
    total: tl.tensor,
    max_norm: float,
    scale: tl.tensor | None,
    found_inf: tl.tensor | None,
    hyper: tl.tensor,
    steps: tl.tensor,
    control: tl.tensor,
    rows: int,
    ROWS: tl.constexpr,
) -> None:
    norm = tl.sqrt(tl.load(total))
    unscale = tl.full([], 1.0, tl.float64)
    if scale is not None:
        unscale /= tl.load(scale).to(tl.float64)
    norm *= unscale
    good = (norm - norm) == 0  # inf − inf and NaN are NaN, which equals nothing
    if found_inf is not None:
        good = good & (tl.load(found_inf) == 0)

    if tl.program_id(0) == 0:
        factor = tl.minimum(max_norm / (norm + 1e-6), 1.0) * unscale
        tl.store(control, tl.where(good, factor, 0.0).to(tl.float32))
        tl.store(control + 1, tl.where(good, 0.0, 1.0))
        tl.store(control + 2, norm.to(tl.float32))

    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    taken = row < tl.where(good, rows, 0)  # all rows or none
    t = tl.load(steps + row, mask=taken, other=0.0) + 1
    tl.store(steps + row, t, mask=taken)
    columns = hyper + 8 * row
    for i in tl.static_range(2):
        beta = tl.load(columns + 1 + i, mask=taken, other=0.0)
        correction = 1 - tl.exp2(t.to(tl.float64) * tl.log2(beta))  # 1 − beta^t, for beta = 0 too
        tl.store(columns + 5 + i, correction if i == 0 else tl.sqrt(correction), mask=taken)


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, dim: int | None = None) -> None:
    if tensor.dtype is not dtype or not tensor.is_contiguous() or (dim is not None and tensor.dim() != dim):
        shape = "" if dim is None else f" with {dim} dimensions"
        raise TypeError(f"{name} must be a contiguous {dtype} tensor{shape}, not {tensor.dtype} {list(tensor.shape)}")
