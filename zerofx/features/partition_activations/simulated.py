"""What a simulated step has to know of saved parts."""

from __future__ import annotations

from torch.fx import Node

from zerofx.features.partition_activations.facts import partition_of
from zerofx.passes import edit
from zerofx.passes.context import Context
from zerofx.simulate.asked import Simulated


def _over(node: Node, ctx: Context) -> tuple[int, int] | None:
    """Tensor-parallel ranks are of one host."""
    ranks = partition_of(ctx).ranks
    return (ranks, ranks) if edit.is_kind(node, "gather_saved") else None


SIMULATED = Simulated(over=_over)
