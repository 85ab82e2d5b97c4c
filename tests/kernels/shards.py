"""A flat shard that takes steps as an optimizer does, and AdamW in any precision to compare it with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton

from zerofx.kernels import blockwise
from zerofx.kernels.adamw import adamw
from zerofx.kernels.norm import finalize, partial_sums
from zerofx.kernels.runs import Buffers, aligned
from zerofx.kernels.segments import ALIGNMENT, BLOCK, make_tiles
from zerofx.kernels.split import join, split

LARGE_BLOCK = 1 << 16
"""For the interpreter, which takes milliseconds per program and little per element."""


@dataclass(frozen=True)
class Row:
    """Hyper-parameters by torch's names."""

    lr: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.1
    maximize: bool = False

    @property
    def columns(self) -> list[float]:
        """The row as it stands in ``hyper``, before the first step."""
        return [self.lr, *self.betas, self.eps, self.weight_decay, 0.0, 0.0, -1.0 if self.maximize else 1.0]


class Shard:
    """``initial`` (float32) as a flat shard of ``dtype``, with its moments, its master and its tables."""

    def __init__(
        self,
        device: str,
        initial: torch.Tensor,
        segments: Sequence[tuple[int, int, int]] | None = None,
        rows: Sequence[Row] = (Row(),),
        *,
        dtype: torch.dtype = torch.float32,
        moments: torch.dtype = torch.float32,
        master: torch.dtype | None = None,
        block: int | None = None,
        seed: int = 0,
        position: int = 0,
    ) -> None:
        segments = [(0, initial.numel(), 0)] if segments is None else segments
        longest = max((length for _, length, _ in segments), default=0)
        least = blockwise.BLOCK if moments is torch.int8 else ALIGNMENT
        fitting = min(LARGE_BLOCK, max(least, triton.next_power_of_2(max(1, longest))))
        self.block = block or (BLOCK if device == "cuda" else fitting)
        self.tiles = make_tiles([segments], self.block).to(device)
        self.hyper = torch.tensor([row.columns for row in rows], dtype=torch.float64, device=device)
        self.steps = torch.zeros(len(rows), device=device)
        self.control = torch.zeros(4, device=device)
        self.partial = torch.zeros(8, dtype=torch.float64, device=device)
        self.seed = None if moments is torch.float32 else torch.tensor([seed], device=device)
        self.position = position

        initial = initial.to(device)
        self.master: torch.Tensor | None = None
        if master is torch.int16:
            self.param, self.master = split(initial)
        else:
            self.param = initial.to(dtype, copy=True)
            if master is not None:
                self.master = initial.clone()
        self.exp_avg = torch.zeros_like(self.param, dtype=moments)
        self.exp_avg_sq = torch.zeros_like(self.param, dtype=torch.uint8 if moments is torch.int8 else moments)
        self.scales: tuple[torch.Tensor, torch.Tensor] | None = None
        if moments is torch.int8:
            blocks = blockwise.blocks_in(initial.numel())
            self.scales = (torch.zeros(blocks, device=device), torch.zeros(blocks, device=device))

    def step(
        self,
        grad: torch.Tensor,
        *,
        max_norm: float = math.inf,
        scale: float | None = None,
        found_inf: float | None = None,
    ) -> None:
        grad = grad.to(self.param.device)
        row = [0, grad.data_ptr(), *[0] * 7]
        partial_sums(grad.dtype, self._table(row), self.tiles, self.partial, aligned=aligned(row), block=self.block)
        self.decide(self.partial.sum(), max_norm, scale, found_inf)
        self.update(grad)

    def decide(
        self,
        total: torch.Tensor,
        max_norm: float = math.inf,
        scale: float | None = None,
        found_inf: float | None = None,
    ) -> None:
        scaled, found = (None if x is None else torch.tensor([x], device=total.device) for x in (scale, found_inf))
        finalize(total, max_norm, scaled, found, self.hyper, self.steps, self.control)

    def update(self, grad: torch.Tensor) -> None:
        buffers = Buffers(self.param, self.exp_avg, self.exp_avg_sq, self.scales, self.master)
        row = buffers.row(0, grad.data_ptr(), self.position, 0)
        kind = buffers.kind(grad.dtype, aligned(row))
        adamw(kind, self._table(row), self.tiles, self.hyper, self.control, self.seed, block=self.block)
        if self.seed is not None:
            self.seed += 1

    def _table(self, row: Sequence[int]) -> torch.Tensor:
        return torch.tensor([row], dtype=torch.int64, device=self.param.device)

    @property
    def weights(self) -> torch.Tensor:
        """What the shard knows its weights to be, on the CPU: the master, however it is stored."""
        if self.master is None:
            return self.param.cpu()
        whole = join(self.param, self.master) if self.master.dtype is torch.int16 else self.master
        return whole.cpu()

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of all that a step may change but ``control``."""
        names = ("param", "exp_avg", "exp_avg_sq", "master", "hyper", "steps")
        copies = {name: getattr(self, name).clone() for name in names if getattr(self, name) is not None}
        return copies | {f"scales.{i}": scales.clone() for i, scales in enumerate(self.scales or ())}

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both, in float32 on the CPU, however they are stored."""
        if self.scales is None:
            return self.exp_avg.float().cpu(), self.exp_avg_sq.float().cpu()
        codes = {"exp_avg_codes": self.exp_avg, "exp_avg_sq_codes": self.exp_avg_sq}
        scales = dict(zip(("exp_avg_scales", "exp_avg_sq_scales"), self.scales, strict=True))
        first, second = blockwise.dequantize(codes | scales)
        return first.cpu(), second.cpu()


def torch_adamw(
    initial: torch.Tensor,
    grads: Sequence[torch.Tensor],
    segments: Sequence[tuple[int, int, int]] | None = None,
    rows: Sequence[Row] = (Row(),),
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """``initial`` after torch.optim.AdamW, all of it in ``dtype``, took a step with each of ``grads``."""
    flat = initial.to(dtype, copy=True)
    segments = [(0, initial.numel(), 0)] if segments is None else segments
    pieces = [(flat[start : start + length].requires_grad_(), start, rows[row]) for start, length, row in segments]
    groups = [{"params": [piece], **vars(row)} for piece, _, row in pieces]
    optimizer = torch.optim.AdamW(groups, foreach=False)
    for grad in grads:
        for piece, start, _ in pieces:
            piece.grad = grad[start : start + piece.numel()].to(dtype)
        optimizer.step()
    return flat.detach()


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype is b.dtype and a.shape == b.shape
    different = (a.cpu().view(torch.uint8) != b.cpu().view(torch.uint8)).sum()
    assert not different, f"{different} bytes differ"
