"""Shard a module in place: every check first, then one group at a time."""

from __future__ import annotations

import hashlib
import itertools
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zerofx._torch import backend_name, batch_gloo_threads, resolve_process_group
from zerofx.compiler.initialize import Template, check_init, initialize, replace_by_empty
from zerofx.compiler.options import Options
from zerofx.model.grouping import Grouping, plan_groups
from zerofx.model.hugging_face import keep_in_step
from zerofx.model.layout import GroupLayout
from zerofx.runtime.eager.leaf import leaf_names, make_leaves
from zerofx.runtime.eager.ondemand import average_by_hook, not_elementwise, reduce_by_hook
from zerofx.runtime.eager.whole import places_of
from zerofx.runtime.ranks import one_copy, same_host
from zerofx.runtime.ranks.watch import stepped, watch_of, watch_too
from zerofx.runtime.state.group import Family, ShardGroup
from zerofx.runtime.state.parameter import ReplicatedParameter, ShardedTensor, replicate_parameter, shard_parameter


def shard(module: nn.Module, **options: Any) -> nn.Module:
    """Shard ``module`` in place over the ranks, without compiling it; returns the same object.

    Each parameter becomes a `ShardedParameter`: same object, same name, full shape, and this rank's slice of the
    data. Groups are converted one at a time: peak extra memory is this rank's shard of the largest group.

    Args:
        module: an ``nn.Module`` whose parameters are on one device. On the meta device: it is initialised here, each
            rank keeping its slices alone; see `zerofx.compiler.initialize`.
        **options: see `Options`.

    Raises:
        RuntimeError: no process group; ranks whose models differ; a module of the meta device of which something was
            left uninitialised.
        ValueError: a module, or an option, that cannot be sharded; the message says why. Nothing has changed then.
    """
    shard_module(module, Options.of(options))
    return module


def shard_module(module: nn.Module, options: Options) -> list[ShardGroup]:
    """`shard` with checked options; returns the groups."""
    process_group = options.process_group()
    device = _device(module, options, process_group)
    planned = _plan_alike(module, options, process_group, device)
    on_meta = next(module.parameters()).is_meta
    sync = options.init_sync and process_group.size() > 1
    precision = options.mixed_precision
    groups, family = [], Family(options.stage, precision, options.buckets, options.one_copy)
    watch = watch_of(process_group.group_name)
    if watch is not None:
        watch.families += 1
        family.number = watch.families
    if options.reduce_group is not None:
        assert isinstance(options.reduce_group, str)
        family.reduce_group = options.reduce_group
        same_host.meet(options.reduce_group)
        if watch is not None:
            watch_too(watch, options.reduce_group)
    if options.stage:
        same_host.meet(process_group.group_name)
    templates, places = {}, places_of(module) if on_meta else {}
    common: list[torch.Tensor | None] = [None] * len(planned)
    if options.one_copy and process_group.size() > 1:
        sizes = [layout.numel * (family.precision.param_dtype or layout.dtype).itemsize for layout, _ in planned]
        common[:] = one_copy.common_memory(sizes, process_group)
    for (layout, parameters), replica in zip(planned, common, strict=True):
        group = ShardGroup(layout, process_group, device, family, replica)
        for slot, parameter in zip(layout.slots, parameters, strict=True):
            if on_meta:
                parameter, template = replace_by_empty(parameter, places[parameter], device)
                templates[parameter] = template
            elif sync:
                _broadcast(parameter, process_group)
            if options.stage == 0:
                if on_meta:
                    parameter.data = templates[parameter].blank()
                replicate_parameter(parameter, group, slot)
                average_by_hook(parameter)  # type: ignore[arg-type]
            else:
                shard_parameter(parameter, group, slot)
                reduce_by_hook(parameter)  # type: ignore[arg-type]
        if options.init_sync and not on_meta and not options.one_copy:
            group.mark_fresh()
        groups.append(group)
    if on_meta:
        _initialize(module, options, templates, device, process_group)
    make_leaves(module, leaf_names(module, options.leaf_modules), keep=options.memory_budget == math.inf)
    if sync:
        for buffer in module.buffers():
            _broadcast(buffer, process_group)
    for m in module.modules():
        m.register_load_state_dict_pre_hook(_refuse_assign)
    if options.stage == 3 and process_group.size() > 1:
        keep_in_step(module)
    if precision is not None:
        family.casts = precision.install(module)
    batch_gloo_threads()
    return groups


def _initialize(
    module: nn.Module,
    options: Options,
    templates: dict[nn.Parameter, Template],
    device: torch.device,
    process_group: dist.ProcessGroup,
) -> None:
    """Values for a module that had none."""
    path = options.init if isinstance(options.init, (str, Path)) else None
    function = options.init if callable(options.init) else None
    initialize(
        module,
        function,
        templates,
        device,
        process_group,
        from_rank_0=options.init_sync,
        buffers_alone=path is not None,
    )
    if path is not None:
        from zerofx.checkpoint import load

        load(path, module, rng=False)


