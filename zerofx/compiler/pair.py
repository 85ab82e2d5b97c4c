"""The forward and the backward that AOTAutograd cuts one graph into: what they have in common.

::

    Unit                   which inputs are parameters; options          fixed
      │
    Pair ── handover       what forward's passes leave for backward's    written by forward, read by backward
      │     activations    what forward saves                            written as the graph is cut (cut.py)
      │     record         graphs before and after, for people           written as each is compiled (lowering.py)
      ▼
    Context                what the passes of one of the graphs know
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule

from zerofx import _torch
from zerofx.compiler.branches import trained_beside
from zerofx.compiler.choices import Activations, Division, Settled
from zerofx.compiler.compared import Compared, Comparison
from zerofx.compiler.records import GraphRecord
from zerofx.compiler.unit import Unit
from zerofx.passes.context import Context, Elsewhere, Executor, Handover, Phase, Sync
from zerofx.passes.own import Pass
from zerofx.runtime.state.account import AtRest

FACTS: list[Callable[[Pair, GraphModule, Phase], Any]] = []
"""What each feature knows of a graph (`zerofx.features.interface.Feature.facts`)."""


class Pair:
    """What both graphs share.

    Attributes:
        unit: what they are cut from.
        executor: that the passes make them ready for.
        record: the graphs, to be read.
        handover: what forward's passes leave for backward's.
        activations: what forward saves within a budget; None: there is none, or it changes nothing.
        memory_budget: for gathered weights.
        division: how ``memory`` was divided; None: there is no such budget.
        settled: all that a budget decided; None: there is none, or it was not decided yet.
        alike: the tensor-parallel ranks that save parts, and what they have compared; None: there are none.
        compared: who says what these have alike of a forward.
        is_cached: what is compiled goes to a cache, where the next start finds it (`zerofx.compiler.warm`).
        written: what forward's code writes to, and returns for backward (`zerofx.passes.proof.code.check_code`).
    """

    def __init__(self, unit: Unit, executor: Executor) -> None:
        self.unit = unit
        self.executor: Executor = executor
        self.record = GraphRecord()
        self.handover = Handover()
        self.activations: Activations | None = None
        self.memory_budget: float | None = unit.options.memory_budget
        self.division: Division | None = None
        self.settled: Settled | None = None
        self.alike: Comparison | None = None
        self.compared: Compared | None = None
        self.written: dict[str, str] = {}
        self.is_cached = False

    def adopt(self, settled: Settled) -> None:
        """Take over what a budget decided."""
        self.settled, self.activations, self.division = settled, settled.activations, settled.division
        if settled.division is not None:
            self.memory_budget = settled.memory_budget

    def elsewhere(self, phase: Phase) -> Elsewhere:
        """What other graphs hold, as the passes of ``phase`` are to know it."""
        unit, family = self.unit, self.unit.family
        beside = (g.gathered_nbytes for g in family.groups() if g.graph_layout not in unit.groups)
        return Elsewhere(family.footprint.gathered_elsewhere(unit.names, phase), max(beside, default=0))

    def context(self, gm: GraphModule, phase: Phase, sync: Sync = "reduce", steps: bool = False) -> Context:
        """For the passes of ``gm``, as AOTAutograd made it."""
        unit, family, output = self.unit, self.unit.family, gm.graph.output_node()
        sharing = unit.group.sharing
        returned = _torch.gradient_outputs(output) if phase == "backward" else {}
        gradients = {position: unit.sharded[i] for position, i in returned.items() if i in unit.sharded}
        second = sharing.replicas or sharing.secondary
        at_rest = AtRest(
            wire=family.wire,
            divides_between=sharing.divides_between,
            two_hops=sharing.two_hops,
            crosses=sharing.crosses,
            on_disk=family.on_disk,
            on_host=frozenset(family.on_host),
            kinds_on_host=family.offload.kinds_on_host if family.offload is not None else frozenset(),
        )
        return Context(
            phase=phase,
            process_group=sharing.weights.name,
            reduce_group=sharing.gradients.name,
            replicas=sharing.copies,
            second_group="" if second is None else second.name,
            backend=unit.group.backend,
            executor=self.executor,
            stage=family.stage,
            in_common=unit.group.weights.in_common,
            reloaded=frozenset(g.layout.name for g in unit.groups.values() if g.weights.streams and g.home.hosts),
            parameters=unit.parameters(gm.graph),
            saved=_torch.saved_outputs(output) if phase == "forward" else frozenset(),
            gradients=gradients,
            trained=trained_beside(gm, gradients, unit.groups, family.buckets),
            buckets=family.buckets,
            sync=sync,
            steps=steps,
            memory_budget=self.memory_budget,
            elsewhere=self.elsewhere(phase),
            own=Pass.all_of(unit.options.passes),
            features={type(fact): fact for fact in (at_rest, *(of(self, gm, phase) for of in FACTS))},
            handover=self.handover,
        )
