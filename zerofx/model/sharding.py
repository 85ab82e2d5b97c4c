"""Over which ranks of a mesh of two dimensions something is divided, for each purpose.

::

    Sharding()                                                          replicas of a module, each divided over a row
    Sharding(gradients="all", optimizer="all")                          beside, the rows share the optimizer's state
    Sharding(weights="all", gradients="all", optimizer="all")           backward gathers inside of a row
    Sharding(weights="all", backward="all", gradients="all", optimizer="all")       one dimension

===========================  =============================================  =======================================
the field calls it           between rows travel, of N weights on R x S     a rank holds, beside 1/(R S) of all
===========================  =============================================  =======================================
HSDP, MiCS                   2 (R - 1)/R N/S                                1/S of weights, gradients and moments
ZeRO-1 between replicas      2 (R - 1)/R N/S, half of it in forward         1/S of weights
hpZ (ZeRO++)                 2 (R - 1)/R N/S, half of it in forward         1/S of weights from forward to backward
one dimension                3 (R - 1)/R N/S, a third of it in forward      nothing
===========================  =============================================  =======================================
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import Literal

Over = Literal["shard", "all"]


@dataclass(frozen=True)
class Sharding:
    """Each is divided over ``"shard"``, the ranks of a row (the mesh's second dimension), or over ``"all"`` ranks.

    Attributes:
        weights: as forward gathers them.
        backward: as backward gathers them.
        gradients: once they are reduced.
        optimizer: what the optimizer updates and remembers.
    """

    weights: Over = "shard"
    backward: Over = "shard"
    gradients: Over = "shard"
    optimizer: Over = "shard"

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value not in ("shard", "all"):
                raise ValueError(f'Sharding: {each.name}={value!r}, expected "shard" or "all".')
        if self.gradients != self.optimizer:
            raise ValueError(
                f"Sharding: gradients={self.gradients!r} with optimizer={self.optimizer!r}: an optimizer needs the "
                "gradients of what it updates, and no others. Give both alike."
            )
        if astuple(self) not in (_SHARD, _BETWEEN, _NEAR, _ALL):
            what = f"weights={self.weights!r}, backward={self.backward!r}, optimizer={self.optimizer!r}"
            raise ValueError(
                f"Sharding: {what}: weights that are held on every row cannot be gathered from all, and what all ranks "
                "hold parts of is updated by all. The module's first lines have the schemes that there are."
            )

    @property
    def name(self) -> str:
        """What the field calls it."""
        return _NAMES[astuple(self)]

    @property
    def divides_optimizer(self) -> bool:
        """Whether the rows share optimizer state, each rank holding 1/S of the weights."""
        return astuple(self) == _BETWEEN

    @property
    def has_secondary(self) -> bool:
        """Whether forward gathers over all ranks, and backward over a row."""
        return astuple(self) == _NEAR

    @property
    def one_dimension(self) -> bool:
        """Whether all is divided over all ranks."""
        return astuple(self) == _ALL


_SHARD = ("shard", "shard", "shard", "shard")
_BETWEEN = ("shard", "shard", "all", "all")
_NEAR = ("all", "shard", "all", "all")
_ALL = ("all", "all", "all", "all")
_NAMES = {_SHARD: "HSDP", _BETWEEN: "ZeRO-1 between replicas", _NEAR: "hpZ", _ALL: "one dimension"}

SCHEMES: tuple[Sharding, ...] = tuple(Sharding(*scheme) for scheme in _NAMES)  # type: ignore[arg-type]
"""All that there are."""
