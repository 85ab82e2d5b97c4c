"""What `verify` knows of a node that is no value of the model's: part of a shard, a whole group, a pack, under way."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from zerofx.model.layout import GroupLayout

_c10d, _zerofx = torch.ops._c10d_functional, torch.ops.zerofx

STEP, REFRESH = _zerofx.step.default, _zerofx.refresh.default
ALL_REDUCES = (_c10d.all_reduce.default, _c10d.all_reduce_.default)


@dataclass(frozen=True)
class Flat:
    """Elements of a group's flat buffer: the same ranges of every rank's shard, here (a rank's own) or end to end.

    ``dtypes``: what they were cast to, one after the other.
    """

    layout: GroupLayout
    ranges: tuple[range, ...]
    dtypes: tuple[torch.dtype, ...] = ()
    whole: bool = False

    @property
    def part(self) -> int:
        """Elements of one rank."""
        return sum(map(len, self.ranges))

    @property
    def numel(self) -> int:
        return self.part * self.layout.world_size if self.whole else self.part

    def flat_index(self, i: int) -> int:
        """Where element ``i`` of the whole lies in the flat buffer."""
        rank, i = divmod(i, self.part)
        for r in self.ranges:
            if i < len(r):
                return rank * self.layout.shard_numel + r[i]
            i -= len(r)
        raise AssertionError("divmod")

    def contiguous_from(self, offset: int, numel: int) -> int | None:
        """Where ``numel`` elements from ``offset`` lie in the flat buffer, if side by side: indices ascend strictly."""
        if not 0 <= offset <= offset + numel <= self.numel:
            return None
        if not numel:
            return offset
        first = self.flat_index(offset)
        return first if self.flat_index(offset + numel - 1) == first + numel - 1 else None


def divided(flat: Flat, ranks: int) -> Flat:
    """A part of a whole group that is divided over ``ranks``."""
    layout = replace(flat.layout, world_size=ranks)
    return Flat(layout, (range(layout.shard_numel),), flat.dtypes)


@dataclass(frozen=True)
class Part:
    """One gradient in a pack: ``numel`` elements from ``offset``."""

    offset: int
    numel: int
    node: Node


@dataclass(frozen=True)
class Pack:
    """Gradients and zeros end to end, on the way through a reduction.

    ``dtype``: of its elements.
    ``state``: "packed", then "shard" (summed, this rank's) or "whole" (summed); or, by way of an exchange, "parts" (of
    every other rank), "parts of 4" (ranks: seen as a matrix), "others of 4" (their sum), "own of 4" (this rank's part),
    and "shard of 4".
    ``narrowed``: it was cast to its parameters' dtype, and that is narrower.
    ``replicas``: over how many replicas it was summed.
    ``divided``: of that sum, this is this rank's part.
    ``of``: where it is a sum over a row on its way through a reduction over the replicas: that sum.
    """

    parts: tuple[Part, ...]
    numel: int
    dtype: torch.dtype
    state: str = "packed"
    scale: float = 1.0
    narrowed: bool = False
    replicas: int = 1
    divided: bool = False
    of: Pack | None = None


@dataclass(frozen=True)
class Share:
    """A view of a reduced `Pack`: a tensor of ``shape`` from ``offset`` on, row-major."""

    pack: Pack
    offset: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Started:
    """A collective under way: ``yields`` is what waiting for it yields: a `Flat`, a `Pack`, or a fact of a feature."""

    start: Node
    yields: Any
