"""What codes on the wire (`zerofx.Wire`) change of a plan: bytes of an element that travels, seconds to write and read.

Bytes are those of rows, scales and small parameters included, over the elements of all groups. Seconds are those of the
memory traffic: codes are written and read at its speed (`zerofx.kernels.wire`). Per gather a rank reads its part of N
elements and writes the codes, then reads all ranks' and writes the buffer. Per reduction it writes codes for all but
its own part, and reads one part of every other rank, which it adds up in float32::

    gather       N/M (w + s) + N (s + w)             w, g: bytes of an element where it is; s: where it travels
    reduction    (M - 1)/M N (g + s + s + 8) + N/M (g + 8)

Between R replicas (``between="nodes"``) a rank sends its N/M elements to each of the others, and adds up what all have
sent, itself included: N/M (R - 1) s bytes travel, where an all-reduce takes 2 (R - 1)/R N/M g::

    sum          N/M (g + s) + R N/M (s + 8)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from sympy import Float

from zerofx.inspect.predict.cost import Sizes
from zerofx.kernels.code import Code
from zerofx.model.layout import GroupLayout
from zerofx.model.precision import MixedPrecision
from zerofx.model.wire import Wire, sent_whole
from zerofx.passes.coded import flattened, row_nbytes
from zerofx.runtime.ranks.sharing import Sharing


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


def coded(
    layouts: list[GroupLayout], wire: Wire | None, sizes: Sizes, precision: MixedPrecision | None, sharing: Sharing
) -> Coded:
    """With ``wire`` on the ranks of ``sharing``; without it, or on one rank, all travels as it is."""
    ranks, replicas = sharing.weights.size, 1 if sharing.replicas is None else sharing.replicas.size
    if wire is None or (ranks == 1 if wire.between == "all" else replicas == 1):
        return Coded(sizes)
    precision = precision or MixedPrecision()
    numel, weights, gradients = sum(slot.numel for layout in layouts for slot in layout.slots), 0.0, 0.0
    for layout in layouts:
        layout = replace(layout, world_size=ranks)
        weight = precision.param_dtype or layout.dtype
        gradient = precision.reduce_dtype or weight
        weights += _row(layout, wire.weight_code, weight) * ranks
        gradients += _row(layout, wire.gradient_code, gradient) * ranks
    if replicas > 1:
        sent, g = gradients / numel, float(sizes.gradient)
        if sent >= g:
            return Coded(sizes)
        added = numel / ranks * (g + sent + replicas * (sent + 8))
        return Coded(replace(sizes, between=Float(sent * replicas / 2)), reduction=added)
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
    return row_nbytes(layout.shard_numel, str(code), flattened(sent_whole(layout)), dtype.itemsize)
