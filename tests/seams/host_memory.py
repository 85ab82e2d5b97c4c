"""A second home: weights and gradients in the host's memory. Graphs reload and offload them by copies on a thread.

::

    graph        reload h ─────────── wait_reload h ─ all-gather ...        the thread copies h meanwhile
    home         a copy on the device is filled    handed out

State is a tensor of the host's at any time. What is no graph, an optimizer or a checkpoint, computes with it where it
lives. Where the host's memory is the device's (a machine without a GPU) a copy is a copy all the same: `Traffic` counts
them, and says what the device holds.

It stands for any home that `streams`, and needs no disk.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from zerofx.runtime.state.home import HOMES, Kind, OnDevice


@dataclass
class Traffic:
    """What was copied between a home and the device.

    Attributes:
        brought, taken: bytes, so far.
        here: bytes that the device has of it now: what was fetched, or is being, and gradients that leave.
        most: the most of that at a time.
    """

    brought: int = 0
    taken: int = 0
    here: int = 0
    most: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def arrives(self, tensor: torch.Tensor) -> None:
        """``tensor`` is on the device, for as long as anybody holds its memory."""
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        self._change(nbytes)
        weakref.finalize(storage, self._change, -nbytes).atexit = False

    def _change(self, nbytes: int) -> None:
        with self._lock:
            self.here += nbytes
            self.most = max(self.most, self.here)


class HostMemory(OnDevice):
    """Weights and gradients live in the host's memory."""

    streams: frozenset[Kind] = frozenset({"weights", "gradient"})
    traffic = Traffic()

    @classmethod
    def takes(cls, stage: int, device: torch.device, file: object = None) -> bool:
        return stage > 0

    def keep(self, kind: Kind, tensor: torch.Tensor) -> torch.Tensor:
        return self.offload(tensor).result() if kind in self.streams else tensor

    def reload(self, state: torch.Tensor, here: torch.Tensor) -> Future[torch.Tensor]:
        self.traffic.arrives(here)
        self.traffic.brought += here.nbytes
        return _copies().submit(here.copy_, state)

    def offload(self, gradient: torch.Tensor) -> Future[torch.Tensor]:
        self.traffic.arrives(gradient)
        self.traffic.taken += gradient.nbytes
        return _copies().submit(torch.empty_like(gradient).copy_, gradient)


_pool: ThreadPoolExecutor | None = None


def _copies() -> ThreadPoolExecutor:
    """The thread that copies, one for all homes: copies are done in the order in which they start."""
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(1, thread_name_prefix="zerofx copies")
    return _pool


@contextlib.contextmanager
def counting() -> Iterator[Traffic]:
    """Models that are sharded inside live there; yields what is copied."""
    HostMemory.traffic = Traffic()
    HOMES.insert(0, HostMemory)
    try:
        yield HostMemory.traffic
    finally:
        HOMES.remove(HostMemory)
