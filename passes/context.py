"""What a pass knows about the graph it is given, and what passes leave for each other.

A graph alone does not say which of its inputs are parameters, which outputs are gradients, or how the parameters are
laid out. The `Context` does. It holds layouts and names only: no process group, no module, no tensor; a pass can be
run on a graph written by hand, at any world size, on any machine.

One context serves one graph::

    ctx.phase, ctx.parameters, ...    facts about the graph, before any pass
    ctx.facts(MeshFacts)              what a feature knows of it, in a class of its own
    ctx.found.shards, ...             what the passes found out
    ctx.handover.recipes, ...         what forward's passes leave for backward's: the pair of graphs has one
    ctx.handover.of(SavedParts)       the same of a feature
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch.fx import GraphModule

from zerofx.model.layout import GroupLayout, Slot
from zerofx.passes.own import Pass
from zerofx.passes.travel import Travel, travel_of

Phase = Literal["forward", "backward", "inference"]
Executor = Literal["inductor", "eager"]
Buckets = Literal["group", "parameter", "all"]
Sync = Literal["reduce", "keep", "merge"]
"""What a backward does with gradients: reduce them; keep them whole (`zerofx.no_sync`); or reduce them together with
what was kept before."""


@dataclass(frozen=True)
class ParameterRef:
    """One parameter, as a pass sees it: its group's layout and its slot there."""

    layout: GroupLayout
    slot: Slot


@dataclass(frozen=True)
class Tag:
    """What a node is for: ``node.meta["zerofx"]`` of every node that a pass inserted.

    Attributes:
        kind: of `zerofx.passes.kinds.NODE_KINDS`; or the name of a user's pass.
        group: the group of parameters that it serves.
    """

    kind: str
    group: str


@dataclass(frozen=True)
class Reduction:
    """An extra output of a backward graph: a contribution to the gradients of ``slots``.

    A flat tensor of ``layout.shard_numel`` elements, this rank's part of the averaged gradients and zero elsewhere; or,
    where gradients are not sharded (stage 0, and whatever ``sync="keep"`` keeps), the whole gradient of the one slot.
    """

    layout: GroupLayout
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class Recipe:
    """How backward rebuilds a value that forward would have saved: a chain of views and casts of one parameter.

    Each step is ``(target, args, kwargs)`` with `CHAIN` standing for the value of the step before, and a `Size` for a
    number that forward saves as well.
    """

    parameter: ParameterRef
    value: Any
    """The parameter's fake tensor: shape, dtype and device."""
    steps: tuple[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]], ...]


@dataclass(frozen=True)
class Size:
    """A size that is known when the graph runs, by the name that forward saves it under."""

    name: str


class Gathered(NamedTuple):
    """A whole group that forward leaves gathered for backward, or this rank's part of it among near ranks."""

    position: int
    """The output of forward in whose place it travels, and"""
    saved: str
    """the name that backward knows that by."""
    numel: int
    dtype: torch.dtype
    ranks: int = 1
    """How many near ranks have a part each, which is what travels; 1: it is whole."""

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass
class Meanings:
    """What forward's `verify` leaves for backward's: values, by their numbers (`zerofx.passes.proof.meaning`).

    Attributes:
        saved: what forward saved before all passes, by the name under which backward receives it.
        given: what it hands over after them: what backward is given under that name.
        kept: by group, what was left gathered (`zerofx.passes.proof.facts.Flat`).
        offloaded: by place, the value that left, which backward reloads.
        widened: of what was cast to a wider dtype, what it was cast from.
        parts: by a part's number, what views of the whole are: size, strides and offset -> number.
    """

    saved: dict[str, int] = field(default_factory=dict)
    given: dict[str, int] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)
    offloaded: dict[int, int] = field(default_factory=dict)
    widened: dict[int, tuple[int, torch.dtype]] = field(default_factory=dict)
    parts: dict[int, Any] = field(default_factory=dict)


