"""The options of ``zerofx.compile``, checked in one place before anything is touched."""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule

from zerofx.compiler.progress import wanted
from zerofx.model.grouping import BlockRule, Grouping
from zerofx.model.ignored import Ignored, check_ignored
from zerofx.model.memory import Memory
from zerofx.model.offload import Offload
from zerofx.model.policies import Policy, check_policies
from zerofx.model.rules import Rule
from zerofx.model.sharding import Sharding
from zerofx.model.wire import Wire
from zerofx.passes import pipeline
from zerofx.passes.context import Buckets
from zerofx.passes.own import Pass, nearest
from zerofx.runtime.eager.leaf import check_rules

EXECUTORS = ("inductor", "regional", "eager")
BUCKETS = ("group", "parameter", "all")

RETIRED = {
    "pool": "Leave it out, and have glibc keep what is freed: start with MALLOC_MMAP_MAX_=0 "
    "MALLOC_TRIM_THRESHOLD_=4294967296 in the environment (docs/tuning.md).",
}
"""Options of the version before, accepted for this one, and what to do instead."""


VARIABLES = ("ZEROFX_PROGRESS", "ZEROFX_SAME_HOST")
"""Variables of the environment that zerofx reads."""


def check_environment() -> None:
    """Refuse a variable that is nearly one of `VARIABLES`: it was meant to do something, and does nothing."""
    prefix = "ZEROFX_"
    known = [name.removeprefix(prefix) for name in VARIABLES]
    for name in os.environ:
        if name.startswith(prefix) and name not in VARIABLES:
            near = difflib.get_close_matches(name.removeprefix(prefix), known, n=1, cutoff=0.75)
            if near:
                meant = prefix + near[0]
                raise ValueError(f"{name} in the environment: zerofx reads no such variable; did you mean {meant}?")


OPTIONAL = ("lookups", "one_copy", "sharding", "partition_activations", "offload", "wire")
"""Options that are a feature's."""

OFFERED: set[str] = set()
"""Of these, those whose feature is there."""


