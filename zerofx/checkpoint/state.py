"""What a module and its optimizer are made of, by name.

Everything is known by the name that the module's own ``state_dict()`` has for it, as in FSDP2::

    model.<name>                      a parameter or buffer
    optim.state.<name>.<what>         exp_avg, momentum_buffer, step, ...
    optim.param_groups.<i>.<option>   lr, betas, ..., and params: the names in the group

as ``torch.distributed.checkpoint`` writes the two dictionaries that its ``state_dict.get_state_dict`` returns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from zerofx._torch import EXTRA_STATE, as_dtensor, is_dtensor
from zerofx.runtime.optim.by_owner import state_in_shards
from zerofx.runtime.state.group import groups_of
from zerofx.runtime.state.home import all_resident, resident_of
from zerofx.runtime.state.parameter import ShardedTensor


def unwrapped(module: nn.Module) -> nn.Module:
    """``module`` without DistributedDataParallel and ``torch.compile`` around it, which prefix its names."""
    while True:
        inner = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else None
        inner = inner or getattr(module, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def model_state(module: nn.Module) -> dict[str, Any]:
    """What ``module.state_dict()`` has: parameters and buffers, sharded ones as they are, and extra state."""
    state = unwrapped(module).state_dict(keep_vars=True)
    return {name: plain(value) if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def is_extra_state(name: str) -> bool:
    """Whether ``name`` stands for what a module's ``get_extra_state`` gives."""
    return name.rpartition(".")[2] == EXTRA_STATE


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without autograd and, in stage 0, without its class, the same memory: a `DTensor`, if it was one."""
    if isinstance(tensor, ShardedTensor):
        return tensor
    return as_whole(tensor, tensor.detach())


def names_of(module: nn.Module) -> dict[torch.Tensor, list[str]]:
    """The names of each parameter: several where it is tied."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, value in unwrapped(module).state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter):
            names.setdefault(value, []).append(name)
    return names


Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
"""One, or several that share out a module's parameters among them."""


def each_of(optimizers: Optimizers | None) -> list[torch.optim.Optimizer]:
    """The optimizers; none of None."""
    if optimizers is None:
        return []
    return [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)


def owned(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, str, torch.Tensor]]:
    """``optimizer``'s parameters in its order: number, name, parameter.

    Raises:
        ValueError: one that is not the module's.
    """
    names = names_of(module)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, p in enumerate(parameters):
        if p not in names:
            raise ValueError(
                f"parameter {number} of {type(optimizer).__name__}, of shape {list(p.shape)}, is not one of "
                f"{type(module).__name__}'s: pass the module whose parameters the optimizer was made with."
            )
        yield number, names[p][0], p


def optimizers_state(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """The states of all ``optimizers`` as that of one, which has all their parameter groups.

    So PyTorch's ``get_optimizer_state_dict`` has those of several, too.

    Raises:
        ValueError: what cannot be told apart when it is loaded: a parameter of two, or state that is no parameter's.
    """
    states = [_optimizer_state(module, optimizer) for optimizer in optimizers]
    if len(states) == 1:
        return states[0]
    owners: dict[str, int] = {}
    for number, state in enumerate(states):
        names = {name for group in state["param_groups"] for name in group["params"]}
        twice = sorted(name for name in names if name in owners)
        beside = sorted(map(str, (state["state"].keys() - names) | (state.keys() - {"state", "param_groups"})))
        kind = type(optimizers[number]).__name__
        if twice:
            raise ValueError(
                f"{twice[0]!r} is a parameter of two of these optimizers, the second a {kind}: expected one that steps "
                "it. Save one of them in a folder of its own."
            )
        if beside:
            raise ValueError(
                f"{kind} keeps {beside[0]!r} beside the state of its parameters, which would get lost among that of "
                "several optimizers: save it in a folder of its own."
            )
        owners |= dict.fromkeys(names, number)
    merged = {name: value for state in states for name, value in state["state"].items()}
    return {"state": merged, "param_groups": [group for state in states for group in state["param_groups"]]}


def _optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """``optimizer.state_dict()`` with names in the place of numbers; parameters without a state have none here.

    What an optimizer keeps besides, in its state under keys of its own or beside it, stays as it is. A collective where
    parameters have owners (`zerofx.runtime.optim.by_owner`).
    """
    name_of = {number: name for number, name, _ in owned(module, optimizer)}
    state_in_shards(optimizer)
    numbered = optimizer.state_dict()
    groups = [
        {**group, "params": [name_of[number] for number in group["params"]]} for group in numbered["param_groups"]
    ]
    return {
        **numbered,
        "state": {name_of.get(key, key): state for key, state in numbered["state"].items()},
        "param_groups": groups,
    }


def new_like(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of ``dtype`` for each element of ``parameter``, sharded as it is."""
    if isinstance(parameter, ShardedTensor):
        local = parameter._local
        return parameter.like(parameter._group.home.new("moment", local.numel(), dtype, local.device))
    return torch.empty_like(parameter.detach(), dtype=dtype)


def as_whole(parameter: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """``state``, which is shaped as ``parameter``, as a checkpoint has it: in stage 0 a part is one of a `DTensor`."""
    layout = None if isinstance(parameter, ShardedTensor) else getattr(parameter, "_dtensor", None)
    return state if layout is None else as_dtensor(state.detach(), layout)


def resident(module: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """The state of ``module``, its optimizer's included, can be read and written inside."""
    return all_resident(group.home for group in groups_of(module))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of ``tensor``."""
    if isinstance(tensor, ShardedTensor):
        return tensor._local
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def non_finite(state: dict[str, Any]) -> str | None:
    """The name of the first tensor of ``state`` of which this rank holds an element that is NaN or infinite.

    A sum finds it at the speed of memory; where that is not finite it may just have overflowed, so one looks again.
    """
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            with resident_of([value]):
                mine = local(value).detach()
                if not mine.sum(dtype=torch.float32).isfinite() and not mine.isfinite().all():
                    return name
    return None
