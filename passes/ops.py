"""The two symbolic operators: one parameter brought, one gradient reduced.

``gather`` and ``reduce`` think per parameter, and say so with one node each; ``group`` then replaces these nodes by
one collective per group. Both operators really run (slowly), so that a graph can be executed after any pass:

==========================================================  ========================================================
``zerofx.unshard(shard, shape, offset, M, group)``          the full parameter, from every rank's ``shard`` of its
                                                            group's flat buffer
``zerofx.reduce_grad(grad, offset, shard_numel, M, group)`` this rank's shard of a flat buffer that holds the average of
                                                            ``grad`` over the M ranks from ``offset`` on, and zeros
==========================================================  ========================================================

and one statement, ``zerofx.discard(buffer)``: frees the storage of a gathered buffer here and now.
"""

from __future__ import annotations

import math

import torch

_c10d = torch.ops._c10d_functional


@torch.library.custom_op("zerofx::unshard", mutates_args=())
def unshard(shard: torch.Tensor, shape: list[int], offset: int, world_size: int, process_group: str) -> torch.Tensor:
    full = shard
    if world_size > 1:
        full = _c10d.wait_tensor(_c10d.all_gather_into_tensor(shard, world_size, process_group))
    return full.narrow(0, offset, math.prod(shape)).view(shape).clone()


@unshard.register_fake
def _(shard: torch.Tensor, shape: list[int], offset: int, world_size: int, process_group: str) -> torch.Tensor:
    return shard.new_empty(shape)


@torch.library.custom_op("zerofx::reduce_grad", mutates_args=())
def reduce_grad(grad: torch.Tensor, offset: int, shard_numel: int, world_size: int, process_group: str) -> torch.Tensor:
    flat = grad.new_zeros(world_size * shard_numel)
    flat[offset : offset + grad.numel()] = grad.reshape(-1)
    if world_size == 1:
        return flat
    reduced = _c10d.reduce_scatter_tensor(flat, "sum", world_size, process_group)
    return _c10d.wait_tensor(reduced) / world_size


@reduce_grad.register_fake
def _(grad: torch.Tensor, offset: int, shard_numel: int, world_size: int, process_group: str) -> torch.Tensor:
    return grad.new_empty(shard_numel)


def discard(buffer: torch.Tensor) -> None:
    """Free ``buffer``'s memory. Views of it may still exist; none may be used."""
    buffer.untyped_storage().resize_(0)
