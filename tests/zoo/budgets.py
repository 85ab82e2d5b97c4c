"""Steps of an architecture within `memory=`, from the least possible on: on every rank what was said, and what is."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.memory import held_over_steps
from tests.zoo.architectures import ARCHITECTURES
from tests.zoo.base import make_batch
from tests.zoo.predicted import OUTSIDE as UNPREDICTED
from tests.zoo.run import ROWS

PLENTY = 10**9
BF16 = zerofx.MixedPrecision(torch.bfloat16)
WAYS: list[dict[str, Any]] = [
    {"stage": 3},
    {"stage": 2, "micro_batches": 2},
    {"stage": 1},
    {"stage": 0},
    {"stage": 3, "micro_batches": 3, "no_sync": True},
    {"stage": 2, "mixed_precision": BF16},
    {"stage": 3, "mixed_precision": BF16, "micro_batches": 2},
    {"stage": 1, "micro_batches": 3, "no_sync": True},
]
OUTSIDE = (*UNPREDICTED, "gpt2")
"""Those of which something that takes memory at the peak runs outside of the model's graphs. GPT-2's is its loss."""


@dataclass(frozen=True)
class Within:
    """A few steps at one budget, in bytes.

    ``off``: how far the losses are from those without a budget.
    """

    budget: int
    said: int
    peak: int
    off: float


def steps_within(name: str, way: dict[str, Any], parts: list[float]) -> list[Within]:
    """On each rank, at budgets from the least (0) to all (1)."""
    options = dict(way)
    how = {key: options.pop(key) for key in ("micro_batches", "no_sync") if key in options}
    batch = make_batch(ARCHITECTURES[name].batch, ROWS, seed=dist.get_rank())

    def build(nbytes: int | None) -> nn.Module:
        torch._dynamo.reset()
        memory = None if nbytes is None else zerofx.Memory(nbytes, **how)
        groups = zerofx.Grouping(min_bytes=0)
        return zerofx.compile(ARCHITECTURES[name].build(0), executor="eager", memory=memory, groups=groups, **options)

    least = 1
    while (more := _asked_for(build(least), batch)) is not None:
        least = more
    whole = build(PLENTY)
    _asked_for(whole, batch)
    most, (wanted, _), found = _said(whole), _trained(build(None), batch, **how), []
    for part in parts:
        budget = round(least + part * (most - least))
        net = build(budget)
        losses, peak = _trained(net, batch, **how)
        off = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
        found.append(Within(budget, _said(net), peak, off))
    return found


def _asked_for(net: nn.Module, batch: dict[str, Any]) -> int | None:
    """The least that a refusal names; None: it is not refused."""
    try:
        net(**batch)
    except Exception as refused:
        least = re.search(r"a step needs at least ([\d,]+) bytes", str(refused))
        if least is None:
            raise
        return int(least[1].replace(",", ""))
    return None


def _said(net: nn.Module) -> int:
    divisions = [record.forward.division for record in zerofx.graphs(net) if record.forward is not None]
    return max(division.peak_bytes for division in divisions if division is not None)


def _trained(
    net: nn.Module, batch: dict[str, Any], micro_batches: int = 1, no_sync: bool = False
) -> tuple[list[float], int]:
    """Losses of four steps with Adam, and the most bytes that all but the first held, in all."""
    optimizer, losses = torch.optim.Adam(net.parameters(), lr=1e-3, foreach=False), []
    torch.manual_seed(7)

    def step() -> None:
        for i in range(micro_batches):
            out = None  # the caller holds what forward returned until the next
            with zerofx.no_sync(net) if no_sync and i < micro_batches - 1 else contextlib.nullcontext():
                out = net(**batch)
                loss = out if isinstance(out, torch.Tensor) else out.loss
                loss.backward()
            losses.append(loss.item())
            del loss

    held = held_over_steps(step, net, optimizer, batch.values())
    return losses, held
