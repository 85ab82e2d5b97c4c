"""Numbers of a whole sharded tensor, of what every rank has of it, with one all-reduce.

=====================================================  =============================================
sum, mean, any, all, max, min, var, std                of all elements; with ``dim`` they need rows
norms (`zerofx.runtime.eager.norms`)                   of any order but 0 and -inf
dot, vdot, inner, of two that are laid out alike       the sum of products
flatten, ravel, view(-1), reshape(-1)                  no number: the same slice, of one dimension,
                                                       of which the others can be asked
=====================================================  =============================================
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from zerofx.runtime.eager.norms import all_reduce, complete, norm
from zerofx.runtime.state.aliases import share_slice
from zerofx.runtime.state.parameter import ShardedTensor

LARGEST = {"max": 1, "amax": 1, "min": -1, "amin": -1}
"""Reductions to an extreme, as the sign under which it is the largest."""

_FLAT = frozenset({"flatten", "ravel", "view", "reshape"})
_PRODUCTS = frozenset({"dot", "vdot", "inner"})


def flat_view(name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A sharded tensor as one of one dimension, of the same memory; NotImplemented for other shapes."""
    tensor = args[0] if args else None
    if name not in _FLAT or kwargs or not isinstance(tensor, ShardedTensor) or tensor._dtensor is not None:
        return NotImplemented
    shape = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list, torch.Size)) else args[1:]
    numel = tensor._slot.numel
    if list(shape) not in ([-1], [numel]) and (name in ("view", "reshape") or list(shape)):
        return NotImplemented
    flat = torch.empty((), dtype=tensor._local.dtype, device=tensor._local.device).expand(numel)
    made = flat.as_subclass(ShardedTensor)
    made._group, made._slot = tensor._group, replace(tensor._slot, shape=(numel,))
    share_slice(made, tensor)
    made._compute_dtype = tensor._compute_dtype
    return made


def _product(name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    if len(args) != 2 or kwargs:
        return NotImplemented
    one, other = args
    if not all(isinstance(x, ShardedTensor) and len(x._slot.shape) == 1 for x in args):
        return NotImplemented
    if one._group is not other._group or one._slot.offset != other._slot.offset or one._dtensor is not None:
        return NotImplemented
    left = one._local.conj() if name == "vdot" else one._local
    with complete([one, other]):
        all_reduce(total := (left * other._local).sum(), dist.ReduceOp.SUM, one)
    return total


def _spread(tensor: ShardedTensor, name: str, correction: float = 1) -> torch.Tensor:
    """``var`` or ``std``: of differences to the mean, which loses fewer digits than of squares."""
    mean = reduction("mean", (tensor,), {})
    with complete([tensor]):
        all_reduce(total := ((tensor._local - mean) ** 2).sum(), dist.ReduceOp.SUM, tensor)
    variance = total / max(0, tensor.numel() - correction)
    return variance.sqrt() if name == "std" else variance


def reduction(name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A reduction of one sharded tensor to a scalar; NotImplemented for any other."""
    tensor = args[0] if args else None
    if not isinstance(tensor, ShardedTensor):
        return NotImplemented
    if name in ("norm", "vector_norm", "linalg_vector_norm"):
        dims = [*args[2:3], kwargs.get("dim")]
        kept = any(args[3:4]) or kwargs.get("keepdim")
        if any(dim is not None for dim in dims) or kept or kwargs.get("out") is not None:
            return NotImplemented
        given = args[1] if len(args) > 1 else kwargs.get("p", kwargs.get("ord", 2.0))
        order = 2.0 if given in (None, "fro") else float(given)
        return NotImplemented if order in (0, -math.inf) else norm(tensor, order, kwargs.get("dtype"))
    if name in _PRODUCTS:
        return _product(name, args, kwargs)
    if name in ("var", "std") and len(args) == 1 and set(kwargs) <= {"unbiased", "correction"}:
        return _spread(tensor, name, kwargs.get("correction", 0 if kwargs.get("unbiased") is False else 1))
    if len(args) > 1 or kwargs or name not in (*LARGEST, "mean", "any", "all", "sum"):
        return NotImplemented
    if name == "mean":
        return tensor.sum() / tensor.numel()
    with complete([tensor]):
        return _scalar(tensor, name)


def _scalar(tensor: ShardedTensor, name: str) -> Any:
    if name in ("any", "all"):
        wrong = tensor._local.logical_not() if name == "all" else tensor._local
        found = wrong.any().to(torch.int32)
        all_reduce(found, dist.ReduceOp.MAX, tensor)
        return found == 0 if name == "all" else found != 0
    if name == "sum":
        all_reduce(total := tensor._local.sum(), dist.ReduceOp.SUM, tensor)
        return total
    return _extreme(tensor, LARGEST[name])


def _extreme(tensor: ShardedTensor, sign: int) -> torch.Tensor:
    """The maximum (``sign`` 1) or minimum (-1) of the whole tensor."""
    local = tensor._local
    least = -torch.inf if local.is_floating_point() else -torch.iinfo(local.dtype).max
    if local.numel() == 0:
        local = local.new_tensor([sign * least])
    value = sign * (local.max() if sign > 0 else local.min())
    # A NaN gets lost when ranks compare: whether there is one travels beside.
    pair = torch.stack([torch.where(value.isnan(), least, value), value.isnan().to(value.dtype)])
    all_reduce(pair, dist.ReduceOp.MAX, tensor)
    return torch.where(pair[1] > 0, torch.nan, sign * pair[0]) if local.is_floating_point() else sign * pair[0]
