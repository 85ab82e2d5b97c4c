"""What a code on the wire is: its name, its block, and where codes and scales lie in a row of bytes.

`zerofx.kernels.wire` has the table of codes and the formulas, `zerofx.kernels.quantize` the same in Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Name = Literal["bf16", "fp8", "int8", "int4"]

TINY = 2.0**-100
"""A block whose largest magnitude is below it is taken for zeros, lest a factor overflow."""

LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}
"""The largest code; both signs have it."""

ALIGNMENT = 16
"""Bytes: every row is a multiple of it, so that parts of any dtype can stand after it."""


@dataclass(frozen=True)
class Code:
    """How elements are written.

    Attributes:
        name: see the table of `zerofx.kernels.wire`.
        block: elements that share a scale; even.
        stochastic: how int8 and int4 are rounded.
    """

    name: Name
    block: int = 256
    stochastic: bool = False

    def __str__(self) -> str:
        return f"{self.name}/{self.block}" + "?" * self.stochastic

    @staticmethod
    def of(text: str) -> Code:
        """What ``str`` made text of."""
        name, _, block = text.rstrip("?").partition("/")
        return Code(name, int(block), text.endswith("?"))  # type: ignore[arg-type]

    def shortens(self, dtype: torch.dtype) -> bool:
        """Whether elements of ``dtype`` take fewer bytes so."""
        return dtype.is_floating_point and self.payload(2) < 2 * dtype.itemsize

    def payload(self, numel: int) -> int:
        """Bytes of the codes of ``numel`` elements."""
        return numel * {"bf16": 16, "fp8": 8, "int8": 8, "int4": 4}[self.name] // 8

    def nbytes(self, numel: int) -> int:
        """Bytes of a row of ``numel`` elements, which are whole blocks: codes and scales."""
        scales = 0 if self.name == "bf16" else numel // self.block * 4
        return -(-(self.payload(numel) + scales) // ALIGNMENT) * ALIGNMENT

    def parts(self, wire: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of ``wire``, [rows, at least `nbytes`]: codes [rows, blocks, bytes of a block], and scales [..., 1]."""
        rows, blocks, payload = wire.shape[0], numel // self.block, self.payload(numel)
        codes = wire[:, :payload].unflatten(1, (blocks, payload // blocks))
        if self.name == "bf16":
            return codes, wire.new_empty(rows, blocks, 1, dtype=torch.float32)
        return codes, wire[:, payload : payload + 4 * blocks].view(torch.float32).unsqueeze(2)
