"""Writes to a sharded tensor that are not slice by slice: each rank keeps its slice of the whole result.

==========================================  ========================================================================
by position (``w[rows] = x``, broadcasts)   on a whole tensor of which only this rank's slice is filled in: each element
                                            of the result depends on the same element alone. No collective
random (``uniform_``, ``torch.nn.init``)    every rank draws the whole, so that generators stay alike; rank 0's is taken
anything else (``addmm_``, ``out=``)        on the gathered tensor
what gives another shape (``t_``)           refused
==========================================  ========================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zerofx._torch import initialise_by, pytree
from zerofx.runtime.eager.unshard import unshard
from zerofx.runtime.eager.whole import take_from_rank_0
from zerofx.runtime.state.parameter import ShardedTensor, count_write

BY_POSITION = frozenset(
    """
    __setitem__ fill_diagonal_ index_add_ index_copy_ index_fill_ index_put_ index_reduce_ masked_fill_ masked_scatter_
    put_ scatter_ scatter_add_ scatter_reduce_ tril_ triu_
    """.split()
)

_RANDOM = frozenset(
    """
    bernoulli_ cauchy_ exponential_ geometric_ kaiming_normal_ kaiming_uniform_ log_normal_ normal_ random_ uniform_
    """.split()
)

_COPY = "compute the full tensor and copy it: `tensor.copy_(full)`"

_RESHAPING = frozenset(
    "as_strided_ squeeze_ swapaxes_ swapdims_ t_ transpose_ unsqueeze_ resize_ resize_as_ set_ data_".split()
)


def write(
    func: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    written: ShardedTensor,
    by_position: bool,
) -> ShardedTensor:
    """Run ``func``, which writes to ``written``. A collective, but where it is ``by_position``."""
    if name in _RESHAPING or written._dtensor is not None:
        written._refuse(f"the in-place operation {name!r}", _COPY)
    if name in _RANDOM:
        whole = torch.empty(written.shape, dtype=written._local.dtype, device=written._local.device)
    elif by_position or "out" in kwargs:
        whole = _with_own_slice(written)
    else:
        whole = unshard(written, name).to(written._local.dtype)

    def full(x: Any) -> Any:
        return unshard(x, name) if isinstance(x, ShardedTensor) else x

    with torch.no_grad():
        if "out" in kwargs:
            func(*pytree.tree_map(full, args), **{**pytree.tree_map(full, {**kwargs, "out": None}), "out": whole})
        else:
            func(whole, *pytree.tree_map(full, args[1:]), **pytree.tree_map(full, kwargs))
        if name in _RANDOM:
            take_from_rank_0(written, whole)
        else:
            written._local.copy_(_own_slice(written, whole))
            count_write(written)
    return written


def _initialise(function: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """What of ``torch.nn.init`` draws numbers beside the tensor: each rank's would be its own."""
    if not isinstance(tensor, ShardedTensor):
        return function(tensor, *args, **kwargs)
    if tensor._dtensor is not None:
        tensor._refuse(f"torch.nn.init.{function.__name__}", _COPY)
    with torch.no_grad():
        whole = torch.empty(tensor.shape, dtype=tensor._local.dtype, device=tensor._local.device)
        take_from_rank_0(tensor, function(whole, *args, **kwargs))
    return tensor


initialise_by(_initialise)


def _own_slice(tensor: ShardedTensor, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``whole``, which has the shape of ``tensor``."""
    piece = tensor._group.layout.piece(tensor._slot, tensor._group.rank)
    return whole.reshape(-1).narrow(0, piece.in_parameter, piece.length)


def _with_own_slice(tensor: ShardedTensor) -> torch.Tensor:
    """A whole tensor that has this rank's elements of ``tensor``, and zeros for those of others."""
    whole = torch.zeros(tensor._slot.shape, dtype=tensor._local.dtype, device=tensor._local.device)
    _own_slice(tensor, whole).copy_(tensor._local)
    return whole
