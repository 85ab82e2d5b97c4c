"""Through which what the host remembers meets what the device has: a few pinned buffers, whatever the model's size.

An optimizer whose state is in the host's memory steps there (ZeRO-Offload; Ren et al., 2021). Gradients come out of the
device for it, and new weights go back, chunk by chunk (`zerofx.runtime.optim.through_host`). Moments never
leave the host, so they are ordinary memory of it. Weights and gradients are pinned where they live there, too.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from zerofx.runtime.state.copies import Copies
from zerofx.runtime.state.pinned import Pinned

BUFFER = 8 << 20
"""Bytes of a buffer: the gradients and weights of a million elements. A power of two, as PyTorch pins memory."""

BUFFERS = 4
"""One is computed with, one goes back, two come out."""


class Staging:
    """Of one module on one rank.

    Attributes:
        copies: how the device and the host copy from each other.
        holds: what lives in the host's memory besides moments: of "weights" and "gradient".
        pinned: where that is.
        brought, taken: bytes that came out of the device, and that went back, so far.
    """

    def __init__(self, copies: Copies, holds: frozenset[str] = frozenset(), sizes: Iterable[int] = ()) -> None:
        """Take the buffers. ``sizes``: bytes of each piece of state that is to be pinned, to have room for it.

        Raises:
            RuntimeError: the host has no memory left that it can pin.
        """
        self.copies = copies
        self.holds = holds
        self.pinned: Pinned = Pinned(copies)
        for buffer in [self.pinned.take(nbytes) for nbytes in sizes]:
            self.pinned.give(buffer)
        self.brought: int = 0
        self.taken: int = 0
        self.buffers: list[torch.Tensor] = [copies.pinned(BUFFER) for _ in range(BUFFERS)]

    @property
    def nbytes(self) -> int:
        """Of all that is pinned."""
        return sum(buffer.nbytes for buffer in self.buffers) + self.pinned.nbytes

    def out(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """`Copies.out`, counted."""
        self.brought += source.nbytes
        self.copies.out(into, source)

    def back(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """`Copies.back`, counted."""
        self.taken += source.nbytes
        self.copies.back(into, source)
