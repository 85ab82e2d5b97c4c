"""The small model that kinds train, and plain PyTorch beside it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import zerofx
from tests.models import GPT

STEPS, ROWS = 5, 2


def sizes(small: bool) -> dict[str, int]:
    """Of the GPT: what a GPU is busy with, or what runs anywhere."""
    if small:
        return {"layers": 2, "dim": 32, "heads": 2, "vocab": 64, "length": 16}
    return {"layers": 8, "dim": 1024, "heads": 16, "vocab": 16384, "length": 512}


def build(device: torch.device, small: bool) -> GPT:
    torch.manual_seed(0)
    with device:
        return GPT(**sizes(small))


def batch(device: torch.device, small: bool, step: int, rank: int) -> torch.Tensor:
    """``x, y`` of one rank at one step."""
    of = sizes(small)
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(of["vocab"], (2, ROWS, of["length"]), generator=generator).to(device)


def train(device: torch.device, small: bool, stage: int, executor: str, **options: Any) -> list[float]:
    """On each rank: losses, averaged over ranks, of a few steps of `zerofx.AdamW`."""
    model = zerofx.compile(build(device, small), stage=stage, executor=executor, **options)  # type: ignore[arg-type]
    optimizer = zerofx.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    losses, rank = [], dist.get_rank()
    for step in range(STEPS):
        loss = model(*batch(device, small, step, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach().clone())
        losses.append(mean.item() / dist.get_world_size())
    return losses


def train_plainly(device: torch.device, small: bool, world: int) -> list[float]:
    """One process that never heard of zerofx, on the rows of all ranks."""
    model = build(device, small)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for rank in range(world):
            loss = model(*batch(device, small, step, rank)) / world
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def difference(found: list[float], wanted: list[float]) -> float:
    """The largest relative one; not a number where one is none."""
    return torch.tensor([abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True)]).max().item()
