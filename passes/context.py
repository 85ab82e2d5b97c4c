"""What a pass knows about the graph it is given, and what passes leave for each other.

A graph alone does not say which of its inputs are parameters, which outputs are gradients, or how the parameters are
laid out. The `Context` does. It holds layouts and names only: no process group, no module, no tensor; a pass can be
run on a graph written by hand, at any world size, on any machine.

One context serves one graph. The pair of graphs that AOTAutograd cuts out of one model share ``recipes``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch.fx import GraphModule

from zerofx.model.layout import GroupLayout, Slot
from zerofx.model.wire import Wire
from zerofx.passes.own import Pass
from zerofx.passes.saved import ActivationChoice, OffloadedActivation, SavedPart
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
        offloaded: by name, what of the saved tensors leaves for a file; and
        offloaded_bytes: how many these are.
    """

    budget: float
    saved_bytes: int
    whole_bytes: int
    least_bytes: int
    recomputed: frozenset[str]
    flops: int
    option: str = "activation_budget"
    offloaded: frozenset[str] = frozenset()
    offloaded_bytes: int = 0


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
        tried: how many divisions were predicted.
        elsewhere: what other graphs of the module add at the worst moment.
    """

    nbytes: int
    at_rest: int
    peak: dict[str, int]
    left: int
    memory_budget: float | None
    step_s: float
    tried: int = 1
    elsewhere: int = 0

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


STATE = {"moment": "optimizer state", "weights": "weights", "gradient": "gradients"}
"""What a kind of state is called."""


class OnDisk(NamedTuple):
    """What of a rank's state lives in a file (`zerofx.Offload`): for who reads a graph. No pass asks for it.

    Attributes:
        path: this rank's file; of a dry run, which has none, the folder.
        kinds: of `STATE`.
        groups: the names of those whose state is there.
        of: how many groups the module has.
        choice: the options that chose these, as they were given; "" where all were taken.
    """

    path: str
    kinds: frozenset[str]
    groups: frozenset[str]
    of: int
    choice: str = ""

    @property
    def names(self) -> str:
        """Of its kinds, in words."""
        *first, last = [name for kind, name in STATE.items() if kind in self.kinds]
        return f"{', '.join(first)} and {last}" if first else last

    @property
    def which(self) -> str:
        """How many groups, and by what choice."""
        if len(self.groups) == self.of:
            return "all groups"
        return f"{len(self.groups)} of {self.of} groups ({self.choice})"


class _Chain:
    def __repr__(self) -> str:
        return "CHAIN"


CHAIN = _Chain()


@dataclass
class Context:
    """Facts about one graph (first block), and what its passes found out (second block)."""

    phase: Phase
    process_group: str
    """Name of the process group, as ``torch.distributed`` resolves it."""
    reduce_group: str = ""
    """Name of the one that reductions run in; by default the same."""
    replica_group: str = ""
    """Name of the one of the ranks that hold the same shard, each another replica's; "" where there is one replica."""
    replicas: int = 1
    """How many of these there are."""
    divides_between: bool = False
    """Stage 3: each of these updates a part of the shard, and shards are refreshed before forward."""
    two_hops: bool = False
    """Stage 3: each of these has that part alone, and graphs gather the shard from there (`two_hop_gather`)."""
    near_group: str = ""
    """Stage 3: name of the process group of the near ranks, in which backward gathers what forward left there."""
    near_ranks: int = 1
    """How many ranks are near each other, where that is known."""
    crosses: bool = False
    """Whether the ranks of ``process_group`` are of several rows of a mesh."""
    backend: str = "gloo"
    """Communication backend of that group: decides how buffers travel (`zerofx.passes.travel`)."""
    executor: Executor = "inductor"
    parameters: dict[str, ParameterRef] = field(default_factory=dict)
    """Placeholder name -> the parameter that it stands for."""
    saved: frozenset[int] = frozenset()
    """Forward: the output positions that are saved for backward."""
    gradients: dict[int, ParameterRef] = field(default_factory=dict)
    """Backward: output position -> the parameter whose gradient it is."""
    trained: tuple[ParameterRef, ...] = ()
    """Stage 0, backward: the parameters that require a gradient, of each bucket of which this graph has some. The graph
    of another rank may have a gradient of each."""
    recipes: dict[str, Recipe] = field(default_factory=dict)
    """Written by forward's `rematerialize`, read by backward's: name of the saved value -> how to rebuild it."""
    stage: int = 3
    one_copy: bool = False
    """Stage 3: the ranks have the whole weights in common memory (`zerofx.features.one_copy.one_copy`)."""
    lookups: bool = False
    """Stage 3: of tables that are only looked up, rows travel (`zerofx.features.lookups`). Indices have one
    shape on all ranks."""
    buckets: Buckets = "group"
    sync: Sync = "reduce"
    steps: bool = False
    """Backward: groups are updated in it, each as soon as its gradient is there (`zerofx.step_in_backward`)."""
    param_dtype: torch.dtype | None = None
    """What weights compute in (`zerofx.model.precision`); None: the parameters' dtype."""
    reduce_dtype: torch.dtype | None = None
    """What gradients are reduced in; None: the dtype backward returns them in."""
    wire: Wire | None = None
    """What travels in codes; None: nothing."""
    weights_away: frozenset[str] = frozenset()
    """Stage 3: the groups whose shards live elsewhere than on the device (`reload_weights`)."""
    gradients_away: frozenset[str] = frozenset()
    """Those whose gradients do (`offload_gradients`)."""
    on_host: frozenset[str] = frozenset()
    """The groups whose optimizer state is in the host's memory."""
    on_disk: OnDisk | None = None
    """What lives in a file, moments as well; None: nothing does."""
    activation_choice: ActivationChoice | None = None
    """Which activations do (`offload_activations`); None: they stay."""
    offloaded: dict[str, OffloadedActivation] = field(default_factory=dict)
    """Written by forward's `offload_activations`, read by backward's: name of the saved value -> what backward gets."""
    memory_budget: float | None = None
    """Most gathered bytes live at any time; None: just enough for each gather to start two groups ahead, and
    a quarter of the largest group (`zerofx.passes.schedule`)."""
    largest_elsewhere: int = 0
    """Bytes of the largest group, gathered, of those that only other graphs of the module use."""
    held_elsewhere: int = 0
    """Gathered bytes that other graphs of the module keep between forward and backward."""
    kept_gathered: dict[str, Gathered] = field(default_factory=dict)
    """Written by forward's `keep` and `secondary_shard`, read by backward's: group name -> what was left gathered."""
    parts_group: str = ""
    """Name of the process group whose ranks save parts of what they have alike (`save_parts`); "" where none do."""
    parts_ranks: int = 1
    """How many these are."""
    alike: frozenset[str] = frozenset()
    """Forward: the nodes whose values these ranks have alike, as they have compared."""
    parts: dict[str, SavedPart] = field(default_factory=dict)
    """Written by forward's `save_parts`, read by backward's: by the first name that backward knows each by."""
    own: tuple[Pass, ...] = ()
    """The user's passes (`zerofx.passes.own`)."""
    before: GraphModule | None = None
    """The graph as AOTAutograd made it, and as a user's passes in front of all of ours left it, for `verify` to compare
    with; None: what it computes is not compared."""
    meanings: Meanings | None = None
    """Written by forward's `verify`, read by backward's: what each value is that goes from one to the other."""

    shards: list[GroupLayout] = field(default_factory=list)
    """Set by `gather`: the groups whose shards are the graph's last inputs, in that order."""
    saved_names: dict[int, str] = field(default_factory=dict)
    """Set by `rematerialize`: output position -> the name that backward knows a saved value by."""
    saved_parameters: dict[int, ParameterRef] = field(default_factory=dict)
    """Set by `save_parameters`: output positions, now None, at which the caller puts the parameter itself."""
    kept: list[ParameterRef] = field(default_factory=list)
    """Set by `reduce` and `all_reduce`: whose kept gradients come after the shards, in that order."""
    gathered: list[str] = field(default_factory=list)
    """Set by backward's `keep` and `secondary_shard`: the groups whose gathered buffers, or parts of these, are the
    graph's very last inputs, in that order."""
    reductions: list[Reduction] = field(default_factory=list)
    """Set by `reduce`, `group` and `all_reduce`: what the graph's extra outputs are, in order; where it ``steps``, what
    the outputs of its updates, which are empty, stand for."""
    published: list[str] = field(default_factory=list)
    """Set by a user's passes: under what names a graph's outputs go to `zerofx.published`. These outputs stand behind
    the model's own, and in front of ``reductions``."""
    activations: Activations | None = None
    """What was saved and recomputed within a budget; None: there is none, or it leaves everything as it is."""
    division: Division | None = None
    """How ``memory`` was divided; None: there is no such budget."""
    gathered_bytes: int = 0
    """Set by `prefetch`: the most gathered bytes live at once, by the schedule it made."""

    def __post_init__(self) -> None:
        self.reduce_group = self.reduce_group or self.process_group

    @property
    def gathers(self) -> bool:
        """Whether weights come as shards and are gathered; otherwise the graph is given them whole."""
        return self.stage == 3 and not self.one_copy

    @property
    def wire_inside(self) -> Wire | None:
        """What travels in codes in ``process_group``."""
        return self.wire if self.wire is not None and (self.crosses or self.wire.between == "all") else None

    @property
    def wire_between(self) -> Wire | None:
        """What travels in codes between the replicas."""
        between = self.wire is not None and self.wire.between == "nodes"
        return self.wire if between and self.replicas > 1 else None

    def averaged_over(self, layout: GroupLayout) -> int:
        """How many ranks a gradient of ``layout`` is averaged over."""
        return layout.world_size * self.replicas

    @property
    def second_group(self) -> str:
        """The process group beside the first: of the replicas, or of the near ranks; "" where there is none."""
        return self.replica_group or self.near_group

    def is_of_replicas(self, args: tuple[Any, ...]) -> bool:
        """Whether a collective with these arguments runs between the replicas: its process group stands last."""
        return bool(self.replica_group) and args[-1:] == (self.replica_group,)

    @property
    def refreshed_shards(self) -> bool:
        """Whether shards are given to a graph while they are refreshed."""
        return self.divides_between and not self.two_hops

    @property
    def world_size(self) -> int:
        """How many ranks share the parameters."""
        refs = [*self.parameters.values(), *self.gradients.values()]
        layouts = [*(ref.layout for ref in refs), *self.shards, *(r.layout for r in self.reductions)]
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
