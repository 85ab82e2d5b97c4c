"""What a budget decided for a graph: `Activations` and `Division`, to be read; `Settled`, to be used; or `TooSmall`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from zerofx.runtime.state.footprint import Demand


@dataclass(frozen=True)
class Activations:
    """What forward saves for backward within ``activation_budget`` (`zerofx.compiler.activations`).

    Attributes:
        budget: the option: a fraction up to 1, or bytes.
        option: its name: "memory", where that budget is one for all.
        saved_bytes: what forward saves in memory, by the shapes that were captured. Parameters and the batch are not in
            it.
        whole_bytes: what it would save without a budget.
        least_bytes: the least that it could save.
        recomputed: the nodes of forward that backward computes once more.
        flops: of these.
        work: of these, as the partitioner weighs it: flops, or those that could be done while a node's bytes move.
        offloaded: by name, what of the saved tensors leaves for a file; and
        offloaded_bytes: how many these are.
    """

    budget: float
    saved_bytes: int
    whole_bytes: int
    least_bytes: int
    recomputed: frozenset[str]
    flops: int
    work: float = 0.0
    option: str = "activation_budget"
    offloaded: frozenset[str] = frozenset()
    offloaded_bytes: int = 0


class Offer(NamedTuple):
    """A division that was predicted: bytes of a rank at the worst moment, and those of them at rest.

    Seconds of a step's forwards and backwards, and of the optimizer after them.
    """

    needs: int
    at_rest: int
    step_s: float
    optimizer_s: float

    @property
    def whole_s(self) -> float:
        """Of all of a step."""
        return self.step_s + self.optimizer_s


class TooSmall(ValueError):
    """No division of ``memory`` fits.

    Attributes:
        offers: what would: from the least on, each faster than those before it.
    """

    def __init__(self, message: str, offers: tuple[Offer, ...]) -> None:
        super().__init__(message)
        self.offers = offers


Search = Callable[[Any], Any]
"""Of a graph's `zerofx.compiler.division.Trials` tries some, and returns one of them: the division that is taken."""


class NotDivided(ValueError):
    """Graphs that share groups, and that no budget is divided between."""


@dataclass(frozen=True)
class Division:
    """How ``memory`` was divided for one pair of graphs (`zerofx.compiler.division`).

    Attributes:
        nbytes: the option.
        at_rest: of these, what is there before a step and after it.
        peak: what is live on top of that at the worst moment of a step, by class.
        left: of that, what stays between forward and backward.
        memory_budget: for gathered weights; None: as without the option.
        step_s: predicted seconds of the forwards and backwards of one optimizer step.
        optimizer_s: of the optimizer's step after them, if that is `zerofx.AdamW`'s.
        tried: how many divisions were predicted.
        elsewhere: what other graphs of the module add at the worst moment.
        offers: of those that were predicted, from the least on, each that is faster than those before it.
    """

    nbytes: int
    at_rest: int
    peak: dict[str, int]
    left: int
    memory_budget: float | None
    step_s: float
    optimizer_s: float = 0.0
    tried: int = 1
    elsewhere: int = 0
    offers: tuple[Offer, ...] = ()

    @staticmethod
    def of_step(divisions: Sequence[Division]) -> Division:
        """Of all graphs of a module: as the one with the highest peak, and all seconds.

        Each was made beside those before it, and room for those after it. The last one knows all others.
        """
        if len(divisions) == 1:
            return divisions[0]
        worst = max(divisions, key=lambda each: each.peak_bytes)
        seconds = sum(each.step_s for each in divisions), max(each.optimizer_s for each in divisions)
        budgets = [each.memory_budget for each in divisions if each.memory_budget is not None]
        return replace(
            worst,
            left=sum(each.left for each in divisions),
            memory_budget=min(budgets, default=None),
            step_s=seconds[0],
            optimizer_s=seconds[1],
            tried=max(each.tried for each in divisions),
            offers=(Offer(worst.peak_bytes, worst.at_rest, *seconds),),
        )

    @property
    def peak_bytes(self) -> int:
        """All of it at the worst moment."""
        return self.at_rest + sum(self.peak.values()) + self.elsewhere

    def __str__(self) -> str:
        """The worst moment of a step, by class."""
        kept = {None: "", math.inf: "  all stay gathered"}
        weights = kept.get(self.memory_budget, f"  within {self.memory_budget or 0:,.0f}")
        rows = [f"  {kind:<11} {n:>15,}{weights * (kind == 'weights')}" for kind, n in self.peak.items()]
        rows += [f"  {'other graphs':<12} {self.elsewhere:>14,}"] * bool(self.elsewhere)
        return "\n".join(
            [
                f"a step takes {self.peak_bytes:,} bytes of memory={self.nbytes:,}",
                f"  {'at rest':<11} {self.at_rest:>15,}",
                *rows,
                f"predicted: {1e3 * self.step_s:,.3f} ms; {self.left:,} bytes stay from forward to backward",
            ]
        )


@dataclass(frozen=True)
class Settled:
    """All that a budget decided for one graph: with it the graph is cut as it was, and nothing is searched for.

    Attributes:
        saved: what forward saves: the joint graph's nodes, by name.
        activations: the same, to be read.
        memory_budget: for gathered weights; None: not decided here.
        division: how ``memory`` was divided; None: the budget is of activations alone.
        demand: of that, what other graphs of the module have to know.
        graph: what was divided, by which ranks compare.
    """

    saved: tuple[str, ...]
    activations: Activations
    memory_budget: float | None = None
    division: Division | None = None
    demand: Demand | None = None
    graph: str = ""

    @property
    def choice(self) -> str:
        """In a text that is alike where ranks have decided alike."""
        return f"{list(self.saved)} {sorted(self.activations.offloaded)} {self.memory_budget}"
