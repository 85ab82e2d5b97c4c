"""What an optional feature adds to the core: `Feature`. The core asks features here, and nowhere else.

::

    FEATURE = Feature(
        facts=WireFacts.of,
        passes=(Insertion(quantize, before="lower", when=lambda ctx: wire_of(ctx).wire is not None),),
        rules=RULES,
    )

stands in ``zerofx/features/wire/feature.py``. `zerofx.features` reads it when zerofx is imported.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from zerofx.compiler.activations import Away
from zerofx.compiler.compared import Comparison
from zerofx.compiler.pair import Pair
from zerofx.compiler.runners import BackwardCode
from zerofx.compiler.unit import Unit
from zerofx.kernels.code import Code
from zerofx.model.layout import GroupLayout
from zerofx.passes.context import Context, Phase
from zerofx.passes.kinds import NodeKind
from zerofx.passes.proof.rules import Rules
from zerofx.runtime.ranks.quantized import Quantized
from zerofx.runtime.ranks.sharing import Sharing
from zerofx.runtime.state import carriage as moved
from zerofx.runtime.state.group import Family, ShardGroup
from zerofx.runtime.state.state_file import StateFile
from zerofx.simulate.asked import Simulated
from zerofx.simulate.clock import Rates

SHARDED = (1, 2, 3)
ALL_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Insertion:
    """A pass of a feature's, and its place among the core's.

    Attributes:
        pass_: the pass.
        after, before: the core's pass that it stands next to; one of both. Those of several features stand there in
            the order of features.
        when: whether a graph needs it. It is not in the pipeline of other graphs.
        stages: whose pipeline it is in.
    """

    pass_: Callable[[GraphModule, Context], int]
    when: Callable[[Context], bool]
    after: str | None = None
    before: str | None = None
    stages: tuple[int, ...] = SHARDED


@dataclass(frozen=True)
class Feature:
    """One feature. Whatever it leaves out it does not need.

    Attributes:
        options: those of `zerofx.compiler.options.OPTIONAL` that are its.
        facts: what it knows of a graph, before any pass: of its own class, for `Context.facts`.
        passes: what it does to graphs.
        node_kinds: what it inserts there, by tag, but for the kinds that the core has as well.
        picks: operators that read no more bytes of a large input than they write, by name.
        rules: what `verify` knows of that.
        laws: the number of what an operator computes, where another one computes the same
            (`zerofx.passes.proof.meaning`).
        away: what of a module's activations may leave the device, where a budget is to choose.
        simulated: what a simulated step has to know of it.
        compares: what tensor-parallel ranks have alike of a graph; they compare it.
        around: what each run of a backward is inside of.
        quantized: how weights travel quantized outside of graphs.
        carriage: what a run of a graph moves to the device and away from it.
        store: where activations go.
        place: makes what is to hold a module's state that does not live on the device, and returns what is to be kept.
        shortcuts: ways to other ranks than their process group's (`zerofx.passes.pairwise`).
        settled: called whenever a module was sharded.
        sharings: who shares a module, by the options ``mesh`` and ``reduce_group``; asked ahead of the core's.
        weights: cases of weights (`zerofx.runtime.state.weights`), asked ahead of the core's.
        homes: cases of where state lives (`zerofx.runtime.state.home`), asked ahead of the core's.
    """

    options: tuple[str, ...] = ()
    facts: Callable[[Pair, GraphModule, Phase], Any] | None = None
    passes: tuple[Insertion, ...] = ()
    node_kinds: Mapping[str, NodeKind] = field(default_factory=dict)
    picks: frozenset[str] = frozenset()
    rules: Rules | None = None
    laws: Mapping[Any, Callable[..., int]] = field(default_factory=dict)
    away: Callable[[Family, Rates | None], Away | None] | None = None
    simulated: Simulated | None = None
    compares: Callable[[Unit, GraphModule, Sequence[Any]], Comparison | None] | None = None
    around: Callable[[BackwardCode], AbstractContextManager[Any]] | None = None
    quantized: Callable[[GroupLayout, Code], Quantized] | None = None
    carriage: Callable[[Iterable[weakref.ref[ShardGroup]], moved.ActivationStore | None], moved.Carriage] | None = None
    store: Callable[[StateFile, int], moved.ActivationStore] | None = None
    place: Callable[[Family, Sharing, torch.device, Sequence[GroupLayout]], Any] | None = None
    shortcuts: tuple[Any, ...] = ()
    settled: tuple[Callable[[], None], ...] = ()
    sharings: tuple[Callable[..., Any], ...] = ()
    weights: tuple[type, ...] = ()
    homes: tuple[type, ...] = ()
