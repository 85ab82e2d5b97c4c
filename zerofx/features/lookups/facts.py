"""What is known of a graph in whose process group rows of tables may travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.fx import GraphModule

from zerofx.passes.context import Context, Phase

if TYPE_CHECKING:
    from zerofx.compiler.pair import Pair


@dataclass(frozen=True)
class LookupFacts:
    """Of one graph. ``on``: of tables that are only looked up, rows travel. Indices have one shape on all ranks."""

    on: bool = False

    @staticmethod
    def of(pair: Pair, gm: GraphModule, phase: Phase) -> LookupFacts:
        """See `zerofx.features.interface.Feature`."""
        return LookupFacts(pair.unit.options.lookups)


def lookups_of(ctx: Context) -> LookupFacts:
    return ctx.facts(LookupFacts)
