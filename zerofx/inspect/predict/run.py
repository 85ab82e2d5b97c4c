"""What a stage costs a rank, of a run that is planned: `zerofx.inspect.predict.cost` with the run's numbers in it.

Bytes at rest are `zerofx.runtime.state.account`'s, without padding. On a mesh of two dimensions
`zerofx.inspect.predict.schemes` says what travels.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from sympy import Expr, Integer, Max, Rational

from zerofx.inspect.predict import cost
from zerofx.inspect.predict.schemes import Held, Mesh
from zerofx.inspect.predict.speed import Speed
from zerofx.inspect.predict.wires import coded, crossing
from zerofx.model.layout import GroupLayout
from zerofx.model.offload import Offload
from zerofx.model.sharding import Sharding
from zerofx.model.wire import Wire
from zerofx.runtime.optim.through_file import BUFFERS
from zerofx.runtime.ranks.sharing import OneGroup, Sharing, pretended
from zerofx.runtime.state.account import Account, Terms, at_rest, state_of, touched
from zerofx.runtime.state.state_file import BUFFER, KEPT


@dataclass(frozen=True)
class StageCost:
    """Of one stage, on one rank, in bytes; padding (below 1 percent) is not counted.

    Attributes:
        memory: at rest, between backward and the optimizer's step; expressions that are numbers.
        traffic: of one optimizer step.
        gathered: stage 3, the three largest neighbouring groups: what ``memory_budget`` is by default, but for the
            quarter of the largest that small ones may have on top.
        packed: stages 1 to 3, gradients on their way: two groups being reduced while the next is filled.
        files: with ``offload``, what lives in the rank's file and passes through it; not in ``memory``.
        passing: with it, what of that is in memory at once.
        time: of one optimizer step, if there is a `Speed`.
        sharding: on a mesh of two dimensions, how it is divided.
    """

    stage: int
    memory: cost.Memory
    traffic: cost.Traffic
    gathered: int
    packed: int
    time: cost.Time | None = None
    sharding: Sharding | None = None
    files: cost.Filed | None = None
    passing: int = 0

    @property
    def buffers(self) -> int:
        """What a step needs on top of what is there at rest, without activations."""
        return self.gathered + self.packed + self.passing

    @property
    def needed(self) -> float:
        """What must be there before the first activation."""
        return float(self.memory.total) + self.buffers


@dataclass(frozen=True)
class Run:
    """What is planned, but for the stage and who shares what.

    Attributes:
        speed: None: there are no times.
    """

    layouts: list[GroupLayout]
    micro_batches: int
    no_sync: bool
    wire: Wire | None
    offload: Offload | None
    speed: Speed | None

    @cached_property
    def dtype(self) -> torch.dtype:
        """The widest of parameters."""
        return max((layout.dtype for layout in self.layouts), key=lambda dtype: dtype.itemsize)

    @cached_property
    def sizes(self) -> cost.Sizes:
        """Bytes of an element, on average."""

        def average(itemsize: Callable[[GroupLayout], int]) -> Expr:
            return Rational(sum(itemsize(x) * numel_of([x]) for x in self.layouts), numel_of(self.layouts))

        return cost.Sizes(average(lambda x: x.dtype.itemsize), average(_weight), average(_gradient))

    @cached_property
    def kinds(self) -> list[list[GroupLayout]]:
        """The groups by their dtypes."""
        found: dict[Any, list[GroupLayout]] = {}
        for layout in self.layouts:
            found.setdefault((layout.dtype, layout.weight_dtype, layout.gradient_dtype), []).append(layout)
        return list(found.values())

    @cached_property
    def trained(self) -> list[GroupLayout]:
        """The groups that require gradients."""
        return [layout for layout in self.layouts if layout.requires_grad]

    @cached_property
    def frozen(self) -> list[GroupLayout]:
        """The others."""
        return [layout for layout in self.layouts if not layout.requires_grad]

    def in_stage(self, stage: int, sharing: Sharing) -> StageCost:
        """On one dimension."""
        ranks = cost.Ranks.of(sharing)
        options: Any = dict(ranks=ranks, no_sync=self.no_sync, frozen=(numel_of(self.frozen), len(self.frozen)))
        numbers: dict[str, float] = {"N": numel_of(self.trained), "n": len(self.trained), "k": self.micro_batches}
        wire = self.wire.in_stage(stage) if self.wire else None
        travels = coded(self.layouts, wire, self.sizes, sharing.weights.size)
        traffic, time = cost.traffic(stage, travels.sizes, **options).at(**numbers), None
        memory, files = self._at_rest(stage, sharing)
        if (speed := self._speed()) is not None:
            rates = {"b": speed.bandwidth, "a": speed.latency, "c": speed.flops or 1.0, "d": speed.files or 1.0}
            gathers, reductions = speed.codes(travels.gather), speed.codes(travels.reduction)
            # Stages 1 and 2 gather in the first of the forwards alone.
            forward = speed.forward + gathers / (1 if stage == 3 else self.micro_batches)
            backward = speed.backward + (gathers if stage == 3 else 0.0) + reductions
            timed = cost.time(stage, travels.sizes, **options, files=files if speed.files is not None else None)
            time = timed.at(**numbers, **rates, F=forward, B=backward)
        return self._cost(stage, sharing, memory, files, traffic, time)

    def on_mesh(self, mesh: tuple[int, int], stage: int, sharding: Sharding) -> StageCost:
        """On a mesh of so many rows of so many ranks."""
        two_hops = stage == 3 and (self.wire is None or self.wire.between == "nodes")
        sharing: Sharing = OneGroup.pretended(mesh[0] * mesh[1])
        if stage:
            sharing = pretended(*mesh, sharding=sharding, two_hops=two_hops)
        memory, files = self._at_rest(stage, sharing)
        wire = self.wire.in_stage(stage) if self.wire else None
        far = crossing(self.layouts, wire, self.sizes, *mesh, sharding)
        trained, frozen = (Held(numel_of(found), len(found)) for found in (self.trained, self.frozen))
        phases = Mesh(*mesh, sharding, sharing.two_hops).sent(stage, self.sizes, far, trained, frozen)
        reductions, time = 1 if self.no_sync else self.micro_batches, None
        if (speed := self._speed()) is not None:
            time = phases.time(speed, far, self.micro_batches, reductions, len(self.layouts))
        left = int(trained.numel * self.sizes.weight) // mesh[1] if stage == 3 and sharding.has_secondary else 0
        traffic = phases.traffic(self.micro_batches, reductions)
        return self._cost(stage, sharing, memory, files, traffic, time, left, sharding)

    def _cost(
        self,
        stage: int,
        sharing: Sharing,
        memory: cost.Memory,
        files: cost.Filed | None,
        traffic: cost.Traffic,
        time: cost.Time | None,
        left: int = 0,
        sharding: Sharding | None = None,
    ) -> StageCost:
        """``left``: bytes that forward leaves gathered beside."""
        gathered = left + (_three(self.layouts, _weight) if stage == 3 else 0)
        packed = _three(self.trained, _gradient) if stage else 0
        passing = 0 if files is None else self._passing(stage, sharing, files)
        if time is not None and files is not None and self.speed is not None and self.speed.files is not None:
            owned = numel_of(self.trained) / (sharing.optimizer.size if stage else 1)
            arithmetic = touched(self.dtype.itemsize) * owned / (self.speed.memory or math.inf)
            time = replace(time, optimizer=Max(files.optimizer_longer / self.speed.files, arithmetic))
        return StageCost(stage, memory, traffic, gathered, packed, time, sharding, files, passing)

    def _speed(self) -> Speed | None:
        if self.speed is not None and not self.trained:
            raise ValueError("no parameter requires a gradient: there is no training step to time.")
        return self.speed

    def _at_rest(self, stage: int, sharing: Sharing) -> tuple[cost.Memory, cost.Filed | None]:
        """What is in memory, and with ``offload`` in a file, of which it says what passes through it, too."""
        found = [self._kind_at_rest(kind, stage, sharing) for kind in self.kinds]
        held, filed = (functools.reduce(operator.add, column) for column in zip(*found, strict=True))
        return (held, None) if self.offload is None else (filed.left(held), filed)

    def _kind_at_rest(self, kind: list[GroupLayout], stage: int, sharing: Sharing) -> tuple[cost.Memory, cost.Filed]:
        """Of groups of the same dtypes."""
        shared = sharing, sharing.weights.size, sharing.copies
        optimizer = state_of(kind[0].dtype.itemsize)
        terms = Terms.of(stage, kind[0], self.wire, *shared, optimizer=optimizer)
        ranks, mixed = cost.Ranks.of(sharing), _weight(kind[0]) != kind[0].dtype.itemsize
        if sharing.two_hops:
            ranks = replace(ranks, weights=ranks.optimizer)

        def of(some: Iterable[GroupLayout], trained: bool, accumulating: bool = False) -> Account:
            numel = Integer(numel_of([x for x in some if x.requires_grad is trained]))
            return at_rest(cost.elements(numel, ranks), terms, trained=trained, accumulating=accumulating)

        accumulating, offload = self.no_sync and self.micro_batches > 1, self.offload
        held = cost.Memory.of(of(kind, True, accumulating), mixed) + cost.Memory.of(of(kind, False), False)
        if offload is None:
            return held, cost.Filed()
        names = offload.chosen(self.layouts) if stage and (offload.kinds or offload.on_host) else set()
        moved = [layout for layout in kind if layout.name in names]
        kinds = offload.kinds | offload.kinds_on_host
        kinds = kinds if stage == 3 else kinds - {"weights"}
        how: Any = {"no_sync": self.no_sync, "accumulating": accumulating, "on_host": offload.on_host}
        return held, cost.filed(of(moved, True), of(moved, False), kinds, mixed, **how).at(k=self.micro_batches)

    def _passing(self, stage: int, sharing: Sharing, files: cost.Filed) -> int:
        """Bytes of memory that what lives in a file takes while it passes; see `zerofx.plan`."""
        assert self.offload is not None
        nbytes = 0 if self.offload.on_host else int(files.at_rest)
        kinds = self.offload.kinds | self.offload.kinds_on_host
        streamed = ("weights" in kinds and stage == 3) + ("gradient" in kinds and stage > 0)
        shards = _three(self.layouts, lambda layout: layout.dtype.itemsize) // sharing.optimizer.size
        return BUFFERS * min(BUFFER, nbytes) + min(KEPT, nbytes) + streamed * shards


def _weight(layout: GroupLayout) -> int:
    """Bytes of an element as it is computed with."""
    return layout.weight_dtype.itemsize


def _gradient(layout: GroupLayout) -> int:
    """Bytes of an element of a gradient as it is reduced."""
    return (layout.gradient_dtype or layout.dtype).itemsize


def _three(layouts: list[GroupLayout], itemsize: Callable[[GroupLayout], int]) -> int:
    """Bytes of the three neighbouring groups that are largest together."""
    sizes = [layout.numel * itemsize(layout) for layout in layouts]
    return max(map(sum, zip(sizes, sizes[1:], sizes[2:])), default=sum(sizes))


def numel_of(layouts: Iterable[GroupLayout]) -> int:
    """Elements of their parameters."""
    return sum(slot.numel for layout in layouts for slot in layout.slots)
