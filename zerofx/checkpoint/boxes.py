"""A rank's slice of a flattened parameter as rectangles, which is what checkpoints are made of.

A rank holds elements ``start`` to ``stop`` of the parameter in row-major order. That is seldom one rectangle, but it
is never more than 2N − 1 of them for N dimensions, each contiguous in the slice::

    shape (4, 5), elements 3 to 17          . . . # #      offsets (0, 3), sizes (1, 2)    the end of a row
                                            # # # # #  ┐   offsets (1, 0), sizes (2, 5)    whole rows
                                            # # # # #  ┘
                                            # # . . .      offsets (3, 0), sizes (1, 2)    the begin of a row

The two ends are in turn slices of a tensor with one dimension less, from somewhere to the end and from the begin to
somewhere: at most N − 1 rectangles each. veScale's RaggedShard is cut in the same way (arXiv 2602.22437).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A rectangle of a tensor: ``offsets`` and ``sizes``, one of each per dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The rectangles that elements ``start`` up to ``stop`` of a tensor of ``shape`` make, in row-major order."""
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    rest = tuple(shape[1:])
    row = math.prod(rest)
    (first, begin), (last, end) = divmod(start, row), divmod(stop, row)
    if first == last:
        return _in_row(first, boxes(rest, begin, end))
    found = []
    if begin:
        found += _in_row(first, boxes(rest, begin, row))
        first += 1
    if first < last:
        found.append(Box((first, *[0] * len(rest)), (last - first, *rest)))
    return found + _in_row(last, boxes(rest, 0, end))


def _in_row(row: int, found: list[Box]) -> list[Box]:
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in found]
