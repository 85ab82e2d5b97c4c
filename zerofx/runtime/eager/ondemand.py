"""Gather on demand: an operation outside of any compiled graph that needs a whole tensor gets it.

This is what keeps code right that Dynamo could not capture: slower (a gather per use, nothing overlapped), so the
first time each line does it there is a warning that names the line.

Each rank's slice is broadcast to all others; in backward each rank's slice of the gradient is reduced to its owner.
A parameter's slice ends where its group's shard ends, so the slices of one tensor are few: one to M.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from zerofx._torch import (
    DisableTorchFunction,
    adapt_arguments,
    end_of_backward,
    inlined_alone,
    inside_backward,
    pytree,
    saved_tensors_are_hooked,
)
from zerofx.model.layout import Slot
from zerofx.model.units import format_bytes
from zerofx.runtime.ranks.agree import ON_DEMAND
from zerofx.runtime.ranks.tracing import region
from zerofx.runtime.ranks.watch import alone
from zerofx.runtime.state.doors import DOORS
from zerofx.runtime.state.gradients import averaged
from zerofx.runtime.state.group import Family, ShardGroup
from zerofx.runtime.state.parameter import ReplicatedParameter, ShardedParameter, ShardedTensor, is_in_place


@region("gather", lambda tensor: tensor._slot.name)
def gather_tensor(tensor: ShardedTensor) -> torch.Tensor:
    """The whole of ``tensor`` on every rank, without autograd. A collective."""
    group, slot = tensor._group, tensor._slot
    if group.weights.holds(tensor._local):
        group.use(trained=False)
    replica = group.weights.own_replica
    if replica is not None and replica.dtype == group.layout.dtype and group.weights.holds(tensor._local):
        group.weights.refresh()
        whole = torch.ops._c10d_functional.wait_tensor(replica)
        return group.layout.view(whole, slot).clone()
    flat = tensor._local.new_empty(slot.numel)
    told = alone(group.group_name, ON_DEMAND, "gather", slot.name, flat.nbytes, flat.dtype)
    with group.home.at_hand(), told:
        for rank in range(group.layout.world_size):
            piece = group.layout.piece(slot, rank)
            part = flat.narrow(0, piece.in_parameter, piece.length)
            if rank == group.rank:
                part.copy_(tensor._local)
            if piece.length and group.layout.world_size > 1:
                # As bytes: gloo does not know every dtype.
                dist.broadcast(part.view(torch.uint8), group=group.process_group, group_src=rank)
    return flat.view(slot.shape)


DOORS.gather = gather_tensor


@region("reduce", lambda parameter, gradient: parameter._slot.name)
def reduce_gradient(parameter: ShardedParameter, gradient: torch.Tensor) -> None:
    """Add the average over ranks of the whole ``gradient`` to ``parameter.grad``. A collective.

    Inside of `zerofx.no_sync` it is kept instead.
    """
    group, slot = parameter._group, parameter._slot
    if (leaf := leaf_of(group)) is not None:
        leaf.collect(group, slot, gradient)
        return
    if not group.family.sync:
        group.gradients.keep(slot, gradient)
        return
    reduce_rest(group.family)
    flat = gradient.reshape(-1).to(group.family.precision.reduce_dtype or group.layout.dtype, copy=True)
    if (kept := group.gradients.take_kept(slot)) is not None:
        flat += kept.reshape(-1)
    group.accumulate((slot,), _average(group, slot, flat))


def leaf_of(group: ShardGroup) -> Any:
    """The leaf module's call that has ``group`` whole, in whose backward this is: nothing needs a collective then."""
    return group.leaf if inside_backward() else None


def reduce_rest(family: Family) -> bool:
    """Inside a backward: as it ends, what `zerofx.no_sync` kept of parameters that it has not come to is reduced.

    Returns whether anything is kept.
    """
    kept = any(group.has_kept() for group in family.groups())
    if kept:
        end_of_backward(lambda: reduce_kept(family))
    return kept


def reduce_kept(family: Family) -> None:
    """Reduce what `zerofx.no_sync` kept of parameters that had no part in the backward behind it. A collective."""
    for group in family.groups():
        if group.gradients.kept_unevenly:
            group.reduce({}, checked=True)
        for slot in group.gradients.kept_slots():
            kept = group.gradients.take_kept(slot)
            assert kept is not None
            flat = kept.reshape(-1).to(group.layout.dtype, copy=True)
            group.accumulate((slot,), _average(group, slot, flat), checked=True)


