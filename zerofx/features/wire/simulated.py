"""What a simulated step has to know of what is quantized."""

from __future__ import annotations

import torch

from zerofx.features.wire.facts import wire_of
from zerofx.features.wire.quantized import QuantizedWeights
from zerofx.model.layout import GroupLayout
from zerofx.passes.context import Context
from zerofx.simulate.asked import Simulated


def _sent(ctx: Context, layout: GroupLayout, replica: torch.Tensor, ranks: int, between: bool) -> int | None:
    wire = wire_of(ctx).between if between else wire_of(ctx).inside
    code = None if wire is None else wire.weight_code
    if code is None or not code.shortens(replica.dtype):
        return None
    return ranks * QuantizedWeights(layout, code).nbytes(replica.numel() // ranks, replica.dtype.itemsize)


SIMULATED = Simulated(sent=_sent)
