"""What is checked before a module is sharded. Nothing has changed when one of these raises.

::

    each rank      the module, the options, the backend, the ranks      a refusal, or facts
    all ranks      tell each other                                      one refuses: all raise; facts differ: all raise
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerofx._torch import backend_name, is_dtensor, resolve_process_group
from zerofx.compiler.apart import Apart, check_copies, check_version
from zerofx.compiler.initialize import check_init
from zerofx.compiler.options import Options
from zerofx.compiler.subclasses import Subclasses
from zerofx.compiler.wrappers import refuse_wrapped
from zerofx.model.grouping import Grouping, plan_groups
from zerofx.model.ignored import How, ignored_in
from zerofx.model.layout import GroupLayout
from zerofx.model.offload import Offload
from zerofx.model.wire import Wire
from zerofx.runtime.eager.leaf import leaf_names
from zerofx.runtime.ranks.sharing import Sharing
from zerofx.runtime.state.gradient_hooks import check_hooks
from zerofx.runtime.state.home import HOMES
from zerofx.runtime.state.parameter import ReplicatedParameter, ShardedTensor
from zerofx.runtime.state.weights import weights_of

Planned = list[tuple[GroupLayout, list[nn.Parameter]]]
"""The groups of a module, and the parameters of each, in the order of its slots."""


@dataclass
class _Told:
    """What a rank tells all others of its model.

    Attributes:
        facts: what must be the same on all ranks that train one ``part``.
        error: why this rank cannot go on.
        part: which part of a module that has DTensors it trains.
        copies: see `Apart.copies`.
    """

    facts: list[tuple[str, str]] = field(default_factory=list)
    error: str = ""
    part: tuple[int, ...] = ()
    copies: dict[str, Any] = field(default_factory=dict)


def plan_alike(
    module: nn.Module, options: Options, sharing: Sharing, device: torch.device, apart: Apart, subclasses: Subclasses
) -> Planned:
    """The groups of ``module``, which are the same on every rank; raises on every rank where one cannot go on.

    DTensors of it are taken ``apart``, and so are its ``subclasses``.
    """
    refusal: Exception | None = None
    mine = _Told()
    planned: Planned = []
    try:
        if isinstance(module, nn.Module):
            refuse_wrapped(module)
            ignored = ignored_in(module, options.ignored)
            for each in (apart, subclasses):
                each.leave(ignored)
        if apart:
            check_version(options.stage)
        apart.take(sharing)
        subclasses.take(options.mixed_precision)
        planned = _checked(module, options, sharing, device)
        mine.facts = _facts(module, options, planned, sharing) + apart.facts()
        mine.part = tuple(ranks.rank for ranks in sharing.foreign)
        mine.copies = apart.copies()
    except (ValueError, TypeError) as e:
        refusal = e
        mine.error = str(e)
    everyone = sharing.whole.all_gathered(mine)
    if refusal is not None:
        raise refusal
    me = sharing.whole.rank
    for rank, theirs in enumerate(everyone):
        if theirs.error:
            raise RuntimeError(f"rank {rank} cannot shard this {type(module).__name__}: {theirs.error}")
    for rank, theirs in enumerate(everyone):
        one = me if theirs.part == mine.part else next(i for i, x in enumerate(everyone) if x.part == theirs.part)
        if theirs.facts != everyone[one].facts:
            differing = [a[0] for a, b in zip(everyone[one].facts, theirs.facts) if a != b]
            what = differing[0] if differing else "the number of groups and buffers"
            parameters = sharing.whole.all_gathered(_parameters(module))  # every rank has found a difference
            of_one = _differing_parameter(parameters[one], parameters[rank], one, rank)
            if what.startswith("the option "):
                given, others = dict(everyone[one].facts)[what], dict(theirs.facts).get(what)
                what += f": {given} on rank {one}, {others} on rank {rank}"
            raise RuntimeError(
                f"rank {one} and rank {rank} have different models: they differ in {of_one or what}. Names, "
                "shapes, dtypes and requires_grad of parameters and buffers, and options must be the same everywhere."
            )
    check_copies([(told.part, told.copies) for told in everyone], sync=options.init_sync)
    return planned


def _checked(module: nn.Module, options: Options, sharing: Sharing, device: torch.device) -> Planned:
    """The groups of ``module`` on this rank, once everything was checked that one rank can check."""
    ignored = ignored_in(module, options.ignored) if isinstance(module, nn.Module) else {}
    check_module(module, ignored)
    _check_ignored(module, ignored)
    for name, p in module.named_parameters():
        if p._backward_hooks and p not in ignored:
            check_hooks(name, uneven=options.uneven, parts=False)
    _check_init(module, options, ignored)
    check_backend(sharing.weights.process_group, device)
    weights_of(options.stage, options.one_copy).check(device)
    sharing.check()
    _check_partition(options, sharing)
    check_wire(options.wire, sharing, one_dimension=options.mesh is None or options.mesh.ndim == 1)
    leaves, ranks = leaf_names(module, options.leaf_modules), sharing.optimizer
    grouping, backend = Grouping.of(options.groups), ranks.backend(device)
    planned = plan_groups(
        module, ranks.size, grouping, leaves, backend, options.code_block, options.mixed_precision, ignored
    )
    if (offload := Offload.of(options.offload)) is not None:
        check_offload(offload, [layout for layout, _ in planned], device)
    return planned


def _check_ignored(module: nn.Module, ignored: Mapping[nn.Parameter, How]) -> None:
    """Refuse what cannot be averaged, or has no values yet."""
    for name, p in module.named_parameters() if ignored else ():
        if p.is_meta:
            raise ValueError(
                f"ignored= with a module on the meta device ({name!r}): zerofx initialises what it shards, and nothing "
                "else. Initialise the module before, or leave ignored= out."
            )
        if ignored.get(p) == "average" and (is_dtensor(p) or p.layout != torch.strided):
            raise ValueError(
                f"ignored: {name!r} is a {type(p).__name__} with layout {p.layout}, whose gradient zerofx does not "
                f'average: expected a dense tensor. Leave its gradient alone, {{{name!r}: "leave"}}.'
            )


def _check_partition(options: Options, sharing: Sharing) -> None:
    """Refuse ranks that have batches of their own: they have no activation alike."""
    name = options.partition_activations
    if name is None:
        return
    try:
        ranks = dist.get_process_group_ranks(resolve_process_group(name))  # type: ignore[arg-type]
    except RuntimeError as e:
        raise ValueError(
            f"partition_activations={name!r}: rank {dist.get_rank()} is in no process group of that name."
        ) from e
    trained = dist.get_process_group_ranks(sharing.everyone.process_group)
    if len(both := sorted(set(ranks).intersection(trained))) > 1:
        raise ValueError(
            f"partition_activations has the ranks {ranks}, of which {both} share the training of this module: they "
            "have batches of their own, and no activation alike. Expected the tensor-parallel dimension of the mesh."
        )


def check_offload(offload: Offload, layouts: list[GroupLayout], device: torch.device) -> None:
    """Refuse a home that is not there."""
    if device.type != "cpu" and offload.folder is not None:
        raise ValueError(
            f"offload={offload!r} with parameters on {device.type}: there state and activations may be in the host's "
            'memory, and files are built for the CPU alone so far. Give "cpu" for each path, or leave it out.'
        )
    offload.chosen(layouts)
    on_host = device.type != "cpu" and offload.on_host
    lacking = "on_host.py" if on_host and not any(home.hosts for home in HOMES) else ""
    if offload.folder is not None and not any(home.moments_away for home in HOMES):
        lacking = "in_file.py"
    if lacking:
        raise ValueError(f"offload={offload!r}: this zerofx has no such home (state/{lacking}). Leave it out.")


def _facts(module: nn.Module, options: Options, planned: Planned, sharing: Sharing) -> list[tuple[str, str]]:
    """What must be the same on every rank: in words, and as text that is equal where the thing is."""
    facts = [("being on the meta device", str(planned[0][1][0].is_meta))]
    ignored, named = ignored_in(module, options.ignored), dict(module.named_parameters())
    averaged = {name: p for name, p in named.items() if ignored.get(p) == "average"}
    facts += [(f"the ignored parameter {name!r}", _digest((p.shape, p.dtype))) for name, p in averaged.items()]
    facts += [("hooks on gradients", repr({n: len(p._backward_hooks or ()) for n, p in module.named_parameters()}))]
    chosen = {name: getattr(options, name) for name in _ALIKE}
    chosen["leaf_modules"] = leaf_names(module, options.leaf_modules)
    if (name := options.partition_activations) is not None:  # each has one of its own
        chosen["partition_activations"] = resolve_process_group(name).size()  # type: ignore[arg-type]
    if sharing.replicas is not None:  # each replica has one of its own
        chosen["reduce_group"] = options.reduce_group is not None
    # What is told first is named, and groups follow from options.
    facts = [(f"the option {name}", repr(value)) for name, value in chosen.items()] + facts
    facts += [(f"group {layout.name!r}", _digest(layout)) for layout, _ in planned]
    return facts + [(f"buffer {n!r}", _digest((b.shape, b.dtype))) for n, b in module.named_buffers()]


def _parameters(module: nn.Module) -> dict[str, str]:
    """Name -> what a parameter is, in words."""
    return {
        name: f"{str(p.dtype).removeprefix('torch.')} {list(p.shape)}{'' if p.requires_grad else ', frozen'}"
        for name, p in module.named_parameters()
    }


def _differing_parameter(one: dict[str, str], other: dict[str, str], rank: int, other_rank: int) -> str | None:
    """The first parameter that two ranks do not have alike, and what each has; None: all are."""
    for name in (*one, *other):
        if (a := one.get(name)) != (b := other.get(name)):
            has = [f"{what or 'not there'} on rank {at}" for what, at in ((a, rank), (b, other_rank))]
            return f"the parameter {name!r}: {has[0]}, {has[1]}"
    return None


_ALIKE = (
    "stage",
    "mixed_precision",
    "buckets",
    "leaf_modules",
    "ignored",
    "memory_budget",
    "activation_budget",
    "memory",
    "partition_activations",
    "executor",
    "reduce_group",
    "one_copy",
    "lookups",
    "wire",
    "offload",
    "sharding",
    "uneven",
)
"""The options that all ranks must agree on."""


def _digest(fact: Any) -> str:
    return hashlib.sha256(repr(fact).encode()).hexdigest()


def check_module(module: nn.Module, ignored: Mapping[nn.Parameter, How] | None = None) -> None:
    """Refuse what cannot be sharded, before anything has changed. Nothing is asked of what is ``ignored``."""
    ignored = ignored or {}
    if not isinstance(module, nn.Module):
        got = type(module).__name__
        if isinstance(module, type) and issubclass(module, nn.Module):
            got = f"the class {module.__name__}: give a module of it, {module.__name__}(...)"
        raise ValueError(f"expected an nn.Module, got {got}.")
    parameters = dict(module.named_parameters())
    if not parameters:
        raise ValueError(f"{type(module).__name__} has no parameters: there is nothing to shard.")
    first_name, first = next(iter(parameters.items()))
    for name, m in module.named_modules():
        is_sparse = isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse and m.weight.requires_grad
        if is_sparse and ignored.get(m.weight) != "leave":
            raise ValueError(
                f"{name!r} is an {type(m).__name__} with sparse=True: expected sparse=False, for ranks reduce flat "
                "buffers, and a sparse gradient has no place there. lookups=True keeps what is sent small."
            )
    storages: dict[int, str] = {}
    for name, p in parameters.items():
        if p.device != first.device:
            raise ValueError(
                f"parameters are on different devices: {first_name!r} on {first.device}, {name!r} on {p.device}. "
                "Move the module to one device first."
            )
        if p in ignored:
            continue
        _check_parameter(name, p)
        has_memory = p.numel() and not p.is_meta
        other = storages.setdefault(p.untyped_storage().data_ptr(), name) if has_memory else name
        if other != name:
            raise ValueError(
                f"{name!r} and {other!r} share memory but are two parameters: sharded apart they would no longer "
                f"be tied. Tie them by assigning one parameter to both names."
            )


def _check_parameter(name: str, p: nn.Parameter) -> None:
    """Refuse one parameter by itself."""
    if isinstance(p, (ShardedTensor, ReplicatedParameter)):
        raise ValueError(f"{name!r} is sharded already: zerofx.compile or zerofx.shard was called on it before.")
    if type(p) is not nn.Parameter and (p.requires_grad or nn.parameter.is_lazy(p)):
        raise ValueError(f"{name!r} is a {type(p).__name__}: expected an nn.Parameter. Shard the plain module.")
    if p.is_complex():
        raise ValueError(
            f"{name!r} has dtype {p.dtype}: expected a real type. Keep its real and imaginary parts as two parameters."
        )
    if (again := next((key for key, x in vars(p).items() if _same_memory(x, p)), None)) is not None:
        raise ValueError(
            f"{name!r} is a {type(p).__name__} whose attribute {again!r} holds all of it once more: sharded, it would "
            "take no less memory. Quantize to 4 bits (bitsandbytes' Linear4bit), or with torchao."
        )
    if p.layout != torch.strided:
        raise ValueError(f"{name!r} has layout {p.layout}: expected a dense (strided) parameter.")
    if p.grad is not None:
        raise ValueError(f"{name!r} has a gradient already: call zero_grad(set_to_none=True) first.")


def _same_memory(x: Any, p: nn.Parameter) -> bool:
    alike = isinstance(x, torch.Tensor) and x.numel() > 0 and not x.is_meta and x.layout == torch.strided
    return alike and x.untyped_storage().data_ptr() == p.untyped_storage().data_ptr()


def check_wire(wire: Wire | None, sharing: Sharing, *, one_dimension: bool) -> None:
    """Refuse codes that would be written of codes, and codes between nodes for what stays inside of one.

    ``one_dimension``: there is no mesh of two that could say which ranks are on one node.
    """
    if wire is None:
        return
    if wire.between == "all" and sharing.replicas is not None:
        raise ValueError(
            f"wire={wire!r} with {sharing.replicas.size} replicas: a gradient would be written in codes twice, inside "
            'of a node and between nodes. Use Wire(..., between="nodes").'
        )
    if wire.between == "nodes" and one_dimension:
        raise ValueError(
            'Wire(between="nodes") on one dimension: which ranks are on one node is not known. Give two, nodes and the '
            "ranks of each: a mesh of two dimensions, or world_size=(nodes, ranks). Or leave between= out."
        )
    if wire.weights is not None and sharing.replicas is not None and not sharing.weights_cross:
        raise ValueError(
            f'Wire(weights={wire.weights!r}, between="nodes"): each node has the weights whole, and none travel '
            'between nodes. Leave weights= out, or use sharing=zerofx.Sharding(gradients="all", optimizer="all").'
        )


def _check_init(module: nn.Module, options: Options, ignored: Container[nn.Parameter]) -> None:
    """What is on the meta device is initialised here, and nothing else is."""
    first_name, first = next((name, p) for name, p in module.named_parameters() if p not in ignored)
    if first.is_meta:
        check_init(module, options.init)
    elif options.init is not None or options.device is not None:
        what = "init" if options.init is not None else "device"
        raise ValueError(
            f"{what}= is for modules on the meta device, and {first_name!r} is on {first.device}: initialise the "
            "module, and move it, before."
        )


def check_backend(process_group: dist.ProcessGroup, device: torch.device) -> None:
    """Refuse what gloo cannot do, which moves host memory alone, and a GPU that is not this rank's."""
    if device.type != "cpu" and backend_name(process_group, device) == "gloo":
        raise ValueError(
            f"parameters on {device.type} with the backend gloo: expected one that works on that device. Call "
            'torch.distributed.init_process_group("nccl"), or keep the module on the CPU.'
        )
    accelerator = torch.accelerator.current_accelerator()
    if device.index is None or accelerator is None or device.type != accelerator.type:
        return
    if device.index != (current := torch.accelerator.current_device_index()):
        raise ValueError(
            f"parameters on {device}, while the current device is {device.type}:{current}: NCCL and kernels run on the "
            f"current one. Call torch.{device.type}.set_device({device.index}) before "
            "torch.distributed.init_process_group."
        )
