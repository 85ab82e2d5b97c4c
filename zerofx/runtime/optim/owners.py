"""Whole parameters, each on one rank: its *owner*.

A rank holds a flat slice of each parameter. What cannot be done on slices (a matrix product, a decomposition) is done
once, by the owner, on the whole::

    slices      rank 0 | A A B . C |         rank 0 | A A A A .  . |
                rank 1 | A A B B C |  ═════▶ rank 1 | B B B C C    |     `Owners.gather`: one all-to-all
                                      ◀═════                             `Owners.scatter`: one all-to-all

Owners are chosen by what their parameters cost (`assign`), so that no rank has much more to do, or to keep, than the
others: the longest first, each to the rank that has least (Graham 1969). Every rank computes the same owners.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from zerofx.model.layout import Slot
from zerofx.runtime.ranks.turns import common
from zerofx.runtime.ranks.watch import alone
from zerofx.runtime.state.group import ShardGroup
from zerofx.runtime.state.home import resident_of
from zerofx.runtime.state.parameter import ShardedTensor

Key = tuple[ShardGroup, Slot]
Cost = Callable[[Sequence[int]], float]


def matrix_cost(shape: Sequence[int]) -> float:
    """Multiplications that a product of the matrix with its own transpose takes; of a vector its elements.

    A tensor of more dimensions is one matrix of its first dimension's rows.
    """
    rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
    return float(rows * columns * min(rows, columns))


def assign(shapes: Sequence[Sequence[int]], ranks: int, cost: Cost = matrix_cost) -> list[int]:
    """The owner of each parameter among ``ranks``: by cost and by elements, whichever would be more uneven."""
    costs = [cost(shape) for shape in shapes]
    sizes = [float(math.prod(shape)) for shape in shapes]
    whole = max(1.0, sum(costs)), max(1.0, sum(sizes))
    parts = [(c / whole[0], n / whole[1]) for c, n in zip(costs, sizes, strict=True)]
    loads = [(0.0, 0.0)] * ranks
    owners = [0] * len(shapes)

    def load_with(rank: int, part: tuple[float, float]) -> tuple[float, float]:
        return loads[rank][0] + part[0], loads[rank][1] + part[1]

    for i in sorted(range(len(shapes)), key=lambda i: (-max(parts[i]), i)):
        owners[i] = min(range(ranks), key=lambda rank: (max(load_with(rank, parts[i])), rank))
        loads[owners[i]] = load_with(owners[i], parts[i])
    return owners


class Owners:
    """The owner of each of some sharded parameters, among the ranks that it is divided over."""

    def __init__(self, parameters: Iterable[ShardedTensor], cost: Cost = matrix_cost) -> None:
        """``parameters``: the same on every rank, in the same order.

        Raises:
            RuntimeError: one stands for a part of a `DTensor`: no rank has the rest of it.
        """
        self._owner: dict[Key, int] = {}
        for members in _by_ranks(parameters):
            for p in members:
                if p._dtensor is not None:
                    p._refuse(
                        "an optimizer's step on the whole",
                        "it is a part of a DTensor, the rest of which is on ranks that zerofx does not divide it "
                        "over. Take an optimizer that works element by element for it",
                    )
            owners = assign([p._slot.shape for p in members], members[0]._group.layout.world_size, cost)
            self._owner.update({_key(p): rank for p, rank in zip(members, owners, strict=True)})

    def __contains__(self, tensor: ShardedTensor) -> bool:
        return _key(tensor) in self._owner

    def owns(self, tensor: ShardedTensor) -> bool:
        """Whether this rank owns the parameter of ``tensor``: itself, a gradient or state of it."""
        return self._owner[_key(tensor)] == tensor._group.rank

    def gather(self, tensors: Sequence[ShardedTensor]) -> list[torch.Tensor]:
        """The whole tensors, plain, of those of ``tensors`` that this rank owns, in their order. A collective."""
        wholes: dict[int, torch.Tensor] = {}
        for members in _by_ranks(tensors, by_dtype=True):
            group, me = members[0]._group, members[0]._group.rank
            to = [self._owner[_key(x)] for x in members]
            ranks = range(group.layout.world_size)
            with resident_of(members):
                parts = [x._local.to(group.device) for r in ranks for x, owner in zip(members, to, strict=True) if owner == r]
            sizes = [sum(x._local.numel() for x, owner in zip(members, to, strict=True) if owner == r) for r in ranks]
            mine = [x for x, owner in zip(members, to, strict=True) if owner == me]
            pieces = [[group_of.piece(slot, r) for group_of, slot in map(_layout_of, mine)] for r in ranks]
            received = _exchange(members, parts, sizes, [sum(p.length for p in row) for row in pieces])
            for x in mine:
                wholes[id(x)] = torch.empty(x._slot.numel, dtype=x._local.dtype, device=group.device)
            at = 0
            for row in pieces:
                for x, piece in zip(mine, row, strict=True):
                    wholes[id(x)].narrow(0, piece.in_parameter, piece.length).copy_(
                        received.narrow(0, at, piece.length)
                    )
                    at += piece.length
        return [wholes[id(x)].view(x._slot.shape) for x in tensors if id(x) in wholes]

    def scatter(self, wholes: Sequence[torch.Tensor], like: Sequence[ShardedTensor]) -> list[torch.Tensor]:
        """This rank's slice of each whole tensor. A collective.

        Args:
            wholes: of those of ``like`` that this rank owns, in their order, in their shapes and of one dtype on all
                ranks, which is that of ``like``.
            like: what the slices are laid out as; the same on every rank.

        Returns:
            one slice for each of ``like``: 1-D, on the group's device.
        """
        owned = iter(wholes)
        of = {id(x): next(owned) for x in like if self.owns(x)}
        slices: dict[int, torch.Tensor] = {}
        for members in _by_ranks(like, by_dtype=True):
            group, me = members[0]._group, members[0]._group.rank
            ranks = range(group.layout.world_size)
            mine = [x for x in members if id(x) in of]
            parts, sizes = [], []
            for r in ranks:
                row = [(x, layout.piece(slot, r)) for x, (layout, slot) in zip(mine, map(_layout_of, mine), strict=True)]
                flats = [of[id(x)].to(group.device, x._local.dtype).reshape(-1) for x, _ in row]
                parts += [f.narrow(0, p.in_parameter, p.length) for f, (_, p) in zip(flats, row, strict=True)]
                sizes.append(sum(p.length for _, p in row))
            to = [self._owner[_key(x)] for x in members]
            coming = [[x for x, owner in zip(members, to, strict=True) if owner == r] for r in ranks]
            received = _exchange(members, parts, sizes, [sum(x._local.numel() for x in row) for row in coming])
            at = 0
            for x in (x for row in coming for x in row):
                slices[id(x)] = received.narrow(0, at, x._local.numel())
                at += x._local.numel()
        return [slices[id(x)] for x in like]


def _key(tensor: ShardedTensor) -> Key:
    return tensor._group, tensor._slot


def _layout_of(tensor: ShardedTensor) -> tuple:
    return tensor._group.layout, tensor._slot


def _by_ranks(tensors: Iterable[ShardedTensor], *, by_dtype: bool = False) -> list[list[ShardedTensor]]:
    """``tensors`` that are divided over the same ranks together, and that are of one dtype."""
    found: dict[tuple, list[ShardedTensor]] = {}
    for x in tensors:
        found.setdefault((x._group.group_name, x._local.dtype if by_dtype else None), []).append(x)
    return list(found.values())


def _exchange(
    members: Sequence[ShardedTensor], parts: list[torch.Tensor], sizes: list[int], coming: list[int]
) -> torch.Tensor:
    """Send ``parts`` side by side, ``sizes`` elements to each rank; what comes of each, side by side."""
    group, dtype = members[0]._group, members[0]._local.dtype
    sent = torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=group.device)
    if group.layout.world_size == 1:
        return sent
    received = torch.empty(sum(coming), dtype=dtype, device=group.device)
    name, nbytes = members[0]._slot.name, sum(x._slot.numel for x in members) * dtype.itemsize
    what = "an optimizer's step by owners"
    with common(group.family.turns, what), alone(group.group_name, what, "all-to-all", name, nbytes, dtype):
        by = dtype.itemsize  # as bytes: gloo does not know every dtype
        dist.all_to_all_single(
            received.view(torch.uint8),
            sent.view(torch.uint8),
            [n * by for n in coming],
            [n * by for n in sizes],
            group=group.process_group,
        )
    return received
