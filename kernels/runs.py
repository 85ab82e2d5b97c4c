"""Where a launch finds the runs that it works through: a row of addresses for each.

A launch of its own for each run costs the host some 50 microseconds, more than the GPU takes for a few million
elements. So one launch does all runs of a *kind*, and reads from a table where their buffers begin::

    Buffers(param, exp_avg, ...)     a span: its flat buffers, whose dtypes and lengths are checked once
         │ row(start, ...)
         ▼
    runs   | param  grad  exp_avg ... | a row per run: addresses where it starts      ──▶ one launch
    tiles  | start  length  row  run  | `zerofx.kernels.segments`

=====================  =======================================================================================
column                 is
=====================  =======================================================================================
param, grad            addresses of the run's first element, in bytes; the same for the moments and the master
exp_avg, exp_avg_sq
exp_avg_scales,        addresses of the scale of its first block; 0 where moments are no codes
exp_avg_sq_scales
master                 0 where there is none
position               where its first element stands among all that share its seed
seed                   the index of its seed
=====================  =======================================================================================

The table is int64 [N, 9], on the device. Nothing in it keeps memory alive: whoever makes it holds the tensors until the
kernel is launched, and frees them after it on the same stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from zerofx.kernels import blockwise

RUN_COLUMNS = (
    "param",
    "grad",
    "exp_avg",
    "exp_avg_sq",
    "exp_avg_scales",
    "exp_avg_sq_scales",
    "master",
    "position",
    "seed",
)
_ADDRESSES = RUN_COLUMNS.index("position")  # as many columns are addresses
_VECTOR = 16  # bytes of the widest load

_PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SECOND_OF = {torch.int8: torch.uint8} | {dtype: dtype for dtype in (torch.float64, torch.float32, torch.bfloat16)}
_EXACT = (torch.float64, torch.float32)  # moments that are not rounded, and need no seed
_MASTERS: dict[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.bfloat16: (torch.float32, torch.int16),
    torch.float16: (torch.float32,),
}
TRITON: dict[torch.dtype | None, tl.dtype | None] = {
    None: None,
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int16: tl.int16,
    torch.int8: tl.int8,
    torch.uint8: tl.uint8,
}
"""A dtype as kernels name it."""


class Kind(NamedTuple):
    """What a kernel is compiled for: dtypes of a run's buffers.

    Attributes:
        moments: of the first moment; int8 if both are codes. None where a run is only counted in the norm.
        aligned: every buffer starts on a multiple of 16 bytes, so loads and stores can be as wide.
    """

    param: torch.dtype
    grad: torch.dtype
    moments: torch.dtype | None
    master: torch.dtype | None = None
    aligned: bool = True

    @property
    def seeded(self) -> bool:
        """Moments are rounded at random."""
        return self.moments is not None and self.moments not in _EXACT


def aligned(row: Sequence[int]) -> bool:
    """Whether all addresses of a row of the table are those of whole vectors."""
    together = 0
    for address in row[:_ADDRESSES]:
        together |= address
    return together % _VECTOR == 0


@dataclass(frozen=True)
class Buffers:
    """What an update of a span reads and writes, but for its gradient: 1-D, contiguous, of one length, on one device.

    Args:
        param: float32, bfloat16, float16 or float64.
        exp_avg, exp_avg_sq: both float32 or both bfloat16; or codes, int8 and uint8; or both float64 beside a float64
            param.
        scales: of codes, float32, one for each 256 elements and each moment.
        master: None; float32 beside a param of 16 bits; int16 beside a bfloat16 param (`zerofx.kernels.split`).

    Raises:
        TypeError: other dtypes.
        ValueError: other shapes.
    """

    param: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor] | None = None
    master: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self._check_dtypes()
        for flat in (self.param, self.exp_avg, self.exp_avg_sq, self.master):
            if flat is not None and (flat.shape != (self.param.numel(),) or not flat.is_contiguous()):
                expected = f"{self.param.numel()} contiguous elements in one dimension"
                raise ValueError(f"expected {expected}, got {list(flat.shape)}")
        wanted = (blockwise.blocks_in(self.param.numel()),)
        for scale in self.scales or ():
            if scale.dtype is not torch.float32 or scale.shape != wanted or not scale.is_contiguous():
                raise ValueError(f"scales are contiguous float32 {list(wanted)}, not {scale.dtype} {list(scale.shape)}")

    def _check_dtypes(self) -> None:
        dtype, moments = self.param.dtype, (self.exp_avg.dtype, self.exp_avg_sq.dtype)
        if dtype not in _PARAM_DTYPES:
            raise TypeError(f"param is float32, bfloat16, float16 or float64, not {dtype}")
        if moments[1] is not _SECOND_OF.get(moments[0]):
            both = f"{moments[0]} and {moments[1]}"
            raise TypeError(f"moments are both float32 or both bfloat16, or int8 and uint8, not {both}")
        if (moments[0] is torch.float64) != (dtype is torch.float64):
            raise TypeError(f"a {dtype} param takes no {moments[0]} moments")
        if (self.scales is None) != (moments[0] is not torch.int8):
            raise TypeError("moments in codes need scales, others none")
        if self.master is not None and self.master.dtype not in _MASTERS.get(dtype, ()):
            raise TypeError(f"a {dtype} param takes no {self.master.dtype} master")

    def kind(self, grad: torch.dtype, aligned: bool = True) -> Kind:
        """What updates these with gradients of ``grad``. Raises TypeError where nothing does."""
        if grad not in (torch.float32, self.param.dtype):
            raise TypeError(f"grad is float32 or {self.param.dtype} as param, not {grad}")
        master = None if self.master is None else self.master.dtype
        return Kind(self.param.dtype, grad, self.exp_avg.dtype, master, aligned)

    def row(self, start: int, grad: int, position: int, seed: int) -> tuple[int, ...]:
        """The table's row of elements from ``start`` on, whose gradient begins at the address ``grad``."""
        if position % 4:
            raise ValueError(f"position={position} is a multiple of 4")
        first, second = (None, None) if self.scales is None else self.scales
        block = start // blockwise.BLOCK
        return (
            _at(self.param, start),
            grad,
            _at(self.exp_avg, start),
            _at(self.exp_avg_sq, start),
            _at(first, block),
            _at(second, block),
            _at(self.master, start),
            position,
            seed,
        )


def _at(flat: torch.Tensor | None, start: int) -> int:
    return 0 if flat is None else flat.data_ptr() + start * flat.itemsize


@triton.jit
def buffer_at(entry: tl.tensor, DTYPE: tl.constexpr, ALIGNED: tl.constexpr) -> tl.tensor:
    """The buffer of ``DTYPE`` whose address stands in the table at ``entry``."""
    pointer = tl.load(entry).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer
