"""Weights that a row of the mesh holds whole, and of which all rows share the optimizer's work (``optimizer="all"``).

::

    flat buffer         |        column 0         |        column 1         |       R x S = 2 x 2
    row copy            | replica 0  | replica 1  | replica 0  | replica 1  |
                        rank 0: #########################                           what graphs gather from, in its row
                        rank 2: #########################
    shard               rank 0: ############                                        what a rank's optimizer updates
                        rank 2:             #############

A rank owns its shard, 1/(R S) of the buffer, and has a copy of what its column owns together. After an optimizer's step
the copies are refreshed, each column by itself, as the replicas of stages 1 and 2 are: the gathers start before the
forward that reads them, and the graph waits for each where it is read first.

Where weights travel between rows in codes (``Wire(weights=..., between="nodes")``), the copy has what was sent, and the
shard is a tensor of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from zerofx.kernels.code import Code
from zerofx.model.layout import GroupLayout
from zerofx.passes.pairwise import under_way
from zerofx.runtime.ranks.sharing import Sharing
from zerofx.runtime.ranks.watch import alone
from zerofx.runtime.state.weights import Weights

_wait = torch.ops._c10d_functional.wait_tensor


class RowCopy(Weights):
    """Stage 3: a rank has its shard, inside of a copy of what its column has."""

    gathers = True

    def __init__(self, layout: GroupLayout, sharing: Sharing, *rest: Any) -> None:
        assert sharing.replicas is not None
        self.column = sharing.replicas
        super().__init__(layout, sharing, *rest)

    def _make(self, memory: torch.Tensor | None) -> None:
        layout = self.layout
        numel = replace(layout, world_size=self.ranks.size).shard_numel
        self.copy = torch.zeros(numel, dtype=layout.dtype, device=self.device)
        if self.home.away or self.code is not None:
            self.shard = self.home.new("weights", layout.shard_numel, layout.dtype, self.device)
        else:  # .data: with a version counter of its own, which counts the optimizer's writes and not the refresh's
            self.shard = self.copy.data.narrow(0, self.column.rank * layout.shard_numel, layout.shard_numel)

    @classmethod
    def takes(cls, stage: int, one_copy: bool, sharing: Sharing | None = None) -> bool:
        return stage == 3 and sharing is not None and sharing.divides_between and not sharing.two_hops

    def shortened_by(self, code: Code) -> bool:
        return code.shortens(self.layout.dtype)

    @property
    def buffer(self) -> torch.Tensor:
        return self.copy

    def mark_fresh(self) -> None:
        self._refreshed = self.shard._version

    def _held(self) -> list[torch.Tensor]:
        return [self.copy, self.shard]

    def refresh(self, *, inside: bool = False) -> None:
        """Start to bring the copy up to date, if the shard was written since; ``wait_tensor`` of it waits for it.

        A collective, and the same decision on every rank, as in `zerofx.runtime.state.weights.Replicated`.
        """
        if self.shard._version != self._refreshed:
            with record_function(f"zerofx: refresh {self.layout.name}"), self.home.resident():
                self.ahead += self._start()
                self.mark_fresh()
        under_way(self.copy, self.ahead)
        self.ahead = []

    def _start(self) -> list[dist.Work]:
        name, nbytes = self.layout.name, self.copy.nbytes
        with alone(self.column.name, "refresh", "all-gather", name, nbytes, self.shard.dtype):
            if self.quantized is None:
                return self.travel.gather_into(self.copy, self.shard, self.column.name)
            return self.quantized.gather_into(self.travel, self.copy, self.shard, self.column.name, self.ranks.name)

    def _gather_into(self, out: torch.Tensor, where: str) -> list[dist.Work]:
        self.refresh()
        mine = _wait(self.copy).to(out.dtype)
        if self.ranks.size == 1:
            out.copy_(mine)
            return []
        with alone(self.ranks.name, where, "all-gather", self.layout.name, self.nbytes, mine.dtype):
            return self.travel.gather_into(out, mine, self.ranks.name)
