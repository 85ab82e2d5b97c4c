"""Buffers in codes (`zerofx.kernels.wire`): four operators, and a gather outside of graphs.

====================================================  =================================================================
``quantize(flat, rows, code, whole, group, within)``  uint8 ``[rows * B]``: each row of ``flat``
``dequantize(wire, rows, numel, code, whole, …)``     ``[rows * numel]`` of ``dtype``: what was quantized
``sum_quantized(pack, arrived, numel, code, …)``      float32 ``[numel]``: the sum over ranks of this rank's row of
                                                      their packs, in rank order
``sum_replicas_quantized(wire, rows, numel, …)``      float32 ``[numel]``: the sum of rows that all are of this rank's
                                                      part, in rank order
====================================================  =================================================================

A row is one rank's part of a flat buffer: a shard, which is this rank's, or a row of a pack for each rank. Its B bytes
are codes, scales, and the elements that are sent as they are::

    [ codes of all blocks │ scales of all blocks │ elements of small parameters │ what is left ]

Codes and scales of one part are in one buffer, so a scale cannot be parted from its codes. ``whole`` are the ranges of
`zerofx.model.wire.sent_whole`, each as two numbers. They count from the beginning of the flat buffer. Every row has
room for as many such elements as the row that has most of them. (They have codes too, which nobody reads.)

``within`` is for a mesh of two dimensions. There ``flat`` is a part of the buffer, divided over a column (``group``):
the part with the number that this rank has in its row, the process group ``within``. "": ``flat`` is the buffer.

``sum_quantized`` takes the others' rows from ``arrived``, with or without this rank's own, and its own from ``pack``:
what does not travel loses nothing. So ``quantize`` leaves this rank's own row of a pack unwritten.
``sum_replicas_quantized`` reads what this rank has sent, too: all ranks get one sum, bit by bit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from zerofx._torch import resolve_process_group
from zerofx.kernels import wire
from zerofx.kernels.code import ALIGNMENT, Code

_library = torch.library.Library("zerofx", "FRAGMENT")
_library.define("quantize(Tensor flat, int rows, str code, int[] whole, str process_group, str within='') -> Tensor")
_library.define(
    "dequantize(Tensor wire, int rows, int numel, str code, int[] whole, ScalarType dtype, str process_group='',"
    " str within='') -> Tensor"
)
_library.define(
    "sum_quantized(Tensor pack, Tensor arrived, int numel, str code, int[] whole, str process_group, str within='')"
    " -> Tensor"
)
_library.define(
    "sum_replicas_quantized(Tensor arrived, int rows, int numel, str code, int[] whole, ScalarType dtype,"
    " str process_group) -> Tensor"
)


def flattened(ranges: Iterable[range]) -> list[int]:
    """Ranges as the operators take them."""
    return [end for each in ranges for end in (each.start, each.stop)]


@functools.lru_cache(maxsize=4096)
def _by_row(whole: tuple[int, ...], numel: int) -> dict[int, list[slice]]:
    """The ranges as rows of ``numel`` elements have them. It follows from the layout, and every step asks for it."""
    found: dict[int, list[slice]] = {}
    for start, stop in zip(whole[::2], whole[1::2], strict=True):
        while start < stop:
            row, at = divmod(start, numel)
            length = min(stop - start, numel - at)
            found.setdefault(row, []).append(slice(at, at + length))
            start += length
    return found


def row_nbytes(numel: int, code: str, whole: Sequence[int], itemsize: int) -> int:
    """Bytes of a row of ``numel`` elements of ``itemsize``."""
    rows = _by_row(tuple(whole), numel).values()
    elements = max((sum(x.stop - x.start for x in ranges) for ranges in rows), default=0)
    return -(-(Code.of(code).nbytes(numel) + elements * itemsize) // ALIGNMENT) * ALIGNMENT


def as_they_are(
    sent: torch.Tensor, row: int, numel: int, code: Code, whole: Sequence[int], dtype: torch.dtype
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Where elements of row number ``row`` travel as they are, and the views of ``sent``, its bytes, where they do."""
    at = code.nbytes(numel)
    for where in _by_row(tuple(whole), numel).get(row, ()):
        end = at + (where.stop - where.start) * dtype.itemsize
        yield where, sent[at:end].view(dtype)
        at = end


def others_rows(rank: int, rows: int) -> list[slice]:
    """The rows of a pack that travel: those before this rank's own, and those after it."""
    return [part for part in (slice(0, rank), slice(rank + 1, rows)) if part.start < part.stop]


def first_row(process_group: str, within: str) -> int:
    """Of the rows that ``process_group`` has in a buffer, the number of the first."""
    return resolve_process_group(within).rank() * resolve_process_group(process_group).size() if within else 0


