"""A home: what a rank keeps of a group lives in a file (`zerofx.Offload`).

Moments do; weights and gradients, if the option says so (`StateFile.holds`). What is in the file comes to memory while
somebody uses it, by name::

    with home.resident(exp_avg):     weights, gradients and the moments that these are views of are in memory
    graphs                          fetch a shard into memory of the graph's own, and put gradients into the file, on a
                                    thread (`reload_weights`, `offload_gradients`)
    zerofx.AdamW                    goes through the moments chunk by chunk (`zerofx.runtime.optim.through_file`), with
                                    the weights and gradients of one group resident
    torch.optim                     what each operation is given is resident, until others need the memory
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import torch

from zerofx._torch import storage_of, with_own_storage
from zerofx.features.offload.elsewhere import Elsewhere
from zerofx.runtime.state.home import Kind
from zerofx.runtime.state.state_file import Extent, StateFile
from zerofx.runtime.state.transfers import transfers


class InFile(Elsewhere[StateFile]):
    """Moments in a file, weights and gradients if it holds them, everything else on the device."""

    kind_of_place = StateFile
    moments_away = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._extents: list[Extent] = []  # of weights and gradients

    def new(self, kind: Kind, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        state = super().new(kind, numel, dtype, device)
        return self._taken(kind, state, fresh=True) if self.moves(kind) else state

    def keep(self, kind: Kind, tensor: torch.Tensor) -> torch.Tensor:
        if not self.moves(kind):
            return tensor
        # A gradient may be a part of a graph's buffer. That cannot be emptied.
        return self._taken(kind, tensor if kind == "moment" else tensor.clone())

    def _taken(self, kind: Kind, state: torch.Tensor, *, fresh: bool = False) -> torch.Tensor:
        with self.place.noting():
            self.place.take(state, fresh=fresh)
            if kind != "moment":
                self._note(state)
        return state

    def _note(self, state: torch.Tensor) -> None:
        """``state`` is weights or a gradient."""
        extent = self.place.extent_of(state)
        with self._lock:
            self._extents = [each for each in self._extents if storage_of(each.ref) is not None]
            self._extents += [extent] if extent is not None else []

    @contextlib.contextmanager
    def resident(self, *state: torch.Tensor) -> Iterator[None]:
        with self._lock:
            # Storages are held: what is pinned does not go before it is unpinned.
            own = [(each, storage) for each in self._extents if (storage := storage_of(each.ref)) is not None]
        with self._pinned([each for each, _ in own], state):
            yield

    def only(self, *state: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        return self._pinned([], state)

    @contextlib.contextmanager
    def _pinned(self, extents: list[Extent], state: Sequence[torch.Tensor]) -> Iterator[None]:
        pinned: list[Extent] = []
        file = self.place
        given = [extent for x in state if (extent := file.extent_of(x)) is not None]
        try:
            for extent in {id(each): each for each in [*extents, *given]}.values():
                with file.noting():
                    file.pin(extent)
                    pinned.append(extent)
            yield
        finally:
            for extent in pinned:
                file.unpin(extent)

    def shaping(self, state: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        extent = self.place.extent_of(state)
        return contextlib.nullcontext() if extent is None else self.place.shaping(extent)

    def reload(self, state: torch.Tensor, here: torch.Tensor) -> Future[torch.Tensor]:
        return transfers().submit(self._fetched, state, here)

    def _fetched(self, state: torch.Tensor, here: torch.Tensor) -> torch.Tensor:
        with self.place.noting():
            extent = self.place.extent_of(state)
            if extent is None:
                return here.copy_(state)
            self.place.copied(extent, here)
            return here
        return here.fill_(math.nan)  # it was noted: the graph goes on, and all ranks raise as the step ends

    def offload(self, gradient: torch.Tensor) -> Future[torch.Tensor]:
        place = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        place.untyped_storage().resize_(0)  # nobody writes to it: it is a place in the file, here and now
        return transfers().submit(self._put, gradient, place)

    def _put(self, gradient: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        with self.place.noting():
            self.place.store(gradient.contiguous(), place)
            self._note(place)
            return place
        return gradient.clone()

    def keep_resident(self, state: torch.Tensor) -> torch.Tensor:
        file = self.place
        extent = file.extent_of(state)
        if extent is None:
            return state
        file.pin(extent)
        view = with_own_storage(state)
        weakref.finalize(view.untyped_storage(), file.unpin, extent).atexit = False
        return view
