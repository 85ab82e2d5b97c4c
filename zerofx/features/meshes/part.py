"""Weights of which each rank of a mesh keeps a part alone, 1/(R S), and gathers the rest in two hops.

::

    flat buffer         |        column 0         |        column 1         |       R x S = 2 x 2
    shard               rank 0: ############                                        all that is there at rest
                        rank 2:             #############
    first hop           rank 0: #########################                           along the column
    second hop          rank 0: ###################################################  in the row

It is stage 3 on all ranks. Graphs make the two hops themselves (`two_hop_gather`); here they are for code outside of
graphs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from zerofx.model.layout import GroupLayout
from zerofx.runtime.ranks.sharing import Sharing
from zerofx.runtime.ranks.watch import alone
from zerofx.runtime.state.weights import Weights


class Part(Weights):
    """Stage 3: a rank has its part of what its column has together."""

    gathers = True

    def __init__(self, layout: GroupLayout, sharing: Sharing, *rest: Any) -> None:
        assert sharing.replicas is not None
        self.column = sharing.replicas
        super().__init__(layout, sharing, *rest)

    def _make(self, memory: torch.Tensor | None) -> None:
        self.shard = self.home.new("weights", self.layout.shard_numel, self.layout.dtype, self.device)

    @classmethod
    def takes(cls, stage: int, one_copy: bool, sharing: Sharing | None = None) -> bool:
        return stage == 3 and sharing is not None and sharing.two_hops

    def _gather_into(self, out: torch.Tensor, where: str) -> list[dist.Work]:
        part, name = self.shard.to(out.dtype), self.layout.name
        in_row = out.new_empty(replace(self.layout, world_size=self.ranks.size).shard_numel)
        with alone(self.column.name, where, "all-gather", name, in_row.nbytes, part.dtype):
            for work in self._cross(in_row, part):
                work.wait()
        with alone(self.ranks.name, where, "all-gather", name, self.nbytes, part.dtype):
            return self.travel.gather_into(out, in_row, self.ranks.name)

    def _cross(self, out: torch.Tensor, part: torch.Tensor) -> list[dist.Work]:
        if self.quantized is None:
            return self.travel.gather_into(out, part, self.column.name)
        return self.quantized.gather_into(self.travel, out, part, self.column.name, self.ranks.name)
