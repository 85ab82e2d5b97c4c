"""One parameter at a time, outside of graphs: its slices are gathered, its gradient is reduced.

::

    gather    each rank's slice is broadcast to all others
    reduce    each rank's part of the gradient is reduced to its owner

A parameter's slice ends where its group's shard ends, so the slices of one tensor are few: one to M. This is the slow
path: a collective for each use, nothing overlapped.

By turns (``uneven=True``) ranks use other parameters so. Each use is offered as a graph is
(`zerofx.runtime.ranks.turns`). Who does not use the parameter takes part in its gather, or reduces what it has kept.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from zerofx._torch import (
    DisableTorchFunction,
    end_of_backward,
    inside_backward,
)
from zerofx.model.layout import Slot
from zerofx.passes.reduce import check_dense
from zerofx.runtime.ranks.agree import ON_DEMAND
from zerofx.runtime.ranks.tracing import region
from zerofx.runtime.ranks.turns import SHADOWS, Shadow, common
from zerofx.runtime.ranks.watch import alone
from zerofx.runtime.state.callbacks import CALLBACKS
from zerofx.runtime.state.gradients import averaged
from zerofx.runtime.state.group import Family, ShardGroup
from zerofx.runtime.state.parameter import ReplicatedParameter, ShardedParameter, ShardedTensor


@region("gather", lambda tensor: tensor._slot.name)
def gather_tensor(tensor: ShardedTensor) -> torch.Tensor:
    """The whole of ``tensor`` on every rank, without autograd. A collective."""
    group, slot = tensor._group, tensor._slot
    group.gradients.hooks.check_alike("the whole of a tensor")
    if not group.weights.holds(tensor._local):
        with common(group.family.turns, f"a gather of what is no weight, of {slot.name!r}"):
            return _gathered(tensor)
    group.use(trained=False)
    with _turn(group, "gather", slot, group.weights.dtype):
        return _gathered(tensor)


def _gathered(tensor: ShardedTensor) -> torch.Tensor:
    group, slot = tensor._group, tensor._slot
    replica = group.weights.own_replica
    if replica is not None and group.weights.exact and group.weights.holds(tensor._local):
        group.weights.refresh()
        whole = torch.ops._c10d_functional.wait_tensor(replica)
        return group.layout.view(whole, slot).clone()
    flat = torch.empty(slot.numel, dtype=tensor._local.dtype, device=group.device)  # moments may be on the host
    told: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if group.layout.world_size > 1:
        told = alone(group.group_name, ON_DEMAND, "gather", slot.name, flat.nbytes, flat.dtype)
    with group.home.only(tensor._local), told:
        for rank in range(group.layout.world_size):
            piece = group.layout.piece(slot, rank)
            part = flat.narrow(0, piece.in_parameter, piece.length)
            if rank == group.rank:
                part.copy_(tensor._local)
            if piece.length and group.layout.world_size > 1:
                # As bytes: gloo does not know every dtype.
                dist.broadcast(part.view(torch.uint8), group=group.process_group, group_src=group.rank_at(rank))
    return flat.view(slot.shape)


def full_tensor(tensor: ShardedTensor) -> torch.Tensor:
    """The whole of ``tensor``, of all parts of it where it stands for a `DTensor`, without autograd. A collective."""
    whole = gather_tensor(tensor)
    return whole if tensor._dtensor is None else tensor._dtensor.whole_of(whole)


CALLBACKS.gather = full_tensor


@region("reduce", lambda parameter, gradient: parameter._slot.name)
def reduce_gradient(parameter: ShardedParameter, gradient: torch.Tensor) -> None:
    """Add the average over ranks of the whole ``gradient`` to ``parameter.grad``. A collective.

    Inside of `zerofx.no_sync` it is kept instead.
    """
    group, slot = parameter._group, parameter._slot
    check_dense(slot.name, gradient.layout)
    if (leaf := leaf_of(group)) is not None:
        leaf.collect(group, slot, gradient)
        return
    group.family.footprint.misses(slot.name)
    if not group.family.sync:
        group.gradients.keep(slot, gradient)
        return
    reduce_rest(group.family)
    flat = gradient.reshape(-1).to(group.layout.reduce_dtype or group.layout.dtype, copy=True)
    if (kept := group.gradients.take_kept(slot)) is not None:
        flat += kept.reshape(-1)
    group.accumulate((slot,), _average(group, slot, flat))


def leaf_of(group: ShardGroup) -> Any:
    """The leaf module's call that has ``group`` whole, in whose backward this is: nothing needs a collective then."""
    return group.leaf if inside_backward() else None


def reduce_rest(family: Family) -> None:
    """Inside a backward: as it ends, what `zerofx.no_sync` kept of parameters that it has not come to is reduced.

    So are the gradients of parameters that are ignored: of every rank, in the same order.
    """
    if family.turns is not None:
        family.turns.end_backward(family)
    elif family.unreduced:
        family.unreduced = False
        end_of_backward(lambda: reduce_kept(family))
    if family.averages is not None:
        family.averages.end_backward()


def reduce_kept(family: Family) -> None:
    """Reduce what `zerofx.no_sync` kept of parameters that had no part in the backward after it. A collective.

    Ranks may have kept gradients of different parameters: they tell each other of which.
    """
    groups = family.groups()
    kept = {group: tuple(group.gradients.kept_slots()) for group in groups}
    told = family.send_used(family.marked((group.layout.name, slot) for group in groups for slot in kept[group]))
    for group in groups:
        anywhere = kept[group] if told is None else family.used_anywhere(told, group, group.layout.slots)
        if anywhere:
            group.gradients.reduce({}, group.accumulate, checked=True)
        group.gradients.kept_unevenly = False


