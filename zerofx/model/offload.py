"""Where state lives when the device is not to hold it: on a disk, by a path that the user gives.

::

    offload="/local/scratch"                                the optimizer's state, in a file per rank in that folder
    Offload(optimizer="/local/scratch", fraction=0.5)       of half of the parameters
    Offload(optimizer="/local/scratch", groups=("blocks.*",))
    Offload("/local/scratch", "/local/scratch", "/local/scratch")   and the gradients, and the weights of stage 3

ZeRO-Infinity (Rajbhandari et al., 2021) is where the idea is from. docs/offload.md has what is moved when.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from zerofx.model.layout import GroupLayout

Place = str | Path | None
"""None: the device. "cpu": the host's memory. Else a folder, in which each rank has a file of its own."""


@dataclass(frozen=True)
class Offload:
    """What of a rank's state lives elsewhere, and of which groups.

    Attributes:
        optimizer: what the optimizer remembers: moments, and masters that it holds.
        gradients: what ``.grad`` holds from backward to the step; the same folder.
        weights: a rank's shard, in stage 3; the same folder.
        fraction: of the parameters, from above 0 to 1; the largest groups first, for their chunks are the longest.
        groups: patterns of group names ("blocks.*"), of those that are moved; None: all.

    Raises:
        ValueError: one of these is out of its range; the message names it.
    """

    optimizer: Place = None
    gradients: Place = None
    weights: Place = None
    fraction: float = 1.0
    groups: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for each in fields(self)[:3]:
            value = getattr(self, each.name)
            if value is not None and (not isinstance(value, (str, Path)) or not str(value)):
                raise ValueError(f'Offload({each.name}={value!r}): expected "cpu", the path of a folder, or None.')
        if not isinstance(self.fraction, (int, float)) or not 0 < self.fraction <= 1:
            raise ValueError(f"Offload(fraction={self.fraction!r}): expected a number above 0, up to 1.")
        if self.groups is not None:
            if isinstance(self.groups, str) or not all(isinstance(pattern, str) for pattern in self.groups):
                raise ValueError(f'Offload(groups={self.groups!r}): expected patterns of names, as ("blocks.*",).')
            object.__setattr__(self, "groups", tuple(self.groups))

    @staticmethod
    def of(given: Offload | str | Path | None) -> Offload | None:
        """The option ``offload``: itself, or where the optimizer's state goes. "" and None are nothing.

        Raises:
            ValueError: it is neither.
        """
        if given is None or isinstance(given, Offload):
            return given
        if not isinstance(given, (str, Path)) or not str(given):
            raise ValueError(f'offload={given!r}: expected "cpu", the path of a folder, a zerofx.Offload, or None.')
        return Offload(optimizer=given)

    @property
    def folder(self) -> Path | None:
        """Where the optimizer's state has its files; None: it has none."""
        return None if self.optimizer in (None, "cpu") else Path(str(self.optimizer))

    @property
    def kinds(self) -> frozenset[str]:
        """What the files hold, in the words of `zerofx.runtime.state.home.Kind`."""
        parts = {"moment": self.optimizer, "gradient": self.gradients, "weights": self.weights}
        return frozenset(kind for kind, place in parts.items() if place not in (None, "cpu"))

    @property
    def choice(self) -> str:
        """The options that choose groups, as they were given; "" where all are taken."""
        given = [f"fraction={self.fraction}"] * (self.fraction < 1)
        given += [f"groups={self.groups!r}"] * (self.groups is not None)
        return ", ".join(given)

    def chosen(self, layouts: Sequence[GroupLayout]) -> set[str]:
        """The names of the groups whose state moves: a fact about the model, and so the same on every rank.

        Raises:
            ValueError: no group fits ``groups``.
        """
        fits = [
            layout
            for layout in layouts
            if self.groups is None or any(fnmatch.fnmatchcase(layout.name, pattern) for pattern in self.groups)
        ]
        if not fits:
            names = ", ".join(layout.name for layout in layouts[:3])
            raise ValueError(f"Offload(groups={self.groups!r}): no group has such a name. There are {names}, ...")
        wanted, taken = self.fraction * sum(layout.numel for layout in fits), 0
        names_taken: set[str] = set()
        for layout in sorted(fits, key=lambda layout: -layout.numel):
            if taken >= wanted:
                break
            taken += layout.numel
            names_taken.add(layout.name)
        return names_taken
