"""State that a parameter has already, loaded or made by another optimizer, becomes this rank's part of it.

=====================  ==========================================
optimizer              its part
=====================  ==========================================
`zerofx.AdamW`         of flat buffers: `adopt`, `begin`
others, on slices      a sharded tensor of the parameter: `divide`
=====================  ==========================================
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import torch

from zerofx.kernels.split import join, split
from zerofx.runtime.optim import moments as _moments
from zerofx.runtime.optim.spans import Member, Span
from zerofx.runtime.state.parameter import ShardedTensor


def load_as_saved(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], names: Collection[str]) -> None:
    """``Optimizer.load_state_dict``, but state of these ``names`` is as it was saved.

    It would be copied to the parameters' device and dtype, and then to where it lives.
    """
    states = {index: {k: v for k, v in of.items() if k not in names} for index, of in state_dict["state"].items()}
    torch.optim.Optimizer.load_state_dict(optimizer, {**state_dict, "state": states})
    saved = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    mine = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for index, p in zip(saved, mine, strict=True):
        for name, value in state_dict["state"].get(index, {}).items():
            if name in names:
                optimizer.state[p][name] = value


def adopt(span: Span, member: Member, state: dict[str, Any]) -> None:
    """``state`` of ``member`` goes to the buffers of ``span``, in their form; then it is views of them."""
    _adopt_masters(span, member, state)
    if span.blocks and "exp_avg" in state:
        _quantize(member, state)
    for name, flat in span.state.items():
        mine = member.like(flat, name)
        if name in state and state[name] is not mine:
            _copy(mine, state[name])
        state[name] = mine
    for name in ({"master", "remainder"} & set(state)) - set(span.state):
        del state[name]


def begin(span: Span, member: Member, state: dict[str, Any], count: torch.Tensor) -> None:
    """``state`` of ``member``, which has none yet, or was emptied: its part of the buffers, as before its first step.

    ``count``: of its updates. What the buffers and the weights are made of is resident.
    """
    if member.state:
        _moments.clear(span, member)
        count.zero_()
        member.updates = 0.0
    state |= {"step": count} | {name: member.like(flat, name) for name, flat in span.state.items()}
    member.state = dict(state)


@torch.no_grad()
def divide(optimizer: torch.optim.Optimizer) -> None:
    """State that is whole, as one process or DistributedDataParallel saves it, or sharded as another module's, becomes
    as its parameter is. A collective where it is sharded another way."""
    for p in itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups):
        state: Any = optimizer.state.get(p)
        for name, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, ShardedTensor) or _is_whole(p, name, value):
                state[name] = as_parameter(p, value)


def as_parameter(p: torch.Tensor, value: torch.Tensor) -> Any:
    """``value``, whole or sharded in some way, as ``p`` is: plain, or sharded alike. A copy, if it is not so."""
    if not isinstance(p, ShardedTensor):
        return value.full_tensor() if isinstance(value, ShardedTensor) else value
    if p._dtensor is not None or (
        isinstance(value, ShardedTensor) and (value._group, value._slot) == (p._group, p._slot)
    ):
        return value
    mine = p.like(torch.empty_like(p._local, dtype=value.dtype))
    _copy(mine, value)
    return mine


def _is_whole(p: torch.Tensor, name: str, value: Any) -> bool:
    if not isinstance(p, ShardedTensor) or type(value) is not torch.Tensor:
        return False
    return value.shape == torch.Size(p._slot.shape) and (value.dim() > 0 or name not in _NUMBERS)


_NUMBERS = ("step", "eta", "mu", "mu_product")
"""State of PyTorch's optimizers that is a number of its parameter: of a scalar one it has the parameter's shape."""


def _adopt_masters(span: Span, member: Member, state: dict[str, Any]) -> None:
    """Masters that were kept another way are made into this optimizer's."""
    weight = member.like(span.weights())
    if "remainder" in state and "master" in span.state:
        local = join(_local(weight), _local(state["remainder"]).to(_local(weight).device, torch.int16))
        state["master"] = _like(state["remainder"], local)
    elif "master" in state and "remainder" in span.state:
        high, low = split(_local(state["master"]).float())
        _local(weight).copy_(high)
        state["remainder"] = _like(state["master"], low)


def _quantize(member: Member, state: dict[str, Any]) -> None:
    """A parameter's moments as they were loaded, whole or sharded some way, become codes and scales of its part."""
    parts = []
    for name in _moments.MOMENTS:
        value = state.pop(name)
        part = member.shaped(_local(member.parameter).new_empty(member.length, dtype=torch.float32))
        _copy(part, value)
        parts.append(part)
    codes = _moments.in_codes(*parts)
    state.update({name: x if name.endswith("_scales") else member.shaped(x) for name, x in codes.items()})


def _copy(mine: torch.Tensor, value: torch.Tensor) -> None:
    """``value``, whole or sharded like ``mine`` (by another module's group, perhaps), into ``mine``."""
    if isinstance(mine, ShardedTensor) and isinstance(value, ShardedTensor):
        if value._group.layout == mine._group.layout and value._slot == mine._slot:
            mine._local.copy_(value._local)
            return
        value = value.full_tensor()
    mine.copy_(value)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local if isinstance(tensor, ShardedTensor) else tensor


def _like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    return tensor.like(local) if isinstance(tensor, ShardedTensor) else local
