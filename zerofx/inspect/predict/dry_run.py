"""Compile without training: the graphs of a training step for any number of ranks, on one machine, without memory.

::

    with torch.device("meta"):
        model = Llama(...)                                           # 405 billion parameters, 0 bytes
    record = zerofx.dry_run(model, tokens, labels, world_size=1024)
    print(record)                                                    # what is gathered when, and how much at once

Dynamo, AOTAutograd and every pass run as they do in a training step, and nothing of the model is computed. Inductor
writes its code where that is asked for, and nothing compiles it::

    record = zerofx.dry_run(model, tokens, labels, world_size=8, backend="nccl", device="cuda", code=True)
    print(record.forward.code)                                       # the wrapper and its Triton kernels, for an H100

What stands in for what:

==================  ======================================================================
the module          a copy whose parameters have their shapes and no memory
the ranks           a process group that has a name, a size and no members
the shards          tensors on the meta device
a file              the name of its folder; nothing is made or looked for there (``offload=``)
compiled code       a function that returns zeros of the right shape; they take no memory
a CUDA device       its properties (zerofx/_torch/pretended_cuda.py), with a CUDA build and no GPU; its tensors are on
                    the CPU, and tracers see them on ``cuda:0``
==================  ======================================================================
"""

from __future__ import annotations

import contextlib
import copy
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from zerofx._torch import (
    ARCHITECTURES,
    DTensorLayout,
    PretendedDevice,
    compile_module,
    pretended_cuda,
    pytree,
    saved_outputs,
)
from zerofx.compiler.apart import Apart
from zerofx.compiler.backend import Backend
from zerofx.compiler.checks import check_module, check_offload, check_wire
from zerofx.compiler.choices import Search
from zerofx.compiler.options import Options, check_places, check_scheme
from zerofx.compiler.records import GraphRecord, records_of
from zerofx.compiler.subclasses import Subclasses
from zerofx.model.grouping import Grouping, plan_groups
from zerofx.model.ignored import ignored_in
from zerofx.model.offload import Offload
from zerofx.model.policies import Policies
from zerofx.passes import edit
from zerofx.runtime.eager.averages import note_ignored
from zerofx.runtime.eager.ondemand import average_by_hook
from zerofx.runtime.ranks.sharing import Sharing, pretended
from zerofx.runtime.state.carriage import STORES
from zerofx.runtime.state.copies import Copies
from zerofx.runtime.state.group import Family, ShardGroup
from zerofx.runtime.state.parameter import adopt_shell, replicate_parameter
from zerofx.runtime.state.staging import Staging
from zerofx.runtime.state.state_file import StateFile
from zerofx.runtime.state.weights import weights_of


def dry_run(
    module: nn.Module,
    *args: Any,
    world_size: int | tuple[int, int],
    backend: str = "gloo",
    device: torch.device | str = "cpu",
    code: bool = False,
    probe: bool = False,
    architecture: str = "sm_90",
    call: dict[str, Any] | None = None,
    **options: Any,
) -> GraphRecord:
    """The graphs that `zerofx.compile` would make of a training step of ``module``.

    Allocates neither parameters nor activations, needs no process group, and leaves ``module`` as it is.

    Args:
        module: on any device, the meta device included.
        *args: what it is called with; tensors on the meta device will do, for only their shapes and dtypes count.
        world_size: over how many ranks it is sharded; or, as of a mesh of two dimensions, how many replicas there are,
            and over how many ranks each is sharded.
        backend: the communication backend that `zerofx.passes.lower` spells collectives for: "gloo", "nccl".
        device: what the graphs are for. "cuda" needs PyTorch's CUDA build, and no GPU.
        code: have Inductor write its code for them, and read it as `zerofx.compile` does; ``trace.code`` is the text.
        probe: with ``memory=``, run each kernel of the step once on zeros, for what it takes inside of itself, as
            `zerofx.compile` does. It takes about the time of a step, and the memory of one kernel's arguments.
        architecture: of the CUDA device that code is written for: "sm_80" (A100), "sm_90" (H100).
        call: keyword arguments that it is called with.
        **options: as they would be given to `zerofx.compile`, ``sharding`` too; no ``mesh``.

    Raises:
        ValueError: a module, an option or a number of ranks that cannot be.
        RuntimeError: ``device="cuda"`` with a build of PyTorch for the CPU.
        zerofx.VerificationError: a graph, or the code for it, does not do what the model says.
        torch._dynamo.exc.Unsupported: the module is not one graph. What stands between graphs would run on values that
            are not there.
    """
    how: Any = {"world_size": world_size, "backend": backend, "architecture": architecture, "code": code}
    (record,) = dry_graphs(module, args, call or {}, options, device=device, probe=probe, whole=True, **how)
    return record


