"""A home: state of a model on a device lives in the host's memory: the optimizer's, and weights and gradients if asked.

::

    weights     pinned ──▶ the device, ahead of a gather     `reload`, on a stream of its own
    gradient    pinned ◀── the device, as it is reduced      `offload`, on another
    moments     ordinary memory of the host, at any time

`zerofx.AdamW` steps there (`zerofx.runtime.optim.through_host`), and no other optimizer. It computes on what `on_host`
gives, after `settle`. In that the host waits, and nowhere else here.

What stands for weights and gradients is a tensor of the device, whose storage is empty at rest. Inside of `resident`
it is there, and may be computed with: it comes as the block begins, and leaves as it ends. All of this is in the order
of the computing stream::

    computing    reduce ●────────────────● free      ● the block ●────────────────● free
                  begin │         after  ▲           │ begin     │ begin   after  ▲
    out                 └── to pinned ───┘           │           └── to pinned ───┘
    back                                             └── to the device, which the computing stream waits for

So what writes pinned memory by a copy comes after the copies that have read it, and a buffer that a gradient has let
go of can be the next one's at once.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from zerofx._torch import StorageWeakRef, storage_of, with_own_storage
from zerofx.features.offload.elsewhere import Elsewhere
from zerofx.features.offload.started import Started
from zerofx.runtime.state.copies import Mark
from zerofx.runtime.state.home import Kind
from zerofx.runtime.state.staging import Staging


@dataclass
class Away:
    """State that is in the host's memory.

    Attributes:
        stands: the storage of the tensor of the device that stands for it.
        pinned: its bytes.
        device: of that tensor.
        mark: after the last copy from or to it.
        users: how many blocks compute with it on the device now; none: that storage is empty.
    """

    stands: StorageWeakRef
    pinned: torch.Tensor
    device: torch.device
    mark: Mark
    users: int = 0


class OnHost(Elsewhere[Staging]):
    """Moments in the host's memory, and what else `Staging.holds`; everything else on the device."""

    kind_of_place = Staging
    hosts = True

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._all: dict[int, Away] = {}  # by the address of the storage that stands for it
        self._let_go: deque[tuple[Away, torch.UntypedStorage]] = deque()  # appended by any thread

    def new(self, kind: Kind, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        state = super().new(kind, numel, dtype, torch.device("cpu") if kind == "moment" else device)
        there = kind in self.streams and device.type != "meta"  # a dry run's is nowhere
        return self._leaving(state).result() if there else state

    def keep(self, kind: Kind, tensor: torch.Tensor) -> torch.Tensor:
        return self._leaving(tensor).result() if kind in self.streams else tensor

    # ---- for graphs -------------------------------------------------------------------------------------------------

    def offload(self, gradient: torch.Tensor) -> Started:  # type: ignore[override]  # as much of a `Future` as is asked
        self._refuse_capture("gradients")
        return self._leaving(gradient)

    def _leaving(self, tensor: torch.Tensor) -> Started:
        """Start to copy ``tensor`` to the host; what stands for it."""
        self._leave()
        copies, flat = self.place.copies, tensor.contiguous()
        stands = torch.empty_like(flat)
        stands.untyped_storage().resize_(0)
        buffer = self.place.pinned.take(flat.nbytes)
        pinned = buffer.narrow(0, 0, flat.nbytes)
        copies.begin()
        self.place.out(pinned, flat.view(torch.uint8))
        mark, storage = copies.mark_out(), stands.untyped_storage()
        with self._lock:
            gone = [key for key, away in self._all.items() if away.stands.expired()]
            for key in gone:
                del self._all[key]
            self._all[storage._cdata] = Away(StorageWeakRef(storage), pinned, tensor.device, mark)
        weakref.finalize(storage, self.place.pinned.give, buffer).atexit = False
        return Started(stands, flat, lambda: copies.go_on_behind(mark))

    def reload(self, state: torch.Tensor, here: torch.Tensor) -> Started:  # type: ignore[override]  # as for `offload`
        self._refuse_capture("weights")
        self._leave()
        away, copies = self._of(state), self.place.copies
        with self._lock:
            if away is None or away.users:
                return Started(here.copy_(state), here, lambda: None)
            copies.begin_back()
            self.place.back(here.view(torch.uint8), away.pinned)
            mark = away.mark = copies.mark_back()
        return Started(here, here, lambda: copies.go_on_behind(mark))

    def _refuse_capture(self, option: str) -> None:
        if self.place.copies.captured:
            raise RuntimeError(
                f'zerofx.Offload({option}="cpu") inside of a CUDA graph that is captured: the optimizer steps on the '
                f"host, which a replay would not do. Run forward and backward outside of it, or leave {option}= out."
            )

    # ---- for who computes on the device -----------------------------------------------------------------------------

    def resident(self, *state: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        with self._lock:
            return self._here([*self._all.values(), *self._given(state)])

    def only(self, *state: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        return self._here(self._given(state))

    def keep_resident(self, state: torch.Tensor) -> torch.Tensor:
        if (away := self._of(state)) is None:
            return state
        self._bring(away, storage := state.untyped_storage())
        view = with_own_storage(state)
        # It leaves when this home is asked next, and not in the midst of a step, where garbage may be collected.
        weakref.finalize(view.untyped_storage(), self._let_go.append, (away, storage)).atexit = False
        return view

    def _leave(self) -> None:
        """What was kept resident, and nobody looks at any more, leaves."""
        with self._lock:
            while self._let_go:
                self._take(*self._let_go.popleft())

    def shaping(self, state: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        away = self._of(state)
        return contextlib.nullcontext() if away is None else self._shaped(away, state.untyped_storage())

    @contextlib.contextmanager
    def _shaped(self, away: Away, storage: torch.UntypedStorage) -> Iterator[None]:
        with self._lock:
            if not away.users:
                storage.resize_(away.pinned.numel())
            try:
                yield
            finally:
                if not away.users:
                    storage.resize_(0)

    @contextlib.contextmanager
    def _here(self, those: Iterable[Away]) -> Iterator[None]:
        brought: list[tuple[Away, torch.UntypedStorage]] = []
        self._leave()
        try:
            for away in {id(each): each for each in those}.values():
                if (storage := storage_of(away.stands)) is not None:
                    self._bring(away, storage)
                    brought.append((away, storage))
            yield
        finally:
            for away, storage in brought:
                self._take(away, storage)

    def _bring(self, away: Away, storage: torch.UntypedStorage) -> None:
        with self._lock:
            if not away.users:
                copies = self.place.copies
                storage.resize_(away.pinned.numel())
                copies.begin_back()
                self.place.back(_bytes_in(storage, away), away.pinned)
                away.mark = copies.mark_back()
                copies.go_on_behind(away.mark)
            away.users += 1

    def _take(self, away: Away, storage: torch.UntypedStorage) -> None:
        with self._lock:
            away.users -= 1
            if not away.users:
                copies = self.place.copies
                copies.begin()
                self.place.out(away.pinned, _bytes_in(storage, away))
                away.mark = copies.mark_out()
                copies.go_on_behind(away.mark)
                storage.resize_(0)

    # ---- for who computes on the host -------------------------------------------------------------------------------

    def on_host(self, state: torch.Tensor, numel: int | None = None) -> torch.Tensor | None:
        away = self._of(state)
        if away is None or away.users:
            return None
        at, numel = state.storage_offset(), state.numel() if numel is None else numel
        return away.pinned.view(state.dtype).narrow(0, at, numel)

    def settle(self, *state: torch.Tensor) -> None:
        for away in self._given(state):
            away.mark.synchronize()

    def _given(self, state: Iterable[torch.Tensor]) -> list[Away]:
        return [away for each in state if (away := self._of(each)) is not None]

    def _of(self, state: torch.Tensor) -> Away | None:
        away = self._all.get(state.untyped_storage()._cdata)
        return None if away is None or away.stands.expired() else away


def _bytes_in(storage: torch.UntypedStorage, away: Away) -> torch.Tensor:
    """The bytes of a storage that is not empty."""
    return torch.empty(0, dtype=torch.uint8, device=away.device).set_(storage, 0, away.pinned.shape, (1,))
