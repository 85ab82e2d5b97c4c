"""Leaf modules: ranks that choose other layers by data neither hang nor compute anything else than one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerofx
from tests.test_parameters import mine, same, twins
from tests.workers import Workers

NONE = -1
ROUTES = [  # the first half is rank 0's. Nobody uses expert 3
    [0, 0, 1, NONE, 0, 1, NONE, NONE, NONE, NONE, NONE, NONE],  # rank 1 uses none
    [NONE, NONE, NONE, NONE, NONE, NONE, 2, 0, 2, 2, 0, NONE],  # rank 0 uses none
    [0, 1, 2, 0, 1, 2, 1, 1, 1, 1, 1, 1],
]


class Experts(nn.Module):
    """Rows go to experts as ``route`` says, or nowhere; an expert that gets no row is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(10, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(10, 20), nn.GELU(), nn.Linear(20, 10)) for _ in range(4))

    def forward(self, x: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (route == i).nonzero().squeeze(1)
            if rows.numel() == 0:
                continue
            score = self.router(x[rows]).softmax(-1)[:, i, None]
            out = out.index_add(0, rows, expert(x[rows]) * score)
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.moe = nn.Linear(10, 10), Experts()

    def forward(self, x: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        return x + self.moe(torch.tanh(self.mix(x)), route)


class Net(nn.Module):
    """Blocks, and experts by themselves: a rank that uses none of these depends on nothing in front of them."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.moe, self.last = Experts(), nn.Linear(10, 10)

    def forward(self, x: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, route)
        return self.last(self.moe(x, route)).square().mean()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(12, 10, generator=torch.Generator().manual_seed(step)), torch.tensor(ROUTES[step % 3])


def check_training(stage: int, **options: Any) -> None:
    module, plain = twins(Net, stage=stage, leaf_modules=[Experts], **options)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (module, plain)]
    for step in range(4):
        x, route = batch(step)
        loss, expected = module(mine(x), mine(route)), plain(x, route)
        loss.backward()
        expected.backward()
        dist.all_reduce(mean := loss.detach().clone())
        torch.testing.assert_close(mean / dist.get_world_size(), expected.detach())
        same(module, plain)  # a gradient that one process has not, nobody has
        assert module.moe.experts[3][0].weight.grad is None
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same(module, plain)
    with torch.no_grad():
        torch.testing.assert_close(module.eval()(x, route), plain.eval()(x, route))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_that_use_other_experts_or_none_train_as_one_process(workers2: Workers, stage: int) -> None:
    workers2.run(check_training, stage, timeout=60)


def check_habits(stage: int, **options: Any) -> None:
    """Accumulation, several calls before one backward, frozen experts, no gradients for weights."""
    module, plain = twins(Net, stage=stage, leaf_modules=["*moe"], **options)
    (x, route), (y, other) = batch(0), batch(1)
    for m, a, b in ((plain, (x, route), (y, other)), (module, (mine(x), mine(route)), (mine(y), mine(other)))):
        with zerofx.no_sync(m) if m is module else torch.enable_grad():
            m(*a).backward()
        (m(*a) + m(*b) * 2).backward()
    same(module, plain)
    for m in (module, plain):
        m.zero_grad()
        m.moe.experts.requires_grad_(False)
        m.blocks[0].moe.requires_grad_(False)
    for m, a in ((module, (mine(x), mine(route))), (plain, (x, route))):
        m(*a).backward()
    same(module, plain)
    with zerofx.no_sync(module):  # and then a backward in which the leaf modules have no part
        module(mine(x), mine(route)).backward()
    module.last(mine(x)).mean().backward()
    plain(x, route).backward()
    plain.last(x).mean().backward()
    same(module, plain)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_leaf_modules_accumulate_and_freeze_as_one_process(workers2: Workers, stage: int) -> None:
    workers2.run(check_habits, stage, timeout=60)


class Remembered(Net):
    """Checkpoints around blocks, or around each expert inside of the leaf modules."""

    inside = False
    reentrant = False

    def forward(self, x: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, route) if self.inside else checkpoint(block, x, route, use_reentrant=self.reentrant)
        return self.last(self.moe(x, route)).square().mean()


class Checkpointed(nn.Sequential):
    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


def check_checkpoint(stage: int, reentrant: bool, inside: bool) -> None:
    def build() -> nn.Module:
        net = Remembered()
        net.inside, net.reentrant = inside, reentrant
        if inside:
            for m in [m for m in net.modules() if isinstance(m, nn.Sequential)]:
                m.__class__ = type("Checkpointed", (Checkpointed,), {"reentrant": reentrant})
        return net

    module, plain = twins(build, stage=stage, leaf_modules=[Experts])
    for step in range(2):
        x, route = batch(step)
        module(mine(x), mine(route)).backward()
        plain(x, route).backward()
        same(module, plain)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_leaf_modules_in_checkpoints_and_with_checkpoints_inside(
    workers2: Workers, stage: int, reentrant: bool, inside: bool
) -> None:
    workers2.run(check_checkpoint, stage, reentrant, inside, timeout=60)