@dataclass(frozen=True)
class Options:
    """What a user asked for.

    Attributes:
        stage: what is sharded. 0: nothing (plain data parallelism), 1: optimizer state, 2: gradients too, 3: parameters
            too. 1 and 2 differ only in what a rank keeps while it accumulates (docs/stages.md).
        executor: "inductor" generates code for the whole graph; "regional" for its regions, equal ones once
            (docs/start-up.md); "eager" runs the rewritten graph as it reads.
        memory_budget: stage 3, the most bytes of gathered weights that a rank holds at any time. First, each gather
            starts two groups ahead. What is left of the budget keeps the last groups gathered from forward to backward.
            The rest starts gathers earlier. None: what two groups ahead take, and a quarter of the largest group.
            ``math.inf``: all stay gathered.
        activation_budget: what forward may save for backward, which recomputes the rest: a fraction, up to 1, of what
            it would save; or bytes, for all graphs of the module together. None: all (docs/activations.md).
        partition_activations: the tensor-parallel dimension of a mesh (``mesh["tp"]``), or its process group. Of what
            all of its ranks have alike, each saves a part, and backward gathers it (docs/activations.md). None: each
            saves all.
        memory: bytes of its device that a rank may use for weights, gradients, optimizer state and activations; a text
            such as "80GB"; or a `zerofx.Memory`. The two budgets above follow from it (docs/memory.md). None: no such
            limit.
        groups: see `zerofx.model.grouping`.
        leaf_modules: module classes and patterns of module names ("layers.*.mlp"), for modules whose code chooses
            layers by data. They run outside of any graph, and are gathered whole when they are entered. See
            `zerofx.runtime.eager.leaf`.
        ignored: module classes and patterns of names, of modules and of parameters. These parameters stay plain and
            whole on every rank, and their gradients are averaged; in a dictionary "leave" says that they are not. See
            `zerofx.model.ignored`.
        lookups: stage 3, for embeddings that are only looked up. Their rows travel instead of the table, and the rows'
            gradients, where that is fewer bytes. Every rank's batches must have one shape. See
            `zerofx.features.lookups`.
        one_copy: stage 3 where all ranks are on one host. They share one copy of the weights, in common memory, and
            gather nothing. See `zerofx.features.one_copy.one_copy`.
        mesh: a device mesh of one dimension, or of two. Of two, the first is of replicas of the module. Each replica is
            divided over the ranks of the second (docs/meshes.md). None: all ranks of the default process group.
            Parameters may be DTensors on any other dimension: ``mesh=mesh["dp"]`` after ``parallelize_module``.
        sharding: on a mesh of two dimensions, over which of them weights, gradients and optimizer state are divided.
            None: over the second. See `zerofx.Sharding`.
        reduce_group: a second process group of the same ranks (``dist.new_group()``), or its name. The reductions of
            compiled graphs run in it, so no gather queues behind one. None: all run in one group.
        init_sync: take rank 0's weights and buffers everywhere.
        init: for a module on the meta device, where its weights come from: a function of a module, a checkpoint, or
            None for what the modules do by themselves. See `zerofx.compiler.initialize`.
        device: for a module on the meta device, the device it moves to. None: the accelerator, if there is one and the
            process group works with it; else the CPU.
        mixed_precision: a `zerofx.MixedPrecision`; or one for each part of the module, by module class and pattern of
            names (`zerofx.model.policies`).
        wire: stages 1 to 3, what travels in codes of fewer bits; see `zerofx.model.wire`. None: all as it is.
        offload: stages 1 to 3, a folder for the optimizer's state, or a `zerofx.Offload` (docs/offload.md). In stage 0
            too, of activations alone. None: all is on the device.
        buckets: stage 0 only, what one all-reduce takes: the gradients of a "group", of one "parameter", or "all".
        timeout: seconds that a rank waits in a collective. Then it is an error, which says who is missing. None: as
            long as the process group waits. Stage 0's collectives, and NCCL's, always wait as long as that.
        uneven: ranks may run different layers, or fewer micro-batches than others: each takes part in the collectives
            of the others' graphs (docs/models.md).
        progress: whether rank 0 says what is compiled, how far it is and how long it took. None: as ``ZEROFX_PROGRESS``
            says (0 or 1), or if there is a terminal; see `zerofx.compiler.progress`.
        cache: a folder that hosts share. What a rank compiles goes there, and the next start takes it from there,
            whatever host it runs on (docs/start-up.md). None: PyTorch's caches alone, on each host.
        passes: passes of your own, functions ``(gm, ctx)`` or `zerofx.Pass`; see docs/own-passes.md.
    """

    stage: int = 3
    executor: Literal["inductor", "regional", "eager"] = "inductor"
    memory_budget: float | None = None
    activation_budget: float | None = None
    partition_activations: DeviceMesh | dist.ProcessGroup | str | None = None
    memory: int | str | Memory | None = None
    groups: Grouping | Iterable[type[nn.Module]] | BlockRule | None = None
    leaf_modules: Sequence[Rule] | None = None
    ignored: Ignored | None = None
    lookups: bool = False
    one_copy: bool = False
    mesh: DeviceMesh | None = None
    sharding: Sharding | None = None
    reduce_group: dist.ProcessGroup | str | None = None
    init_sync: bool = True
    init: Callable[[nn.Module], Any] | str | Path | None = None
    device: torch.device | str | None = None
    mixed_precision: Policy | None = None
    wire: Wire | None = None
    offload: Offload | str | Path | None = None
    buckets: Buckets = "group"
    timeout: float | None = None
    passes: Sequence[Pass | Callable[[GraphModule, Any], Any]] = ()
    uneven: bool = False
    progress: bool | None = None
    cache: str | Path | None = None

    def __post_init__(self) -> None:
        for name in OPTIONAL:
            if getattr(self, name) not in (None, False) and name not in OFFERED:
                raise ValueError(f"{name}=: this zerofx has no such feature (zerofx.features). Leave it out.")
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"stage={self.stage!r}: expected 0, 1, 2 or 3.")
        if self.executor not in EXECUTORS:
            raise ValueError(f"executor={self.executor!r}: expected one of {', '.join(map(repr, EXECUTORS))}.")
        self._check_memory()
        if self.buckets not in BUCKETS:
            raise ValueError(f"buckets={self.buckets!r}: expected one of {', '.join(map(repr, BUCKETS))}.")
        if self.buckets != "group" and self.stage != 0:
            raise ValueError(f"buckets={self.buckets!r} with stage={self.stage}: only stage 0 has a choice.")
        self._check_numbers()
        if self.lookups and (self.stage != 3 or self.one_copy):
            other = "one_copy=True" if self.one_copy else f"stage={self.stage}"
            raise ValueError(f"lookups=True with {other}: no table is gathered there. Leave it out, or use stage=3.")
        if self.one_copy and self.stage != 3:
            raise ValueError(f"one_copy=True with stage={self.stage}: expected stage=3, which takes no longer with it.")
        check_policies(self.mixed_precision)
        self._check_wire()
        self._check_offload(Offload.of(self.offload))
        if self.init is not None and not callable(self.init) and not isinstance(self.init, (str, Path)):
            raise ValueError(f"init={self.init!r}: expected a function of a module, a path, or None.")
        if self.device is not None:
            try:
                torch.device(self.device)
            except (RuntimeError, TypeError) as e:
                raise ValueError(f"device={self.device!r}: expected a torch.device or its name, or None.") from e
        object.__setattr__(self, "passes", Pass.all_of(self.passes))
        pipeline(self.stage, self.passes)  # type: ignore[arg-type]  # it refuses a place that is not there
        check_environment()
        self._check_uneven()
        if self.progress not in (True, False, None):
            raise ValueError(f"progress={self.progress!r}: expected True, False or None.")
        wanted(self.progress)
        if not isinstance(self.cache, (str, Path, NoneType)):
            raise ValueError(f"cache={self.cache!r}: expected a folder, or None.")
        Grouping.of(self.groups)
        check_rules(self.leaf_modules)
        check_ignored(self.ignored)
        self._check_ranks()

    def _check_uneven(self) -> None:
        if not self.uneven:
            return
        for name in _NOT_UNEVEN:
            if getattr(self, name) not in (None, False, ()):
                raise ValueError(
                    f"uneven=True with {name}={getattr(self, name)!r}: ranks do not take part in each other's graphs "
                    "with that yet. Leave one of both out."
                )

    def _check_numbers(self) -> None:
        """Budgets and seconds."""
        budget, saved, seconds = self.memory_budget, self.activation_budget, self.timeout
        if budget is not None and not (isinstance(budget, (int, float)) and budget > 0):
            raise ValueError(f"memory_budget={budget!r}: expected a number of bytes above 0, or None.")
        if saved is not None and not (isinstance(saved, (int, float)) and saved >= 0):
            raise ValueError(
                f"activation_budget={saved!r}: expected a fraction from 0 to 1, a number of bytes above that, or None."
            )
        if seconds is not None and not (isinstance(seconds, (int, float)) and seconds > 0):
            raise ValueError(f"timeout={seconds!r}: expected a number of seconds above 0, or None.")

    def _check_ranks(self) -> None:
        """Who takes part: meshes and process groups."""
        if self.mesh is not None and not isinstance(self.mesh, DeviceMesh):
            raise ValueError(f"mesh={self.mesh!r}: expected a DeviceMesh of one or two dimensions, or None.")
        if self.mesh is not None and self.mesh.ndim > 2:
            raise ValueError(
                f"mesh has {self.mesh.ndim} dimensions: expected one, or two (replicas, shards). Give those two of it: "
                'mesh["replicate", "shard"].'
            )
        _check_sharding(self)
        object.__setattr__(self, "partition_activations", _name_of(self.partition_activations))
        if isinstance(self.reduce_group, dist.ProcessGroup):  # by name, as `zerofx.runtime.ranks.sharing` keeps it
            object.__setattr__(self, "reduce_group", self.reduce_group.group_name)
        elif self.reduce_group == dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]
            object.__setattr__(self, "reduce_group", "")  # refused together with the ranks that are in it
        if self.reduce_group is not None and not isinstance(self.reduce_group, str):
            raise ValueError(f"reduce_group={self.reduce_group!r}: expected a process group, its name, or None.")

    @property
    def two_hops(self) -> bool:
        """Whether a gather over all ranks of a mesh may be one along the column and one in the row.

        Else it is one exchange: codes in a row, too, and rows of tables travel straight from rank to rank.
        """
        alone = not self.lookups and not self.one_copy and self.reduce_group is None
        return self.stage == 3 and alone and (self.wire is None or self.wire.between == "nodes")

    @property
    def code_block(self) -> int:
        """Elements that a layout keeps together, since they travel with one scale."""
        return 1 if self.wire is None else self.wire.block

    def _check_memory(self) -> None:
        if Memory.of(self.memory) is None:
            return
        for name in ("memory_budget", "activation_budget"):
            if getattr(self, name) is not None:
                raise ValueError(f"memory= with {name}={getattr(self, name)!r}: memory= divides itself. Leave one out.")
        if self.leaf_modules is not None:
            raise ValueError("memory= with leaf_modules=: what these take is not known ahead. Leave one of both out.")

    def _check_wire(self) -> None:
        if self.wire is None:
            return
        if not isinstance(self.wire, Wire):
            raise ValueError(
                f'wire={self.wire!r}: expected a zerofx.Wire, such as zerofx.Wire(gradients="int8"), or None.'
            )
        if self.stage == 0:
            raise ValueError(
                f"wire={self.wire!r} with stage=0: its all-reduce adds up what it is given, and codes cannot be added. "
                "Use stage=1."
            )
        if self.stage == 3 and self.wire.of_changes:
            raise ValueError(
                'Wire(weights="int4") with stage=3: it is the code of what a step has changed, and no rank has the '
                'weights whole to add that to. Use stage=2, or weights="int8".'
            )
        if self.one_copy and self.wire.weights is not None:
            raise ValueError(f"wire={self.wire!r} with one_copy=True: no weights travel there. Leave weights= out.")

    def _check_offload(self, offload: Offload | None) -> None:
        object.__setattr__(self, "offload", offload)
        if offload is None:
            return
        if self.stage == 0 and (offload.optimizer, offload.gradients, offload.weights) != (None, None, None):
            raise ValueError(
                f"offload={offload!r} with stage=0: its parameters are plain tensors, and so is what an optimizer "
                "keeps of them. Use stage=1, or give activations= alone."
            )
        if offload.activations is not None and self.partition_activations is not None:
            raise ValueError(
                f"offload={offload!r} with partition_activations=: what is saved in parts does not go to a file yet. "
                "Leave activations= or partition_activations= out."
            )
        names = ("one_copy", "lookups", "wire", "mesh", "leaf_modules")
        check_places(offload, {name: getattr(self, name) for name in names})
        if offload.weights is not None and self.stage != 3:
            raise ValueError(
                f"offload={offload!r} with stage={self.stage}: the weights are whole on every rank there, and stay "
                "where they are. Leave weights= out, or use stage=3."
            )

    def __repr__(self) -> str:
        """The stage, and what else differs from the defaults: ``zerofx(stage=3)``. Dynamo's errors begin with it."""
        chosen = {f.name: getattr(self, f.name) for f in fields(self)}
        said = [
            f"{f.name}={chosen[f.name]!r}" for f in fields(self) if f.name == "stage" or chosen[f.name] != f.default
        ]
        return f"zerofx({', '.join(said)})"

    @staticmethod
    def of(options: dict[str, Any]) -> Options:
        """Options from a dictionary (``torch.compile(..., options=...)``)."""
        known = Options.__dataclass_fields__
        for name in sorted(RETIRED.keys() & options.keys()):
            warnings.warn(f"{name}= does nothing any more. {RETIRED[name]}", DeprecationWarning, stacklevel=3)
        options = {name: value for name, value in options.items() if name not in RETIRED}
        unknown = sorted(set(options) - set(known))
        if unknown:
            found = nearest(unknown[0], known)
            raise ValueError(f"unknown option {unknown[0]!r}{found} zerofx knows {', '.join(known)}.")
        return Options(**options)


