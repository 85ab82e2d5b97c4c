"""A home: what the optimizer remembers of a group lives in a file (`zerofx.Offload`).

Weights and gradients are on the device at any time. Moments come to memory while somebody uses them, by name::

    with home.at_hand(exp_avg):     the moments that these are views of are in memory
    zerofx.AdamW                    goes through the file chunk by chunk instead (`zerofx.runtime.optim.through_file`)
    torch.optim                     each operation has at hand what it is given; that stays until others need room
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch

from zerofx._torch import with_own_storage
from zerofx.runtime.state.home import HOMES, Kind, OnDevice
from zerofx.runtime.state.state_file import Extent, StateFile


class InFile(OnDevice):
    """Moments in a file, everything else on the device."""

    moments_away = True

    @classmethod
    def takes(cls, stage: int, device: torch.device, file: StateFile | None) -> bool:
        return stage > 0 and file is not None

    def new(self, kind: Kind, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        state = super().new(kind, numel, dtype, device)
        return state if kind != "moment" else self._taken(state, fresh=True)

    def keep(self, kind: Kind, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if kind != "moment" else self._taken(tensor)

    def _taken(self, state: torch.Tensor, *, fresh: bool = False) -> torch.Tensor:
        assert self.file is not None
        with self.file.noting():
            self.file.take(state, fresh=fresh)
        return state

    @contextlib.contextmanager
    def at_hand(self, *state: torch.Tensor) -> Iterator[None]:
        pinned: list[Extent] = []
        file = self.file
        assert file is not None
        try:
            for extent in {id(e): e for x in state if (e := file.extent_of(x)) is not None}.values():
                with file.noting():
                    file.pin(extent)
                    pinned.append(extent)
            yield
        finally:
            for extent in pinned:
                file.unpin(extent)

    def lend(self, state: torch.Tensor) -> torch.Tensor:
        assert self.file is not None
        extent = self.file.extent_of(state)
        if extent is None:
            return state
        self.file.pin(extent)
        lent = with_own_storage(state)
        weakref.finalize(lent.untyped_storage(), self.file.unpin, extent).atexit = False
        return lent


HOMES.insert(0, InFile)
