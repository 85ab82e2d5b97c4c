"""What forward's passes leave for backward's of saved values: which are parts, and which were offloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class SavedPart:
    """A value of which forward saves this rank's part (`zerofx.features.partition_activations.partition_saved`).

    Attributes:
        name: what computes it in forward.
        numel, dtype: of the whole.
        ranks: how many have a part each.
        positions: the outputs of forward in whose places the part travels.
        views: by the name that backward knows each of them by: its size, strides and offset in the whole's memory.
    """

    name: str
    numel: int
    dtype: torch.dtype
    ranks: int
    positions: tuple[int, ...]
    views: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]]

    @property
    def numel_of_one(self) -> int:
        return -(-self.numel // self.ranks)

    @property
    def nbytes(self) -> int:
        """Of the whole."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class ActivationChoice:
    """Which saved tensors leave the device: those of ``smallest`` bytes or more; ``only``: of these, by name."""

    smallest: int
    only: frozenset[str] | None = None


@dataclass(frozen=True)
class OffloadedActivation:
    """What stands behind one saved value that left in forward (`offload_activation`).

    Attributes:
        place: its number among what left; several saved views of one tensor have one number.
        source: the node of forward that left.
        order: of its dimensions in memory, the outermost first.
        handle: the fake tensor that backward is given instead.
        steps: from what comes back to the saved value, as in a `Recipe`.
    """

    place: int
    source: str
    order: tuple[int, ...]
    handle: Any
    steps: tuple[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]], ...] = ()