def _name_of(tensor_parallel: Any) -> str | None:
    """The name of the process group that ``partition_activations`` is, for options keep no process group."""
    group = tensor_parallel
    if isinstance(group, DeviceMesh) and group.ndim == 1:
        group = group.get_group()
    if isinstance(group, dist.ProcessGroup):
        group = group.group_name
    if group is not None and not isinstance(group, str):
        raise ValueError(
            f"partition_activations={tensor_parallel!r}: expected a DeviceMesh of one dimension, a process group, its "
            "name, or None."
        )
    return group


def check_places(offload: Offload, beside: Mapping[str, Any]) -> None:
    """Refuse weights and gradients anywhere but with the optimizer's state, and with options ``beside`` them."""
    both = (offload.optimizer, offload.activations)
    if None not in both and Path(str(both[0])) != Path(str(both[1])):
        raise ValueError(
            f"offload={offload!r}: a rank has one file for all that it moves. Give optimizer= and activations= "
            "the same path, or leave one out."
        )
    for part in ("gradients", "weights"):
        place = getattr(offload, part)
        if place is None:
            continue
        if offload.optimizer is None or Path(str(place)) != Path(str(offload.optimizer)):
            raise ValueError(
                f"offload={offload!r}: {part}= is built for the folder of optimizer= alone, where a rank has one "
                'file for all, or for "cpu" with that. Give both the same, or leave it out.'
            )
        for name, value in beside.items():
            if value:
                raise ValueError(
                    f"offload={offload!r} with {name}={value!r}: {part}= is not built for that yet. "
                    "Leave one of both out."
                )


