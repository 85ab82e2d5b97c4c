"""The step on the CPU: the same update as `adamw`'s, at memory speed, and the norm that decides about it.

==========================  ==================================================================================
param, grad, moments        runs
==========================  ==================================================================================
all float32, or float64     ``torch._fused_adamw_``: PyTorch's own, all flat runs in one call
anything else               `update`, compiled by Inductor into one vectorized loop over the run
==========================  ==================================================================================

The host is the device here: nothing is gained by keeping scalars in tensors, and a step that is not to be taken is not
started.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from zerofx.kernels.split import join, split

_FUSED = {torch.float32, torch.float64}

CHUNK = 1 << 16
"""Elements whose squares are summed in float32; the sums of chunks are summed in float64."""


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

    In chunks: over 25 million elements a sum in float32 alone is wrong in the third digit.
    """
    chunks = grad.split(CHUNK)
    total = torch.stack([_square(x if x.dtype in _FUSED else x.float()) for x in chunks]).double().sum().item()
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
    factor, decay, beta1, rest1, beta2, rest2, step_size, root2, eps = coefficients.unbind()
    if master is None:
        p = param.float()
    else:
        p = join(param, master) if master.dtype == torch.int16 else master
    g = grad.float() * factor
    p = p - decay * p
    m = beta1 * exp_avg.float() + rest1 * g
    v = beta2 * exp_avg_sq.float() + rest2 * g * g
    p = p - step_size * m / (v.sqrt() / root2 + eps)
    if seed is not None:
        bits = _random_bits(seed, param.numel(), param.device)
        m, v = _round_stochastically(m, bits & 0xFFFF), _round_stochastically(v, (bits >> 16) & 0xFFFF)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
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
    """To bfloat16, up with the probability of what is cut off."""
    return ((x.view(torch.int32) + bits) & -0x10000).view(torch.float32)


def _random_bits(seed: torch.Tensor, n: int, device: torch.device) -> torch.Tensor:
    """32 bits for each of n elements: an integer hash of position and seed (lowbias32, C. Wellons 2018)."""
    x = torch.arange(n, dtype=torch.int32, device=device) + seed
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32))):
        x = (x ^ ((x >> shift) & ((1 << (32 - shift)) - 1))) * factor
    return x ^ ((x >> 16) & 0xFFFF)


@functools.cache
def _compiled() -> Callable[..., None]:
    return torch.compile(update, dynamic=True)


def adamw(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor | None],
    hyper: Hyper,
    factor: float = 1.0,
    seeds: Sequence[int] | None = None,
) -> None:
    """One step on several runs that share ``hyper``.

    ``factor`` multiplies the gradients (clip coefficient / scale); ``seeds``, one for each run, round bfloat16 moments.
    """
    if all(_uniform(*run) for run in zip(params, grads, exp_avgs, exp_avg_sqs, masters, strict=True)):
        scale = None if factor == 1.0 else torch.tensor(1.0 / factor)
        torch._fused_adamw_(
            list(params),
            list(grads),
            list(exp_avgs),
            list(exp_avg_sqs),
            [],
            [torch.tensor(float(hyper.step)) for _ in params],
            lr=hyper.lr,
            beta1=hyper.beta1,
            beta2=hyper.beta2,
            weight_decay=hyper.weight_decay,
            eps=hyper.eps,
            amsgrad=False,
            maximize=hyper.maximize,
            grad_scale=scale,
        )
        return
    sign = -1.0 if hyper.maximize else 1.0
    coefficients = torch.tensor([sign * factor, *hyper.coefficients], dtype=torch.float32)
    for i, run in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, masters, strict=True)):
        seed = None if seeds is None else torch.tensor(seeds[i] % (1 << 31), dtype=torch.int32)
        _compiled()(*run, coefficients, seed)


def _uniform(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    master: torch.Tensor | None,
) -> bool:
    dtypes = {param.dtype, grad.dtype, exp_avg.dtype, exp_avg_sq.dtype}
    return master is None and len(dtypes) == 1 and dtypes <= _FUSED
