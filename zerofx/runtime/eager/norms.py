"""Norms of sharded tensors, with one all-reduce for many.

``torch.nn.utils.clip_grad_norm_`` asks for the norm of one gradient after another. Answered one by one that is an
all-reduce per parameter. So the first question about a gradient computes the norms of all gradients of its module, and
the others are answered from there: once each, and only while the gradient is the same tensor, unwritten since.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerofx.runtime.ranks.sharing import RankGroup
from zerofx.runtime.ranks.turns import common
from zerofx.runtime.state.home import resident_of
from zerofx.runtime.state.parameter import ShardedTensor


def norm(tensor: ShardedTensor, order: float, dtype: torch.dtype | None) -> torch.Tensor:
    """The norm of the whole ``tensor``, a scalar on every rank. A collective, unless it was computed ahead."""
    group, slot = tensor._group, tensor._slot
    owner = group.members.live(slot)
    if owner is None or owner.grad is not tensor or tensor._local.is_inference():
        return norms([tensor], order, dtype)[0]
    ahead = group.family.norms
    found = ahead.pop((order, dtype, group.layout.name, slot), None)
    if found is None or not found.of(tensor):
        ahead.clear()
        gradients = group.family.gradients()
        for gradient, value in zip(gradients, norms(gradients, order, dtype), strict=True):
            ahead[order, dtype, gradient._group.layout.name, gradient._slot] = _Norm(gradient, value)
        found = ahead.pop((order, dtype, group.layout.name, slot))
    return found.value


def norms(tensors: Sequence[torch.Tensor], order: float = 2.0, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """The norm of each whole tensor, with one all-reduce for all of them; plain tensors may be among them.

    Raises:
        ValueError: order 0 or -inf, or one that is no number.
    """
    with complete(tensors), resident_of(tensors):
        return _norms(tensors, float(order), dtype)


def _norms(tensors: Sequence[torch.Tensor], order: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    if order in (0, -float("inf")) or order != order:
        raise ValueError(f"norms of order {order}: expected a number other than 0 and -inf (inf is the maximum).")
    largest = order == float("inf")
    parts = []
    for x in tensors:
        local = x._local if isinstance(x, ShardedTensor) else x
        if local.numel() == 0:
            parts.append(local.new_zeros((), dtype=dtype))
        else:
            part = torch.linalg.vector_norm(local, order, dtype=dtype)
            parts.append(part if largest else part**order)
    wide = functools.reduce(torch.promote_types, [part.dtype for part in parts])
    wholes = [part.to(wide) for part in parts]
    sharded = [i for i, x in enumerate(tensors) if isinstance(x, ShardedTensor)]
    # Stacked from lists: an index or a mask made here would be copied to the device, and the host would wait.
    counted = [largest or tensors[i]._group.sharing.counts(tensors[i]._dtensor) for i in sharded]  # type: ignore[attr-defined]
    reduced = torch.stack(
        [wholes[i] if of else wholes[i].new_zeros(()) for i, of in zip(sharded, counted, strict=True)]
    )
    if largest:  # a NaN gets lost when ranks compare: whether there is one travels beside
        pair = torch.stack([reduced.nan_to_num(nan=0.0, posinf=torch.inf), reduced.isnan().to(wide)])
        everywhere(pair, dist.ReduceOp.MAX, tensors[sharded[0]])
        reduced = torch.where(pair[1] > 0, torch.nan, pair[0])
    else:
        everywhere(reduced, dist.ReduceOp.SUM, tensors[sharded[0]])
    for i, value in zip(sharded, reduced.unbind(), strict=True):
        wholes[i] = value
    stacked = torch.stack(wholes)
    stacked = stacked if largest else stacked ** (1.0 / order)
    return [value.to(part.dtype) for value, part in zip(stacked.unbind(), parts, strict=True)]


def complete(tensors: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """All ranks ask the same, inside, of sharded ``tensors``: gradients must be complete (``uneven=True``)."""
    first = next((x for x in tensors if isinstance(x, ShardedTensor)), None)
    if first is None:
        return contextlib.nullcontext()
    group = first._group
    group.gradients.hooks.check_alike("a norm, sum or extreme of the whole")
    reads = not group.weights.holds(first._local)
    return common(group.family.turns, "a norm, sum, extreme or scaling of sharded tensors", reads=reads)


def all_reduce(value: torch.Tensor, op: Any, like: Any) -> None:
    """All-reduce ``value`` in place over the ranks that share the sharded tensor ``like``, all parts of a DTensor."""
    sharing = like._group.sharing
    _over([sharing.optimizer, *sharing.divide(like._dtensor)], value, op, like._group.device)


def everywhere(value: torch.Tensor, op: Any, like: Any) -> None:
    """All-reduce ``value`` in place over all ranks that share the module of the sharded tensor ``like``."""
    sharing = like._group.sharing
    _over([sharing.optimizer, *sharing.foreign], value, op, like._group.device)


def _over(groups: Sequence[RankGroup], value: torch.Tensor, op: Any, device: torch.device) -> None:
    there = value.to(device)  # moments may be on the host, and ranks meet on the device
    for ranks in groups:
        ranks.sum_(there, op)
    if there is not value:
        value.copy_(there)


class _Norm:
    """A norm, and the state of the slice that it was computed of."""

    def __init__(self, tensor: ShardedTensor, value: torch.Tensor) -> None:
        self.value = value
        self._local = weakref.ref(tensor._local)
        self._version = tensor._local._version

    def of(self, tensor: ShardedTensor) -> bool:
        """Whether ``tensor`` holds the very slice, and nothing has written to it since."""
        return self._local() is tensor._local and self._version == tensor._local._version
