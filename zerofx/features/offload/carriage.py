"""What one run of a graph has brought to the device, and taken away from it: a `Carrier` of homes."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import record_function

from zerofx.features.offload.activation_store import ActivationStore
from zerofx.features.offload.operators import carrying
from zerofx.runtime.state.state_file import StateFile

if TYPE_CHECKING:
    from zerofx.runtime.state.group import ShardGroup


class Carriage:
    """See `zerofx.runtime.state.carriage.Carriage`."""

    def __init__(self, groups: Iterable[weakref.ref[ShardGroup]], store: Any = None) -> None:
        """``store``: the `ActivationStore` for what forward saves; None: it stays."""
        self.gradients: dict[int, torch.Tensor] = {}
        self._groups = {group.layout.name: group for ref in groups if (group := ref()) is not None}
        self._coming: dict[str, Future[torch.Tensor]] = {}
        self._leaving: dict[int, Future[torch.Tensor]] = {}
        self._store: ActivationStore | None = store
        self._activations: dict[int, Future[torch.Tensor]] = {}

    def files(self) -> list[StateFile]:
        """In which its groups have state, in the same order on every rank."""
        files = [group.home.file for group in self._groups.values()]
        files += [self._store.file] if self._store is not None else []
        return [file for file in dict.fromkeys(files) if file is not None]

    def reload(self, group: str, here: torch.Tensor) -> None:
        """`zerofx.features.offload.operators.Carrier`"""
        one = self._groups[group]
        self._coming[group] = one.home.reload(one.shard, here)

    def reloaded(self, group: str) -> torch.Tensor:
        """`zerofx.features.offload.operators.Carrier`"""
        with record_function(f"zerofx: reload {group}"):
            return self._coming.pop(group).result()

    def offload(self, group: str, place: int, gradient: torch.Tensor) -> None:
        """`zerofx.features.offload.operators.Carrier`"""
        self._leaving[place] = self._groups[group].home.offload(gradient)

    def offloaded(self, group: str, place: int) -> None:
        """`zerofx.features.offload.operators.Carrier`"""
        with record_function(f"zerofx: offload {group}"):
            self.gradients[place] = self._leaving.pop(place).result()

    def offload_activation(self, place: int, saved: torch.Tensor, order: list[int]) -> None:
        """`zerofx.features.offload.operators.Carrier`"""
        self._activations[place] = self._its.offload(saved, order)

    def activation_offloaded(self, place: int) -> torch.Tensor:
        """`zerofx.features.offload.operators.Carrier`"""
        with record_function("zerofx: offload_activation"):
            return self._activations.pop(place).result()

    def reload_activation(self, place: int, handle: torch.Tensor, here: torch.Tensor) -> None:
        """`zerofx.features.offload.operators.Carrier`"""
        self._activations[place] = self._its.reload(handle, here)

    def activation_reloaded(self, place: int) -> torch.Tensor:
        """`zerofx.features.offload.operators.Carrier`"""
        with record_function("zerofx: reload_activation"):
            return self._activations.pop(place).result()

    @property
    def _its(self) -> ActivationStore:
        assert self._store is not None
        return self._store

    def agree(self) -> None:
        """A graph without a backward has run: no step comes that would ask whether its reads went well. A collective.

        Raises:
            OffloadError: on every rank, where a shard could not be read on one of them.
        """
        for file in self.files():
            before = file.in_step
            file.agree("What was computed without gradients is not right, on any rank.")
            file.in_step = before

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """See `zerofx.runtime.state.carriage.Carriage`."""
        files = {file: file.in_step for file in self.files()}
        for file in files:
            file.in_step = True
        try:
            yield
        finally:
            for file, before in files.items():
                file.in_step = before

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """See `zerofx.runtime.state.carriage.Carriage`."""
        with self.noting(), carrying(self):
            yield
