"""What is known of a graph that saves parts, and what its forward leaves for its backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.fx import GraphModule

from zerofx.passes.context import Context, Phase

if TYPE_CHECKING:
    from zerofx.compiler.pair import Pair


@dataclass(frozen=True)
class PartitionFacts:
    """Of one graph.

    Attributes:
        group: name of the process group whose ranks save parts of what they have alike; "" where none do.
        ranks: how many these are.
        alike: forward: the nodes whose values these ranks have alike, as they have compared.
    """

    group: str = ""
    ranks: int = 1
    alike: frozenset[str] = frozenset()

    @staticmethod
    def of(pair: Pair, gm: GraphModule, phase: Phase) -> PartitionFacts:
        """See `zerofx.features.interface.Feature`."""
        if pair.alike is None or pair.compared is None:
            return PartitionFacts()
        ranks = pair.alike.ranks
        return PartitionFacts(ranks.name, ranks.size, pair.compared.saved(gm) if phase == "forward" else frozenset())


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


class SavedParts(dict[str, SavedPart]):
    """Of a pair of graphs, by the first name that backward knows each by."""


def partition_of(ctx: Context) -> PartitionFacts:
    return ctx.facts(PartitionFacts)


def saved_parts(ctx: Context) -> SavedParts:
    return ctx.handover.of(SavedParts)