_NOT_UNEVEN = (
    "lookups", "leaf_modules", "ignored", "one_copy", "mesh", "reduce_group", "wire", "offload",
    "partition_activations", "memory", "passes",
)  # fmt: skip


def _check_sharding(options: Options) -> None:
    """Refuse what does not go with ``sharding``."""
    if options.sharding is not None and options.mesh is None:
        raise ValueError("sharding= without mesh=: give a mesh of two dimensions, whose rows and columns it is about.")
    check_scheme(options.sharding, options)


def check_scheme(chosen: Sharding | None, options: Options) -> None:
    """Refuse a ``sharding`` that is none, or goes with none of the other options."""
    if chosen is None:
        return
    if not isinstance(chosen, Sharding):
        raise ValueError(f"sharding={chosen!r}: expected a zerofx.Sharding, or None.")
    if chosen == Sharding() or chosen.one_dimension:
        return
    if options.stage != 3:
        raise ValueError(
            f"sharding={chosen!r} with stage={options.stage}: expected stage=3. In stages 1 and 2 a mesh of one "
            "dimension divides the optimizer's state over all ranks; in stage 0 nothing is divided."
        )
    if options.one_copy:
        raise ValueError(f"sharding={chosen!r} with one_copy=True: a row's ranks hold different copies. Leave one out.")
    if options.reduce_group is not None:
        raise ValueError(f"sharding={chosen!r} with reduce_group=: rows and columns have groups of their own already.")