def dry_graphs(
    module: nn.Module,
    args: tuple[Any, ...],
    call: dict[str, Any],
    options: dict[str, Any],
    *,
    world_size: int | tuple[int, int],
    backend: str,
    device: torch.device | str,
    code: bool = False,
    probe: bool = False,
    architecture: str = "sm_90",
    whole: bool = False,
    search: Search | None = None,
) -> list[GraphRecord]:
    """As `dry_run`: the graphs of a module with graph breaks, in the order in which they run.

    What stands between them runs on zeros of the right shapes. With ``whole`` a break is refused.
    ``search``: finds a division of ``memory=``; None: the fastest that fits.
    """
    sharding = options.get("sharding")
    options = {name: value for name, value in options.items() if name != "sharding"}
    checked = Options.of(options)
    check_scheme(sharding, checked)
    if sharding is not None and not isinstance(world_size, tuple):
        raise ValueError(f"sharding= with world_size={world_size}: expected two numbers, (replicas, ranks of each).")
    replicas, ranks = world_size if isinstance(world_size, tuple) else (1, world_size)
    if min(replicas, ranks) < 1:
        raise ValueError(f"world_size={world_size}: expected 1 or more.")
    _check_here(checked, code)
    device = _checked_device(device, architecture, probe)
    weights_of(checked.stage, checked.one_copy).check(device)
    sharing = pretended(replicas, ranks, backend, sharding, two_hops=checked.two_hops)
    sharing = sharing if checked.stage else sharing.undivided()
    apart, subclasses = Apart(module), Subclasses(module)
    with _place(device, architecture) as place:
        try:
            apart.take(sharing, pretended=True)
            ignored = ignored_in(module, checked.ignored)
            subclasses.leave(ignored)
            subclasses.take(checked.mixed_precision)
            check_module(module, ignored)
            there, module = module, place.without_memory(module)
            pairs = zip(there.parameters(), module.parameters(), strict=True)
            layouts = {copied: apart.layouts[p] for p, copied in pairs if p in apart.layouts}
        finally:
            apart.undo()
            subclasses.undo()
        check_wire(checked.wire, sharing, one_dimension=not isinstance(world_size, tuple))
        if (offload := Offload.of(checked.offload)) is not None and isinstance(world_size, tuple):
            check_places(offload, {"world_size": world_size})
        groups = _shard(module, sharing, checked, device, layouts)
        compiles = Backend(checked, place.pretend, code, probe, search)
        compile_module(module, backend=compiles, dynamic=False, fullgraph=whole)
        given = [x for x in pytree.tree_leaves((args, call)) if isinstance(x, torch.Tensor)]
        stand_ins = {id(x): place.stand_in(x) for x in given}  # who is given twice is one input
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: stand_ins[id(x)], (args, call))
        with torch.enable_grad():
            module(*args, **kwargs)
    return list(records_of(groups))


def _check_here(options: Options, code: bool) -> None:
    """Refuse what needs processes, or what runs."""
    for name in ("mesh", "reduce_group", "partition_activations"):
        if getattr(options, name) is not None:
            raise ValueError(f"{name}= in a dry run: there are no processes that could form one. Give world_size=.")
    if options.leaf_modules is not None:
        raise ValueError("leaf_modules in a dry run: they run outside of any graph, and there is nothing to run on.")
    if code and options.executor != "inductor":
        raise ValueError(f"code=True with executor={options.executor!r}: that one has no code but the graph itself.")


def _checked_device(device: torch.device | str, architecture: str, probe: bool) -> torch.device:
    device = torch.device(device)
    if probe and device.type != "cpu":
        raise ValueError(f"probe=True with device={str(device)!r}: there is no such device to run kernels on.")
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture={architecture!r}: expected one of {', '.join(ARCHITECTURES)}.")
    return device


@contextlib.contextmanager
def _place(device: torch.device, architecture: str) -> Iterator[_Place]:
    """Where a model for ``device`` is while it is compiled."""
    if device.type != "cuda":
        yield _Place(device, None)
        return
    with pretended_cuda(architecture) as pretended:
        yield _Place(torch.device("cpu"), pretended)


