"""What is known of a graph of whose state or activations some are offloaded, and what its forward leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from zerofx.passes.context import Context, Phase

if TYPE_CHECKING:
    from zerofx.compiler.pair import Pair


@dataclass(frozen=True)
class ActivationChoice:
    """Which saved tensors leave the device: those of ``smallest`` bytes or more; ``only``: of these, by name."""

    smallest: int
    only: frozenset[str] | None = None


@dataclass(frozen=True)
class OffloadedActivation:
    """What stands behind one saved value that left in forward (`offload_activation`).

    Attributes:
        place: its number among what left; several saved views of one tensor have one number.
        source: the node of forward that left.
        order: of its dimensions in memory, the outermost first.
        handle: the fake tensor that backward is given instead.
        steps: from what comes back to the saved value, as in a `Recipe`.
    """

    place: int
    source: str
    order: tuple[int, ...]
    handle: Any
    steps: tuple[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]], ...] = ()


class OffloadedActivations(dict[str, OffloadedActivation]):
    """Of a pair of graphs: by the name of the saved value, what backward gets."""


@dataclass(frozen=True)
class OffloadFacts:
    """Of one graph.

    Attributes:
        weights: stage 3: the groups whose shards live elsewhere than on the device (`reload_weights`).
        gradients: those whose gradients do (`offload_gradients`).
        activations: which activations do (`offload_activations`); None: they stay.
        on_host: what leaves the device goes to the host's memory, and not to a file.
    """

    weights: frozenset[str] = frozenset()
    gradients: frozenset[str] = frozenset()
    activations: ActivationChoice | None = None
    on_host: bool = False

    @staticmethod
    def of(pair: Pair, gm: GraphModule, phase: Phase) -> OffloadFacts:
        """See `zerofx.features.interface.Feature`."""
        family, groups = pair.unit.family, list(pair.unit.groups.values())
        store, chosen = family.activation_store, pair.activations
        return OffloadFacts(
            weights=frozenset(g.layout.name for g in groups if g.weights.streams),
            gradients=frozenset(g.layout.name for g in groups if family.stage and "gradient" in g.home.streams),
            activations=None
            if store is None
            else ActivationChoice(store.smallest, None if chosen is None else chosen.offloaded),
            on_host=(store is not None and store.file is None) or any(g.home.hosts and g.home.away for g in groups),
        )


def offload_of(ctx: Context) -> OffloadFacts:
    return ctx.facts(OffloadFacts)


def offloaded(ctx: Context) -> OffloadedActivations:
    return ctx.handover.of(OffloadedActivations)
