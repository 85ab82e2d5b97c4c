"""What tensor-parallel ranks have alike of a graph: the interface by which the compiler asks a feature.

A feature compares before AOTAutograd has the graph, and says afterwards of each forward which of its values all ranks
have alike (`zerofx.features.partition_activations`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch.fx import Graph, GraphModule

from zerofx.compiler.unit import Unit
from zerofx.runtime.ranks.sharing import RankGroup


class Compared(Protocol):
    """Who says what ranks have alike of a forward."""

    def saved(self, gm: GraphModule) -> frozenset[str]:
        """The names of the nodes that all ranks have alike."""


class Comparison(Compared, Protocol):
    """Of one graph of Dynamo's. Methods are collectives of ``ranks``, but for `foresee` and `groups`."""

    @property
    def ranks(self) -> RankGroup:
        """Those that compare."""

    def learn(self, joint: GraphModule) -> None:
        """Look at forward and backward in one graph: a parameter is alike where its gradient is."""

    def foresee(self, joint: GraphModule) -> Compared:
        """What `saved` will say, for graphs that may never run."""

    def agree(self, choice: str) -> None:
        """Raise where ranks have divided ``memory=`` otherwise."""

    def groups(self, graph: Graph) -> set[str]:
        """The names of the process groups of the model's own in which ``graph`` talks to these ranks."""

    def check(self, given: dict[str, Any]) -> None:
        """As backward begins: what was taken to be alike of its inputs is, or all ranks raise."""


COMPARES: list[Callable[[Unit, GraphModule, Sequence[Any]], Comparison | None]] = []
"""Of features: given Dynamo's graph and its inputs; None: nothing is to be compared."""
