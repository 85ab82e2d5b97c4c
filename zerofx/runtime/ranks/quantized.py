"""Weights that travel quantized outside of graphs: what `zerofx.features.wire` does for code that knows no graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from zerofx.kernels.code import Code
from zerofx.model.layout import GroupLayout
from zerofx.passes.travel import Travel


class Quantized(Protocol):
    """The weights of one group in one code. It knows what is sent as it is (`zerofx.model.wire.sent_whole`)."""

    def gather_into(
        self, travel: Travel, out: torch.Tensor, shard: torch.Tensor, process_group: str, within: str = ""
    ) -> list[dist.Work]:
        """Start to fill ``out`` with what every rank sends of its ``shard``, itself included; what to wait for.

        ``within``: name of the process group in which ``shard`` is itself divided.
        """

    def gather_changes_into(
        self, travel: Travel, out: torch.Tensor, shard: torch.Tensor, process_group: str
    ) -> list[dist.Work]:
        """The same, of how much each ``shard`` is from its part of ``out``, which is added to it."""

    def nbytes(self, numel: int, itemsize: int) -> int:
        """Of ``numel`` elements of so many bytes, as one rank sends them."""


QUANTIZED: list[Callable[[GroupLayout, Code], Quantized]] = []
"""Of the feature; empty where it is not there, and ``wire=`` is refused."""


def quantized(layout: GroupLayout, code: Code) -> Quantized:
    """The weights of ``layout``, as they travel in ``code``."""
    return QUANTIZED[0](layout, code)
