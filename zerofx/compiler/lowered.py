"""What is left of a graph when it is compiled: its code, and by name what the code is given and what becomes of it.

::

    compilers.py     graph ─▶ passes ─▶ executor ─▶ Lowered + code ─▶ a function that trains      first start
    warm.py                             cache    ─▶ Lowered + code ─▶ a function that trains      next start

A `Lowered` knows no process: groups are layouts, parameters are slots. So it can be written to a cache with its code.
`forward_of` and `backward_of` bind both to the groups of this process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerofx.compiler.choices import Settled
from zerofx.compiler.observed import named
from zerofx.compiler.runners import BackwardCode, forward_runner
from zerofx.compiler.unit import Unit
from zerofx.model.layout import GroupLayout, Slot
from zerofx.passes.context import Elsewhere, ParameterRef, Phase, Sync
from zerofx.runtime.ranks.agree import Schedule, identity
from zerofx.runtime.ranks.turns import Shadow
from zerofx.runtime.ranks.watch import watch_of
from zerofx.runtime.ranks.watched import watched
from zerofx.runtime.state.group import ShardGroup

Slots = tuple[Slot, ...]


@dataclass(frozen=True)
class Lowered:
    """One graph.

    Attributes:
        phase: what it does.
        name: the phase, and what it does with gradients, if that is not just to reduce them.
        groups: the names of the groups that it talks of, in order.
        kept: which of the old inputs the code takes.
        shards: the groups whose buffers it takes after these.
        schedules: process group -> the collectives that it starts there.
        published: the names of the outputs that a user's passes publish.
        carries: whether it moves state between the device and where that lives.
        donates: whether the code writes over inputs that nobody else has, unless ``retain_graph=True`` keeps them.
        elsewhere: what other graphs of the module held, as its passes knew it.
        fingerprint: what the graph was before all passes (`zerofx.runtime.ranks.agree.fingerprint`).
        text: the code, to be read; None: the executor writes none.
    """

    phase: Phase
    name: str
    groups: tuple[str, ...]
    kept: tuple[int, ...]
    shards: tuple[GroupLayout, ...]
    schedules: Mapping[str, Schedule]
    published: tuple[str, ...]
    carries: bool
    donates: bool
    elsewhere: Elsewhere
    fingerprint: str
    text: str | None


@dataclass(frozen=True)
class LoweredForward(Lowered):
    """A forward, or a graph that no backward follows.

    Attributes:
        saved: outputs that are parameters, saved for backward.
        gathered: outputs that are whole groups, left gathered for backward: their names.
        stays: bytes of these.
        counted: outputs that are activations within a budget; None: nobody counts them.
        settled: what a budget decided; None: there is none.
    """

    saved: Mapping[int, ParameterRef]
    gathered: Mapping[int, str]
    stays: int
    counted: tuple[int, ...] | None
    settled: Settled | None


@dataclass(frozen=True)
class LoweredBackward(Lowered):
    """A backward, in one way of treating gradients.

    Attributes:
        way: what it does with gradients, and whether it updates weights.
        outputs: how many gradients of inputs it returns, None among them.
        kept_gradients: parameters whose kept gradients it takes, with a tensor like each.
        gathered: arguments that are whole groups, left gathered by forward: their names.
        reductions: what its extra outputs are: of which group, of which parameters this rank has a gradient, and of
            which others may.
    """

    way: tuple[Sync, bool]
    outputs: int
    kept_gradients: tuple[tuple[ParameterRef, torch.Tensor], ...]
    gathered: tuple[tuple[int, str], ...]
    reductions: tuple[tuple[GroupLayout, Slots, Slots], ...]


def forward_of(lowered: LoweredForward, compiled: Callable, unit: Unit, shadow: Shadow | None = None) -> Callable:
    """The boxed function of a forward whose code is ``compiled``."""
    by_name = {layout.name: group for layout, group in unit.groups.items()}
    trained = lowered.phase == "forward"
    if trained:
        unit.family.footprint.keeps(unit.names, lowered.stays)
    return forward_runner(
        _under_watch(lowered, compiled, unit),
        lowered.kept,
        [unit.groups[layout] for layout in lowered.shards],
        {i: unit.groups[ref.layout].parameter(ref.slot) for i, ref in lowered.saved.items()},
        {i: by_name[name] for i, name in lowered.gathered.items()},
        uses=list(unit.groups.values()),
        trained=trained,
        published=lowered.published,
        publish=unit.family.published.update,
        counted=None if lowered.counted is None else _counting(lowered.counted, unit),
        carries=lowered.carries,
        store=unit.family.activation_store if lowered.carries and trained else None,
        shadow=shadow,
    )


def backward_of(
    lowered: LoweredBackward,
    compiled: Callable,
    unit: Unit,
    check: Callable[[list[Any]], None] | None = None,
    shadow: Shadow | None = None,
) -> BackwardCode:
    """A backward whose code is ``compiled``; ``check``: see `BackwardCode`."""

    def ref(layout: GroupLayout) -> weakref.ref[ShardGroup]:
        return weakref.ref(unit.groups[layout])

    by_name = {layout.name: ref(layout) for layout in unit.groups}
    return BackwardCode(
        _under_watch(lowered, compiled, unit),
        lowered.kept,
        groups=[ref(layout) for layout in lowered.shards],
        uses=[ref(layout) for layout in unit.groups],
        kept=[(ref(p.layout), p.slot, like) for p, like in lowered.kept_gradients],
        gathered=[(i, by_name[name]) for i, name in lowered.gathered],
        reductions=[(ref(layout), mine, others) for layout, mine, others in lowered.reductions],
        keeps=lowered.way[0] == "keep",
        steps=lowered.way[1],
        carries=lowered.carries,
        store=unit.family.activation_store if lowered.carries else None,
        published=lowered.published,
        publish=unit.family.published.update,
        check=check,
        shadow=shadow,
    )


def publish(schedules: Mapping[str, Schedule], fingerprint: str, unit: Unit) -> None:
    """Compare with the other ranks what was compiled: the collectives of a graph that was ``fingerprint``."""
    what = None if unit.family.turns is not None else identity(fingerprint, unit.family.number)
    for process_group, schedule in schedules.items():
        if schedule.collectives and (watch := watch_of(process_group)) is not None:
            watch.publish(schedule, what)


def _under_watch(lowered: Lowered, compiled: Callable, unit: Unit) -> Callable:
    """``compiled`` under the watchdog, and under a name for profilers."""
    if unit.pretend is None:
        for process_group, schedule in lowered.schedules.items():
            compiled = watched(compiled, schedule, process_group, unit.options.timeout)
    return named(compiled, lowered.name, lowered.groups)


def _counting(saved: Sequence[int], unit: Unit) -> Callable[[list[Any]], None]:
    """Notes the activations among a forward's outputs."""
    names, family = unit.names, weakref.ref(unit.family)

    def count(values: list[Any]) -> None:
        family().footprint.note_saved(names, [values[i] for i in saved])  # type: ignore[union-attr]

    return count