class _Place:
    """Where tensors are, and for which device they stand in, if it is not that one."""

    def __init__(self, device: torch.device, pretended: PretendedDevice | None) -> None:
        self.device, self.pretended = device, pretended

    def without_memory(self, module: nn.Module) -> nn.Module:
        """A copy whose parameters have their shapes and no memory; buffers are there."""
        memo: dict[int, Any] = {}
        for p in module.parameters():
            empty = self._standing_in(torch.empty(p.shape, dtype=p.dtype, device=self.device))
            empty.untyped_storage().resize_(0)  # before anything was written: it was never more than an address
            memo[id(p)] = kept = nn.Parameter(empty, p.requires_grad)
            kept.__dict__.update(vars(p))
        memo |= {id(buffer): self.stand_in(buffer) for buffer in module.buffers()}
        return copy.deepcopy(module, memo)

    def stand_in(self, x: torch.Tensor) -> torch.Tensor:
        """For an input or a buffer."""
        here = torch.zeros_like(x, device=self.device) if x.is_meta else x.detach().to(self.device, copy=True)
        return self._standing_in(here)

    def pretend(self, gm: GraphModule, inputs: list[Any], static: list[int]) -> Any:
        """In the place of an executor: zeros of the shapes that the graph promises, one element of memory each.

        What goes on to another graph has its strides, too, and addresses for all of it: that graph counts it.
        """
        values = [node.meta["val"] if isinstance(node, Node) else node for node in edit.output_values(gm.graph)]
        saved = saved_outputs(gm.graph.output_node())
        made = [self._zeros(value, goes_on=i not in saved) for i, value in enumerate(values)]

        def run(args: list[Any]) -> list[Any]:
            args.clear()
            return [make() for make in made]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _zeros(self, value: Any, goes_on: bool) -> Callable[[], Any]:
        """What makes zeros like ``value``; or ``value``, if it is no tensor."""
        if not isinstance(value, torch.Tensor):
            return lambda: value
        shape, stride, dtype, device = value.shape, value.stride(), value.dtype, self.device
        offset, nbytes = value.storage_offset(), value.untyped_storage().nbytes()
        if not goes_on or device.type != "cpu" or not nbytes:
            return lambda: torch.zeros((), dtype=dtype, device=device).expand(shape)

        def addresses() -> torch.Tensor:
            """Pages that nobody writes take no memory."""
            storage = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).untyped_storage()
            return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)

        return addresses

    def _standing_in(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.pretended is None else self.pretended.stands_in(x)


class _NoFile(StateFile):
    """What a rank's file would hold."""

    def __init__(self, folder: Path, holds: frozenset[str]) -> None:
        self.path, self.holds = folder, holds
        self.error, self.in_step = "", False

    @property
    def nbytes(self) -> int:
        """Nothing is there."""
        return 0

    def take(self, tensor: torch.Tensor, *, fresh: bool = False) -> None:
        """Shards of a dry run are nowhere."""

    def extent_of(self, tensor: torch.Tensor) -> None:
        """None: see `take`."""


class _NoStaging(Staging):
    """What would be in the host's memory. Nothing is pinned."""

    def __init__(self, holds: frozenset[str]) -> None:
        super().__init__(_NoCopies(torch.device("meta")), holds)


class _NoCopies(Copies):
    captured = False

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)


def _shard(
    module: nn.Module,
    sharing: Sharing,
    options: Options,
    device: torch.device,
    dtensors: dict[nn.Parameter, DTensorLayout],
) -> list[ShardGroup]:
    """What `zerofx.shard` does, with shards that are nowhere."""
    wire = options.wire
    offload = Offload.of(options.offload)
    groups, family = [], Family(options.stage, options.buckets, options.one_copy, wire, offload)
    nowhere = torch.device("meta")
    backend, block = sharing.weights.backend(nowhere), options.code_block
    ranks = sharing.optimizer.size
    how: Any = {"backend": backend, "code_block": block, "mixed_precision": options.mixed_precision}
    how["ignored"] = ignored_in(module, options.ignored)
    for parameter in how["ignored"]:
        note_ignored(parameter)
    planned = plan_groups(module, ranks, Grouping.of(options.groups), **how)
    if offload is not None:
        check_offload(offload, [layout for layout, _ in planned], device)
        if offload.on_host and device.type != "cpu":
            family.on_host = offload.chosen([layout for layout, _ in planned])
            family.staging = _NoStaging(offload.kinds_on_host - {"moment"})
        if offload.activations == "cpu" and device.type != "cpu":
            family.activation_store = STORES[0](None, offload.smallest)
        if offload.folder is not None:
            if offload.optimizer is not None:
                family.in_file = offload.chosen([layout for layout, _ in planned])
            file = _NoFile(offload.folder, offload.kinds)
            family.file = file  # which the groups will hold
            if offload.activations is not None:
                family.activation_store = STORES[0](file, offload.smallest)
    for layout, parameters in planned:
        group = ShardGroup(layout, sharing, nowhere, family)
        group.dtensors = {s: dtensors[p] for s, p in zip(layout.slots, parameters) if p in dtensors}
        for slot, parameter in zip(layout.slots, parameters, strict=True):
            if options.stage == 0:
                replicate_parameter(parameter, group, slot)
                if parameter.requires_grad:
                    average_by_hook(parameter)  # type: ignore[arg-type]
            else:
                adopt_shell(parameter, group, slot)
        if options.stage:
            group.weights.mark_fresh()
        groups.append(group)
    if options.mixed_precision is not None:
        Policies(module, options.mixed_precision).install()
    return groups