def _average(group: ShardGroup, slot: Slot, flat: torch.Tensor) -> torch.Tensor:
    """The average of ``flat`` over the ranks as `ShardGroup.accumulate` takes it; ``flat`` is used up."""
    with alone(group.group_name, ON_DEMAND, "reduction", slot.name, flat.nbytes, flat.dtype):
        return _reduced(group, slot, flat)


def _reduced(group: ShardGroup, slot: Slot, flat: torch.Tensor) -> torch.Tensor:
    ranks = group.layout.world_size
    if group.family.stage == 0:
        if ranks > 1:
            dist.all_reduce(flat, group=group.process_group)
        return averaged(flat, group.layout.dtype, ranks).view(slot.shape)
    for rank in range(ranks):
        piece = group.layout.piece(slot, rank)
        if piece.length and ranks > 1:
            part = flat.narrow(0, piece.in_parameter, piece.length)
            dist.reduce(part, group=group.process_group, group_dst=rank)
    piece = group.layout.piece(slot, group.rank)
    shard = torch.zeros_like(group.shard)
    mine = flat.narrow(0, piece.in_parameter, piece.length)
    group.local(slot, shard).copy_(averaged(mine, shard.dtype, ranks))
    return shard


def average_by_hook(parameter: ReplicatedParameter) -> None:
    """Have the gradient averaged that code outside of any graph gives a parameter of stage 0."""
    reference = weakref.ref(parameter)

    def hook(gradient: torch.Tensor | None) -> torch.Tensor | None:
        target = reference()
        if gradient is None or target is None:
            return None  # compiled code has seen to it
        group, slot = target._group, target._slot
        if (leaf := leaf_of(group)) is not None:
            leaf.collect(group, slot, gradient)
            return torch.zeros_like(gradient)
        if not group.family.sync:
            group.gradients.keep(slot, gradient)
            return torch.zeros_like(gradient)
        reduce_rest(group.family)
        flat = gradient.reshape(-1).to(group.family.precision.reduce_dtype or gradient.dtype, copy=True)
        if (kept := group.gradients.take_kept(slot)) is not None:
            flat += kept.reshape(-1)
        return _average(group, slot, flat)

    with _trained(parameter):
        parameter.register_hook(hook)


@contextlib.contextmanager
def _trained(parameter: torch.nn.Parameter) -> Iterator[None]:
    """Hooks can be registered on what requires grad alone, and stay when it is frozen: it may be trained later."""
    with DisableTorchFunction():
        before = parameter.requires_grad
        parameter.requires_grad_(True)
        yield
        parameter.requires_grad_(before)


def reduce_by_hook(parameter: ShardedParameter) -> None:
    """Have a gradient reduced that autograd itself brings: of a ``torch.autograd.Function`` outside of any graph.

    Such a function is handed the parameter as it is, without any word to us, and returns a whole gradient. The engine
    is let to put that where ``.grad`` was, and then it is added to what was there as any other is.
    """
    reference, held = weakref.ref(parameter), []

    def before(gradient: torch.Tensor | None) -> None:
        if gradient is not None and (target := reference()) is not None:
            held.append(target.grad)
            target.grad = None

    def after(target: torch.Tensor) -> None:
        if held and isinstance(target, ShardedParameter):
            whole, target.grad = target.grad, held.pop()
            assert whole is not None
            reduce_gradient(target, whole)

    with _trained(parameter):
        parameter.register_hook(before)
        parameter.register_post_accumulate_grad_hook(after)


class _Unshard(torch.autograd.Function):
    """The full weight from a sharded parameter; its gradient goes to ``parameter.grad`` as a slice."""

    @staticmethod
    def forward(ctx: Any, parameter: ShardedParameter) -> torch.Tensor:
        ctx.parameter = parameter
        return _whole(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"double backward through the sharded parameter {ctx.parameter._slot.name!r}: gradients of gradients "
                "(create_graph=True) are not supported for sharded parameters."
            )
        # Autograd would add to the parameter's full-size grad, which has no memory: None, and done by hand.
        reduce_gradient(ctx.parameter, gradient)


def _whole_where_hooked(function: str, x: Any) -> Any:
    """What a ``torch.autograd.Function`` outside of any graph gets for ``x`` where hooks keep what it saves.

    That is so in a checkpoint. Autograd takes what such a hook brings back for an ordinary tensor: a sharded one would
    be read in backward as if it had memory. Elsewhere the function gets the parameter, see `reduce_by_hook`.
    """
    return unshard(x, function) if isinstance(x, ShardedTensor) and saved_tensors_are_hooked() else x


adapt_arguments(_whole_where_hooked)


