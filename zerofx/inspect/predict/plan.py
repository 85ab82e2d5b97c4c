"""What a run would cost, stage by stage, before anything is allocated.

`zerofx.inspect.predict.cost` with a module's numbers in it::

    >>> print(zerofx.plan(model.bfloat16(), world_size=64, memory=24e9))
    7,663,476,736 parameters in 112 groups, 64 ranks, Adam with two moments
    stage   weights  gradients    master   moments     total   buffers  sent per step  collectives  fits 24.0 GB
        0   15.3 GB    15.3 GB   30.7 GB   61.3 GB  122.6 GB       0 B        30.2 GB          112            no
        1   15.3 GB   239.5 MB  479.0 MB  957.9 MB   17.0 GB  418.4 MB        30.2 GB          224           yes
        2   15.3 GB   239.5 MB  479.0 MB  957.9 MB   17.0 GB  418.4 MB        30.2 GB          224           yes
        3  239.5 MB   239.5 MB  479.0 MB  957.9 MB    1.9 GB  836.8 MB        45.3 GB          336           yes
    recommended: stage 1, the lowest that fits; 6.6 GB of 24.0 GB are left for activations

A stage fits if what a rank holds at rest (``total``) and the ``buffers`` of a step leave something of ``memory`` for
activations, which no formula knows: they depend on the batch, and `zerofx.predict` counts them. The lowest stage that
fits is recommended: a higher one saves memory that is not needed, and stage 3 sends half as much again.

With ``bandwidth``, ``flops`` and ``tokens`` there are seconds too (`zerofx.inspect.predict.speed`): all collectives one
after the other (``on the wire``), all forwards and backwards (``computing``), both together as the schedule overlaps
them (``step``), and how long of that compute waits (``exposed``). Recommended is the fastest stage that fits.

A module on the meta device will do. Frozen parameters have weights, and neither gradients nor moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from zerofx.compiler.checks import check_wire
from zerofx.compiler.options import check_places
from zerofx.inspect.predict.run import Run, StageCost, numel_of
from zerofx.inspect.predict.speed import Speed
from zerofx.model.grouping import Grouping, plan_groups
from zerofx.model.layout import GroupLayout
from zerofx.model.offload import Offload
from zerofx.model.policies import Policy
from zerofx.model.sharding import SCHEMES, Sharding
from zerofx.model.units import format_bytes, format_seconds
from zerofx.model.wire import Wire
from zerofx.runtime.ranks.sharing import OneGroup, Sharing, pretended

MOST_RANKS = 2**20
"""Where the search for a number of ranks that fits ends."""

ALIKE = 0.01
"""Steps that differ by less than this part count as equally fast: formulas know no better."""


@dataclass(frozen=True)
class Plan:
    """What each stage would cost; ``print`` it.

    Attributes:
        memory: bytes that a rank has; None: nobody said.
        least_ranks: the smallest number of ranks on which stage 3 fits into ``memory``; None if there is none, or no
            ``memory``.
        speed: what the times of `stages` rest on; None: there are none.
        replicas: how many there are of the module, each on ``world_size`` ranks.
        offload: of "cpu" the files of `stages` are the host's memory, and what a step copies from and to it.
    """

    parameters: int
    groups: int
    world_size: int
    stages: tuple[StageCost, ...]
    memory: float | None = None
    least_ranks: int | None = None
    speed: Speed | None = None
    replicas: int = 1
    offload: Offload | None = None

    def fits(self, stage: StageCost) -> bool:
        """Whether ``stage`` leaves something of ``memory`` for activations."""
        return self.memory is None or stage.needed < self.memory

    @property
    def recommended(self) -> StageCost | None:
        """The fastest of ``stages`` that fits (of those `ALIKE` the first), or where there are no times the first.

        None if none fits, or nobody said into what.
        """
        if self.memory is None:
            return None
        fitting = [each for each in self.stages if self.fits(each)]
        fastest = min((float(each.time.whole) for each in fitting if each.time), default=0.0)
        alike = [each for each in fitting if not each.time or float(each.time.whole) <= (1 + ALIKE) * fastest]
        return min(alike, key=lambda each: each.stage, default=None)

    def __str__(self) -> str:
        ranks = f"{self._ranks}, Adam with two moments"
        lines = [f"{self.parameters:,} parameters in {self.groups} groups, {ranks}"]
        columns = [self._column(each) for each in self.stages]
        rows = [list(columns[0]), *(list(column.values()) for column in columns)] if columns else []
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        lines += ["  ".join(map(str.rjust, row, widths)) for row in rows]
        if self.speed is not None:
            lines.append(f"at {self.speed}")
        return "\n".join([*lines, self.recommendation] if self.memory is not None else lines)

    @property
    def _ranks(self) -> str:
        of_each = f"{self.world_size} ranks"
        return of_each if self.replicas == 1 else f"{self.replicas} replicas of {of_each}"

    def _column(self, each: StageCost) -> dict[str, str]:
        """What is printed of a stage, under its heading."""
        sizes = {"total": each.memory.total, "buffers": each.buffers, "sent per step": each.traffic.total}
        parts = zip(("weights", "gradients", "master", "moments"), astuple(each.memory), strict=True)
        scheme = {} if each.sharding is None else {"divided": each.sharding.name if each.stage else "nothing"}
        column = {"stage": str(each.stage)} | scheme | {k: format_bytes(float(x)) for k, x in (*parts, *sizes.items())}
        if each.files is not None:
            on_host = self.offload is not None and self.offload.on_host
            there, through = ("on the host", "to and from it") if on_host else ("on disk", "through it")
            column[there] = format_bytes(float(each.files.at_rest))
            column[through] = format_bytes(float(each.files.per_step))
        if self.replicas > 1:
            column["between rows"] = format_bytes(float(each.traffic.between))
        column["collectives"] = f"{int(each.traffic.collectives):,}"
        if each.time is not None and self.speed is not None:
            times = {"on the wire": each.time.wire}
            if self.speed.flops is not None:
                times |= {"computing": each.time.compute, "step": each.time.step, "exposed": each.time.exposed}
            if each.files is not None and self.speed.files is not None:
                times["optimizer"] = each.time.optimizer
            column |= {k: format_seconds(float(x)) for k, x in times.items()}
        if self.memory is not None:
            column[f"fits {format_bytes(self.memory)}"] = "yes" if self.fits(each) else "no"
        return column

    @property
    def recommendation(self) -> str:
        """`recommended`, and why, in a line; "" if nobody said into what it must fit."""
        if self.memory is None:
            return ""
        memory, chosen = format_bytes(self.memory), self.recommended
        if chosen is not None:
            left = format_bytes(self.memory - chosen.needed)
            why = "the lowest that fits" if self.speed is None else "the fastest that fits"
            stage = f"stage {chosen.stage}" + (f", {chosen.sharding.name}" if chosen.sharding and chosen.stage else "")
            return f"recommended: {stage}, {why}; {left} of {memory} are left for activations"
        line = f"no stage fits into {memory} on {self._ranks}; "
        if self.least_ranks is None:
            return (
                line + "more ranks do not help: the groups that a step gathers take more. Try smaller groups (groups=)"
            )
        return line + f"stage 3 does from {self.least_ranks:,} ranks on"


def plan(
    module: nn.Module,
    *,
    world_size: int | tuple[int, int],
    sharing: Callable[[int], Sharing] = OneGroup.pretended,
    sharding: Sharding | None = None,
    stages: Iterable[int] = (0, 1, 2, 3),
    memory: float | None = None,
    mixed_precision: Policy | None = None,
    groups: Any = None,
    wire: Wire | None = None,
    offload: Offload | str | Path | None = None,
    micro_batches: int = 1,
    no_sync: bool = False,
    bandwidth: float | None = None,
    node_bandwidth: float | None = None,
    ranks_per_node: int | None = None,
    replica_bandwidth: float | None = None,
    latency: float | None = None,
    memory_bandwidth: float | None = None,
    disk_bandwidth: float | None = None,
    host_bandwidth: float | None = None,
    flops: float | None = None,
    tokens: float | None = None,
    sequence_length: int | None = None,
    flops_per_token: float | None = None,
) -> Plan:
    """What training ``module`` on ``world_size`` ranks would cost. Allocates nothing and needs no process group.

    Args:
        module: on any device, the meta device included (`zerofx.inspect.predict.shapes.build` makes well-known
            ones). With 16-bit parameters the optimizer is taken to be `zerofx.AdamW`, which keeps float32
            masters and moments; with others, any Adam.
        world_size: a number of ranks; or, as of a mesh of two dimensions, how many replicas there are, and over how
            many ranks each is sharded. Then there is a line for each scheme of stage 3 (docs/meshes.md).
        sharding: of these schemes, this one alone.
        sharing: who shares what, of a number of ranks (`zerofx.runtime.ranks.sharing`): by default all share all.
        memory: bytes that each rank has; a stage is recommended then.
        mixed_precision, groups: as they would be given to `zerofx.compile`. Groups are as large as on an accelerator
            (`zerofx.Grouping`); on gloo there are more, which are smaller.
        wire: what travels in codes in stages 1 to 3, as it would be given to `zerofx.compile`; codes of changes in 1
            and 2 alone. Writing and reading codes takes time if there is a ``memory_bandwidth``.
        offload: what lives in a file per rank in stages 1 to 3, as it would be given to `zerofx.compile`; weights do in
            stage 3. Nothing is looked for at the path. Memory is what stays in memory then; ``on disk`` what does not,
            and ``through it`` what a step reads and writes there. In ``buffers`` are four of 8 MB, 32 MB of what was
            used last, and three groups' shards for weights and for gradients that move. "cpu": as on a GPU.
        micro_batches, no_sync: backward passes per optimizer step, and whether all but the last run under
            `zerofx.no_sync`, where gradients are whole.
        bandwidth, node_bandwidth, ranks_per_node, replica_bandwidth, latency: of the links, as in
            `zerofx.inspect.predict.speed`; without ``bandwidth`` there are no times.
        memory_bandwidth: bytes per second that a rank reads or writes (``zerofx.Rates.memory_bytes_per_s``).
        disk_bandwidth: bytes per second that a rank reads and writes, together (``zerofx.Rates.disk_bytes_per_s``). An
            optimizer's step takes ``max(bytes / disk_bandwidth, bytes of memory / memory_bandwidth)`` then, and no
            forward or backward is shorter than what it moves. Stage 0 has an optimizer's time, too.
        host_bandwidth: with ``offload="cpu"``, bytes per second between a device and its host, each way
            (``zerofx.Rates.host_copy_bytes_per_s``): as for a disk, by the busier way.
        flops: floating-point operations per second that a rank reaches; without it, times are the wire's alone.
        tokens, sequence_length, flops_per_token: of one micro-batch on one rank, as in `zerofx.inspect.predict.speed`.

    Raises:
        ValueError: a stage, or a number of anything, that there cannot be; options that need one another.
    """
    one_dimension = not isinstance(world_size, tuple)
    mesh = replicas, world_size = world_size if isinstance(world_size, tuple) else (1, world_size)
    sharing = partial(pretended, replicas) if replicas > 1 else sharing
    _check_numbers(min(replicas, world_size), micro_batches, memory)
    _check(sharding, wire, replicas, world_size, one_dimension)
    filed = _check_offload(Offload.of(offload), wire, None if one_dimension else mesh, disk_bandwidth, host_bandwidth)
    ranks = sharing(world_size)
    layouts = _layouts(module, ranks.weights.size, groups, wire, mixed_precision)
    speed = Speed.of(
        module,
        ranks,
        bandwidth=bandwidth,
        node_bandwidth=node_bandwidth,
        ranks_per_node=ranks_per_node,
        replica_bandwidth=replica_bandwidth,
        latency=latency,
        memory_bandwidth=memory_bandwidth,
        disk_bandwidth=disk_bandwidth,
        host_bandwidth=host_bandwidth,
        flops=flops,
        tokens=tokens,
        sequence_length=sequence_length,
        flops_per_token=flops_per_token,
    )
    run = Run(layouts, micro_batches, no_sync, wire, filed, speed)
    bare = replace(run, wire=wire if replicas == 1 else None, speed=None)
    least = None if memory is None else least_number(lambda number: bare.in_stage(3, sharing(number)).needed < memory)
    if replicas == 1:
        made = [run.in_stage(stage, ranks if stage else ranks.undivided()) for stage in stages]
    else:
        made = [run.on_mesh(mesh, stage, each) for stage in stages for each in _schemes(stage, sharding, world_size)]
    return Plan(numel_of(layouts), len(layouts), world_size, tuple(made), memory, least, speed, replicas, filed)


def _layouts(
    module: nn.Module, ranks: int, groups: Any, wire: Wire | None, precision: Policy | None
) -> list[GroupLayout]:
    """Of its groups. Raises: it has no parameters."""
    block = 1 if wire is None else wire.block
    layouts = [layout for layout, _ in plan_groups(module, ranks, Grouping.of(groups), (), "", block, precision)]
    if not layouts:
        raise ValueError(f"{type(module).__name__} has no parameters: there is nothing to shard.")
    return layouts


def _check_offload(
    offload: Offload | None, wire: Wire | None, mesh: tuple[int, int] | None, disk: float | None, host: float | None
) -> Offload | None:
    """Refuse what `zerofx.compile` would, and rates of what nothing passes."""
    if (offload is None or not offload.kinds) and disk is not None:
        raise ValueError(f"disk_bandwidth={disk} says nothing without a folder in offload=.")
    if (offload is None or not offload.on_host) and host is not None:
        raise ValueError(f'host_bandwidth={host} says nothing without offload="cpu".')
    if offload is not None:
        check_places(offload, {"wire": wire, "world_size": mesh})
        if offload.activations is not None:
            raise ValueError(
                f"offload={offload!r}: activations= is not planned, for what is saved follows from a graph. Leave it "
                "out, and ask zerofx.predict of the compiled module."
            )
    return offload


def _check_numbers(world_size: int, micro_batches: int, memory: float | None) -> None:
    for name, number in (("world_size", world_size), ("micro_batches", micro_batches)):
        if number < 1:
            raise ValueError(f"{name}={number}: expected 1 or more.")
    if memory is not None and not memory > 0:
        raise ValueError(f"memory={memory}: expected bytes, more than 0.")


def _check(sharding: Sharding | None, wire: Wire | None, rows: int, ranks: int, one_dimension: bool) -> None:
    """Refuse what goes with no mesh, or with no scheme of it."""
    if sharding is not None and one_dimension:
        raise ValueError(f"sharding= with world_size={ranks}: expected two numbers, (replicas, ranks of each).")
    for_all = sharding or Sharding(gradients="all", optimizer="all")
    check_wire(wire, pretended(rows, ranks, sharding=for_all), one_dimension=one_dimension)


def _schemes(stage: int, sharding: Sharding | None, ranks: int) -> tuple[Sharding, ...]:
    """How a mesh can be divided in a stage: the first scheme, and in stage 3 all that there are."""
    if sharding is not None or stage != 3:
        return (sharding if sharding is not None and stage == 3 else Sharding(),)
    return tuple(each for each in SCHEMES if ranks > 1 or not each.has_secondary)


def least_number(fits: Callable[[int], bool]) -> int | None:
    """The smallest number of ranks that fits, where more ranks never need more; None: not even `MOST_RANKS` do."""
    high = 1
    while not fits(high):
        high *= 2
        if high > MOST_RANKS:
            return None
    low = high // 2  # does not fit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
