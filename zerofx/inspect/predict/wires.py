"""What codes on the wire (`zerofx.Wire`) change of a plan: bytes of an element that travels, seconds to write and read.

Bytes are those of rows, scales and small parameters included, over the elements of all groups. Seconds are those of the
memory traffic: codes are written and read at its speed (`zerofx.kernels.wire`). Per gather a rank reads its part of N
elements and writes the codes, then reads all ranks' and writes the buffer. Per reduction it writes codes for all but
its own part, and reads one part of every other rank, which it adds up in float32::

    gather       N/M (w + s) + N (s + w)             w, g: bytes of an element where it is; s: where it travels
    reduction    (M - 1)/M N (g + s + s + 8) + N/M (g + 8)

On a mesh (``between="nodes"``), of N/S elements that a row of S ranks has reduced, or that R rows have updated::

    sum over replicas       N/S (g + s) + R N/S (s + 8)
    a part of it            (R - 1)/R N/S (g + s + s + 8) + N/(R S) (g + 8)
    what was updated        N/(R S) (m + s) + N/S (s + m)
    the first of two hops   N/(R S) (w + s) + N/S (s + w)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from sympy import Float

from zerofx.inspect.predict.cost import Sizes
from zerofx.kernels.code import Code
from zerofx.model.layout import GroupLayout
from zerofx.model.sharding import Sharding
from zerofx.model.wire import Wire
from zerofx.runtime.ranks.quantized import quantized


@dataclass(frozen=True)
class Coded:
    """Of one stage: what travels, and how many bytes of memory that costs.

    Attributes:
        sizes: bytes of elements as they travel.
        gather, reduction: bytes that a rank reads and writes for the codes of one, of all groups.
    """

    sizes: Sizes
    gather: float = 0.0
    reduction: float = 0.0


def coded(layouts: list[GroupLayout], wire: Wire | None, sizes: Sizes, ranks: int) -> Coded:
    """With ``wire`` on ``ranks`` ranks; without it, or on one rank, all travels as it is."""
    if wire is None or ranks == 1:
        return Coded(sizes)
    numel, weights, gradients = sum(slot.numel for layout in layouts for slot in layout.slots), 0.0, 0.0
    for layout in layouts:
        layout = replace(layout, world_size=ranks)
        weights += _row(layout, wire.weight_code, layout.weight_dtype) * ranks
        gradients += _row(layout, wire.gradient_code, layout.gradient_dtype or layout.dtype) * ranks
    w, g, gather, reduction = float(sizes.weight), float(sizes.gradient), 0.0, 0.0
    if (sent := weights / numel) < w:
        sizes, gather = replace(sizes, weight=Float(sent)), numel * (1 + 1 / ranks) * (w + sent)
    if (sent := gradients / numel) < g:
        others = (ranks - 1) * (g + 2 * sent + 8)
        sizes, reduction = replace(sizes, gradient=Float(sent)), numel / ranks * (others + g + 8)
    return Coded(sizes, gather, reduction)


def _row(layout: GroupLayout, code: Code | None, dtype: torch.dtype) -> int:
    """Bytes of one rank's part on the wire."""
    if code is None or not code.shortens(dtype):
        return layout.shard_numel * dtype.itemsize
    return quantized(layout, code).nbytes(layout.shard_numel, dtype.itemsize)


@dataclass(frozen=True)
class Crossing:
    """Of a mesh: bytes of an element as it crosses rows, and of memory for the codes of all groups.

    Attributes:
        weight, gradient: of an element that is gathered, or reduced.
        refreshed: of a weight that the rows have updated together.
        summed: of a gradient that all rows get the sum of: twice its (R - 1)/R is what a rank receives.
        gather, reduction, first: memory that one gather or reduction takes, or the first forward of a step.
    """

    weight: float
    gradient: float
    refreshed: float
    summed: float
    gather: float = 0.0
    reduction: float = 0.0
    first: float = 0.0


def crossing(
    layouts: list[GroupLayout],
    wire: Wire | None,
    sizes: Sizes,
    rows: int,
    ranks: int,
    sharding: Sharding,
) -> Crossing:
    """With ``wire`` on a mesh of ``rows`` rows of ``ranks`` ranks; without it all travels as it is."""
    w, g, m = map(float, (sizes.weight, sizes.gradient, sizes.master))
    plain = Crossing(w, g, m, g)
    if wire is None:
        return plain
    every = rows * ranks
    over_all = sharding.one_dimension or sharding.has_secondary
    if over_all and wire.between == "all":
        found = coded(layouts, wire, sizes, every)
        sent = float(found.sizes.weight), float(found.sizes.gradient)
        return replace(plain, weight=sent[0], gradient=sent[1], gather=found.gather, reduction=found.reduction)
    numel = sum(slot.numel for layout in layouts for slot in layout.slots)
    divided, shard = over_all or sharding.divides_optimizer, numel / ranks
    parts, updated, reduced = every if divided else ranks, 0.0, 0.0
    for layout in layouts:
        layout = replace(layout, world_size=parts)
        dtype = layout.weight_dtype if over_all else layout.dtype
        updated += _row(layout, wire.weight_code, dtype) * parts / numel
        reduced += _row(layout, wire.gradient_code, layout.gradient_dtype or layout.dtype) * parts / numel
    if reduced < g and divided:
        work = shard / rows * ((rows - 1) * (g + 2 * reduced + 8) + g + 8)
        plain = replace(plain, gradient=reduced, reduction=work)
    elif reduced < g:
        plain = replace(plain, summed=reduced * rows / 2, reduction=shard * (g + reduced + rows * (reduced + 8)))
    if over_all:
        if updated < w:
            plain = replace(plain, weight=updated, gather=shard * (1 + 1 / rows) * (w + updated))
    elif divided and updated < m:
        plain = replace(plain, refreshed=updated, first=shard * (1 + 1 / rows) * (m + updated))
    return plain
