"""Pinned memory of the host, in buffers that are used again.

::

    take(5000)    a buffer of 8192 bytes      of those that were given back, or a new one
    give(it)      it is free, for who asks next

PyTorch rounds pinned memory up to a power of two. So every buffer has such a size, and any two of one size are alike.

A buffer may be given back while a copy is still at it. So who takes it writes to it by copies that come after the
computing stream, which has waited for all that were started before.
"""

from __future__ import annotations

from collections import defaultdict, deque

import torch

from zerofx.runtime.state.copies import Copies


class Pinned:
    """The buffers of one module on one rank.

    Attributes:
        nbytes: of all of them, in use or free.
    """

    def __init__(self, copies: Copies) -> None:
        self.nbytes: int = 0
        self._copies = copies
        self._back: deque[torch.Tensor] = deque()  # appended by whichever thread lets go of what it held
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)  # by size

    def take(self, nbytes: int) -> torch.Tensor:
        """A buffer of ``nbytes`` or more, ``uint8``; what is in it is anything.

        Raises:
            RuntimeError: the host has no memory left that it can pin.
        """
        while self._back:
            buffer = self._back.popleft()
            self._free[buffer.numel()].append(buffer)
        size = 1 << (nbytes - 1).bit_length()
        if self._free[size]:
            return self._free[size].pop()
        buffer = self._copies.pinned(size)
        self.nbytes += size
        return buffer

    def give(self, buffer: torch.Tensor) -> None:
        """``buffer`` is free. Any thread may say so."""
        self._back.append(buffer)
