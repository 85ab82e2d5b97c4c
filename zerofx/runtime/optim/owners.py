"""Whole parameters, each on one rank: its *owner*.

A rank holds a flat slice of each parameter. What cannot be done on slices (a matrix product, a decomposition) is done
once, by the owner, on the whole::

    slices      rank 0 | A A B . C |         rank 0 | A A A A .  . |
                rank 1 | A A B B C |  ═════▶ rank 1 | B B B C C    |     `Owners.gather`: one all-to-all
                                      ◀═════                             `Owners.scatter`: one all-to-all

Owners are chosen by what their parameters cost (`assign`), so that no rank has much more to do, or to keep, than the
others. Among such choices one is taken that moves little: an owner has part of its parameter already. Every rank
computes the same owners.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

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


SLACK = 1.05
"""How much more than its share a rank may own, so that less has to move."""

Load = tuple[float, float]
"""Shares of all cost, and of all elements."""


def assign(
    shapes: Sequence[Sequence[int]],
    ranks: int,
    cost: Cost = matrix_cost,
    held: Sequence[Mapping[int, int]] | None = None,
) -> list[int]:
    """The owner of each parameter among ``ranks``: by cost and by elements, whichever would be more uneven.

    The longest first, each to the rank that has least (Graham 1969). With ``held`` each goes to the rank that holds
    most of it, as long as that has no more than some rank would by the first rule, or than `SLACK` times its share.
    First come those that gain most by it, or, where that ends uneven, the longest.

    Args:
        shapes: of the parameters.
        ranks: how many there are.
        cost: of the update of a parameter, by its shape.
        held: of each parameter, the elements that a rank has of it, by rank; ranks without any are left out.
    """
    parts = _shares([cost(shape) for shape in shapes], [float(math.prod(shape)) for shape in shapes])
    longest = sorted(range(len(parts)), key=lambda i: (-max(parts[i]), i))
    even, limit = _placed(parts, longest, ranks)
    if held is None:
        return even
    limit = max(limit, SLACK / ranks) * (1 + 1e-9)
    gains = [_gain(elements.values()) for elements in held]
    for order in (sorted(range(len(parts)), key=lambda i: -gains[i]), longest):
        owners, most = _placed(parts, order, ranks, held, limit)
        if most <= limit:
            return owners
    return even


def _shares(costs: Sequence[float], sizes: Sequence[float]) -> list[Load]:
    whole = max(1.0, sum(costs)), max(1.0, sum(sizes))
    return [(c / whole[0], n / whole[1]) for c, n in zip(costs, sizes, strict=True)]


def _gain(elements: Iterable[int]) -> int:
    """What the best owner has more of a parameter than the next best."""
    first, second = sorted([0, 0, *elements])[:-3:-1]
    return first - second


def _placed(
    parts: Sequence[Load],
    order: Iterable[int],
    ranks: int,
    held: Sequence[Mapping[int, int]] = (),
    limit: float = 0.0,
) -> tuple[list[int], float]:
    """The owner of each, taken in ``order``, and the greatest load.

    It is who holds most of it, if that has no more than ``limit`` then, else who has least.
    """
    loads: list[Load] = [(0.0, 0.0)] * ranks
    owners = [0] * len(parts)

    def load_with(rank: int, part: Load) -> Load:
        return loads[rank][0] + part[0], loads[rank][1] + part[1]

    for i, part in ((i, parts[i]) for i in order):
        there = held[i] if held else {}
        fits = [rank for rank in there if max(load_with(rank, part)) <= limit]
        among = {rank: -there[rank] for rank in fits} or dict.fromkeys(range(ranks), 0)
        owners[i] = min((less, max(load_with(rank, part)), rank) for rank, less in among.items())[-1]
        loads[owners[i]] = load_with(owners[i], part)
    return owners, max(map(max, loads))


class Owners:
    """The owner of each of some sharded parameters, among the ranks that it is divided over."""

    def __init__(self, parameters: Iterable[ShardedTensor], cost: Cost = matrix_cost) -> None:
        """``parameters``: the same on every rank, in the same order.

        Raises:
            RuntimeError: one stands for a part of a `DTensor`: no rank has the rest of it.
        """
        self._owner: dict[Key, int] = {}
        self._elsewhere: dict[Key, int] = {}
        for members in by_ranks(parameters):
            for p in members:
                if p._dtensor is not None:
                    p._refuse(
                        "an optimizer's step on the whole",
                        "it is a part of a DTensor, the rest of which is on ranks that zerofx does not divide it "
                        "over. Take an optimizer that works element by element for it",
                    )
            held = [_held(p) for p in members]
            owners = assign([p._slot.shape for p in members], members[0]._group.layout.world_size, cost, held)
            for p, elements, owner in zip(members, held, owners, strict=True):
                self._owner[_key(p)] = owner
                self._elsewhere[_key(p)] = p._slot.numel - elements.get(owner, 0)

    def __contains__(self, tensor: ShardedTensor) -> bool:
        return _key(tensor) in self._owner

    def owner_of(self, tensor: ShardedTensor) -> int:
        """The place, among those that it is divided over, of the rank that owns the parameter of ``tensor``."""
        return self._owner[_key(tensor)]

    def elsewhere(self, tensor: ShardedTensor) -> int:
        """Elements of the parameter of ``tensor`` that its owner has not: they travel to it, and back."""
        return self._elsewhere[_key(tensor)]

    def owns(self, tensor: ShardedTensor) -> bool:
        """Whether this rank owns the parameter of ``tensor``: itself, a gradient or state of it."""
        return self.owner_of(tensor) == tensor._group.rank

    def gather(self, tensors: Sequence[ShardedTensor], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """The whole tensors, plain, of those of ``tensors`` that this rank owns, in their order. A collective.

        Args:
            dtype: what they are cast to before they travel; None: they are as they are.
        """
        wholes: dict[int, torch.Tensor] = {}
        for members in by_ranks(tensors, by_dtype=True):
            route = _Route(members, [self._owner[_key(x)] for x in members], dtype)
            with resident_of(members):
                slices = [x._local.to(route.device, route.dtype) for x in route.by_owner]
            received = route.exchange(slices, route.slices, route.owned)
            for x in route.mine:
                wholes[id(x)] = torch.empty(x._slot.numel, dtype=route.dtype, device=route.device)
            for part, piece in zip(received.split([p.length for _, p in route.pieces]), route.pieces, strict=True):
                x, at = piece
                wholes[id(x)].narrow(0, at.in_parameter, at.length).copy_(part)
        return [wholes[id(x)].view(x._slot.shape) for x in tensors if id(x) in wholes]

    def scatter(
        self, wholes: Sequence[torch.Tensor], like: Sequence[ShardedTensor], dtype: torch.dtype | None = None
    ) -> list[torch.Tensor]:
        """This rank's slice of each whole tensor. A collective.

        Args:
            wholes: of those of ``like`` that this rank owns, in their order and in their shapes.
            like: what the slices are laid out as; the same on every rank.
            dtype: what they are cast to before they travel; None: that of ``like``.

        Returns:
            one slice for each of ``like``: 1-D, of ``dtype``, on the group's device.
        """
        owned = iter(wholes)
        whole_of = {id(x): next(owned) for x in like if self.owns(x)}
        slices: dict[int, torch.Tensor] = {}
        for members in by_ranks(like, by_dtype=True):
            route = _Route(members, [self._owner[_key(x)] for x in members], dtype)
            flat = {id(x): whole_of[id(x)].to(route.device, route.dtype).reshape(-1) for x in route.mine}
            parts = [flat[id(x)].narrow(0, p.in_parameter, p.length) for x, p in route.pieces]
            received = route.exchange(parts, route.owned, route.slices)
            for x, part in zip(route.by_owner, received.split([x._local.numel() for x in route.by_owner]), strict=True):
                slices[id(x)] = part
        return [slices[id(x)] for x in like]


class _Route:
    """What of some tensors of one dtype travels between this rank and each other.

    Attributes:
        dtype: in which they travel.
        by_owner: all of them, those of rank 0 first.
        slices: how many elements of this rank's slices belong to the tensors of each rank.
        mine: those that this rank owns.
        pieces: of these, the part that each rank has a slice of, rank 0's first.
        owned: how many elements of them each rank has.
    """

    def __init__(self, members: Sequence[ShardedTensor], owners: Sequence[int], dtype: torch.dtype | None) -> None:
        self._group, self._name = members[0]._group, members[0]._slot.name
        self.dtype: torch.dtype = dtype or members[0]._local.dtype
        self._nbytes = sum(x._slot.numel for x in members) * self.dtype.itemsize
        ranks = range(self._group.layout.world_size)
        of = [[x for x, owner in zip(members, owners, strict=True) if owner == rank] for rank in ranks]
        self.by_owner = [x for row in of for x in row]
        self.slices = [sum(x._local.numel() for x in row) for row in of]
        self.mine = of[self._group.rank]
        self.pieces = [(x, x._group.layout.piece(x._slot, rank)) for rank in ranks for x in self.mine]
        self.owned = [sum(x._group.layout.piece(x._slot, rank).length for x in self.mine) for rank in ranks]

    @property
    def device(self) -> torch.device:
        return self._group.device

    def exchange(self, parts: list[torch.Tensor], sizes: list[int], coming: list[int]) -> torch.Tensor:
        """Send ``parts`` side by side, ``sizes`` elements to each rank; what comes of each, side by side."""
        sent = torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype, device=self.device)
        if self._group.layout.world_size == 1:
            return sent
        received = torch.empty(sum(coming), dtype=self.dtype, device=self.device)
        what, by = "an optimizer's step by owners", self.dtype.itemsize
        told = alone(self._group.group_name, what, "all-to-all", self._name, self._nbytes, self.dtype)
        with common(self._group.family.turns, what), told:
            dist.all_to_all_single(
                received.view(torch.uint8),  # as bytes: gloo does not know every dtype
                sent.view(torch.uint8),
                [n * by for n in coming],
                [n * by for n in sizes],
                group=self._group.process_group,
            )
        return received


def _held(tensor: ShardedTensor) -> dict[int, int]:
    """Elements that ranks have of a parameter, of those that have some."""
    layout, slot = tensor._group.layout, tensor._slot
    first, last = slot.offset // layout.shard_numel, max(slot.offset, slot.end - 1) // layout.shard_numel
    return {rank: n for rank in range(first, last + 1) if (n := layout.piece(slot, rank).length)}


def _key(tensor: ShardedTensor) -> Key:
    return tensor._group, tensor._slot


def by_ranks(tensors: Iterable[ShardedTensor], *, by_dtype: bool = False) -> list[list[ShardedTensor]]:
    """``tensors`` that are divided over the same ranks together, and that are of one dtype."""
    found: dict[tuple, list[ShardedTensor]] = {}
    for x in tensors:
        found.setdefault((x._group.group_name, x._local.dtype if by_dtype else None), []).append(x)
    return list(found.values())
