"""Hugging Face's own models in every stage, against one process on the whole batch.

What must hold, for both executors, on 2 and 3 ranks, over 10 steps: every loss within 1e-5 relative of the single
process, and with SGD every parameter within 1e-5 at the end. (Adam turns a gradient that is pure rounding, such as a
key bias's, into whole steps: there the losses decide.)

All of it in ``make slow``: what ``make test`` runs of these models is in tests/road. Numbers of ranks go in turns.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerofx
from tests import models
from tests.agreement import assert_ranks_agree
from tests.pairwise import EXECUTORS, STAGES

STEPS, BATCH = 10, 2  # per rank: on 2 and on 3 ranks Inductor finds the same shapes, and its kernels compiled
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1),
}


def world_of(name: str, stage: int) -> int:
    """Two ranks or three: in turns, so that each model and each stage meets both."""
    return 2 + (models.HUGGING_FACE.index(name) + stage) % 2


def train_sharded(name: str, stage: int, executor: str) -> dict[str, Any]:
    """On each rank: train from the same weights with each optimizer; losses (averaged over ranks) and parameters."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = models.build(name, seed=rank)  # rank 0's weights must win
    zerofx.compile(model, stage=stage, executor=executor, groups=zerofx.Grouping(min_bytes=0))
    start = models.build(name, seed=0).state_dict()
    results: dict[str, Any] = {}
    for key, make in OPTIMIZERS.items():
        model.load_state_dict(start)
        optimizer, losses = make(model.parameters()), []
        for step in range(STEPS):
            batch = models.slice_batch(models.make_batch(name, BATCH * world, seed=step), rank, world)
            loss = models.loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(mean := loss.detach().clone())
            losses.append(mean.item() / world)
        assert_ranks_agree(model)
        parameters = {
            n: p.full_tensor() if isinstance(p, zerofx.ShardedTensor) else p.detach().clone()
            for n, p in model.named_parameters()
        }
        results[key] = losses, parameters if rank == 0 else None
    return results


@functools.cache
def reference(name: str, optimizer: str, world: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    return models.reference_run(name, STEPS, OPTIMIZERS[optimizer], batch=BATCH * world)


# GPT-2 a second time, its graph broken once.
@pytest.mark.slow
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", models.HUGGING_FACE)
def test_losses_and_parameters_are_those_of_one_process(make_workers, name: str, stage: int, executor: str) -> None:
    world = world_of(name, stage)
    results = make_workers(world).run(train_sharded, name, stage, executor, timeout=280)
    for optimizer in OPTIMIZERS:
        expected, parameters = reference(name, optimizer, world)
        for rank_results in results:
            for step, (loss, wanted) in enumerate(zip(rank_results[optimizer][0], expected, strict=True)):
                assert math.isclose(loss, wanted, rel_tol=1e-5), f"{optimizer}, step {step}: {loss} != {wanted}"
        if optimizer == "sgd":
            for key, value in results[0][optimizer][1].items():
                torch.testing.assert_close(
                    value, parameters[key], rtol=1e-5, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}"
                )
