"""Code that reads a tensor's memory without asking: a sharded parameter has none, so it is refused, never a crash."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn

import zerofx
from tests.test_parameters import mine, same, twins
from tests.workers import Workers


def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def dual(w: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        return forward_ad.make_dual(w, torch.ones(w.shape)) * 2


REFUSED: dict[str, Callable[[Any], Any]] = {
    "grad": torch.func.grad(lambda p: p.sum()),
    "grad of a dictionary": lambda w: torch.func.grad(lambda d: d["w"].sum())({"w": w}),
    "vjp": lambda w: torch.func.vjp(twice, w),
    "vmap": torch.func.vmap(twice),
    "jacrev": torch.func.jacrev(twice),
    "hessian": torch.func.hessian(lambda p: p.square().sum()),
    "functionalize": torch.func.functionalize(twice),
    "torch.jit.trace around it": lambda w: torch.jit.trace(lambda x: x @ w, torch.ones(2, 3)),
    "torch.jit.script": lambda w: torch.jit.script(twice)(w),
}


def refusals() -> dict[str, str]:
    module = zerofx.shard(nn.Linear(4, 3))
    before, said = module.weight.full_tensor(), {}
    for name, use in REFUSED.items():
        with pytest.raises(RuntimeError) as error:
            use(module.weight)
        said[name] = str(error.value)
    assert torch.equal(module.weight.full_tensor(), before)
    assert torch.equal(dual(module.weight), 2 * before)
    ones = torch.ones(before.shape)  # what follows gathers it, once
    mapped = torch.func.vmap(lambda x: module.weight * x)(ones.expand(5, -1, -1))
    assert torch.equal(mapped, before.expand(5, -1, -1))
    assert torch.equal(torch.func.grad(lambda x: (module.weight * x).sum())(ones), before)
    value, tangent = torch.func.jvp(twice, (module.weight,), (ones,))
    assert torch.equal(value, 2 * before) and torch.equal(tangent, 2 * ones)
    return said


def test_what_reads_memory_without_asking_is_refused_and_nothing_crashes(workers2: Workers) -> None:
    for said in workers2.run(refusals):
        ours = {name for name, message in said.items() if "the sharded tensor 'weight' reaches" in message}
        assert ours >= set(REFUSED) - {"hessian"}  # PyTorch says those itself


class Mapped(nn.Module):
    """A layer under vmap, and a gradient with respect to its input, both inside of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.func.vmap(self.layer)(x)
        return x + torch.func.grad(lambda y: self.layer(y).square().sum())(x)


def train_mapped() -> None:
    module, plain = twins(Mapped)
    x = torch.randn(4, 5)
    module(mine(x)).mean().backward()
    plain(x).mean().backward()
    same(module, plain)


def test_transforms_inside_of_compiled_code_still_work(workers2: Workers) -> None:
    workers2.run(train_mapped)
