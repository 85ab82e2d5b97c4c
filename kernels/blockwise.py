"""Moments in 8 bits: a code for each element and one float32 scale for each *block* of 256 neighbours.

The code is a signed square root, counted in steps::

    x         −scale ......... 0 ......... +scale          scale = the block's largest |x|
    code        −127 ... −2 −1 0 1 2 ... 127               x = code · |code| / 127² · scale

    exp_avg      x = exp_avg                               codes from −127 to 127, int8
    exp_avg_sq   x = sqrt(exp_avg_sq)                      codes from 0 to 255, uint8; 255 for 127

A step is fine near zero, where most elements of a block are, and 1.6 (0.8) percent wide at the largest. The second
moment is kept by its root because that is what divides the update, and because it spans half the magnitudes. A root
that is not zero never gets code 0, since the update would then be the first moment over eps.

**Rounded stochastically**: up with the probability of what is cut off, so that the mean of x is exact. Rounded to
nearest, a number moves only where one step of AdamW moves it by half a code, and 1 − beta2 is less than that.

What it costs. Left: error of the update, of its size, root mean square, with the moments of a GPT of 0.5 million
parameters that learns with betas (0.9, 0.999). Right: error of what weights moved in 100 steps from float64's AdamW,
where the sizes of a block's gradients are spread by a factor of e^s, s = 0.5, 1 and 1.5 (one standard deviation):

=====================================================  =======  ========  =====  =====  =====
code of both moments, in blocks of 256                 step 25  step 400  s=0.5  s=1    s=1.5
=====================================================  =======  ========  =====  =====  =====
this one, stochastically                               0.034    0.050     0.024  0.048  0.117
this one, to nearest                                   0.025    0.066     0.018  0.040  0.099
dynamic map of bitsandbytes, to nearest as there       0.041    0.092     0.028  0.088  0.262
=====================================================  =======  ========  =====  =====  =====

(Right: bitsandbytes 0.50.2 itself. bfloat16 moments: 0.004. Floating point codes of 8 bits are worse: 0.10 at step 400
for an exp_avg_sq with 5 bits of exponent alone.) Blocks, the dynamic map, and that this trains: Dettmers et al., "8-bit
Optimizers via Block-wise Quantization", 2022.

**What comes back**: the largest element, exactly. And codes: ``quantize(dequantize(codes, scales))`` is both, bit for
bit, as long as the squares of roots do not underflow (scales of exp_avg_sq above 2^-46). A first moment whose block has
nothing above 2^-100 is zero. A number that is not finite makes its block read as not finite.

No element is divided: a block's scale is turned into a factor once, a little too large (``MARGIN``), so that the
largest element does reach the largest code however the factor was rounded.
"""

from __future__ import annotations

import torch

BLOCK = 256
"""Elements that share a scale."""

LARGEST_FIRST, LARGEST_SECOND = 127, 255
"""The largest codes of either moment."""

TINY = 2.0**-100
"""A scale below it is taken for zero, lest its inverse overflow."""

MARGIN = 1 + 2.0**-21
"""By how much factors are too large: more than all roundings between a scale and a code."""

NEAREST = 0.5


def scales_of(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude in each row of ``x`` (float32 [n, L]), as float32 [n, 1]; 0 where it is below ``TINY``."""
    largest = x.abs().amax(dim=-1, keepdim=True)
    return torch.where(largest < TINY, 0.0, largest)


def decode(codes: torch.Tensor, scales: torch.Tensor, largest: int) -> torch.Tensor:
    """What ``codes`` (int8 or uint8 [n, L]) stand for, in float32."""
    root = codes.to(torch.float32)
    return root * root.abs() * (1 / largest**2) * scales


def encode_first(x: torch.Tensor, scales: torch.Tensor, u: torch.Tensor | float = NEAREST) -> torch.Tensor:
    """Codes of first moments, int8; rounded up where the part cut off is more than ``u``, uniform in [0, 1)."""
    magnitude = _encode(x.abs(), scales, LARGEST_FIRST, u)
    return torch.where(x < 0, -magnitude, magnitude).to(torch.int8)


def encode_second(root: torch.Tensor, scales: torch.Tensor, u: torch.Tensor | float = NEAREST) -> torch.Tensor:
    """Codes of the roots of second moments, uint8; see `encode_first`."""
    magnitude = _encode(root, scales, LARGEST_SECOND, u)
    return torch.where(root > 0, magnitude.clamp_min(1), magnitude).to(torch.uint8)


def _encode(x: torch.Tensor, scales: torch.Tensor, largest: int, u: torch.Tensor | float) -> torch.Tensor:
    factor = torch.where(scales > 0, scales.reciprocal() * (largest**2 * MARGIN), 0.0)
    square = x * factor
    square = torch.where(square < largest**2, square, float(largest**2))
    code = square.sqrt().floor()
    return code + (u * (2 * code + 1) < square - code * code)  # (code + 1)² − code² is 2 code + 1


def quantize(exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> dict[str, torch.Tensor]:
    """Two 1-D tensors of equal length as codes (their length) and scales (one for each block), to nearest.

    The keys are those of ``optimizer.state``: "exp_avg_codes", "exp_avg_scales" and the same of "exp_avg_sq".
    """
    first, second = rows_of(exp_avg.float()), rows_of(exp_avg_sq.float()).sqrt()
    scales, roots = scales_of(first), scales_of(second)
    numel = exp_avg.numel()
    return {
        "exp_avg_codes": encode_first(first, scales).view(-1)[:numel],
        "exp_avg_scales": scales.view(-1),
        "exp_avg_sq_codes": encode_second(second, roots).view(-1)[:numel],
        "exp_avg_sq_scales": roots.view(-1),
    }


def dequantize(state: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Both moments, float32, of what `quantize` returns."""
    codes, roots = state["exp_avg_codes"], state["exp_avg_sq_codes"]
    first = decode(rows_of(codes), state["exp_avg_scales"][:, None], LARGEST_FIRST)
    second = decode(rows_of(roots), state["exp_avg_sq_scales"][:, None], LARGEST_SECOND)
    return first.view(-1)[: codes.numel()], second.square().view(-1)[: roots.numel()]


def blocks_in(numel: int) -> int:
    """How many blocks ``numel`` elements have, the last perhaps a part of one."""
    return -(-numel // BLOCK)


def rows_of(flat: torch.Tensor) -> torch.Tensor:
    """A 1-D tensor with a block in each row, the last filled up with zeros."""
    return torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
