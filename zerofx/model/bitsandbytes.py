"""What zerofx knows of bitsandbytes, which it never imports."""

from __future__ import annotations

from torch import nn

_REPACKS = "support_avx512bf16_for_cpu"


def keep_packing(module: nn.Module) -> None:
    """Have 4-bit layers compute with their codes as they are.

    On CPUs with AVX512-BF16 they would pack them in another shape as they evaluate first: a write in forward, after
    which they cannot be trained.
    """
    for m in module.modules():
        if hasattr(m, _REPACKS):
            setattr(m, _REPACKS, False)
