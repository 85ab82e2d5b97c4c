"""Measures a disk as `zerofx.AdamW` uses it: chunks read ahead, changed, and written behind.

::

    disk, reading    c0 c1 c2 c3 ...      `FILE` bytes, in the chunks, by the threads and the buffers
    one byte            c0 c1 c2 c3 ...   of `zerofx.runtime.optim.through_file`; changed, since what is
    disk, writing          c0 c1 c2 ...   as it was is not written

All ranks do so at once, so ranks that share a disk share what it can do. Checksums are part of it, and so is the
kernel's cache where a file system has no direct transfers.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch

from zerofx.runtime.optim.through_file import Batch, walk
from zerofx.runtime.ranks.sharing import RankGroup
from zerofx.runtime.state.raw_file import padded
from zerofx.runtime.state.state_file import CHUNK, OffloadError, Piece, StateFile

FILE = 1 << 26
"""Bytes of a rank's file; each is read once and written once in a run."""

RUNS = 3
"""The median of so many counts. One more comes first: it writes a file that has nothing yet."""


def seconds_per_byte(folder: Path, ranks: RankGroup) -> float:
    """Of a byte read or written, where as many are read as are written. A collective.

    Raises:
        OffloadError: on every rank, where one of them cannot make, read or write its file in ``folder``.
    """
    option = "zerofx.calibrate(path=)"
    file = ranks.all_or_none(option, lambda: StateFile(folder, ranks.rank, "calibrate", ranks), OffloadError)
    batches = ranks.all_or_none(option, lambda: _batches(file), OffloadError)
    times = [ranks.all_or_none(option, lambda: _pass(file, batches), OffloadError) for _ in range(1 + RUNS)]
    return statistics.median(times[1:]) / (2 * FILE)


def _batches(file: StateFile) -> list[Batch]:
    """Two moments of fp32 elements, chunk beside chunk."""
    moments = [torch.empty(FILE // 8) for _ in range(2)]
    extents = []
    for moment in moments:
        file.take(moment, fresh=True)
        extent = file.extent_of(moment)
        assert extent is not None
        extents.append(extent)
    made = []
    for i in range(-(-FILE // 8 // CHUNK)):
        pieces: list[Piece] = []
        nbytes = 0
        for extent in extents:
            pieces.append((extent, i, nbytes))
            nbytes += padded(extent.chunk(i)[1])
        made.append(Batch(pieces, nbytes=nbytes))
    return made


def _pass(file: StateFile, batches: list[Batch]) -> float:
    """Seconds in which all of the file passes through memory."""
    start = time.perf_counter()
    walk(file, batches, touch)
    return time.perf_counter() - start


def touch(batch: Batch, buffer: memoryview) -> None:
    """Change a byte of each chunk, so that it is written."""
    for _, _, at in batch.pieces:
        buffer[at] ^= 1
