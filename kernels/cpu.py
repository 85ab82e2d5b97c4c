"""The step on the CPU: the same update as `adamw`'s, at memory speed, and the norm that decides about it.

==========================  ==================================================================================
param, grad, moments        runs
==========================  ==================================================================================
all float32, or float64     ``torch._fused_adamw_``: PyTorch's own, all flat runs in one call
moments in 8 bits           `update_8bit`, compiled by Inductor: a loop for a block's scales, another for the rest
anything else               `update`, compiled by Inductor into one vectorized loop over the run
==========================  ==================================================================================

The host is the device here: nothing is gained by keeping scalars in tensors, and a step that is not to be taken is not
started. Or the state of a model on a GPU is in the host's memory: the default device may be that GPU then, so tensors
that are made here say where.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerofx.kernels import blockwise
from zerofx.kernels.split import join, split

_FUSED = {torch.float32, torch.float64}

Scales = tuple[torch.Tensor, torch.Tensor]

CHUNK = 1 << 16
"""Elements whose squares are summed in float32; the sums of chunks are summed in float64."""

CHUNK_8BIT = 1 << 19
"""Elements with moments in 8 bits that are updated at once: Inductor's loops have temporaries of this size."""


@dataclass(frozen=True)
class Hyper:
    """What all elements of a run have in common. ``step`` counts from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool
    step: float

    @property
    def coefficients(self) -> list[float]:
        """As `update` takes them: decay, beta1, 1 - beta1, beta2, 1 - beta2, step size, root of correction, eps."""
        correction1, correction2 = 1 - self.beta1**self.step, 1 - self.beta2**self.step
        decays = [self.lr * self.weight_decay, self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2]
        return [*decays, self.lr / correction1, math.sqrt(correction2), self.eps]


def sum_of_squares(grad: torch.Tensor) -> float:
    """Of a 1-D tensor of any floating dtype; not finite exactly where an element is not.

    In chunks: over 25 million elements a sum in float32 alone is wrong in the third digit. What is to be cast to
    float32 comes in smaller ones, which stay in cache.
    """
    fused = grad.dtype in _FUSED
    chunks = grad.split(CHUNK if fused else CHUNK // 4)
    total = torch.stack([_square(x if fused else x.float()) for x in chunks]).double().sum().item()
    if math.isfinite(total):
        return total
    return sum(x.double().square().sum().item() for x in chunks)  # large and finite, or not


def _square(x: torch.Tensor) -> torch.Tensor:
    return torch.dot(x, x)


def update(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    master: torch.Tensor | None,
    coefficients: torch.Tensor,
    seed: torch.Tensor | None,
) -> None:
    """One step of AdamW on 1-D tensors of equal length, in place; the arithmetic is float32.

    ``master`` is None (param is the master), float32, or the int16 remainder of a bfloat16 ``param`` (`split`).
    ``coefficients``: float32 [9], the gradients' factor and `Hyper.coefficients`. ``seed`` (int32, one element): round
    bfloat16 moments stochastically.
    """
    p, m, v, _ = _step(param, grad, exp_avg.float(), exp_avg_sq.float(), master, coefficients)
    if seed is not None:
        bits = _random_bits(seed + torch.arange(param.numel(), dtype=torch.int32, device=param.device))
        m, v = _round_stochastically(m, bits & 0xFFFF), _round_stochastically(v, (bits >> 16) & 0xFFFF)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    _store(param, master, p)


def update_8bit(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    exp_avg_scales: torch.Tensor,
    exp_avg_sq_scales: torch.Tensor,
    master: torch.Tensor | None,
    coefficients: torch.Tensor,
    seed: torch.Tensor,
) -> None:
    """`update` with moments in codes (`blockwise`): all [n, L], a block of L elements in each row; scales [n, 1]."""
    m = blockwise.decode(exp_avg, exp_avg_scales, blockwise.LARGEST_FIRST)
    v = blockwise.decode(exp_avg_sq, exp_avg_sq_scales, blockwise.LARGEST_SECOND).square()
    p, m, _, root = _step(param, grad, m, v, master, coefficients)
    rows, columns = (torch.arange(n, dtype=torch.int32, device=param.device) for n in param.shape)
    bits = _random_bits(seed + (rows[:, None] * blockwise.BLOCK + columns))
    first, second = ((half & 0xFFFF).float() * 2.0**-16 for half in (bits, bits >> 16))
    scales, root_scales = blockwise.scales_of(m), blockwise.scales_of(root)
    exp_avg.copy_(blockwise.encode_first(m, scales, first))
    exp_avg_sq.copy_(blockwise.encode_second(root, root_scales, second))
    exp_avg_scales.copy_(scales)
    exp_avg_sq_scales.copy_(root_scales)
    _store(param, master, p)


def _step(
    param: torch.Tensor,
    grad: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    master: torch.Tensor | None,
    coefficients: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The float32 weight, both moments and the second one's root after a step, from both moments before it."""
    factor, decay, beta1, rest1, beta2, rest2, step_size, root2, eps = coefficients.unbind()
    if master is None:
        p = param.float()
    else:
        p = join(param, master) if master.dtype == torch.int16 else master
    g = grad.float() * factor
    p = p - decay * p
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    root = v.sqrt()
    return p - step_size * m / (root / root2 + eps), m, v, root


