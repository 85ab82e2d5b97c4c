"""One division of `memory=`, tried: forward and backward of a copy of the joint graph, through the passes.

::

    joint graph ──copy──▶ cut: forward saves `rung` ──▶ forward  ──passes, within `memory_budget`──▶ ┐ a prediction
                                                        backward ──passes───────────────────────────▶ ┘

Nothing of a trial stays: its contexts are its own, and no executor gets its graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from torch.fx import GraphModule, Node

from zerofx import _torch
from zerofx.compiler.choices import Activations
from zerofx.compiler.rewriting import Rewriting, copy_graph
from zerofx.passes import Pass
from zerofx.passes.context import Context, Executor, Phase, Sync

Halves = tuple[GraphModule, GraphModule]
"""Forward and backward."""

Choice = Callable[[_torch.Cut], Sequence[Node]]
"""Says of a joint graph what its forward saves."""

Contexts = Callable[[Activations, float | None], Callable[[GraphModule, Phase, Sync], Context]]
"""For what forward saves, and a budget for gathered weights: what makes the contexts of a forward and its backwards."""


class Given(Rewriting):
    """A graph on its way through the passes but for `verify`; of it stay the two graphs that a prediction reads."""

    @property
    def passes(self) -> tuple[Pass, ...]:
        """Without the proof: what is chosen is compiled once more, and proved then."""
        return tuple(pass_ for pass_ in super().passes if pass_.__name__ != "verify")

    def go(self, gm: GraphModule) -> None:
        """Run the passes on ``gm``."""
        with _torch.fake_mode_of([node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]):
            for pass_ in self.passes:
                if pass_.__name__ == "lower":
                    self._front = copy_graph(gm)
                self._apply(pass_, gm, self.context)
        self._final = gm

    def after(self, name: str, *, executor: Executor | None = None) -> GraphModule:
        """The last graph: nobody asks for another."""
        return self._final

    def before_lower(self) -> GraphModule:
        """As it was noted on the way."""
        return self._front


class Rung:
    """One thing that forward may save: the joint graph cut so, for as many budgets of gathered weights as are tried.

    ``cut``: cuts a copy of the joint graph, once, when it is first tried.
    """

    def __init__(self, saved: Sequence[Node], chosen: Activations, cut: Callable[[Choice], Halves]) -> None:
        self.names, self.chosen = [node.name for node in saved], chosen
        self._cut = cut

    @cached_property
    def halves(self) -> Halves:
        """Forward and backward, which nothing may change."""

        def choose(cut: _torch.Cut) -> list[Node]:
            found = {node.name: node for node in cut.graph.nodes}
            return [found[name] for name in self.names]

        return self._cut(choose)

    def graphs(self) -> Halves:
        """Copies of forward and backward."""
        return copy_graph(self.halves[0]), copy_graph(self.halves[1])


def through_passes(
    contexts: Contexts, rung: Rung, memory_budget: float | None, ways: Sequence[Sync]
) -> tuple[Given, list[Given]]:
    """Forward, and a backward for each of ``ways``.

    Raises:
        zerofx.passes.schedule.TooLittle: ``memory_budget`` is.
    """
    context = contexts(rung.chosen, memory_budget)

    def go(half: GraphModule, phase: Phase, way: Sync = "reduce") -> Given:
        gm = copy_graph(half)
        given = Given(gm, context(gm, phase, way), pretended=True, before=half)
        given.go(gm)
        return given

    forward, backward = rung.halves
    done, variants = go(forward, "forward"), dict[Sync, Given]()
    for way in ways:
        if way not in variants:
            variants[way] = go(backward, "backward", way)
    return done, [variants[way] for way in ways]
