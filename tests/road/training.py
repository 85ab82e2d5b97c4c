"""One loop for four ways of training: one process, DistributedDataParallel, FSDP2, zerofx.

One process sees the whole batch; a rank sees its rows, and losses are averaged over ranks. AdamW's ``eps`` is above
rounding: a gradient that should be zero, as a key's bias has it, would else be a step of full length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zerofx
from tests import models
from tests.agreement import assert_ranks_agree

BEFORE, AFTER = range(3), range(3, 5)  # steps, before the checkpoint and behind it
ROWS = 2  # of each rank
Weights = dict[str, torch.Tensor]


@dataclasses.dataclass
class Run:
    losses: list[float]
    weights: Weights


def train(
    name: str, model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int], alone: bool = False
) -> list[float]:
    rank, world = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in steps:
        batch = models.make_batch(name, ROWS * world, seed=step)
        loss = models.loss_of(model, batch if alone else models.slice_batch(batch, rank, world))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if not alone:
            dist.all_reduce(mean)
        losses.append(mean.item() / (1 if alone else world))
    return losses


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1)


def whole(model: nn.Module) -> Weights:
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p.detach().clone())
        for name, p in model.named_parameters()
    }


def fsdp2(model: nn.Module) -> nn.Module:
    for blocks in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for block in blocks:
            fully_shard(block)
    return fully_shard(model)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "one process": lambda model: model,
    "DistributedDataParallel": DistributedDataParallel,
    "FSDP2": fsdp2,
}


def others(name: str) -> dict[str, Run]:
    """On each rank: what zerofx must compute."""
    found = {}
    for way, wrap in WRAPPERS.items():
        model = models.build(name)
        wrapped = wrap(model)
        losses = train(name, wrapped, adamw(wrapped), [*BEFORE, *AFTER], alone=way == "one process")
        found[way] = Run(losses, whole(model))
    return found


def zerofx_run(name: str, stage: int, folder: Path) -> Run:
    """On each rank: train, save in the middle; then go back to what was saved, and on from there once more."""
    model = models.build(name, seed=dist.get_rank())  # rank 0's weights must win
    zerofx.compile(model, stage=stage, groups=zerofx.Grouping(min_bytes=0))
    optimizer = adamw(model)
    losses = train(name, model, optimizer, BEFORE)
    zerofx.save(folder, model, optimizer)
    saved = whole(model)
    first = train(name, model, optimizer, AFTER)
    assert_ranks_agree(model)
    run = Run(losses + first, whole(model))

    zerofx.load(folder, model, optimizer)
    check_same(whole(model), saved)
    assert train(name, model, optimizer, AFTER) == first
    check_same(whole(model), run.weights)

    other = zerofx.shard(models.build(name, seed=1), stage=3 - stage)
    zerofx.load(folder, other)
    check_same(whole(other), saved)
    return run


def check_same(found: Weights, wanted: Weights) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def check(run: Run, wanted: Run, way: str) -> None:
    def say(message: str) -> str:
        return f"beside {way}: {message}"

    torch.testing.assert_close(run.losses, wanted.losses, rtol=1e-5, atol=0, msg=say)
    torch.testing.assert_close(run.weights, wanted.weights, rtol=1e-5, atol=1e-5, msg=say)