def _device(module: nn.Module, options: Options, process_group: dist.ProcessGroup) -> torch.device:
    """Where the shards are to be: with the parameters, or where a module of the meta device is to go."""
    first = next(module.parameters(), None) if isinstance(module, nn.Module) else None
    if first is None or not first.is_meta:
        return torch.device("cpu") if first is None else first.device
    if options.device is not None:
        return torch.device(options.device)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or backend_name(process_group, accelerator) == "gloo":
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def groups_of(module: nn.Module) -> list[ShardGroup]:
    """The groups of a sharded module, in registration order."""
    groups = {p._group: None for p in module.parameters() if isinstance(p, (ShardedTensor, ReplicatedParameter))}
    return list(groups)


def _broadcast(tensor: torch.Tensor, process_group: dist.ProcessGroup) -> None:
    """Rank 0's values everywhere. A tensor that is not contiguous becomes so."""
    data = tensor.detach()
    if not data.is_contiguous():
        tensor.data = data = data.contiguous()
    dist.broadcast(data, group=process_group, group_src=0)


def check_module(module: nn.Module) -> None:
    """Refuse what cannot be sharded, before anything has changed."""
    if not isinstance(module, nn.Module):
        raise ValueError(f"expected an nn.Module, got {type(module).__name__}.")
    parameters = dict(module.named_parameters())
    if not parameters:
        raise ValueError(f"{type(module).__name__} has no parameters: there is nothing to shard.")
    first_name, first = next(iter(parameters.items()))
    storages: dict[int, str] = {}
    for name, p in parameters.items():
        if isinstance(p, (ShardedTensor, ReplicatedParameter)):
            raise ValueError(f"{name!r} is sharded already: zerofx.compile or zerofx.shard was called on it before.")
        if type(p) is not nn.Parameter:
            raise ValueError(f"{name!r} is a {type(p).__name__}: expected an nn.Parameter. Shard the plain module.")
        if p.device != first.device:
            raise ValueError(
                f"parameters are on different devices: {first_name!r} on {first.device}, {name!r} on {p.device}. "
                "Move the module to one device first."
            )
        if not p.is_floating_point():
            raise ValueError(
                f"{name!r} has dtype {p.dtype}: expected a real floating-point type. Keep "
                f"{'its real and imaginary parts as two parameters' if p.is_complex() else 'it in a buffer'}."
            )
        if p.layout != torch.strided:
            raise ValueError(f"{name!r} has layout {p.layout}: expected a dense (strided) parameter.")
        if p._backward_hooks:
            raise ValueError(
                f"{name!r} has a tensor hook (register_hook): its gradient is reduced inside the compiled graph, no "
                "hook would see it. Use register_post_accumulate_grad_hook, or remove it."
            )
        if p.grad is not None:
            raise ValueError(f"{name!r} has a gradient already: call zero_grad(set_to_none=True) first.")
        has_memory = p.numel() and not p.is_meta
        other = storages.setdefault(p.untyped_storage().data_ptr(), name) if has_memory else name
        if other != name:
            raise ValueError(
                f"{name!r} and {other!r} share memory but are two parameters: sharded apart they would no longer "
                f"be tied. Tie them by assigning one parameter to both names."
            )


def _check_init(module: nn.Module, options: Options) -> None:
    """What is on the meta device is initialised here, and nothing else is."""
    first_name, first = next(iter(module.named_parameters()))
    if first.is_meta:
        check_init(module, options.init)
    elif options.init is not None or options.device is not None:
        what = "init" if options.init is not None else "device"
        raise ValueError(
            f"{what}= is for modules on the meta device, and {first_name!r} is on {first.device}: initialise the "
            "module, and move it, before."
        )


