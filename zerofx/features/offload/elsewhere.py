"""What homes have in common whose moments are elsewhere, and weights and gradients if their place holds them, too.

::

    home      place          holds
    InFile    a StateFile    "moment", "weights", "gradient"; some of these
    OnHost    a Staging      "weights", "gradient"; moments are in the host's memory in any case
"""

from __future__ import annotations

from typing import ClassVar, Generic, TypeVar, cast

import torch

from zerofx.runtime.state.home import Kind, OnDevice, Place
from zerofx.runtime.state.staging import Staging
from zerofx.runtime.state.state_file import StateFile

P = TypeVar("P", StateFile, Staging)


class Elsewhere(OnDevice, Generic[P]):
    """Of weights and gradients, graphs copy themselves what the place holds.

    Attributes:
        kind_of_place: which groups it takes, by where their moments are to be.
        place: that.
    """

    kind_of_place: ClassVar[type]
    place: P

    @classmethod
    def takes(cls, stage: int, device: torch.device, place: Place) -> bool:
        return stage > 0 and isinstance(place, cls.kind_of_place)

    def has(self, place: Place) -> None:
        super().has(place)
        self.place = cast(P, place)
        kinds: tuple[Kind, ...] = ("weights", "gradient")
        self.streams = frozenset(kind for kind in kinds if kind in self.place.holds)
        self.away = bool(self.streams)

    def moves(self, kind: Kind) -> bool:
        return kind in self.place.holds
