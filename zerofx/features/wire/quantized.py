"""Weights travel quantized outside of graphs: `zerofx.runtime.ranks.quantized.Quantized`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from zerofx._torch import PythonWork, resolve_process_group
from zerofx.features.wire.operators import as_they_are, decode_into, encode, first_row, flattened, row_nbytes
from zerofx.kernels import wire
from zerofx.kernels.code import Code
from zerofx.model.layout import GroupLayout
from zerofx.model.wire import sent_whole
from zerofx.passes.travel import Travel


class QuantizedWeights:
    """Of one group."""

    def __init__(self, layout: GroupLayout, code: Code) -> None:
        self.code, self.whole = code, flattened(sent_whole(layout))

    def nbytes(self, numel: int, itemsize: int) -> int:
        """See `Quantized`."""
        return row_nbytes(numel, str(self.code), self.whole, itemsize)

    def gather_into(
        self, travel: Travel, out: torch.Tensor, shard: torch.Tensor, process_group: str, within: str = ""
    ) -> list[dist.Work]:
        """See `Quantized`."""
        sent = encode(shard, 1, str(self.code), self.whole, process_group, within)
        ranks = out.numel() // shard.numel()
        arrived = sent.new_empty(ranks * sent.numel())

        def read() -> None:
            decode_into(out.detach(), arrived, ranks, self.code, self.whole, first_row(process_group, within))

        return [_Reading(read, travel.gather_into(arrived, sent, process_group))]

    def gather_changes_into(
        self, travel: Travel, out: torch.Tensor, shard: torch.Tensor, process_group: str
    ) -> list[dist.Work]:
        """See `Quantized`. ``out`` is the same on all ranks, and stays so.

        What an addition leaves between it and the shards is in the next change.
        """
        rank, numel = resolve_process_group(process_group).rank(), shard.numel()
        high = torch.promote_types(shard.dtype, torch.float32)
        own = out.detach().view(-1, numel)[rank]
        sent = encode((shard.to(high) - own.to(high)).to(out.dtype), 1, str(self.code), self.whole, process_group)
        for where, part in as_they_are(sent, rank, numel, self.code, self.whole, out.dtype):
            part.copy_(shard[where])
        ranks = out.numel() // numel
        arrived = sent.new_empty(ranks * sent.numel())

        def read() -> None:
            rows = out.detach().view(ranks, -1)
            codes = arrived.view(ranks, -1)
            wire.add(codes, self.code, rows)
            for row in range(ranks):
                for where, part in as_they_are(codes[row], row, numel, self.code, self.whole, out.dtype):
                    rows[row, where] = part

        return [_Reading(read, travel.gather_into(arrived, sent, process_group))]


class _Reading(PythonWork):
    """The end of a gather of codes: waits for them, and reads them."""

    def __init__(self, read: Callable[[], None], works: list[dist.Work]) -> None:
        super().__init__()
        self._works = works
        self._read: Callable[[], None] | None = read

    def wait(self, timeout: Any = None) -> bool:
        """Returns when what was sent is read."""
        with self.ending(), torch.no_grad():
            for work in self._works:
                work.wait()
            if self._read is not None:
                self._read()
            self._works, self._read = [], None
            return True
