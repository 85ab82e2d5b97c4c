"""Which attention kernel PyTorch takes on a CUDA device that is not there.

``scaled_dot_product_attention`` asks the driver for the device, finds none, and takes the slow way of plain products.
The choice is made here instead, by the same facts of the tensors (2.11, 2.13, 2.15)::

    16 bits, no mask, heads of at most 256        flash attention
    else, without grouped heads                   memory-efficient attention, which takes masks and float32
    else                                          plain products

cuDNN's attention is never taken: which of its versions takes what is not known here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

_aten = torch.ops.aten
_KEYS = ("AutogradCUDA", "CUDA")


@contextlib.contextmanager
def pretended_attention() -> Iterator[None]:
    """Inside, tracers see the operators that a CUDA device would run."""
    op = _aten.scaled_dot_product_attention.default
    keys = [getattr(torch._C.DispatchKey, key) for key in _KEYS]
    before = {key: op.py_kernels[key] for key in keys if key in op.py_kernels}
    for key in keys:
        op.py_kernels[key] = _attention
    op._dispatch_cache.clear()
    try:
        yield
    finally:
        for key in keys:
            del op.py_kernels[key]
        op.py_kernels.update(before)
        op._dispatch_cache.clear()


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    given: list[Any] = [query, key, value]
    four = all(x.dim() == 4 for x in given)
    head, same = query.shape[-1], query.shape[-1] == value.shape[-1]
    if four and same and attn_mask is None and head <= 256 and query.dtype in (torch.float16, torch.bfloat16):
        padded = [F.pad(x, (0, -head % 8)) if head % 8 else x for x in given]
        scale = head**-0.5 if scale is None else scale  # of the heads as they were
        return _aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, scale=scale)[0][..., :head]
    aligned = head % (4 if query.dtype == torch.float32 else 8) == 0 == value.shape[-1] % 4
    if four and not enable_gqa and aligned and query.dtype != torch.float64:
        saved = torch.is_grad_enabled() and any(x.requires_grad for x in given)
        mask = _bias(attn_mask, query, key)
        return _aten._scaled_dot_product_efficient_attention(*given, mask, saved, dropout_p, is_causal, scale=scale)[0]
    more = {"scale": scale, "enable_gqa": enable_gqa}
    return _aten._scaled_dot_product_attention_math(*given, attn_mask, dropout_p, is_causal, **more)[0]


def _bias(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """A mask as the kernel wants it: what is added to scores, of all heads, in rows that begin at 32 bytes."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        nothing = torch.zeros((), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, nothing, float("-inf"))
    length = mask.shape[-1]
    if length % 16:
        mask = F.pad(mask, (0, -length % 16))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
