"""State that a graph moves between the device and where it lives: the interface by which a run asks a feature.

`zerofx.features.offload` fills it in. A graph without such transfers has no carriage.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from zerofx.runtime.state.state_file import StateFile


class ActivationStore(Protocol):
    """Where activations of one module's graphs go, and from how many bytes on.

    Attributes:
        file: None: they are in the host's memory.
        nbytes: of pinned memory of the host.
    """

    @property
    def file(self) -> StateFile | None: ...

    @property
    def nbytes(self) -> int: ...

    smallest: int


class Carriage(Protocol):
    """What one run of a graph has brought to the device, and taken away from it.

    Attributes:
        gradients: what has left, where it lives now, by its place among the graph's reductions.
    """

    gradients: dict[int, torch.Tensor]

    def running(self) -> contextlib.AbstractContextManager[None]:
        """The graph runs inside."""

    def noting(self) -> contextlib.AbstractContextManager[None]:
        """What goes wrong with files inside is noted, for all ranks to raise as the step ends (`StateFile.agree`)."""

    def agree(self) -> None:
        """A graph without a backward has run: no step comes that would ask whether all went well. A collective."""


CARRIAGES: list[Callable[[Iterable[weakref.ref[Any]], ActivationStore | None], Carriage]] = []
"""Of the feature: given the groups whose state moves (`ShardGroup`), and where activations go."""

STORES: list[Callable[[StateFile | None, int], ActivationStore]] = []
"""Of the feature. Without a file it is pretended, of a dry run: they would be in the host's memory."""


def carried(carriage: Carriage | None) -> contextlib.AbstractContextManager[None]:
    """A graph runs inside, whose state ``carriage`` moves; None: it is on the device."""
    return contextlib.nullcontext() if carriage is None else carriage.running()


def noting(carriage: Carriage | None) -> contextlib.AbstractContextManager[None]:
    """See `Carriage.noting`."""
    return contextlib.nullcontext() if carriage is None else carriage.noting()
