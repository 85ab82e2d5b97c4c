"""A mesh of two dimensions: each replica of the module is divided over a row; gradients are averaged over all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerofx
from tests.counting import count_collectives
from tests.models import GPT
from tests.workers import Workers

STEPS, VOCAB, LENGTH = 3, 50, 8
GROUPS = zerofx.Grouping(min_bytes=0)


def mesh_of(rows: int, columns: int) -> Any:
    return init_device_mesh("cpu", (rows, columns), mesh_dim_names=("replicate", "shard"))


def build() -> GPT:
    torch.manual_seed(dist.get_rank())  # rank 0's weights are taken
    return GPT(2, 32, 2, VOCAB, LENGTH)


def train(shape: tuple[int, int] | None, how: str = "plain", optimizer: str = "torch", **options: Any) -> list[float]:
    """Losses, norms and a sum over all weights."""
    mesh = None if shape is None else mesh_of(*shape)
    options = {"groups": GROUPS, "executor": "eager", **options}
    model = zerofx.compile(build(), mesh=mesh, **options)
    kind = zerofx.AdamW if optimizer == "zerofx" else torch.optim.AdamW
    steps, history = kind(model.parameters(), lr=1e-2), []
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(STEPS):
        data = torch.randint(VOCAB, (2, world, 2, LENGTH), generator=torch.Generator().manual_seed(step))[:, rank]
        if how == "no_sync":
            with zerofx.no_sync(model):
                model(data[0], data[0]).backward()
            loss = model(data[1], data[1])
            loss.backward()
        elif how == "step_in_backward":
            with zerofx.step_in_backward(steps):
                loss = model(data[0], data[0])
                loss.backward()
        else:
            loss = model(data[0], data[0])
            loss.backward()
        total = loss.detach().float().clone()
        dist.all_reduce(total)
        history.append(total.item() / world)
        if how != "step_in_backward":
            history.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            steps.step()
        steps.zero_grad()
    whole = zerofx.full_state_dict(model, rank0_only=False)
    return [*history, float(sum(value.double().abs().sum() for value in whole.values()))]


CASES = [
    ("plain", {}),
    ("plain", {"stage": 0}),
    ("plain", {"stage": 1}),
    ("no_sync", {}),
    ("no_sync", {"stage": 2}),
    ("step_in_backward", {}),
    ("step_in_backward", {"stage": 2}),
    ("plain", {"leaf_modules": ["blocks.1"]}),
    ("no_sync", {"leaf_modules": ["blocks.1"], "stage": 1}),
    ("plain", {"lookups": True}),
    ("plain", {"one_copy": True}),
    ("plain", {"memory_budget": float("inf")}),
]


def compare(shape: tuple[int, int], cases: list[Any], optimizer: str) -> None:
    for how, options in cases:
        wanted = train(None, how, optimizer, **{**options, "one_copy": False})
        found = train(shape, how, optimizer, **options)
        assert found == pytest.approx(wanted, rel=1e-5), (how, options)


@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (4, 1)])
def test_training_is_as_on_one_dimension(make_workers: Any, shape: tuple[int, int]) -> None:
    make_workers(4).run(compare, shape, CASES if shape == (2, 2) else CASES[:4:3], "zerofx", timeout=300)
