"""What a simulated step has to know of what is quantized."""

from __future__ import annotations

import torch

from zerofx.features.wire.facts import wire_of
from zerofx.features.wire.operators import flattened, row_nbytes
from zerofx.model.layout import GroupLayout
from zerofx.model.wire import sent_whole
from zerofx.passes.context import Context
from zerofx.simulate.asked import Simulated


def _sent(ctx: Context, layout: GroupLayout, replica: torch.Tensor, ranks: int, between: bool) -> int | None:
    wire = wire_of(ctx).between if between else wire_of(ctx).inside
    code = None if wire is None else wire.weight_code
    if code is None or not code.shortens(replica.dtype):
        return None
    whole, part = flattened(sent_whole(layout)), replica.numel() // ranks
    return ranks * row_nbytes(part, str(code), whole, replica.dtype.itemsize)


SIMULATED = Simulated(sent=_sent)
