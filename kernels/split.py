"""A float32 master weight as the bfloat16 weight and 16 bits more, without losing one.

::

    float32       s eeeeeeee mmmmmmm mmmmmmmmmmmmmmmm            bits, 32 of them
                  └────── high ────┘ └───── low ────┘

    split         remainder = low, read as a signed int16        from −32768 to 32767
                  weight    = (bits − remainder) >> 16           high, or high + 1 where low ≥ 0x8000

    join          bits      = (weight << 16) + remainder

Subtracting a signed remainder *is* rounding to nearest: the weight is the nearest bfloat16, and on a tie the one
farther from zero. (Rounding ties to even cannot be undone with 16 bits: an even bfloat16 would stand for 65,537
float32 numbers, both its ties included.) It differs from ``master.bfloat16()`` at ties only, one number in 65,536.

All of it is arithmetic on integers modulo 2^32, so every number comes back with its bits: zeros of either sign,
subnormals, infinities. Every NaN comes back as the usual one, 0x7fc00000, and its weight is NaN: with their own bits,
some would read as infinity, and a GPU's (0x7fffffff) as zero. As a weight alone, finite numbers from 0x7f7f8000 on read
as infinity, as in every rounding to bfloat16, and infinity as itself.

The idea of a signed remainder is that of apex's DistributedFusedAdam (``store_param_remainders``).
"""

from __future__ import annotations

import torch


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A float32 tensor as ``(weight, remainder)``, bfloat16 and int16 of its shape."""
    if master.dtype is not torch.float32:
        raise TypeError(f"a master weight is float32, not {master.dtype}")
    bits = torch.where(master == master, master.view(torch.int32), 0x7FC00000)
    remainder = bits.to(torch.int16)
    weight = ((bits - remainder) >> 16).to(torch.int16)
    return weight.view(torch.bfloat16), remainder


def join(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The float32 tensor that :func:`split` made ``weight`` (bfloat16) and ``remainder`` (int16) of."""
    if weight.dtype is not torch.bfloat16 or remainder.dtype is not torch.int16:
        raise TypeError(f"join takes bfloat16 and int16, not {weight.dtype} and {remainder.dtype}")
    bits = (weight.view(torch.int16).to(torch.int32) << 16) + remainder
    return bits.view(torch.float32)
