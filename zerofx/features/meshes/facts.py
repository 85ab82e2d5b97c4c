"""What is known of a graph whose ranks are a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.fx import GraphModule

from zerofx.passes.context import Context, Phase

if TYPE_CHECKING:
    from zerofx.compiler.pair import Pair


@dataclass(frozen=True)
class MeshFacts:
    """Of one graph. Its replicas are the core's: `Context.replicas`, `Context.replica_group`.

    Attributes:
        divides_between: stage 3: each replica updates a part of the shard, and shards are refreshed before forward.
        two_hops: stage 3: a rank has that part alone, and graphs gather the shard from there (`two_hop_gather`).
        secondary_group: stage 3: name of the process group in which backward gathers what forward left there
            (`secondary_shard`); "" where it gathers over all ranks.
        secondary_ranks: how many ranks a row of the mesh has, where that is known.
    """

    divides_between: bool = False
    two_hops: bool = False
    secondary_group: str = ""
    secondary_ranks: int = 1

    @property
    def refreshes_shards(self) -> bool:
        """Whether shards are given to a graph while they are refreshed."""
        return self.divides_between and not self.two_hops

    @staticmethod
    def of(pair: Pair, gm: GraphModule, phase: Phase) -> MeshFacts:
        """See `zerofx.features.interface.Feature`."""
        sharing = pair.unit.group.sharing
        near = "" if sharing.secondary is None else sharing.secondary.name
        return MeshFacts(sharing.divides_between, sharing.two_hops, near, sharing.row_size)


def mesh_of(ctx: Context) -> MeshFacts:
    return ctx.facts(MeshFacts)
