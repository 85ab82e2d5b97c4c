"""What is known of a graph whose collectives are quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from zerofx.model.wire import Wire
from zerofx.passes.context import Context, Phase

if TYPE_CHECKING:
    from zerofx.compiler.pair import Pair


@dataclass(frozen=True)
class WireFacts:
    """Of one graph.

    Attributes:
        inside: how it is quantized what travels in its process group; None: it is not.
        between: the same of what travels between the replicas.
        divides_between: whether each replica updates a part of the shard, so that it gets a part of the sum.
    """

    inside: Wire | None = None
    between: Wire | None = None
    divides_between: bool = False

    @property
    def wire(self) -> Wire | None:
        """Either: one option says both."""
        return self.inside or self.between

    @staticmethod
    def by(wire: Wire | None, *, crosses: bool = False, replicas: int = 1, divides_between: bool = False) -> WireFacts:
        """By the option, on ranks that are of several rows of a mesh (``crosses``), or of so many replicas."""
        if wire is None:
            return WireFacts()
        inside = crosses or wire.between == "all"
        between = wire.between == "nodes" and replicas > 1
        return WireFacts(wire if inside else None, wire if between else None, divides_between)

    @staticmethod
    def of(pair: Pair, gm: GraphModule, phase: Phase) -> WireFacts:
        """See `zerofx.features.interface.Feature`."""
        sharing = pair.unit.group.sharing
        how: Any = {"crosses": sharing.crosses, "replicas": sharing.copies, "divides_between": sharing.divides_between}
        return WireFacts.by(pair.unit.family.wire, **how)


def wire_of(ctx: Context) -> WireFacts:
    return ctx.facts(WireFacts)
