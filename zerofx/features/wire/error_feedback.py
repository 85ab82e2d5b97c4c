"""Gradients in codes whose rest is kept: what a code cut off is added to the next gradient of the same rank.

::

    rest += pack                      the others' rows; this rank's own does not travel, but where it is the only one
    rows  = encode(rest)
    rest -= decode(rows)              0 where that is not finite, and where elements travel as they are

``zerofx.quantize_with_rest(pack, rows, code, whole, process_group, group, within)`` is ``zerofx.quantize`` of a pack,
and does that. The rest is state of the group named ``group``: float32, a row for each that travels. Whoever runs the
graph has it (`feeding`). Error feedback: Seide et al. 2014; Karimireddy et al. 2019.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from zerofx._torch import resolve_process_group
from zerofx.features.wire.operators import as_they_are, encoded, first_row, others_rows, row_nbytes
from zerofx.kernels import wire
from zerofx.kernels.code import Code

_library = torch.library.Library("zerofx", "FRAGMENT")
_library.define(
    "quantize_with_rest(Tensor pack, int rows, str code, int[] whole, str process_group, str group, str within=''"
    ") -> Tensor"
)


class Keeper(Protocol):
    """Who has the rests of a graph's groups."""

    def rest(self, group: str, rows: int, numel: int) -> torch.Tensor:
        """Float32, [rows, numel]: zeros at first, and afterwards what was written to it."""


_here = threading.local()


@contextlib.contextmanager
def feeding(keeper: Keeper) -> Iterator[None]:
    """A graph runs inside, in this thread, and ``keeper`` has its groups' rests."""
    before, _here.keeper = getattr(_here, "keeper", None), keeper
    try:
        yield
    finally:
        _here.keeper = before


@torch.no_grad()
def _quantize_with_rest(
    pack: torch.Tensor,
    rows: int,
    code: str,
    whole: Sequence[int],
    process_group: str,
    group: str,
    within: str = "",
) -> torch.Tensor:
    keeper: Keeper | None = getattr(_here, "keeper", None)
    if keeper is None:
        raise RuntimeError(
            f"zerofx.quantize_with_rest of group {group!r} outside of a backward: nobody has what was cut off before. "
            "Run the graph as that backward does."
        )
    parts, how, rank = pack.detach().view(rows, -1), Code.of(code), resolve_process_group(process_group).rank()
    numel, alone, first = parts.shape[1], rows == 1, first_row(process_group, within)
    rest = keeper.rest(group, 1 if alone else rows - 1, numel)
    nbytes = row_nbytes(numel, code, whole, pack.dtype.itemsize)
    out = pack.new_empty(rows, nbytes, dtype=torch.uint8)
    for others in [slice(0, 1)] if alone else others_rows(rank, rows):
        before = int(others.start > rank)  # this rank's own row, which has no rest
        mine = rest[others.start - before : others.stop - before]
        mine += parts[others]
        wire.encode(mine, how, out[others])
        wire.subtract(out[others], how, mine)
        mine.nan_to_num_(0, 0, 0)
    for row in [0] if alone else [row for row in range(rows) if row != rank]:
        for where, sent in as_they_are(out[row], first + (rank if alone else row), numel, how, whole, pack.dtype):
            sent.copy_(parts[row, where])
            rest[row - (row > rank), where] = 0
    return out.view(-1)


_library.impl("quantize_with_rest", _quantize_with_rest, "CompositeExplicitAutograd")
_library.impl("quantize_with_rest", encoded, "Meta")