class _Chain:
    def __repr__(self) -> str:
        return "CHAIN"


CHAIN = _Chain()


T = TypeVar("T")


@dataclass
class Handover:
    """What forward's passes leave for backward's. The two graphs of a pair have one.

    Attributes:
        recipes: of `rematerialize`: name of a saved value -> how backward rebuilds it.
        kept_gathered: of `keep` and `secondary_shard`: group name -> what forward left gathered.
        meanings: of `verify`: what each value is that goes from one graph to the other.
        features: of features' passes: by their own class.
    """

    recipes: dict[str, Recipe] = field(default_factory=dict)
    kept_gathered: dict[str, Gathered] = field(default_factory=dict)
    meanings: Meanings = field(default_factory=Meanings)
    features: dict[type, Any] = field(default_factory=dict)

    def of(self, kind: type[T]) -> T:
        """What a feature's forward left, of its own class ``kind``; an empty one at first."""
        return self.features.setdefault(kind, kind())

    def copy(self) -> Handover:
        """With containers of its own. ``meanings`` are the same: no pass but `verify` touches them."""
        features = {kind: copy.copy(left) for kind, left in self.features.items()}
        return replace(self, recipes=dict(self.recipes), kept_gathered=dict(self.kept_gathered), features=features)


@dataclass
class Found:
    """What the passes of one graph found out, for those after them and for whoever runs the graph.

    Attributes:
        shards: of `gather`: the groups whose shards are the graph's last inputs, in that order.
        saved_names: of `rematerialize`: output position -> the name that backward knows a saved value by.
        saved_parameters: of `save_parameters`: output positions, now None, at which the caller puts the parameter.
        kept: of `reduce` and `all_reduce`: whose kept gradients come after the shards, in that order.
        gathered: of backward's `keep` and `secondary_shard`: the groups whose gathered buffers, or parts of these, are
            the graph's very last inputs, in that order.
        reductions: of `reduce`, `group` and `all_reduce`: what the graph's extra outputs are, in order. Where it
            ``steps``: what the outputs of its updates, which are empty, stand for.
        published: of a user's passes: under what names a graph's outputs go to `zerofx.published`. They stand after
            the model's own outputs, before ``reductions``.
        gathered_bytes: of `prefetch`: the most gathered bytes that are live at once, by its schedule.
    """

    shards: list[GroupLayout] = field(default_factory=list)
    saved_names: dict[int, str] = field(default_factory=dict)
    saved_parameters: dict[int, ParameterRef] = field(default_factory=dict)
    kept: list[ParameterRef] = field(default_factory=list)
    gathered: list[str] = field(default_factory=list)
    reductions: list[Reduction] = field(default_factory=list)
    published: list[str] = field(default_factory=list)
    gathered_bytes: int = 0

    def copy(self) -> Found:
        """With containers of its own."""
        return Found(**{each.name: copy.copy(getattr(self, each.name)) for each in fields(self)})


class Elsewhere(NamedTuple):
    """What other graphs of the module do with its groups: gathered bytes."""

    held: int = 0
    """That they keep between forward and backward."""
    largest: int = 0
    """Of the largest group that only they use."""