@torch.no_grad()
def encode(
    flat: torch.Tensor,
    rows: int,
    code: str,
    whole: Sequence[int],
    process_group: str,
    within: str = "",
) -> torch.Tensor:
    parts, how = flat.detach().view(rows, -1), Code.of(code)
    numel = parts.shape[1]
    nbytes = row_nbytes(numel, code, whole, flat.dtype.itemsize)
    out = flat.new_empty(rows, nbytes, dtype=torch.uint8)
    rank, first = resolve_process_group(process_group).rank(), first_row(process_group, within)
    if rows == 1:
        wire.encode(parts, how, out)
    else:
        for others in others_rows(rank, rows):
            wire.encode(parts[others], how, out[others])
    for i, part in enumerate(parts):
        row = first + (rank if rows == 1 else i)
        for where, sent in as_they_are(out[i], row, numel, how, whole, flat.dtype):
            sent.copy_(part[where])
    return out.view(-1)


@torch.no_grad()
def _decode(
    arrived: torch.Tensor,
    rows: int,
    numel: int,
    code: str,
    whole: Sequence[int],
    dtype: torch.dtype,
    process_group: str = "",
    within: str = "",
) -> torch.Tensor:
    out = arrived.new_empty(rows * numel, dtype=dtype)
    decode_into(out, arrived, rows, Code.of(code), whole, first_row(process_group, within))
    return out


def decode_into(
    out: torch.Tensor, arrived: torch.Tensor, rows: int, code: Code, whole: Sequence[int], first: int = 0
) -> None:
    """`zerofx.dequantize` into memory that is there: of ``rows`` rows from number ``first`` on."""
    out, read = out.view(rows, -1), arrived.view(rows, -1)
    wire.decode(read, code, out)
    for row in range(rows):
        for where, sent in as_they_are(read[row], first + row, out.shape[1], code, whole, out.dtype):
            out[row, where] = sent


@torch.no_grad()
def _sum_quantized(
    pack: torch.Tensor,
    arrived: torch.Tensor,
    numel: int,
    code: str,
    whole: Sequence[int],
    process_group: str,
    within: str = "",
) -> torch.Tensor:
    how, rank = Code.of(code), resolve_process_group(process_group).rank()
    mine = first_row(process_group, within) + rank
    own = pack.detach().view(-1, numel)
    read = list(arrived.view(-1, row_nbytes(numel, code, whole, pack.dtype.itemsize)))
    if len(read) < len(own):
        read.insert(rank, read[0])  # its place alone
    total = torch.zeros(1, numel, dtype=torch.float32, device=pack.device)
    for other, row in enumerate(read):
        if other == rank:
            total += own[rank]
            continue
        _add_row(total, row, mine, how, whole, pack.dtype)
    return total[0]


@torch.no_grad()
def _sum_replicas_quantized(
    arrived: torch.Tensor,
    rows: int,
    numel: int,
    code: str,
    whole: Sequence[int],
    dtype: torch.dtype,
    process_group: str,
) -> torch.Tensor:
    how, mine = Code.of(code), resolve_process_group(process_group).rank()
    total = torch.zeros(1, numel, dtype=torch.float32, device=arrived.device)
    for row in arrived.view(rows, -1):
        _add_row(total, row, mine, how, whole, dtype)
    return total[0]


def _add_row(
    total: torch.Tensor, row: torch.Tensor, number: int, how: Code, whole: Sequence[int], dtype: torch.dtype
) -> None:
    """Add what was sent to ``total``, float32 [1, numel]: a row with this ``number`` in the buffer."""
    sums = [(where, total[0, where] + x) for where, x in as_they_are(row, number, total.shape[1], how, whole, dtype)]
    wire.add(row.unsqueeze(0), how, total)
    for where, value in sums:
        total[0, where] = value


def encoded(flat: torch.Tensor, rows: int, code: str, whole: Sequence[int], *over: str) -> torch.Tensor:
    """The shape of the result of `zerofx.quantize`, and of `zerofx.quantize_with_rest`."""
    nbytes = row_nbytes(flat.numel() // rows, code, whole, flat.dtype.itemsize)
    return flat.new_empty(rows * nbytes, dtype=torch.uint8)


def _decoded(
    arrived: torch.Tensor,
    rows: int,
    numel: int,
    code: str,
    whole: Sequence[int],
    dtype: torch.dtype,
    *over: str,
) -> torch.Tensor:
    return arrived.new_empty(rows * numel, dtype=dtype)


def _summed(pack: torch.Tensor, arrived: torch.Tensor, numel: int, *description: Any) -> torch.Tensor:
    return pack.new_empty(numel, dtype=torch.float32)


def _sent_summed(arrived: torch.Tensor, rows: int, numel: int, *description: Any) -> torch.Tensor:
    return arrived.new_empty(numel, dtype=torch.float32)


for _name, _run, _shape in (
    ("quantize", encode, encoded),
    ("dequantize", _decode, _decoded),
    ("sum_quantized", _sum_quantized, _summed),
    ("sum_replicas_quantized", _sum_replicas_quantized, _sent_summed),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    _library.impl(_name, _shape, "Meta")
