"""`memory=`: how one budget is divided between gathered weights and activations, by what each division would take.

::

                    memory_budget: least    more    all gathered
    all saved                        -       -           -
    less saved                       fits    -           -          of those that fit the fastest
    least saved                      fits    fits        fits

A division is a *rung* (what forward saves: `zerofx.compiler.activations.ladders`) and a budget for gathered weights.
Each that is tried is compiled up to the executor, on copies, and its step is predicted: live bytes operation by
operation, gradients in flight and workspace among them, and seconds. Of those that fit the fastest is taken; of equally
fast ones that with the lower peak. No rule of thumb takes part.

On one rung more gathered bytes mean fewer gathers, and a higher peak. The least in which gathers still hide behind what
is computed is what three groups take, as a rule. So the first rung that fits with these is searched for; then, from it
on, the first that fits with more; then a rung before it with the least, where gathers wait. A rung that is slower
than what was found ends a search: those below it compute more.

Layers of several groups have a second ladder, which saves what enters a layer. **Activations in a file**
(`zerofx.Offload`) are one more: its rungs have less in memory by what leaves, or is computed again. Each is searched as
the first one is, and the clock decides.

All of it follows from the graph, from bytes and from rates that are the same everywhere, so every rank divides alike;
that is compared through the store (`zerofx.runtime.ranks.agree.publish_choice`).

**Several graphs.** A module with graph breaks is several graphs, and each is compiled when the one before has run.
While one is at its peak, the others have what they save, or the gradients that they have made. So a division fits if,
for each graph that is known::

    at rest + peak of this graph + what waits of all others  <=  memory

What waits of graphs that are still to come is estimated: as much as this one saves, by how many parameters they have,
and their gradients. So the first graph leaves room for the next, and none takes what another was promised.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch.fx import Graph, GraphModule, Node

from zerofx import _torch
from zerofx.compiler.activations import Away, ladders, top_rung
from zerofx.compiler.choices import Activations, Division, NotDivided, Offer, Search, Settled, TooSmall
from zerofx.compiler.compared import Comparison
from zerofx.compiler.rewriting import copy_graph
from zerofx.compiler.trial import Choice, Contexts, Halves, Rung, through_passes
from zerofx.model.memory import Memory
from zerofx.model.units import format_bytes, format_seconds
from zerofx.passes.context import ParameterRef, Sync
from zerofx.passes.save_entries import save_entries
from zerofx.passes.schedule import TooLittle
from zerofx.runtime.ranks.agree import publish_choice
from zerofx.runtime.ranks.watch import watch_of
from zerofx.runtime.state.footprint import Demand
from zerofx.runtime.state.group import Family, ShardGroup
from zerofx.runtime.state.state_file import KEPT
from zerofx.simulate.price import Price, at_rest, of_code, optimizer_s, price
from zerofx.simulate.rehearsal import Pair

STEPS = 2
"""How many budgets for gathered weights there are between the least one and all of them."""

STRIDE = 2
"""Of how many rungs a search tries one."""


class Tried(NamedTuple):
    """A division that was tried."""

    rung: int
    memory_budget: float | None
    at_rest: int
    price: Price
    elsewhere: int
    optimizer_s: float

    @property
    def needs(self) -> int:
        """All bytes of a rank at the worst moment."""
        return self.at_rest + sum(self.price.peak.values()) + self.elsewhere


@dataclass(frozen=True)
class Subject:
    """The graph that is divided, as far as a division asks: `zerofx.compiler.cut` makes it.

    Attributes:
        groups: those that it reads; the first is any.
        family: those of its module.
        fuses: whether its executor fuses pointwise operations.
        pretended: it is of `zerofx.dry_run`: no other rank is asked.
        probes: whether kernels are run, for what they take inside of themselves.
        search: finds a division; None: the fastest that fits.
        share: of all that no graph has read yet, what this one does.
        away: what of activations may leave the device; None: nothing.
        alike: what tensor-parallel ranks have alike of it; None: they do not share activations.
        parameters: of a graph that is cut out of it, by the names of their placeholders.
        contexts: makes, for what was chosen, the contexts of such graphs.
    """

    groups: Sequence[ShardGroup]
    family: Family
    fuses: bool
    pretended: bool
    probes: bool
    search: Search | None
    share: float
    away: Away | None
    alike: Comparison | None
    parameters: Callable[[Graph], dict[str, ParameterRef]]
    contexts: Contexts

    @property
    def names(self) -> frozenset[str]:
        """The groups' names, by which `Footprint` knows a graph."""
        return frozenset(group.layout.name for group in self.groups)