def _store(param: torch.Tensor, master: torch.Tensor | None, p: torch.Tensor) -> None:
    if master is None:
        param.copy_(p)
    elif master.dtype == torch.int16:
        high, low = split(p)
        param.copy_(high)
        master.copy_(low)
    else:
        param.copy_(p)
        master.copy_(p)


def _round_stochastically(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """To bfloat16, up with the probability of what is cut off. A GPU's NaN, 0x7fffffff, would be carried to −0."""
    return torch.where(x == x, ((x.view(torch.int32) + bits) & -0x10000).view(torch.float32), torch.nan)


def _random_bits(x: torch.Tensor) -> torch.Tensor:
    """32 bits for each int32 in ``x``, position plus seed: an integer hash (lowbias32, C. Wellons 2018)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32))):
        x = (x ^ ((x >> shift) & ((1 << (32 - shift)) - 1))) * factor
    return x ^ ((x >> 16) & 0xFFFF)


@functools.cache
def _compiled() -> Callable[..., None]:
    return torch.compile(update, dynamic=True)


@functools.cache
def _compiled_8bit() -> Callable[..., None]:
    # What the loop for scales computes, the other computes again: cheaper than to write it to memory between them.
    options: dict[str, Any] = {"realize_opcount_threshold": 1000, "realize_reads_threshold": 100}
    return torch.compile(update_8bit, dynamic=True, options=options)


def adamw(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor | None],
    hyper: Hyper,
    factor: float = 1.0,
    seeds: Sequence[int] = (),
    scales: Sequence[Scales | None] | None = None,
) -> None:
    """One step on several runs that share ``hyper``.

    ``factor`` multiplies the gradients (clip coefficient / scale). ``seeds``, one for each run, round moments of less
    than 32 bits. ``scales``, for each run, are those of moments in codes (int8 and uint8), None for others.
    """
    runs = list(zip(params, grads, exp_avgs, exp_avg_sqs, masters, strict=True))
    uniform = [run for run in runs if _uniform(*run)]
    if uniform:
        ps, gs, ms, vs = (list(tensors) for tensors in list(zip(*uniform, strict=True))[:4])
        torch._fused_adamw_(
            ps,
            gs,
            ms,
            vs,
            [],
            [torch.tensor(hyper.step, dtype=torch.float32, device="cpu") for _ in ps],
            lr=hyper.lr,
            beta1=hyper.beta1,
            beta2=hyper.beta2,
            weight_decay=hyper.weight_decay,
            eps=hyper.eps,
            amsgrad=False,
            maximize=hyper.maximize,
            grad_scale=None if factor == 1.0 else torch.tensor(1.0 / factor, dtype=torch.float32, device="cpu"),
        )
    if len(uniform) == len(runs):
        return
    sign = -1.0 if hyper.maximize else 1.0
    coefficients = torch.tensor([sign * factor, *hyper.coefficients], dtype=torch.float32, device="cpu")
    for i, run in enumerate(runs):
        codes = None if scales is None else scales[i]
        if codes is not None:
            _adamw_8bit(run, codes, coefficients, seeds[i])
        elif not _uniform(*run):
            _compiled()(*run, coefficients, None if run[2].dtype == torch.float32 else _seed(seeds[i]))


def _adamw_8bit(run: Sequence[torch.Tensor | None], scales: Scales, coefficients: torch.Tensor, seed: int) -> None:
    """Whole blocks first, `CHUNK_8BIT` elements at a time, then what is left at the end."""
    numel, block = run[0].numel(), blockwise.BLOCK  # type: ignore[union-attr]
    whole = numel // block * block
    for start in [*range(0, whole, CHUNK_8BIT), *([whole] if whole < numel else [])]:
        end = min(start + CHUNK_8BIT, whole) if start < whole else numel
        columns = min(block, end - start)
        param, grad, m, v, master = (None if x is None else x[start:end].view(-1, columns) for x in run)
        parts = (x[start // block : -(-end // block), None] for x in scales)
        _compiled_8bit()(param, grad, m, v, *parts, master, coefficients, _seed(seed + start))


def _seed(seed: int) -> torch.Tensor:
    return torch.tensor(seed % (1 << 31), dtype=torch.int32, device="cpu")


def _uniform(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    master: torch.Tensor | None,
) -> bool:
    dtypes = {param.dtype, grad.dtype, exp_avg.dtype, exp_avg_sq.dtype}
    return master is None and len(dtypes) == 1 and dtypes <= _FUSED
