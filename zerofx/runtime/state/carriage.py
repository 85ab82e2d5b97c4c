"""What one run of a graph has brought to the device, and taken away from it: `zerofx.passes.carry.Carrier` of homes."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch
from torch.profiler import record_function

from zerofx.passes.carry import carrying
from zerofx.runtime.state.state_file import StateFile
from zerofx.runtime.state.stows import Stows

if TYPE_CHECKING:
    from zerofx.runtime.state.group import ShardGroup


class Carriage:
    """One run of a graph.

    Attributes:
        gradients: what has left, where it lives now, by its place among the graph's reductions.
    """

    def __init__(self, groups: Iterable[weakref.ref[ShardGroup]], stows: Stows | None = None) -> None:
        """``stows``: where what forward saves goes; None: it stays."""
        self.gradients: dict[int, torch.Tensor] = {}
        self._groups = {group.layout.name: group for ref in groups if (group := ref()) is not None}
        self._coming: dict[str, Future[torch.Tensor]] = {}
        self._leaving: dict[int, Future[torch.Tensor]] = {}
        self._stows = stows
        self._stowed: dict[int, Future[torch.Tensor]] = {}

    def files(self) -> list[StateFile]:
        """In which its groups have state, in the same order on every rank."""
        files = [group.home.file for group in self._groups.values()]
        files += [self._stows.file] if self._stows is not None else []
        return [file for file in dict.fromkeys(files) if file is not None]

    def fetch(self, group: str, here: torch.Tensor) -> None:
        """`zerofx.passes.carry.Carrier`"""
        one = self._groups[group]
        self._coming[group] = one.home.fetch(one.shard, here)

    def fetched(self, group: str) -> torch.Tensor:
        """`zerofx.passes.carry.Carrier`"""
        with record_function(f"zerofx: fetch {group}"):
            return self._coming.pop(group).result()

    def put(self, group: str, place: int, gradient: torch.Tensor) -> None:
        """`zerofx.passes.carry.Carrier`"""
        self._leaving[place] = self._groups[group].home.put(gradient)

    def left(self, group: str, place: int) -> None:
        """`zerofx.passes.carry.Carrier`"""
        with record_function(f"zerofx: put {group}"):
            self.gradients[place] = self._leaving.pop(place).result()

    def stow(self, place: int, saved: torch.Tensor, order: list[int]) -> None:
        """`zerofx.passes.carry.Carrier`"""
        self._stowed[place] = self._its.leave(saved, order)

    def stowed(self, place: int) -> torch.Tensor:
        """`zerofx.passes.carry.Carrier`"""
        with record_function("zerofx: stow"):
            return self._stowed.pop(place).result()

    def unstow(self, place: int, handle: torch.Tensor, here: torch.Tensor) -> None:
        """`zerofx.passes.carry.Carrier`"""
        self._stowed[place] = self._its.bring(handle, here)

    def unstowed(self, place: int) -> torch.Tensor:
        """`zerofx.passes.carry.Carrier`"""
        with record_function("zerofx: unstow"):
            return self._stowed.pop(place).result()

    @property
    def _its(self) -> Stows:
        assert self._stows is not None
        return self._stows

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
def noting(carriage: Carriage | None) -> Iterator[None]:
    """What goes wrong with files inside is noted, for all ranks to raise as the step ends (`StateFile.agree`)."""
    files = {file: file.in_step for file in carriage.files()} if carriage is not None else {}
    for file in files:
        file.in_step = True
    try:
        yield
    finally:
        for file, before in files.items():
            file.in_step = before


@contextlib.contextmanager
def carried(carriage: Carriage | None) -> Iterator[None]:
    """A graph runs inside, whose state ``carriage`` brings and takes; None: it is on the device."""
    with noting(carriage), carrying(carriage):
        yield
