"""Hooks for saved tensors (`torch.autograd.graph.saved_tensors_hooks`, `save_on_cpu`) around a forward, in every stage.

A hook may read what it is given. A sharded parameter has no memory to be read.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tests.slow import slow_if
from tests.test_control_flow import Custom, Normalised, Squared, compare
from tests.test_parameters import mine, same, twins
from tests.workers import Workers
from zerofx.runtime.state.gathered import Gathered


def through_numpy(x: torch.Tensor) -> Any:
    return x.numpy().copy()


HOOKS: dict[str, Callable[[], AbstractContextManager]] = {
    "clone": lambda: saved_tensors_hooks(torch.clone, lambda x: x),
    "numpy": lambda: saved_tensors_hooks(through_numpy, torch.from_numpy),
    "save_on_cpu": save_on_cpu,
}


class Outside(nn.Module):
    """A function that saves its weight, outside of any graph; then a layer inside of one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, 10) / 10)
        self.first, self.head = nn.Linear(10, 10), nn.Linear(10, 1)

    @torch.compiler.disable
    def outside(self, x: torch.Tensor) -> torch.Tensor:
        return Squared.apply(self.first(x), self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.outside(x) + x).square().mean()


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.index_add(0, torch.arange(len(x)), self.linear(x).tanh())


class Chosen(nn.Module):
    """A leaf module between two compiled layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.expert, self.last = nn.Linear(10, 10), Expert(), nn.Linear(10, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.expert(self.first(x).tanh())).square().mean()


def check_hooks(build: Callable[[], nn.Module], hook: str, **options: Any) -> None:
    """Two steps, gradients and weights as on one process; the hook is around the forward of ours alone."""
    module, plain = twins(build, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, plain)]

    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        if m is plain:
            return m(x).mean()
        with HOOKS[hook]():
            return m(x).mean()

    for seed in range(2):
        compare(module, plain, run, torch.randn(12, 10, generator=torch.Generator().manual_seed(seed)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same(module, plain)


def build_mlp() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(10, 10), nn.GELU())))


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("stage", range(4))
def test_a_hook_may_read_what_is_saved(workers2: Workers, stage: int, hook: str) -> None:
    workers2.run(check_hooks, build_mlp, hook, stage=stage)


@slow_if(lambda options: options.get("executor") == "inductor")
@pytest.mark.parametrize(
    "options", [{"executor": "inductor"}, {"memory_budget": 1000}, {"memory_budget": 10**9}], ids=str
)
def test_a_hook_may_read_what_is_saved_however_stage_3_runs(workers2: Workers, options: dict[str, Any]) -> None:
    workers2.run(check_hooks, build_mlp, "clone", stage=3, **options)


@pytest.mark.parametrize(
    ("build", "options"),
    [(Custom, {}), (Outside, {}), (Chosen, {"leaf_modules": [Expert]})],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_a_hook_may_read_what_is_saved_outside_of_graphs(workers2: Workers, build: Any, options: dict) -> None:
    workers2.run(check_hooks, build, "clone", stage=3, **options)


def check_checkpoint(stage: int, hook: str | None) -> None:
    """A checkpoint around the compiled module, and a hook around that."""
    module, plain = twins(Normalised, stage=stage)

    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        if m is plain:
            return m(x)
        with HOOKS[hook]() if hook else torch.enable_grad():
            return checkpoint(m, x.clone().requires_grad_(), use_reentrant=hook is None)

    for seed in range(2):
        x = torch.randn(6, 10, generator=torch.Generator().manual_seed(seed))
        compare(module, plain, run, torch.cat([x, x]))  # BatchNorm has the same numbers on both


@pytest.mark.parametrize("hook", [None, "clone"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_checkpoint_around_a_module_trains_it_alike(workers2: Workers, stage: int, hook: str | None) -> None:
    workers2.run(check_checkpoint, stage, hook)


def write_behind_a_hook(stage: int) -> list[str]:
    """What a backward says that runs after the optimizer's step, and one whose weights nobody has written."""
    module, _ = twins(build_mlp, stage=stage, memory_budget=1000)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    said = []
    for steps in (False, True):
        with HOOKS["clone"]():
            loss = module(mine(torch.ones(4, 10))).mean()
        if steps:
            optimizer.step()
        try:
            loss.backward()
            said.append("")
        except RuntimeError as e:
            said.append(str(e))
    return said


@pytest.mark.parametrize("stage", [1, 3])
def test_under_a_hook_a_weight_that_was_written_since_forward_is_an_error(workers2: Workers, stage: int) -> None:
    for unwritten, written in workers2.run(write_behind_a_hook, stage):
        assert unwritten == ""
        assert "modified by an inplace operation: the parameter '2.weight'" in written
        assert "Run backward before the optimizer's step" in written


def test_a_copy_where_a_gathered_buffer_was_is_not_taken_for_that_buffer() -> None:
    """Under a hook a buffer that forward left goes, and its copy may have the address of an earlier one."""
    shard, memory = torch.zeros(2), np.zeros(2, np.float32)
    gathered = Gathered(SimpleNamespace(shard=shard, layout=SimpleNamespace(name="a")))  # type: ignore[arg-type]
    left = torch.from_numpy(memory)
    gathered.leave(left)
    shard.add_(1)
    with pytest.raises(RuntimeError, match="a parameter of the group 'a', between forward and backward"):
        gathered.check(left)
    gathered.leave(left)
    del left
    shard.add_(1)
    gathered.check(torch.from_numpy(memory))