def _refuse_assign(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    """``load_state_dict(assign=True)`` would put plain parameters in the place of sharded ones."""
    if not metadata.get("assign_to_params_buffers"):
        return
    for name, p in module.named_parameters(recurse=False):
        if isinstance(p, (ShardedTensor, ReplicatedParameter)) and state.get(prefix + name, p) is not p:
            raise RuntimeError(
                f"load_state_dict(assign=True): {p._slot.name!r} is sharded, and would be replaced by a plain "
                "parameter, of which neither the optimizer nor zerofx knows. Use assign=False: it writes in place."
            )


def check_backend(process_group: dist.ProcessGroup, device: torch.device) -> None:
    """Refuse what gloo cannot do: it sends from and receives into host memory alone."""
    if device.type != "cpu" and backend_name(process_group, device) == "gloo":
        raise ValueError(
            f"parameters on {device.type} with the backend gloo: expected one that works on that device. Call "
            'torch.distributed.init_process_group("nccl"), or keep the module on the CPU.'
        )


def _plan_alike(
    module: nn.Module, options: Options, process_group: dist.ProcessGroup, device: torch.device
) -> list[tuple[GroupLayout, list[nn.Parameter]]]:
    """The groups of ``module``, which are the same on every rank; raises on every rank where one cannot go on."""
    refusal: Exception | None = None
    facts: list[tuple[str, str]] = []
    planned: list[tuple[GroupLayout, list[nn.Parameter]]] = []
    try:
        check_module(module)
        _check_init(module, options)
        check_backend(process_group, device)
        if options.one_copy:
            one_copy.check(device)
        _check_reduce_group(options, process_group)
        leaves = leaf_names(module, options.leaf_modules)
        planned = plan_groups(
            module, process_group.size(), Grouping.of(options.groups), leaves, backend_name(process_group, device)
        )
        facts = [(f"group {layout.name!r}", _digest(layout)) for layout, _ in planned]
        facts += [("being on the meta device", str(next(module.parameters()).is_meta))]
        chosen: dict[str, Any] = {
            "stage": options.stage,
            "mixed_precision": options.mixed_precision,
            "buckets": options.buckets,
            "leaf_modules": leaves,
        }
        chosen |= {"memory_budget": options.memory_budget, "executor": options.executor}
        chosen |= {"reduce_group": options.reduce_group, "one_copy": options.one_copy}
        chosen |= {"lookups": options.lookups}
        facts += [(f"the option {name}", repr(value)) for name, value in chosen.items()]
        facts += [(f"buffer {n!r}", _digest((b.shape, b.dtype))) for n, b in module.named_buffers()]
    except (ValueError, TypeError) as e:
        refusal = e
    everyone: list[Any] = [(facts, str(refusal or ""))] * process_group.size()
    if process_group.size() > 1:
        dist.all_gather_object(everyone, (facts, str(refusal or "")), group=process_group)
    if refusal is not None:
        raise refusal
    for rank, (theirs, error) in enumerate(everyone):
        if error:
            raise RuntimeError(f"rank {rank} cannot shard this {type(module).__name__}: {error}")
        if theirs != facts:
            differing = [mine[0] for mine, other in zip(facts, theirs) if mine != other]
            what = differing[0] if differing else "the number of groups and buffers"
            raise RuntimeError(
                f"rank {process_group.rank()} and rank {rank} have different models: they differ in {what}. Names, "
                "shapes, dtypes and requires_grad of parameters and buffers, and options must be the same everywhere."
            )
    return planned


def _check_reduce_group(options: Options, process_group: dist.ProcessGroup) -> None:
    if options.reduce_group is None:
        return
    assert isinstance(options.reduce_group, str)
    try:
        ranks = dist.get_process_group_ranks(resolve_process_group(options.reduce_group))
    except RuntimeError as e:
        raise ValueError(
            f"reduce_group={options.reduce_group!r}: rank {dist.get_rank()} is in no process group of that name."
        ) from e
    if ranks != (expected := dist.get_process_group_ranks(process_group)):
        raise ValueError(
            f"reduce_group has the ranks {ranks}: expected {expected}, those that the module is sharded over. Make one "
            "with torch.distributed.new_group(ranks)."
        )


def _digest(fact: Any) -> str:
    return hashlib.sha256(repr(fact).encode()).hexdigest()


_WHOLE_TENSOR_OPTIMIZERS = {
    "Adafactor": "row and column means",
    "LBFGS": "dot products of all parameters",
    "Muon": "matrix products",
    "SparseAdam": "sparse gradients",
}


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Before any optimizer's step: PyTorch's own that are not elementwise are refused before they change anything.

    So is a step while gradients are kept back: the optimizer would not see them.
    """
    for shards in _groups_in(optimizer):
        if shards.has_kept():
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() while zerofx.no_sync keeps gradients back (of "
                f"{shards.kept_slots()[0].name!r}, for one): run the last backward outside of zerofx.no_sync, or "
                "give them up with zerofx.drop_kept(module)."
            )
    names = [cls.__name__ for cls in type(optimizer).__mro__]  # a subclass is as little elementwise
    uses = next((_WHOLE_TENSOR_OPTIMIZERS[name] for name in names if name in _WHOLE_TENSOR_OPTIMIZERS), None)
    if uses is None:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, ShardedTensor):
                raise TypeError(not_elementwise(type(optimizer).__name__, uses, parameter._slot.name))


def _note_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """After any optimizer's step: the watchdogs of those who share its parameters hear of it."""
    for name in {shards.group_name for shards in _groups_in(optimizer) if shards.family.stage}:
        stepped(name)


def _groups_in(optimizer: torch.optim.Optimizer) -> list[ShardGroup]:
    parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    groups = dict.fromkeys(getattr(parameter, "_group", None) for parameter in parameters)
    return [group for group in groups if isinstance(group, ShardGroup)]


register_optimizer_step_pre_hook(_check_step)
register_optimizer_step_post_hook(_note_step)
