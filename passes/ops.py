"""zerofx's own operators: two symbolic ones, a collective, and a statement.

``gather`` and ``reduce`` think per parameter, and say so with one node each; ``group`` then replaces these nodes by
one collective per group. Both operators really run (slowly), so that a graph can be executed after any pass:

==========================================================  ========================================================
``zerofx.unshard(shard, shape, offset, M, group)``          the full parameter, from every rank's ``shard`` of its
                                                            group's flat buffer
``zerofx.reduce_grad(grad, offset, shard_numel, M, group)`` this rank's shard of a flat buffer that holds the average of
                                                            ``grad`` over the M ranks from ``offset`` on, and zeros
==========================================================  ========================================================

One collective that PyTorch spells worse on gloo, ``zerofx.all_gather_by_broadcast(shard, M, group)``: what
``all_gather_into_tensor`` is, by a broadcast of each rank's part. (Gloo's all-gather goes through a second buffer, its
broadcast does not: less than half the time, docs/architecture.md.) And one statement, ``zerofx.discard(buffer)``: frees
the storage of a gathered buffer here and now.
"""

from __future__ import annotations

import math

import torch

from zerofx._torch import resolve_process_group

_c10d = torch.ops._c10d_functional


@torch.library.custom_op("zerofx::unshard", mutates_args=())
def unshard(shard: torch.Tensor, shape: list[int], offset: int, world_size: int, process_group: str) -> torch.Tensor:
    full = shard
    if world_size > 1:
        full = _gathered(shard, world_size)  # with out=: the way that is sound on gloo
        full = _c10d.wait_tensor(_c10d.all_gather_into_tensor_out(shard, world_size, process_group, out=full))
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


# Straight to the dispatcher: what `custom_op` wraps around it costs a tenth of a millisecond a call.
_library = torch.library.Library("zerofx", "FRAGMENT")
_library.define("all_gather_by_broadcast(Tensor shard, int world_size, str process_group) -> Tensor")


def all_gather_by_broadcast_(
    out: torch.Tensor, shard: torch.Tensor, world_size: int, process_group: str
) -> torch.Tensor:
    """Start to fill ``out`` with every rank's ``shard`` (of any dtype); ``wait_tensor(out)`` waits for it."""
    parts = out.chunk(world_size)
    parts[resolve_process_group(process_group).rank()].copy_(shard)
    for rank, part in enumerate(parts):
        _c10d.broadcast_(part, rank, process_group)
    return out


def _all_gather_by_broadcast(shard: torch.Tensor, world_size: int, process_group: str) -> torch.Tensor:
    return all_gather_by_broadcast_(_gathered(shard, world_size), shard, world_size, process_group)


def _gathered(shard: torch.Tensor, world_size: int, process_group: str = "") -> torch.Tensor:
    return shard.new_empty(world_size * shard.numel())


_library.impl("all_gather_by_broadcast", _all_gather_by_broadcast, "CompositeExplicitAutograd")
_library.impl("all_gather_by_broadcast", _gathered, "Meta")


def discard(buffer: torch.Tensor) -> None:
    """Free ``buffer``'s memory. Views of it may still exist; none may be used."""
    buffer.untyped_storage().resize_(0)
