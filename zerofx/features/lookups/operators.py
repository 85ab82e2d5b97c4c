"""The operators behind `lookup`: one picks rows from a shard, one adds up what rows are given.

A shard is any part of a flat buffer, so it may begin and end inside of
a row; a row that two ranks have in part is the sum of what each says of it:

==========================================================  ========================================================
``zerofx.own_rows(shard, indices, offset, length, width,    ``[len(indices) * width]``: what this rank's ``shard`` has
group)``                                                    of these rows of the table that lies at ``offset``, and
                                                            zeros for what others have
``zerofx.sum_rows(rows, indices, offset, length, width,     ``[shard_numel]``: the sum of ``rows`` for each row of the
padding_idx, shard_numel, group)``                          table, as far as it lies in this rank's shard; an index
                                                            that is ``padding_idx`` adds nothing
==========================================================  ========================================================
"""

from __future__ import annotations

import torch

from zerofx._torch import resolve_process_group

_library = torch.library.Library("zerofx", "FRAGMENT")
_library.define(
    "own_rows(Tensor shard, Tensor indices, int offset, int length, int width, str process_group) -> Tensor"
)
_library.define(
    "sum_rows(Tensor rows, Tensor indices, int offset, int length, int width, int padding_idx, int shard_numel, "
    "str process_group) -> Tensor"
)


class _Piece:
    """What this rank's shard has of a table of ``length`` rows of ``width`` elements at ``offset``, in whole rows.

    ::

        flat buffer   |        rank 0        |        rank 1        |
        table               [ row 0 | row 1 | row 2 | row 3 ]
        rank 1's piece                [ row 1 ...      row 3 ]    rows first to last, ``before`` elements of rank 0's
    """

    def __init__(self, offset: int, length: int, width: int, shard_numel: int, process_group: str) -> None:
        at = resolve_process_group(process_group).rank() * shard_numel - offset
        begin, end = max(at, 0), min(at + shard_numel, length * width)
        self.empty = begin >= end
        self.first, self.last = begin // width, -(-end // width)
        self.start, self.numel = begin - at, end - begin
        """Of the piece in the shard."""
        self.before, self.behind = begin - self.first * width, self.last * width - end

    def local(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``indices`` counted from the first row here; and which of them are here."""
        local = indices - self.first
        return local, (local >= 0) & (local < self.last - self.first)


def _own_rows(
    shard: torch.Tensor, indices: torch.Tensor, offset: int, length: int, width: int, process_group: str
) -> torch.Tensor:
    _check_indices(indices, length)
    piece = _Piece(offset, length, width, shard.numel(), process_group)
    if piece.empty or not indices.numel():
        return shard.new_zeros(indices.numel() * width)
    table = shard.narrow(0, piece.start, piece.numel)
    if piece.before or piece.behind:
        table = torch.nn.functional.pad(table, (piece.before, piece.behind))
    local, here = piece.local(indices)
    table = table.view(-1, width)
    rows = table.index_select(0, local.clamp(0, len(table) - 1))
    return rows.masked_fill_(~here.unsqueeze(1), 0).view(-1)


def _check_indices(indices: torch.Tensor, length: int) -> None:
    """What `embedding` refuses, refused on every rank: all see all indices."""
    if not indices.numel():
        return
    smallest, largest = indices.aminmax()
    message = f"an index into an embedding of {length} rows is out of range: expected 0 to {length - 1}, on every rank."
    if indices.device.type != "cpu":
        torch._assert_async((smallest >= 0) & (largest < length), message)
    elif smallest < 0 or largest >= length:
        raise IndexError(f"{message} Found {int(smallest if smallest < 0 else largest)}.")


def _sum_rows(
    rows: torch.Tensor,
    indices: torch.Tensor,
    offset: int,
    length: int,
    width: int,
    padding_idx: int,
    shard_numel: int,
    process_group: str,
) -> torch.Tensor:
    piece = _Piece(offset, length, width, shard_numel, process_group)
    if piece.empty:
        return rows.new_zeros(shard_numel)
    ahead = max(0, piece.before - piece.start)  # of the shard, where its first row begins in another's
    behind = max(0, piece.start + piece.numel + piece.behind - shard_numel)
    flat = rows.new_zeros(ahead + shard_numel + behind)
    table = flat.narrow(0, ahead + piece.start - piece.before, (piece.last - piece.first) * width).view(-1, width)
    local, here = piece.local(indices)
    added = rows.view(-1, width).masked_fill((~here | (indices == padding_idx)).unsqueeze(1), 0)
    table.index_put_((local.clamp(0, len(table) - 1),), added, accumulate=True)  # in the order of indices, on a GPU too
    return flat.narrow(0, ahead, shard_numel)


def _rows_like(
    shard: torch.Tensor, indices: torch.Tensor, offset: int, length: int, width: int, process_group: str
) -> torch.Tensor:
    return shard.new_empty(indices.numel() * width)


def _sums_like(
    rows: torch.Tensor,
    indices: torch.Tensor,
    offset: int,
    length: int,
    width: int,
    padding_idx: int,
    shard_numel: int,
    process_group: str,
) -> torch.Tensor:
    return rows.new_empty(shard_numel)


for _name, _run, _shape in (("own_rows", _own_rows, _rows_like), ("sum_rows", _sum_rows, _sums_like)):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    _library.impl(_name, _shape, "Meta")

OWN_ROWS, SUM_ROWS = torch.ops.zerofx.own_rows.default, torch.ops.zerofx.sum_rows.default
