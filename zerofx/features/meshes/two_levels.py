"""Two levels: a mesh of replicas, each divided over ranks of its own ("hybrid sharding", FSDP2's HSDP).

::

    mesh             shard 0   shard 1          weights     rank 2 gathers from 2, 3
    replica 0           0         1             gradients   rank 2 reduces over 2, 3, then sums its shard over 0, 2
    replica 1           2         3             everyone    0, 1, 2, 3

The ranks of a row are near each other, on one host say: all that stage 3 gathers, or stage 2 reduces, stays there. Of
a gradient, one shard for each rank goes between the rows. All rows hold the same weights and optimizer state; nothing
else travels between them.

A dimension of one rank is none: 1 x S is the one-dimensional mesh of S ranks (`OneGroup`). R x 1 divides nothing, and
sums gradients over the rows. In stage 0 there is nothing to divide, and all ranks are one group.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zerofx.model.sharding import Sharding
from zerofx.passes.travel import travel_of
from zerofx.runtime.ranks.sharing import OneGroup, RankGroup, Sharing
from zerofx.runtime.ranks.watch import Watch, watch_of, watch_together


class Placed(RankGroup):
    """All ranks of a mesh in the order in which they own parts of a buffer: column by column.

    ``rank`` is a place in that order. The rows of a column own parts that lie side by side.
    """

    def __init__(self, everyone: RankGroup, ranks: list[list[int]]) -> None:
        super().__init__(everyone.process_group)
        in_order = sorted(rank for row in ranks for rank in row)
        self._at = [in_order.index(row[column]) for column in range(len(ranks[0])) for row in ranks]
        self.rank = self._at.index(everyone.rank)

    def rank_at(self, place: int) -> int:
        return self._at[place]


class TwoLevels(OneGroup):
    """All is divided over a row of a mesh; gradients are summed over its columns."""

    def __init__(
        self, row: RankGroup, column: RankGroup, everyone: RankGroup, ranks: list[list[int]], reductions: str | None
    ) -> None:
        """``ranks``: the mesh, as numbers."""
        super().__init__(row, reductions)
        self.everyone, self.replicas, self._mesh = everyone, column, ranks

    def by(self, sharding: Sharding | None, *, two_hops: bool = False) -> Sharing:
        if sharding is None:
            return self
        over_all = sharding.one_dimension or sharding.has_secondary
        if over_all and two_hops and self.weights.size > 1:
            hops = copy.copy(self)
            hops.optimizer, hops.two_hops = Placed(self.everyone, self._mesh), True
            if sharding.has_secondary:
                hops.secondary, hops.row_size = self.weights, self.weights.size
            return hops
        if sharding.one_dimension or (sharding.has_secondary and self.weights.size == 1):
            one = OneGroup(self.everyone, self._reductions)
            one.row_size, one.crosses = self.weights.size, True
            return one
        if sharding.has_secondary:
            return Near(self.everyone, self.weights)
        if not sharding.divides_optimizer:
            return self
        between = copy.copy(self)
        between.optimizer = Placed(self.everyone, self._mesh)
        return between

    def connect(self, device: torch.device) -> None:
        super().connect(device)
        assert self.replicas is not None
        others = [self.replicas, self.everyone] if self.divides_between else [self.replicas]
        for ranks in others:
            travel_of(ranks.backend(device)).connect(ranks.name)

    def watch(self) -> Watch | None:
        """The watchdog of the row. A failure there is one of the column, and so of all ranks."""
        assert self.replicas is not None
        row, column = super().watch(), watch_of(self.replicas.name)
        watches = [watch for watch in (row, column) if watch is not None]
        if self.divides_between and (everyone := watch_of(self.everyone.name)) is not None:
            watches.append(everyone)
        watch_together(watches)
        return row or column


class Near(OneGroup):
    """All is divided over all ranks; backward gathers in a row what forward left there."""

    def __init__(self, everyone: RankGroup, row: RankGroup) -> None:
        super().__init__(everyone)
        self.secondary: RankGroup = row
        self.row_size, self.crosses = row.size, True

    def connect(self, device: torch.device) -> None:
        super().connect(device)
        travel_of(self.secondary.backend(device)).connect(self.secondary.name)

    def watch(self) -> Watch | None:
        everyone, row = super().watch(), watch_of(self.secondary.name)
        watch_together([watch for watch in (everyone, row) if watch is not None])
        return everyone


def rows_and_columns(mesh: DeviceMesh | None, reductions: str | None) -> Sharing | None:
    """How a module is shared over a 2-D mesh; None for any other.

    Raises:
        ValueError: this rank is not in the mesh, or its ranks are not in order.
    """
    if mesh is None or mesh.ndim != 2:
        return None
    _check(mesh)
    row = RankGroup(mesh.get_group(1))
    if mesh.size(0) == 1:
        return OneGroup(row, reductions)
    return TwoLevels(row, RankGroup(mesh.get_group(0)), _everyone(mesh), mesh.mesh.tolist(), reductions)


def _check(mesh: DeviceMesh) -> None:
    """Refuse a mesh in which places by rank are not places in the mesh."""
    if mesh.get_coordinate() is None:
        raise ValueError(f"mesh: rank {dist.get_rank()} is not in it: expected every rank that shards a module.")
    ranks = mesh.mesh
    if not (bool((ranks.diff(dim=0) > 0).all()) and bool((ranks.diff(dim=1) > 0).all())):
        raise ValueError(
            f"mesh has the ranks {ranks.tolist()}: expected them in ascending order in each row and each column, as "
            "torch.distributed.init_device_mesh puts them."
        )


def _everyone(mesh: DeviceMesh) -> RankGroup:
    """All ranks of the mesh. A collective among them where they are not all there are."""
    ranks = sorted(mesh.mesh.flatten().tolist())
    if len(ranks) == dist.get_world_size():
        assert dist.group.WORLD is not None
        return RankGroup(dist.group.WORLD)
    group = dist.new_group(ranks, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return RankGroup(group)
