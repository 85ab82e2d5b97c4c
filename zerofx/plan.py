"""What a run would cost, stage by stage, before anything is allocated: `zerofx.cost` with a module's numbers in it.

::

    >>> print(zerofx.plan(model.bfloat16(), world_size=64))
    7,663,476,736 parameters in 112 groups, 64 ranks, Adam with two moments
    stage   weights  gradients    master   moments     total  sent per step  collectives
        0   15.3 GB    15.3 GB   30.7 GB   61.3 GB  122.6 GB        30.2 GB          112
        1   15.3 GB   239.5 MB  479.0 MB  957.9 MB   17.0 GB        30.2 GB          224
        2   15.3 GB   239.5 MB  479.0 MB  957.9 MB   17.0 GB        30.2 GB          224
        3  239.5 MB   239.5 MB  479.0 MB  957.9 MB    1.9 GB        45.3 GB          336

A module on the meta device will do. Frozen parameters have weights, and neither gradients nor moments.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from typing import Any

from torch import nn

from zerofx import cost
from zerofx.grouping import Grouping, plan_groups
from zerofx.layout import GroupLayout
from zerofx.precision import MixedPrecision
from zerofx.printing import format_bytes


@dataclass(frozen=True)
class StageCost:
    """Of one stage, on one rank, in bytes; padding (below 1 percent) is not counted.

    Attributes:
        memory: at rest, between backward and the optimizer's step; expressions that are numbers.
        traffic: of one optimizer step.
    """

    stage: int
    memory: cost.Memory
    traffic: cost.Traffic


@dataclass(frozen=True)
class Plan:
    """What each stage would cost; ``print`` it."""

    parameters: int
    groups: int
    world_size: int
    stages: tuple[StageCost, ...]

    def __str__(self) -> str:
        title = (
            f"{self.parameters:,} parameters in {self.groups} groups, {self.world_size} ranks, Adam with two moments"
        )
        head = ("stage", "weights", "gradients", "master", "moments", "total", "sent per step", "collectives")
        rows: list[tuple[str, ...]] = [head]
        for each in self.stages:
            sizes = [*astuple(each.memory), each.memory.total, each.traffic.total]
            rows.append(
                (str(each.stage), *(format_bytes(float(x)) for x in sizes), f"{int(each.traffic.collectives):,}")
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        return "\n".join([title, *("  ".join(map(str.rjust, row, widths)) for row in rows)])


def plan(
    module: nn.Module,
    *,
    world_size: int,
    stages: Iterable[int] = (0, 1, 2, 3),
    mixed_precision: MixedPrecision | None = None,
    groups: Any = None,
    micro_batches: int = 1,
    no_sync: bool = False,
) -> Plan:
    """What training ``module`` on ``world_size`` ranks would cost. Allocates nothing and needs no process group.

    Args:
        module: on any device, the meta device included. With 16-bit parameters the optimizer is taken to be
            `zerofx.AdamW`, which keeps float32 masters and moments; with others, any Adam.
        mixed_precision, groups: as they would be given to `zerofx.compile`.
        micro_batches, no_sync: backward passes per optimizer step, and whether all but the last run under
            `zerofx.no_sync`, where gradients are whole.

    Raises:
        ValueError: a stage, number of ranks or of micro-batches that there cannot be.
    """
    for name, number in (("world_size", world_size), ("micro_batches", micro_batches)):
        if number < 1:
            raise ValueError(f"{name}={number}: expected 1 or more.")
    layouts = [layout for layout, _ in plan_groups(module, world_size, Grouping.of(groups))]
    dtype = max((layout.dtype for layout in layouts), key=lambda dtype: dtype.itemsize)
    sizes, accumulating = cost.Sizes.of(mixed_precision, dtype), no_sync and micro_batches > 1
    trained, frozen = ([x for x in layouts if x.requires_grad is flag] for flag in (True, False))
    costs = []
    for stage in stages:
        traffic = cost.traffic(stage, sizes, no_sync=no_sync)
        if dtype.itemsize == 2:
            memory = cost.memory_16_bit(stage, accumulating=accumulating)
        else:
            memory = cost.memory(stage, sizes, accumulating=accumulating)
        numbers = {"N": _numel(trained), "M": world_size, "n": len(trained), "k": micro_batches}
        memory, traffic = memory.at(**numbers), traffic.at(**numbers)
        parts = world_size if stage == 3 else 1
        memory = replace(memory, weights=memory.weights + _numel(frozen) * dtype.itemsize / parts)
        if stage == 3:  # only there frozen weights travel: replicas of them never get old
            twice, weight = 2 * micro_batches, int(sizes.weight)
            traffic = replace(
                traffic,
                gathered=traffic.gathered + twice * weight * _numel(frozen) * (world_size - 1) / world_size,
                collectives=traffic.collectives + twice * len(frozen),
            )
        costs.append(StageCost(stage, memory, traffic))
    return Plan(_numel(layouts), len(layouts), world_size, tuple(costs))


def _numel(layouts: list[GroupLayout]) -> int:
    return sum(slot.numel for layout in layouts for slot in layout.slots)
