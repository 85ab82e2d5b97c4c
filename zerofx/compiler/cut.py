"""Where one graph becomes two: what forward saves for backward is decided here, before AOTAutograd cuts.

::

    before_cut     the joint graph: reads and draws that are to be saved are marked
    saving         what is saved: all, or what `activation_budget` or `memory` says
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from zerofx import _torch
from zerofx.compiler.activations import away_of, choose, cost, is_whole
from zerofx.compiler.choices import Activations, Settled
from zerofx.compiler.compared import COMPARES, Compared
from zerofx.compiler.division import Subject, divide, settle
from zerofx.compiler.pair import Pair
from zerofx.compiler.trial import Halves
from zerofx.compiler.written import check_unwritten
from zerofx.model.memory import Memory
from zerofx.passes.recompute_dequantized import recompute_dequantized
from zerofx.passes.save_ahead import save_ahead
from zerofx.passes.save_entries import save_entries
from zerofx.passes.save_inputs import save_inputs
from zerofx.passes.save_random import save_random
from zerofx.passes.save_reads import save_reads
from zerofx.passes.spare_gathers import spare_gathers


class Cut:
    """The cut of one graph into the ``pair``, which is told what forward saves."""

    def __init__(self, pair: Pair) -> None:
        self.pair, self.unit = pair, pair.unit
        self._foreseen: Compared | None = None

    def compare(self, gm: GraphModule, example_inputs: Sequence[Any]) -> None:
        """Find out what tensor-parallel ranks have alike of Dynamo's graph: a collective of theirs."""
        found = (compare(self.unit, gm, example_inputs) for compare in COMPARES)
        self.pair.alike = self.pair.compared = next((each for each in found if each is not None), None)

    def note_given(self, example_inputs: Sequence[Any], unread: list[weakref.ref[torch.Tensor]]) -> None:
        """With `memory=`: what a graph is given counts. ``unread``: what graphs without parameters were."""
        unit = self.unit
        if unit.options.memory is None:
            return
        given = [x for i, x in enumerate(example_inputs) if i not in unit.sharded]
        if not unit.groups:
            unread.extend(weakref.ref(x) for x in given if isinstance(x, torch.Tensor))
            return
        unit.family.footprint.is_given(unit.names, given)
        unit.family.footprint.is_given(frozenset(), [x for ref in unread if (x := ref()) is not None])

    def before_cut(self, joint: GraphModule) -> None:
        """Forward and backward in one graph: what backward is to recompute is decided next."""
        options, alike = self.unit.options, self.pair.alike
        check_unwritten(joint, self.pair)
        save_reads(joint)
        if alike is not None:
            alike.learn(joint)
            self._foreseen = alike.foresee(joint) if options.memory is not None else None
        recompute_dequantized(joint, self.unit.parameters(joint.graph))
        if self.unit.gathers:
            spare_gathers(joint, self.unit.parameters(joint.graph))
        if options.memory is not None or not is_whole(options.activation_budget):
            save_random(joint)

    @contextlib.contextmanager
    def saving(self) -> Iterator[bool]:
        """Graphs that are cut inside save what `activation_budget` or `memory` says; yields whether one does."""
        budget, memory = self.unit.options.activation_budget, Memory.of(self.unit.options.memory)
        if memory is not None and self.unit.groups:
            with _torch.partitioning(partial(self._divide, memory), cost):
                yield True
        elif budget is None or is_whole(budget) or not self.unit.groups:
            with _torch.saving_as(self._by_rule):
                yield False
        else:
            with _torch.saving(partial(self._choose, budget), cost):
                yield True

    def _choose(self, budget: float, cut: _torch.Cut) -> list[Node]:
        """What forward saves within an `activation_budget`."""
        if (known := self.pair.settled) is not None:
            return _by_name(known, cut)
        unit, parameters = self.unit, self.unit.parameters(cut.graph)
        saved, activations = choose(
            cut,
            budget,
            fuses=unit.fuses,
            elsewhere=unit.family.footprint.saved_elsewhere(unit.names),
            share=unit.share,
            save_entries=partial(save_entries, parameters=parameters),
            away=away_of(unit.family),
        )
        saved = save_inputs(cut.graph, saved, parameters)
        self.settle(Settled(tuple(node.name for node in saved), activations))
        return saved

    def _divide(self, memory: Memory, joint: GraphModule, partition: _torch.Partition) -> Halves:
        """Cut ``joint`` by the division of ``memory`` that is chosen, and note that."""

        def by_rule(gm: GraphModule, choice: Callable[[_torch.Cut], Sequence[Node]]) -> Halves:
            parameters = self.unit.parameters(gm.graph)
            return partition(gm, lambda cut: save_inputs(cut.graph, choice(cut), parameters))

        if (known := self.pair.settled) is not None:
            return by_rule(joint, partial(_by_name, known))
        halves, settled = divide(self._subject(memory), memory, joint, by_rule)
        if settled is not None:
            self.settle(settled)
        return halves

    def settle(self, settled: Settled) -> None:
        """Note what a budget decided, here or where the graph was compiled before.

        Raises:
            OutOfStepError: another rank has decided otherwise.
        """
        settle(self._subject(Memory.of(self.unit.options.memory)), settled)
        self.pair.adopt(settled)

    def _subject(self, memory: Memory | None) -> Subject:
        unit, pair = self.unit, self.pair
        return Subject(
            groups=list(unit.groups.values()),
            family=unit.family,
            fuses=unit.fuses,
            pretended=unit.pretend is not None,
            probes=unit.probe,
            search=unit.search,
            share=unit.share,
            away=away_of(unit.family, None if memory is None else memory.rates),
            alike=pair.alike,
            parameters=unit.parameters,
            contexts=lambda *choices: self._trial(*choices).context,
        )

    def _trial(self, activations: Activations, memory_budget: float | None) -> Pair:
        """Another pair of the same graph, never run, with other choices. No other rank is asked what it has alike."""
        trial = Pair(self.unit, "eager")
        trial.alike, trial.compared = self.pair.alike, self._foreseen
        trial.activations, trial.memory_budget = activations, memory_budget
        return trial

    def _by_rule(self, joint: Graph, saved: Sequence[Node]) -> list[Node]:
        """What forward saves for ``saved``, lest backward gather out of turn, or read what was written since."""
        parameters = self.unit.parameters(joint)
        if self.unit.gathers:
            ahead = 0 if self.pair.memory_budget else 1
            saved = [*saved, *save_ahead(joint, saved, parameters, ahead=ahead)]
        return save_inputs(joint, saved, parameters)


def _by_name(settled: Settled, cut: _torch.Cut) -> list[Node]:
    found = {node.name: node for node in cut.graph.nodes}
    return [found[name] for name in settled.saved]
