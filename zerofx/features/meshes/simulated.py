"""What a simulated step has to know of a mesh."""

from __future__ import annotations

from torch.fx import Node

from zerofx.features.meshes.facts import mesh_of
from zerofx.passes.context import Context
from zerofx.passes.kinds import NODE_KINDS
from zerofx.simulate.asked import Simulated


def _over(node: Node, ctx: Context) -> tuple[int, int] | None:
    """A gather in a row, or over all rows, where rows are known. Activations are no business of a mesh's."""
    mesh = mesh_of(ctx)
    if mesh.secondary_ranks == 1 or NODE_KINDS[node.meta["zerofx"].kind].counts_as == "activations":
        return None
    in_row = node.args[-1] == mesh.secondary_group
    return mesh.secondary_ranks if in_row else ctx.world_size, mesh.secondary_ranks


def _refreshes(ctx: Context) -> int | None:
    return ctx.replicas if mesh_of(ctx).refreshes_shards else None


SIMULATED = Simulated(over=_over, refreshes=_refreshes)
