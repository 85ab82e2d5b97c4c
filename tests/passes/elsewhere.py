"""A carrier for tests: state of groups, and activations, in other tensors; every start and wait counted."""

from __future__ import annotations

import torch

from tests.passes.graphs import Numbers
from zerofx.features.offload.operators import new_handle
from zerofx.passes import Context


class Elsewhere:
    """`zerofx.features.offload.operators.Carrier`: weights by group; gradients by group and place.

    Attributes:
        gradients: what was taken away.
        flying: what is on its way; and
        most: the most at a time, of weights, of gradients and of activations.
    """

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights
        self.gradients: dict[int, torch.Tensor] = {}
        self.flying: dict[str, list[str]] = {"weights": [], "gradients": [], "activations": []}
        self.most: dict[str, int] = dict.fromkeys(self.flying, 0)
        self._brought: dict[str, torch.Tensor] = {}
        self._saved: dict[int, torch.Tensor] = {}

    @staticmethod
    def of(ctx: Context, numbers: Numbers, rank: int = 0) -> Elsewhere:
        """With the shards of ``numbers``."""
        parts = {layout: layout.shard_numel for layout in ctx.found.shards}
        return Elsewhere({n.name: numbers.flats[n][rank * k : (rank + 1) * k] for n, k in parts.items()})

    def _start(self, kind: str, name: str) -> None:
        self.flying[kind].append(name)
        self.most[kind] = max(self.most[kind], len(self.flying[kind]))

    def reload(self, group: str, here: torch.Tensor) -> None:
        self._start("weights", group)
        self._brought[group] = here.copy_(self.weights[group])

    def reloaded(self, group: str) -> torch.Tensor:
        self.flying["weights"].remove(group)
        return self._brought.pop(group)

    def offload(self, group: str, place: int, gradient: torch.Tensor) -> None:
        self._start("gradients", group)
        self.gradients[place] = gradient  # what is written to it before it has left is seen

    def offloaded(self, group: str, place: int) -> None:
        self.flying["gradients"].remove(group)
        self.gradients[place] = self.gradients[place].clone()

    def offload_activation(self, place: int, saved: torch.Tensor, order: list[int]) -> None:
        self._start("activations", str(place))
        self._saved[place] = saved

    def activation_offloaded(self, place: int) -> torch.Tensor:
        self.flying["activations"].remove(str(place))
        self._saved[place] = self._saved[place].clone()
        return new_handle(self._saved[place])

    def reload_activation(self, place: int, handle: torch.Tensor, here: torch.Tensor) -> None:
        self._start("activations", str(place))
        self._saved[place] = here.copy_(self._saved[place])

    def activation_reloaded(self, place: int) -> torch.Tensor:
        self.flying["activations"].remove(str(place))
        return self._saved.pop(place)