class Trials:
    """The divisions of one joint graph.

    ``first``: the rung that saves all; ``more``: makes the ladders, or few rungs of them; the first begins with it.
    """

    def __init__(self, of: Subject, first: Rung, more: Callable[[bool], list[list[Rung]]], memory: Memory) -> None:
        self.of, self.memory = of, memory
        self.rungs, self._more = [first], more
        self.family, self.held, self.names = of.family, of.family.footprint, of.names
        self.tried: dict[tuple[int, float | None], Tried | None] = {}
        self._needed = max((group.gathered_nbytes for group in of.groups), default=0)
        self._workspaces: dict[Any, int] | None = {} if of.probes else None
        self._others: list[Demand] = self.held.taken_elsewhere(self.names)

    def choose(self) -> Tried:
        """The fastest that fits.

        Raises:
            TooSmall: none does.
        """
        first = self.try_(0, self.most())
        if first is not None and self.fits(first):
            return first
        ladders = self.ladders()
        for ladder in ladders:
            self._search(ladder)
        fitting = [tried for tried in self.found() if self.fits(tried)]
        if not fitting:
            self.try_(0, self.most())
            return self._any_of(ladders)
        return min(fitting, key=lambda tried: (tried.price.step_s, tried.needs))

    def choose_any(self) -> Tried:
        """One that fits, found by few tries. `choose` finds one wherever this does.

        Raises:
            TooSmall: none does, of those that were tried.
        """
        return self._any_of(self.ladders(few=True))

    def _any_of(self, ladders: Sequence[Sequence[int]]) -> Tried:
        """The first that fits, on each ladder from the least in memory on, as long as the next one needs less.

        What is computed again is live, too: so the least that is saved is not always the least that is needed.

        Raises:
            TooSmall: none does, of those that were tried.
        """
        for ladder in reversed(ladders if self.of.away is None else ladders[-1:]):
            before = math.inf
            for rung in reversed(ladder):
                tried = self.least(rung)
                if tried is not None and self.fits(tried):
                    return tried
                if tried is None or tried.at_rest > self.memory.nbytes or tried.needs >= before:
                    break
                before = tried.needs
        self._refuse()

    def _refuse(self) -> NoReturn:
        least = min(self.found(), key=lambda tried: (tried.needs, tried.price.step_s))
        raise TooSmall(
            f"memory={self.memory.nbytes:,} is too small: a step needs at least {least.needs:,} bytes, "
            f"of which {format_bytes(least.at_rest)} are there at rest{_of_others(least)}. "
            f"Predicted: {_in_words(self.offers())}. "
            f"Give it that, a smaller batch, or more ranks.{self.memory.hint}",
            self.offers(),
        )

    def ladders(self, few: bool = False) -> list[list[int]]:
        """Numbers of rungs, each ladder with less and less in memory."""
        (_, *others), *beside = self._more(few)
        numbers: list[list[int]] = []
        for new in (others, *beside):
            numbers.append([*range(len(self.rungs), len(self.rungs) + len(new))])
            self.rungs += new
        numbers[0].insert(0, 0)
        return numbers

    def found(self) -> list[Tried]:
        """What was tried and is possible, in order."""
        return [tried for tried in self.tried.values() if tried is not None]

    def fits(self, tried: Tried) -> bool:
        """Whether it stays within the budget."""
        return tried.needs <= self.memory.nbytes

    def _search(self, ladder: Sequence[int]) -> None:
        """Try what may be the fastest of one ladder, from ample gathered weights on.

        Where what is there at rest is too much, nothing fits, and the last rung is tried alone, for what it needs.
        """
        if all(tried.at_rest > self.memory.nbytes for tried in self.found()):
            self.least(ladder[-1])
            return
        ample, *more = self.budgets()
        found = self._first(ladder, partial(self.try_, memory_budget=ample))
        for budget in reversed(more if found < len(ladder) else []):  # to gather less may be worth computing more
            if self._first(ladder[found:], partial(self.try_, memory_budget=budget)) == 0:
                break
        if found == len(ladder):
            self._search_least(ladder, ample)
        elif more:
            self._first(ladder[:found], self.least)

    def _search_least(self, ladder: Sequence[int], ample: float | None) -> None:
        """Try rungs with the least gathered weights, where none fits with ``ample`` ones: those that may, in order."""
        tried = {i: self._bound(rung, ample) for i, rung in enumerate(ladder) if (rung, ample) in self.tried}
        beside = {i: [tried[j] for j in (i - 1, i, i + 1) if j in tried] for i in range(len(ladder))}
        bounds = [tried.get(i, min(beside[i], default=0)) for i in range(len(ladder))]
        may = [rung for rung, bound in zip(ladder, bounds, strict=True) if bound <= self.memory.nbytes]
        if not any(self._fit(self.least(rung)) for rung in may):
            self.least(ladder[bounds.index(min(bounds))])  # for what it needs

    def _bound(self, rung: int, ample: float | None) -> int:
        """Bytes that a rung needs with less gathered weights, too: what was live beside them. 0: it is not known."""
        tried = self.tried[rung, ample]
        if tried is None:
            return 0
        return tried.needs - (tried.price.peak.get("weights", 0) if self._searches() else 0)

    def _first(self, ladder: Sequence[int], tried: Callable[[int], Tried | None]) -> int:
        """The place of the first rung that fits as it is ``tried``, or of one next to it; their number: none does.

        Every second one is tried, and then the one in front. What a rung needs may be more than what those before
        it do, for what is computed again is live, too. So halves would skip what fits. Rungs after compute more.
        """
        for i in range(0, len(ladder), STRIDE):
            now = tried(ladder[i])
            if self._fit(now):
                return i - 1 if i and self._fit(tried(ladder[i - 1])) else i
            if now is not None and now.price.step_s >= self._best():
                break
        return len(ladder)

    def _fit(self, tried: Tried | None) -> bool:
        return tried is not None and self.fits(tried)

    def _best(self) -> float:
        """Seconds of the fastest that fits so far."""
        return min((tried.price.step_s for tried in self.found() if self.fits(tried)), default=math.inf)

    def most(self) -> float | None:
        """The budget for gathered weights with which all stay gathered; or the one that other ranks go on with."""
        fixed = self.held.memory_budget_of(self.names)
        if fixed is not None:
            return fixed[0]
        return math.inf if any(group.weights.gathers for group in self.of.groups) else None

    def _searches(self) -> bool:
        """Whether a budget for gathered weights is to be found: there are some, and no rank goes on with one."""
        return self.most() == math.inf and self.held.memory_budget_of(self.names) is None

    def budgets(self) -> list[float | None]:
        """For gathered weights: from what three groups take to all. In less, gathers wait for each other."""
        if not self._searches():
            return [self.most()]
        sizes = sorted(group.gathered_nbytes for group in self.of.groups)
        all_, some = sum(sizes), sum(sizes[-3:])
        return [*(some + (all_ - some) * i // STEPS for i in range(STEPS)), math.inf]

    def least(self, rung: int) -> Tried | None:
        """With the least in which this rung's gathers have room, one after the other."""
        if not self._searches():
            return self.try_(rung, self.most())
        while (tried := self.try_(rung, self._needed)) is None:
            pass
        return tried

    def try_(self, rung: int, memory_budget: float | None) -> Tried | None:
        """Predict a division; None where ``memory_budget`` has no room for one group."""
        key = rung, memory_budget
        if key not in self.tried:
            try:
                graphs = through_passes(self.of.contexts, self.rungs[rung], memory_budget, ways(self.memory))
            except TooLittle as e:
                self._needed = e.least
                self.tried[key] = None
                return None
            layouts = [group.graph_layout for group in self.family.groups()]
            rest = at_rest(graphs[0], layouts, self.memory)
            found, behind = price(*graphs, self.memory, self._workspaces), optimizer_s(graphs[0], layouts, self.memory)
            self.tried[key] = Tried(rung, memory_budget, rest, found, self._elsewhere(rest, found), behind)
        return self.tried[key]

    def _elsewhere(self, at_rest: int, price: Price) -> int:
        """What other graphs add where this one is at its peak; or where one of them is, if that is worse."""
        here = at_rest + sum(price.peak.values())
        come, waits = self._to_come(price.left), self.taken(at_rest, price).waits
        known = sum(other.waits for other in self._others)
        there = (other.at_rest + other.peak + known - other.waits + waits + come for other in self._others)
        given = self.held.given_elsewhere(self.names)
        return max([here + given + known + come, *there]) - here

    def taken(self, at_rest: int, price: Price) -> Demand:
        """What this graph takes by a division."""
        groups = [group for group in self.family.groups() if group.layout.name in self.names]
        return Demand(at_rest, sum(price.peak.values()), self._waits(price.left, self._gradients(groups)))

    def _to_come(self, left: int) -> int:
        """What is likely to wait of graphs that were not compiled yet, where this one leaves ``left``."""
        layouts = frozenset(group.layout.name for group in self.family.groups())
        unread = self.held.unread_elsewhere(self.names, layouts)
        groups = [group for group in self.family.groups() if group.layout.name in unread]
        return self._waits(int(left / self.of.share) - left, self._gradients(groups))

    def _waits(self, left: int, gradients: int) -> int:
        """What is there of a graph while others run: a backward's gradients come when what was saved is gone."""
        return left + gradients if self.memory.micro_batches > 1 else max(left, gradients)

    def _gradients(self, groups: Sequence[ShardGroup]) -> int:
        whole = self.memory.no_sync or not self.family.stage
        here, away = 0, 0
        for group in groups:
            nbytes = group.at_rest(accumulating=self.memory.no_sync).gradients
            if not whole and "gradient" in group.home.streams:
                away += nbytes if group.home.file is not None else 0  # on the host none of them stays here
            else:
                here += nbytes
        return here + (min(KEPT, away) if self.memory.micro_batches > 1 else 0)  # sums that stay a while

    def offers(self) -> tuple[Offer, ...]:
        """What needs least; and what takes more, up to all, each faster than those before it."""
        offers: list[Offer] = []
        for tried in sorted(self.found(), key=lambda tried: (tried.needs, tried.price.step_s)):
            if not offers or tried.price.step_s < offers[-1].step_s:
                offers.append(Offer(tried.needs, tried.at_rest, tried.price.step_s, tried.optimizer_s))
        return tuple(offers)


def _in_words(offers: tuple[Offer, ...]) -> str:
    """How long a step takes with the least, and with more."""
    least, *faster = offers
    shown = [faster[i] for i in sorted({0, len(faster) // 2, len(faster) - 1})] if faster else []
    return "; ".join(f"at {x.needs:,} a step takes about {format_seconds(x.step_s)}" for x in [least, *shown])


def _of_others(tried: Tried) -> str:
    said = f", and about {format_bytes(tried.elsewhere)} are of the module's other graphs"
    return said if tried.elsewhere else ""


def ways(memory: Memory) -> list[Sync]:
    """What the backwards of an optimizer step's micro-batches do with gradients: the first, one between, the last."""
    if not memory.no_sync:
        return ["reduce"] * min(memory.micro_batches, 2)
    kept: list[Sync] = ["keep"] * min(memory.micro_batches - 1, 2)
    return [*kept, "merge"]


def divide(
    of: Subject, memory: Memory, joint: GraphModule, partition: _torch.Partition
) -> tuple[Halves, Settled | None]:
    """Cut ``joint`` by the division that is chosen; None: nothing of it goes to backward.

    Raises:
        TooSmall: ``memory`` is too small.
    """
    memory = replace(memory, rates=memory.rates or (None if of.away is None else of.away.rates))
    _refuse_pending(of)
    _torch.hold_up_to_counted([node.meta.get("val") for node in joint.graph.find_nodes(op="placeholder")])
    graph = _identity(of, joint)
    first, halves = _all_saved(of, memory, joint, partition)
    if first is None:
        return halves, None
    trials = Trials(of, first, partial(_ladders, of, memory, joint, partition), memory)
    with _torch.without_code():
        tried = (of.search or Trials.choose)(trials)
    rung, price = trials.rungs[tried.rung], tried.price
    division = Division(
        nbytes=memory.nbytes,
        at_rest=tried.at_rest,
        peak=price.peak,
        left=price.left,
        memory_budget=tried.memory_budget,
        step_s=price.step_s,
        optimizer_s=tried.optimizer_s,
        tried=len(trials.found()),
        elsewhere=tried.elsewhere,
        offers=trials.offers(),
    )
    demand = trials.taken(tried.at_rest, price)
    return rung.graphs(), Settled(tuple(rung.names), rung.chosen, tried.memory_budget, division, demand, graph)


def settle(of: Subject, settled: Settled) -> None:
    """Say to the module's other graphs, and to the other ranks, what was decided for this one.

    Raises:
        OutOfStepError: another rank has decided otherwise.
    """
    held, names = of.family.footprint, of.names
    if settled.demand is not None:
        _refuse_pending(of)
    held.saves(names, settled.activations.saved_bytes)
    if settled.demand is None:
        return
    held.takes(names, settled.demand)
    held.gathers_within(names, settled.memory_budget)
    if of.alike is not None:
        of.alike.agree(settled.choice)
    if not of.pretended and (watch := watch_of(of.groups[0].sharing.optimizer.name)) is not None:
        publish_choice(watch.store, settled.graph, settled.choice, watch.rank, watch.world_size)


def _refuse_pending(of: Subject) -> None:
    """Refuse to divide what activations of other graphs share with."""
    if any(group.pending for group in of.groups) and of.family.footprint.saved_now(of.names):
        raise NotDivided(
            "memory= and a graph that is compiled while another that reads the same groups has activations in memory: "
            "these two are not divided yet. Mend the graph break, run each backward before the next forward, or give "
            "memory_budget= and activation_budget= instead."
        )


def _all_saved(
    of: Subject, memory: Memory, joint: GraphModule, partition: _torch.Partition
) -> tuple[Rung | None, Halves]:
    """The rung that saves all, and ``joint`` cut so; None: nothing of it goes to backward."""
    found: list[tuple[list[Node], Activations]] = []

    def look(cut: _torch.Cut) -> list[Node]:
        found.append(top_rung(cut, memory.nbytes, of.fuses))
        return found[0][0]

    halves = partition(copy_graph(joint), look)
    return (Rung(*found[0], lambda _: halves) if found else None), halves


def _ladders(
    of: Subject, memory: Memory, joint: GraphModule, partition: _torch.Partition, few: bool
) -> list[list[Rung]]:
    """All rungs, or ``few``: see `zerofx.compiler.activations.ladders`."""
    found: list[list[Rung]] = []

    def as_it_is(choose: Choice) -> Halves:
        return partition(copy_graph(joint), choose)

    def look(cut: _torch.Cut) -> list[Node]:
        mark = partial(save_entries, parameters=of.parameters(cut.graph))
        each = ladders(cut, memory.nbytes, of.fuses, mark, away=of.away, few=few)
        found.extend([Rung(*rung, as_it_is) for rung in ladder] for ladder in each)
        return each[0][0][0]

    partition(copy_graph(joint), look)
    return found


def check_code(division: Division, record: Pair) -> None:
    """Compare what Inductor made of both graphs with the budget, before they run.

    Raises:
        RuntimeError: its code takes more than the graphs themselves would have.
    """
    needs = division.at_rest + of_code(record) + division.elsewhere
    if needs > division.nbytes:
        raise RuntimeError(
            f"memory={division.nbytes:,}: the code that Inductor wrote takes {needs:,} bytes, where the graphs that it "
            f'was given would have taken {division.peak_bytes:,}. Give {needs:,}, or executor="eager".'
        )


def _identity(of: Subject, joint: GraphModule) -> str:
    """What is divided: operators, shapes, parameters, module."""
    operators = [str(node.target) for node in joint.graph.nodes if node.op == "call_function"]
    values = [node.meta.get("val") for node in joint.graph.find_nodes(op="placeholder")]
    shapes = [str(x.shape) for x in values if isinstance(x, torch.Tensor)]
    text = repr((of.family.number, sorted(of.names), operators, shapes))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
