"""A carrier for tests: state of groups in a second set of tensors, and every start and wait counted."""

from __future__ import annotations

import torch

from tests.passes.graphs import Numbers
from zerofx.passes import Context


class Elsewhere:
    """`zerofx.passes.carry.Carrier`: weights by group; gradients by group and place.

    Attributes:
        gradients: what was taken away.
        flying: what is on its way; and
        most: the most at a time, of weights and of gradients.
    """

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights
        self.gradients: dict[int, torch.Tensor] = {}
        self.flying: dict[str, list[str]] = {"weights": [], "gradients": []}
        self.most: dict[str, int] = {"weights": 0, "gradients": 0}

    @staticmethod
    def of(ctx: Context, numbers: Numbers, rank: int = 0) -> Elsewhere:
        """With the shards of ``numbers``."""
        parts = {layout: layout.shard_numel for layout in ctx.shards}
        return Elsewhere({n.name: numbers.flats[n][rank * k : (rank + 1) * k] for n, k in parts.items()})

    def _start(self, kind: str, name: str) -> None:
        self.flying[kind].append(name)
        self.most[kind] = max(self.most[kind], len(self.flying[kind]))

    def fetch(self, group: str) -> None:
        self._start("weights", group)

    def fetched(self, group: str) -> torch.Tensor:
        self.flying["weights"].remove(group)
        return self.weights[group].clone()

    def put(self, group: str, place: int, gradient: torch.Tensor) -> None:
        self._start("gradients", group)
        self.gradients[place] = gradient  # what is written to it before it has left is seen

    def left(self, group: str, place: int) -> None:
        self.flying["gradients"].remove(group)
        self.gradients[place] = self.gradients[place].clone()
