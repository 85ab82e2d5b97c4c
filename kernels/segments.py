"""What a launch works through: tiles of flat runs, and the small tables through which host and kernels talk.

A flat run holds pieces of many parameters. A *segment* of it has one set of hyper-parameters and one step count: a row
of a table. Segments are cut into *tiles*, and a Triton program takes one tile, so neither parameter groups nor runs
need launches of their own::

    flat run     | attn.weight .................. | attn.bias ... | pad | norm ... |
    segments     |<------------ row 0 ----------->|<--- row 1 --->|     |<-row 1-->|
    tiles        |<- block ->|<- block ->|<- ... >|<--- ... ----->|     |<- ... -->|
    programs           0           1         2            3                   4

The law of tiles: every element of a segment lies in one tile, every other element in none; a tile is no longer than a
block and never empty; it starts on a multiple of ``ALIGNMENT`` elements, so that 16-byte loads are possible.

The tables, all on the shard's device, so that nothing of a step waits for the host:

=========  ===========  ================================================================================================
table      is           columns
=========  ===========  ================================================================================================
tiles      int64 T×4    start in the run, length, row of the next two, run (a row of ``runs.py``)
hyper      float64 R×8  lr, beta1, beta2, eps, weight_decay, 1 − beta1^t, sqrt(1 − beta2^t), sign (+1, or −1: maximize)
steps      float32 R    t, the updates that a row has had
control    float32 4    factor on every gradient, found_inf (0 or 1), norm of the unscaled gradients, spare
=========  ===========  ================================================================================================

Hyper-parameters are float64 as they are in Python: float32 would know 1 − 0.999 to five digits only, and the second
moment with it. A program reads eight numbers for thousands of elements, so their width costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

ALIGNMENT = 32
"""Elements. 128 bytes of float32, 64 of a 16-bit dtype: whole vector loads of either."""

BLOCK = 1024
"""Elements that a program works on at once: 8 for each of 128 threads, which is 16 bytes of a 16-bit dtype."""

HYPER_COLUMNS = (
    "lr",
    "beta1",
    "beta2",
    "eps",
    "weight_decay",
    "bias_correction1",
    "sqrt_bias_correction2",
    "sign",
)
TILE_COLUMNS = ("start", "length", "row", "run")
CONTROL_COLUMNS = ("gradient_factor", "found_inf", "total_norm", "spare")


def make_tiles(runs: Iterable[Iterable[tuple[int, int, int]]], block: int = BLOCK) -> torch.Tensor:
    """Cut runs, each some ``(start, length, row)`` segments, into tiles: an int64 CPU tensor [T, 4] of `TILE_COLUMNS`.

    Raises ValueError where segments of a run overlap, do not ascend or start off ``ALIGNMENT``; empty ones may stand
    anywhere.
    """
    if block <= 0 or block % ALIGNMENT:
        raise ValueError(f"block={block} must be a positive multiple of {ALIGNMENT} elements")
    segments = [(*segment, i) for i, run in enumerate(runs) for segment in _checked(run)]
    starts, lengths, rows, numbers = torch.tensor(segments, dtype=torch.int64).view(-1, 4).unbind(1)
    counts = (lengths + block - 1).div(block, rounding_mode="floor")
    of = torch.repeat_interleave(counts)  # the segment of each tile
    before = (torch.arange(len(of)) - (counts.cumsum(0) - counts)[of]) * block  # of its segment, elements ahead of it
    return torch.stack([starts[of] + before, (lengths[of] - before).clamp(max=block), rows[of], numbers[of]], dim=1)


def _checked(run: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Those that are not empty."""
    end = 0
    for start, length, row in run:
        if length < 0 or row < 0:
            raise ValueError(f"segment ({start}, {length}, {row}): no length and no row is negative")
        if not length:
            continue
        if start < end or start % ALIGNMENT:
            raise ValueError(
                f"segment ({start}, {length}, {row}) overlaps, descends or starts off {ALIGNMENT} elements"
            )
        end = start + length
        yield start, length, row