def _average(group: ShardGroup, slot: Slot, flat: torch.Tensor) -> torch.Tensor:
    """The average of ``flat`` over the ranks as `ShardGroup.accumulate` takes it; ``flat`` is used up."""
    with _turn(group, "reduction", slot, flat.dtype):
        return _averaged(group, slot, flat)


def _averaged(group: ShardGroup, slot: Slot, flat: torch.Tensor) -> torch.Tensor:
    with alone(group.group_name, ON_DEMAND, "reduction", slot.name, flat.nbytes, flat.dtype):
        return _reduced(group, slot, flat)


def _reduced(group: ShardGroup, slot: Slot, flat: torch.Tensor) -> torch.Tensor:
    ranks, sharing = group.layout.world_size, group.sharing
    if group.family.stage == 0:
        if ranks > 1:
            dist.all_reduce(flat, group=group.process_group)
        return averaged(flat, group.layout.dtype, ranks).view(slot.shape)
    for rank in range(ranks):
        piece = group.layout.piece(slot, rank)
        if piece.length and ranks > 1:
            part = flat.narrow(0, piece.in_parameter, piece.length)
            dist.reduce(part, group=group.process_group, group_dst=group.rank_at(rank))
    piece = group.layout.piece(slot, group.rank)
    shard = torch.zeros_like(group.shard)
    mine = flat.narrow(0, piece.in_parameter, piece.length)
    if piece.length:
        sharing.sum_over_replicas_(mine, ON_DEMAND, slot.name)
    group.local(slot, shard).copy_(averaged(mine, shard.dtype, sharing.averaged_over))
    return shard


def _turn(group: ShardGroup, kind: str, slot: Slot, dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    """One parameter's collective runs inside: by turns, where ranks take them (``uneven=True``)."""
    family = group.family
    if family.turns is None or (kind == "gather" and not group.weights.sends):
        return contextlib.nullcontext()
    if kind == "reduction" and family.stage:
        group.gradients.check_all_accumulate((slot,))
    family.turns.end_backward(family)
    what = group.layout.name, slot.name, dtype
    return family.turns.graph(Shadow(kind, family.number, what, reduces=kind == "reduction"))


def _member(family: Family, what: tuple[str, str, torch.dtype]) -> tuple[ShardGroup, Slot]:
    group = next(group for group in family.groups() if group.layout.name == what[0])
    return group, next(slot for slot in group.layout.slots if slot.name == what[1])


def _take_part_in_gather(family: Family, what: tuple[str, str, torch.dtype]) -> None:
    group, slot = _member(family, what)
    _gathered(group.parameter(slot))


def _take_part_in_reduction(family: Family, what: tuple[str, str, torch.dtype]) -> None:
    group, slot = _member(family, what)
    kept = group.gradients.take_kept(slot)
    flat = torch.zeros(slot.numel, dtype=what[2], device=group.device)
    if kept is not None:
        flat += kept.reshape(-1)
    group.accumulate((slot,), _averaged(group, slot, flat), checked=True)


SHADOWS["gather"], SHADOWS["reduction"] = _take_part_in_gather, _take_part_in_reduction
SHADOWS["kept"] = lambda family, _: reduce_kept(family)


def average_by_hook(parameter: ReplicatedParameter) -> None:
    """Have the gradient averaged that code outside of any graph gives a parameter of stage 0."""
    reference = weakref.ref(parameter)

    def hook(gradient: torch.Tensor | None) -> torch.Tensor | None:
        target = reference()
        if target is None:
            return None
        average = None if gradient is None else _averaged_whole(target, gradient)
        result = target._group.gradients.settle(target._slot, average)
        return torch.zeros_like(gradient) if gradient is not None and result is None else result

    if parameter.is_floating_point():  # no other dtype has gradients
        with _trained(parameter):
            torch.Tensor.register_hook(parameter, hook)


def _averaged_whole(parameter: ReplicatedParameter, gradient: torch.Tensor) -> torch.Tensor | None:
    """The average over ranks of what code outside of graphs gives a parameter of stage 0; None: not reduced yet."""
    group, slot = parameter._group, parameter._slot
    check_dense(slot.name, gradient.layout)
    if (leaf := leaf_of(group)) is not None:
        leaf.collect(group, slot, gradient)
        return None
    group.family.footprint.misses(slot.name)
    if not group.family.sync:
        group.gradients.keep(slot, gradient)
        return None
    reduce_rest(group.family)
    flat = gradient.reshape(-1).to(group.layout.reduce_dtype or gradient.dtype, copy=True)
    if (kept := group.gradients.take_kept(slot)) is not None:
        flat += kept.reshape(-1)
    return _average(group, slot, flat)


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
        if (target := reference()) is None:
            return
        if gradient is None:
            target._group.gradients.settle(target._slot)
        else:
            held.append(target.grad)
            target.grad = None

    def after(target: torch.Tensor) -> None:
        if held and isinstance(target, ShardedParameter):
            whole, target.grad = target.grad, held.pop()
            assert whole is not None
            reduce_gradient(target, whole)
            target._group.gradients.settle(target._slot)

    if parameter.is_floating_point():  # no other dtype has gradients
        with _trained(parameter):
            torch.Tensor.register_hook(parameter, before)
            parameter.register_post_accumulate_grad_hook(after)
