"""Where state lives when the device is not to hold it: on a disk, by a path that the user gives, or on the host.

::

    offload="/local/scratch"                                the optimizer's state, in a file per rank in that folder
    Offload(optimizer="/local/scratch", fraction=0.5)       of half of the parameters
    Offload(optimizer="/local/scratch", groups=("blocks.*",))
    Offload("/local/scratch", "/local/scratch", "/local/scratch")   and the gradients, and the weights of stage 3
    Offload(activations="/local/scratch")                   what forward saves for backward, in any stage
    Offload("cpu", "cpu", "cpu")                            of a model on a GPU, all of it in the host's memory

ZeRO-Infinity (Rajbhandari et al., 2021) is where the idea is from. docs/offload.md has what is moved when.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from zerofx.model.layout import GroupLayout

Place = str | Path | None
"""None: the device. "cpu": the host's memory. Else a folder, in which each rank has a file of its own."""


PARTS = {"optimizer": "moment", "gradients": "gradient", "weights": "weights", "activations": "activation"}
"""What can be moved: the options' names, and what is in a file then."""


@dataclass(frozen=True)
class Offload:
    """What of a rank's state lives elsewhere, and of which groups.

    Attributes:
        optimizer: what the optimizer remembers: moments, and masters that it holds.
        gradients: what ``.grad`` holds from backward to the step; the same place.
        weights: a rank's shard, in stage 3; the same place.
        activations: what forward saves for backward, of all groups; the same folder, where there is another.
        fraction: of the parameters, from above 0 to 1; the largest groups first, for their chunks are the longest.
        groups: patterns of group names ("blocks.*"), of those that are moved; None: all.
        smallest: bytes of a saved tensor from which on it is moved; smaller ones stay.
        rates: of ``zerofx.calibrate(path=...)``, by which an ``activation_budget`` chooses between moving and computing
            again. None: an ordinary machine's.

    Raises:
        ValueError: one of these is out of its range; the message names it.
    """

    optimizer: Place = None
    gradients: Place = None
    weights: Place = None
    fraction: float = 1.0
    groups: Sequence[str] | None = None
    activations: Place = None
    smallest: int = 1 << 16
    rates: Any = None

    def __repr__(self) -> str:
        """What was given; the rest is as above."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return f"Offload({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    def __post_init__(self) -> None:
        for name in PARTS:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, (str, Path)) or not str(value)):
                raise ValueError(f'Offload({name}={value!r}): expected "cpu", the path of a folder, or None.')
        if type(self.smallest) is not int or self.smallest < 1:
            raise ValueError(f"Offload(smallest={self.smallest!r}): expected a number of bytes above 0.")
        known = ("disk_bytes_per_s", "host_copy_bytes_per_s")
        if self.rates is not None and all(getattr(self.rates, name, None) is None for name in known):
            raise ValueError(
                f"Offload(rates={self.rates!r}): expected the zerofx.Rates that zerofx.calibrate(path=...) returns, "
                "or zerofx.Rates with host_copy_bytes_per_s."
            )
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
    def moves(self) -> bool:
        """Whether anything is to be elsewhere."""
        return any(getattr(self, name) is not None for name in PARTS)

    @property
    def on_host(self) -> bool:
        """Whether the optimizer's state is to be in the host's memory."""
        return self.optimizer == "cpu"

    @property
    def folder(self) -> Path | None:
        """Where a rank has its file; None: it has none."""
        place = self.activations if self.optimizer is None else self.optimizer
        return None if place in (None, "cpu") else Path(str(place))

    @property
    def kinds(self) -> frozenset[str]:
        """What the files hold, in the words of `zerofx.runtime.state.home.Kind`."""
        return frozenset(kind for name, kind in PARTS.items() if getattr(self, name) not in (None, "cpu"))

    @property
    def kinds_on_host(self) -> frozenset[str]:
        """What of a rank's state is to be in the host's memory, in the same words."""
        both = ("optimizer", "gradients", "weights")
        return frozenset(PARTS[name] for name in both if self.on_host and getattr(self, name) == "cpu")

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


STATE = {"moment": "optimizer state", "weights": "weights", "gradient": "gradients"}
"""What a kind of state is called."""


def names_of(kinds: Collection[str]) -> str:
    """Of some kinds, in words: "weights and gradients"."""
    *first, last = [name for kind, name in STATE.items() if kind in kinds]
    return f"{', '.join(first)} and {last}" if first else last


class OnDisk(NamedTuple):
    """What of a rank's state lives in a file (`zerofx.Offload`): for who reads a graph. No pass asks for it.

    Attributes:
        path: this rank's file; of a dry run, which has none, the folder.
        kinds: of `STATE`.
        groups: the names of those whose state is there.
        of: how many groups the module has.
        choice: the options that chose these, as they were given; "" where all were taken.
    """

    path: str
    kinds: frozenset[str]
    groups: frozenset[str]
    of: int
    choice: str = ""

    @property
    def names(self) -> str:
        """Of its kinds, in words."""
        return names_of(self.kinds)

    @property
    def which(self) -> str:
        """How many groups, and by what choice."""
        if len(self.groups) == self.of:
            return "all groups"
        return f"{len(self.groups)} of {self.of} groups ({self.choice})"