@dataclass
class Context:
    """Facts about one graph, and what its passes found out (``handover``, ``found``)."""

    phase: Phase
    process_group: str
    """Name of the process group, as ``torch.distributed`` resolves it."""
    reduce_group: str = ""
    """Name of the one that reductions run in; by default the same."""
    replicas: int = 1
    """How many replicas of the module there are."""
    second_group: str = ""
    """Name of the second process group that collectives of the graph run in: that of the ranks with the same shard, one
    of each replica; else of the ranks that have a secondary shard together. "" where there is none."""
    backend: str = "gloo"
    """Communication backend of the first group: decides how buffers travel (`zerofx.passes.travel`)."""
    executor: Executor = "inductor"
    stage: int = 3
    in_common: bool = False
    """Stage 3: graphs are given whole weights all the same (`zerofx.features.one_copy`)."""
    reloaded: frozenset[str] = frozenset()
    """Stage 3: the groups whose shards the graph copies to the device from the host's memory."""
    parameters: dict[str, ParameterRef] = field(default_factory=dict)
    """Placeholder name -> the parameter that it stands for."""
    saved: frozenset[int] = frozenset()
    """Forward: the output positions that are saved for backward."""
    gradients: dict[int, ParameterRef] = field(default_factory=dict)
    """Backward: output position -> the parameter whose gradient it is."""
    trained: tuple[ParameterRef, ...] = ()
    """Stage 0, backward: the parameters that require a gradient, of each bucket of which this graph has some. The graph
    of another rank may have a gradient of each."""
    buckets: Buckets = "group"
    sync: Sync = "reduce"
    steps: bool = False
    """Backward: groups are updated in it, each as soon as its gradient is there (`zerofx.step_in_backward`)."""
    memory_budget: float | None = None
    """Most gathered bytes live at any time; None: just enough for each gather to start two groups ahead, and
    a quarter of the largest group (`zerofx.passes.schedule`)."""
    elsewhere: Elsewhere = field(default_factory=Elsewhere)
    own: tuple[Pass, ...] = ()
    """The user's passes (`zerofx.passes.own`)."""
    before: GraphModule | None = None
    """The graph as AOTAutograd made it, and as a user's passes before all of ours left it, for `verify` to compare
    with; None: what it computes is not compared."""
    features: dict[type, Any] = field(default_factory=dict)
    """What features know of the graph: by their own class."""
    handover: Handover = field(default_factory=Handover)
    found: Found = field(default_factory=Found)

    def __post_init__(self) -> None:
        self.reduce_group = self.reduce_group or self.process_group

    def facts(self, kind: type[T]) -> T:
        """What a feature knows of this graph, of its own class ``kind``; ``kind()`` where it has noted nothing."""
        return self.features.setdefault(kind, kind())

    def copy(self) -> Context:
        """With containers of its own; layouts, graphs and features' facts are the same."""
        own: dict[str, Any] = {"parameters": dict(self.parameters), "features": dict(self.features)}
        return replace(self, **own, handover=self.handover.copy(), found=self.found.copy())

    @property
    def gathers(self) -> bool:
        """Whether weights come as shards and are gathered; otherwise the graph is given them whole."""
        return self.stage == 3 and not self.in_common

    def averaged_over(self, layout: GroupLayout) -> int:
        """How many ranks a gradient of ``layout`` is averaged over."""
        return layout.world_size * self.replicas

    @property
    def replica_group(self) -> str:
        """Name of the process group of the ranks with the same shard; "" where there is one replica."""
        return self.second_group if self.replicas > 1 else ""

    def is_of_replicas(self, args: tuple[Any, ...]) -> bool:
        """Whether a collective with these arguments runs between the replicas: its process group stands last."""
        return self.replicas > 1 and args[-1:] == (self.second_group,)

    @property
    def world_size(self) -> int:
        """How many ranks share the parameters."""
        refs = [*self.parameters.values(), *self.gradients.values()]
        layouts = [*(ref.layout for ref in refs), *self.found.shards, *(r.layout for r in self.found.reductions)]
        return layouts[0].world_size if layouts else 1

    @property
    def own_kinds(self) -> frozenset[str]:
        """The kinds of nodes that a user's passes inserted: their names."""
        return frozenset(pass_.name for pass_ in self.own)

    @property
    def travel(self) -> Travel:
        """How buffers travel between the ranks."""
        return travel_of(self.backend)

    @property
    def ways(self) -> list[str]:
        """What sets this graph apart from other variants of its backward, in words; none, where it just reduces."""
        return [self.sync] * (self.sync != "reduce") + ["step"] * self.steps

    @property
    def name(self) -> str:
        """The phase, and the ways in brackets."""
        return self.phase + (f" ({', '.join(self.ways)})" if self.ways else "")
