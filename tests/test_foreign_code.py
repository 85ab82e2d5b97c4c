"""Code that reads a tensor's memory without asking: a sharded parameter has none, so it is refused, never a crash."""

from __future__ import annotations

import warnings
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


@torch.compile(backend="eager")
def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w.t()) * w.mean()


@torch.compile(backend="eager", fullgraph=True)
def normed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x / x.norm(dim=-1, keepdim=True) * w[0]


class Decorated(nn.Module):
    """Functions that a library has compiled, inside of a graph and outside."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = normed(scaled(x, self.inside.weight), self.inside.weight)
        return self.uncompiled(x).square().mean()

    @torch.compiler.disable
    def uncompiled(self, x: torch.Tensor) -> torch.Tensor:
        return normed(scaled(x, self.outside.weight), self.outside.weight)


def compiled_by_others(stage: int) -> list[str]:
    module, plain = twins(Decorated, stage=stage)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (module, plain)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(3):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
            module(mine(x)).backward()
            plain(x).backward()
            same(module, plain)
            torch.compile(optimizers[0].step, backend="eager")()
            optimizers[1].step()
            for m in (module, plain):
                m.zero_grad()
    w = torch.ones(6, 6)  # elsewhere the function is compiled as ever
    torch._dynamo.utils.counters.clear()
    scaled(w, w)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 1
    return [str(warning.message) for warning in caught if "by another backend" in str(warning.message)]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_function_that_others_compile_runs_uncompiled_on_sharded_weights(workers2: Workers, stage: int) -> None:
    said, silent = workers2.run(compiled_by_others, stage)
    assert not silent
    names = [message.split("'")[1] for message in said]
    step = "step" if torch.__version__ < "2.12" else "wrapper"  # the frame around it
    assert names == ([] if stage == 0 else ["scaled", "normed", step]), said


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
