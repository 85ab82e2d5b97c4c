"""Addresses for buffers of which it is known when each lives: two that live at once never overlap.

::

    time ─▶      a ├────────────┤                      0 ┌──────────┐
                 b     ├───┤            ─────▶           │ a        │ c, when a is gone
                 c                ├──────┤               ├──────────┤
                 d          ├───────┤                    │ b   │ d  (when b is gone)

Each is an interval of time and a number of bytes. Buffers whose intervals meet are neighbours, and addresses are their
colours: an interval colouring, or "dynamic storage allocation". The smallest frame is hard to find (it is NP-complete).
So several orders are tried, each buffer going into the lowest gap, or the smallest, that its neighbours have left. The
smallest frame wins. No frame is smaller than what is live at once.

It is deterministic, and takes as long as there are pairs of neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNED = 64
"""Bytes that each address is a multiple of: a line of a cache, which kernels for vectors may count on."""


@dataclass(frozen=True)
class Interval:
    """A buffer: when it is made, when it is used last, and its bytes."""

    first: int
    last: int
    nbytes: int

    @property
    def room(self) -> int:
        """Its bytes, rounded up."""
        return -(-self.nbytes // ALIGNED) * ALIGNED


def colour(intervals: Sequence[Interval]) -> tuple[list[int], int, int]:
    """Where each begins; the bytes of all; and the most that are live at once, which is the least that they could take.

    At one and the same time, a buffer that is made there and one that is used there last are both live.
    """
    neighbours, least = _neighbours(intervals)
    everyone = range(len(intervals))
    orders = (
        sorted(everyone, key=lambda i: (-intervals[i].room, intervals[i].first)),
        sorted(everyone, key=lambda i: (intervals[i].first, -intervals[i].room)),
        sorted(everyone, key=lambda i: (intervals[i].first - intervals[i].last, -intervals[i].room)),
        sorted(everyone, key=lambda i: (-intervals[i].last, -intervals[i].room)),
    )
    best: list[int] = []
    smallest = -1
    for order in orders:
        for fits_best in (True, False):
            if smallest == least:
                break
            starts = _placed(intervals, order, neighbours, fits_best)
            nbytes = max((start + each.room for start, each in zip(starts, intervals)), default=0)
            if smallest < 0 or nbytes < smallest:
                best, smallest = starts, nbytes
    return best, max(smallest, 0), least


def _neighbours(intervals: Sequence[Interval]) -> tuple[list[list[int]], int]:
    """Of each, who lives at the same time; and the most bytes that do."""
    found: list[list[int]] = [[] for _ in intervals]
    live: list[int] = []
    least = nbytes = 0
    for i in sorted(range(len(intervals)), key=lambda i: intervals[i].first):
        gone = [j for j in live if intervals[j].last < intervals[i].first]
        nbytes += intervals[i].room - sum(intervals[j].room for j in gone)
        live = [j for j in live if intervals[j].last >= intervals[i].first]
        for j in live:
            found[i].append(j)
            found[j].append(i)
        live.append(i)
        least = max(least, nbytes)
    return found, least


def _placed(
    intervals: Sequence[Interval], order: Sequence[int], neighbours: Sequence[Sequence[int]], fits_best: bool
) -> list[int]:
    """Where each begins, if they are placed in this order: in the smallest gap, or in the lowest."""
    starts = [-1] * len(intervals)
    for i in order:
        taken = sorted((starts[j], starts[j] + intervals[j].room) for j in neighbours[i] if starts[j] >= 0)
        room, end, gaps = intervals[i].room, 0, []
        for start, stop in taken:
            if start - end >= room:
                gaps.append((start - end if fits_best else 0, end))
            end = max(end, stop)
        starts[i] = min(gaps)[1] if gaps else end
    return starts
