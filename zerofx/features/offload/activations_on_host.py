"""What forward saves for backward, in pinned memory of the host, of a model on a device (``activations="cpu"``).

::

    computing    saved ●──────────────── its memory is free      here ●─────────────── read
                       │ begin         ▲ after                        │ begin_back   ▲ after
    out                └── to the host ┘                              │              │
    back                                                              └── to `here` ─┘

Each copy begins after what the computing stream was given until then, and the computing stream goes on after it where
the graph waits. The host waits for nothing. So what writes a buffer again comes after the copy that read it: between
the two the computing stream has waited for that copy.

A *handle* stands for what left, as in `zerofx.features.offload.activation_store`: its buffer is free when it goes. The
idea is PyTorch's ``save_on_cpu(pin_memory=True)``, whose copies stop the host or the computing stream.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass

import torch

from zerofx._torch import StorageWeakRef
from zerofx.features.offload.activation_store import refuse_copy
from zerofx.features.offload.operators import new_handle
from zerofx.features.offload.started import Started
from zerofx.runtime.state.copies import Copies
from zerofx.runtime.state.pinned import Pinned


@dataclass
class _Entry:
    """``nbytes`` in ``buffer``, of the handle with the memory ``of``."""

    buffer: torch.Tensor
    nbytes: int
    of: StorageWeakRef
    key: int


class ActivationsOnHost:
    """See `zerofx.runtime.state.carriage.ActivationStore`.

    Attributes:
        file: None: there is none.
        smallest: bytes of a tensor from which on it goes.
        nbytes: of pinned memory: as much as was ever in use at once, each buffer rounded up to a power of two, which is
            how PyTorch pins.
    """

    file = None

    def __init__(self, copies: Copies, smallest: int) -> None:
        self.smallest = smallest
        self._copies = copies
        self._buffers = Pinned(copies)
        self._entries: dict[int, _Entry] = {}
        self._gone: deque[_Entry] = deque()  # appended by whichever thread lets go of a handle

    @property
    def nbytes(self) -> int:
        """See above."""
        return self._buffers.nbytes

    def offload(self, saved: torch.Tensor, order: list[int]) -> Started:
        """Start to copy ``saved``, whose dimensions lie in ``order``; the result is the handle that stands for it."""
        if self._copies.captured:
            raise RuntimeError(
                'zerofx.Offload(activations="cpu") inside of a CUDA graph that is captured: a replay would not know '
                "which buffer a handle stands for. Run forward and backward outside of it, or leave activations= out."
            )
        self._bury()
        flat, handle = saved.permute(order).reshape(-1).view(torch.uint8), new_handle(saved)
        buffer = self._buffers.take(flat.numel())
        self._copies.begin()
        self._copies.out(buffer.narrow(0, 0, flat.numel()), flat)
        mark, storage = self._copies.mark_out(), handle.untyped_storage()
        entry = self._entries[storage._cdata] = _Entry(buffer, flat.numel(), StorageWeakRef(storage), storage._cdata)
        weakref.finalize(storage, self._gone.append, entry).atexit = False
        return Started(handle, flat, lambda: self._copies.go_on_behind(mark))

    def reload(self, handle: torch.Tensor, here: torch.Tensor) -> Started:
        """Start to copy what ``handle`` stands for to the memory of ``here``."""
        entry = self._entries.get(handle.untyped_storage()._cdata)
        if entry is None or entry.of.expired():
            refuse_copy()
        flat = here.as_strided((here.numel(),), (1,)).view(torch.uint8)
        self._copies.begin_back()
        self._copies.back(flat, entry.buffer.narrow(0, 0, entry.nbytes))
        mark = self._copies.mark_back()
        return Started(here, flat, lambda: self._copies.go_on_behind(mark))

    def _bury(self) -> None:
        while self._gone:
            entry = self._gone.popleft()
            if self._entries.get(entry.key) is entry:  # else the handle's place in memory is another handle's by now
                del self._entries[entry.key]
            self._buffers.give(entry.buffer)
