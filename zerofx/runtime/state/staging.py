"""Through which what the host remembers meets what the device has: a few pinned buffers, whatever the model's size.

An optimizer whose state is in the host's memory steps there (ZeRO-Offload; Ren et al., 2021). Gradients come out of the
device for it, and new weights go back, chunk by chunk (`zerofx.runtime.optim.through_host`). Nothing else is pinned:
moments never leave the host, so they are ordinary memory of it.
"""

from __future__ import annotations

import torch

from zerofx.runtime.state.copies import Copies

BUFFER = 8 << 20
"""Bytes of a buffer: the gradients and weights of a million elements. A power of two, as PyTorch pins memory."""

BUFFERS = 4
"""One is computed with, one goes back, two come out."""


class Staging:
    """Of one module on one rank.

    Attributes:
        copies: how the device and the host copy from each other.
        brought, taken: bytes that came out of the device, and that went back, so far.
    """

    def __init__(self, copies: Copies) -> None:
        """Take the buffers.

        Raises:
            RuntimeError: the host has no memory left that it can pin.
        """
        self.copies = copies
        self.brought: int = 0
        self.taken: int = 0
        self.buffers: list[torch.Tensor] = [copies.pinned(BUFFER) for _ in range(BUFFERS)]

    @property
    def nbytes(self) -> int:
        """Of its buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def out(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """`Copies.out`, counted."""
        self.brought += source.nbytes
        self.copies.out(into, source)

    def back(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """`Copies.back`, counted."""
        self.taken += source.nbytes
        self.copies.back(into, source)