def unshard(tensor: ShardedTensor, func_name: str) -> torch.Tensor:
    """The full tensor for an operation that needs it, differentiable where the parameter is.

    Raises:
        TypeError: the operation is an optimizer's. On each rank's slice it would mean something else than on the
            whole, and on the whole every rank would repeat all of the work.
    """
    frame = _caller()
    optimizer = _enclosing_optimizer(frame)
    if optimizer is not None:
        raise TypeError(not_elementwise(optimizer, func_name, tensor._slot.name))
    if leaf_of(tensor._group) is None:
        _warn(frame, func_name, tensor)
    if isinstance(tensor, ShardedParameter) and tensor.requires_grad and torch.is_grad_enabled():
        tensor._group.use(trained=True)
        full = _Unshard.apply(tensor)
    else:
        full = _whole(tensor)
    # Code of the model that was not compiled sees what compiled code sees (`precision`).
    return full if tensor._compute_dtype is None else full.to(tensor._compute_dtype)


def _whole(tensor: ShardedTensor) -> torch.Tensor:
    leaf = leaf_of(tensor._group) if tensor._group.weights.holds(tensor._local) else None
    return gather_tensor(tensor) if leaf is None else leaf.whole(tensor)


def not_elementwise(optimizer: str, func_name: str, parameter: str) -> str:
    """What to tell who brings an optimizer that looks at more than one element at a time."""
    return (
        f"{optimizer} is not elementwise: it uses {func_name!r} on {parameter!r}. A rank holds a flat slice of each "
        "parameter, which need not be whole rows, so only optimizers that treat every element by itself (SGD, Adam, "
        "AdamW, Adagrad, RMSprop, NAdam, RAdam, Adadelta, Adamax, ASGD, Rprop) work on it. Use one of these."
    )


class GatheredView(torch.Tensor):
    """A view of a gathered weight, as eager code without autograd gets it: readable, not writable.

    ``with torch.no_grad(): weight[0].zero_()`` would write to the gathered copy and be lost.
    """

    @classmethod
    @inlined_alone
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = getattr(func, "__name__", "").split(".")[0]
        written = [(kwargs or {}).get("out"), args[0] if is_in_place(name) and args else None]
        if any(isinstance(x, cls) for x in pytree.tree_leaves(written)):
            raise RuntimeError(
                f"{name!r} writes to a view of a sharded weight. The view is of a gathered copy, the write would be "
                "lost: change weight.full_tensor() and copy it back, weight.copy_(full)."
            )
        with DisableTorchFunction():
            return readonly(func(*args, **(kwargs or {})), args)


def readonly(result: Any, inputs: Any) -> Any:
    """``result``, with every tensor in it that shares memory with one of ``inputs`` made a `GatheredView`."""
    storages = {x.untyped_storage().data_ptr() for x in pytree.arg_tree_leaves(inputs) if isinstance(x, torch.Tensor)}

    def mark(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.numel() and x.untyped_storage().data_ptr() in storages:
            return x.as_subclass(GatheredView)
        return x

    return pytree.tree_map(mark, result)


_HERE = str(Path(__file__).parents[2])
_TORCH = str(Path(torch.__file__).parent)
_warned: set[tuple[str, int]] = set()


def _caller() -> FrameType | None:
    """The innermost frame that is neither ours nor PyTorch's, or is an optimizer's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if _optimizer_of(frame) is not None or not name.startswith((_HERE, _TORCH)):
            return frame
        frame = frame.f_back
    return None


def _enclosing_optimizer(frame: FrameType | None) -> str | None:
    while frame is not None:
        owner = _optimizer_of(frame)
        if owner is not None and "step" in frame.f_code.co_name:
            return type(owner).__name__
        frame = frame.f_back
    return None


def _optimizer_of(frame: FrameType) -> Optimizer | None:
    """The optimizer of which this frame runs a method, whatever it calls ``self``."""
    names = frame.f_code.co_varnames
    owner = frame.f_locals.get(names[0]) if names else None
    return owner if isinstance(owner, Optimizer) else None


def _warn(frame: FrameType | None, func_name: str, tensor: ShardedTensor) -> None:
    place = (frame.f_code.co_filename, frame.f_lineno) if frame else ("unknown", 0)
    if place in _warned:
        return
    _warned.add(place)
    size = format_bytes(tensor._slot.numel * tensor._local.element_size())
    ranks = tensor._group.layout.world_size
    warnings.warn_explicit(
        f"{func_name!r} needs the whole of {tensor._slot.name!r} outside of a compiled graph: it is gathered here, at "
        f"every use, {size} from all {ranks} ranks. Right, but slow: compile the code around it.",
        UserWarning,
        *place,
    )
