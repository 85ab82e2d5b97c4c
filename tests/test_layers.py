"""Layers that compilers treat in a way of their own, on channels-last data, recurrent, complex: as on one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerofx
from tests.slow import slow_if
from tests.workers import Workers
from zerofx import ShardedTensor


class ConvNeXt(nn.Module):
    """A convolution that sees what a permutation left: channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 2, stride=2), nn.LayerNorm(8)
        self.down = nn.Conv2d(8, 12, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.down(x).square().mean()


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.inner, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x.contiguous(memory_format=torch.channels_last))
        x = x + F.relu(self.inner(F.relu(self.norm(x))))
        return self.head(x.mean((2, 3))).square().mean()


class Recurrent(nn.Module):
    """Dynamo leaves these to plain code."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(7, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0]).square().mean()


class Filter(nn.Module):
    """A filter of frequencies, kept as pairs of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.filter, self.head = nn.Parameter(torch.randn(5, 2)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x)
        return (x + torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.filter), n=8)).square().mean()


class Solved(nn.Module):
    """Solving may fail, which is an effect: PyTorch orders effects by tokens, inputs and outputs of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.first(x)
        spread = rows[:, :, None] * rows[:, None, :] + torch.eye(6)
        return self.head(torch.linalg.solve(spread, rows)).square().mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convnext": (ConvNeXt, (4, 3, 8, 8)),
    "resnet": (ResNet, (4, 3, 8, 8)),
    "lstm": (lambda: Recurrent(nn.LSTM), (4, 5, 7)),
    "gru": (lambda: Recurrent(nn.GRU), (4, 5, 7)),
    "rnn": (lambda: Recurrent(nn.RNN), (4, 5, 7)),
    "filter": (Filter, (4, 8)),
    "solved": (Solved, (4, 6)),
}


def full(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, ShardedTensor) else x


def check(name: str, **options: Any) -> None:
    build, shape = MODELS[name]
    torch.manual_seed(0)
    plain, module = build(), build()
    module.load_state_dict(plain.state_dict())
    zerofx.compile(module, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, module)]
    for seed in range(2):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        module(x.chunk(dist.get_world_size())[dist.get_rank()]).backward()
        plain(x).backward()
        for (which, p), q in zip(module.named_parameters(), plain.parameters()):
            torch.testing.assert_close(full(p.grad), q.grad, msg=f"{which}: {{}}".format, rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


DEAR = [
    *((name, stage, "inductor") for name in ("convnext", "resnet") for stage in range(4)),
    ("filter", 0, "inductor"),
    *(("solved", stage, "inductor") for stage in (1, 2)),
]


@slow_if(lambda name, stage, executor: (name, stage, executor) in DEAR)
@pytest.mark.parametrize("executor", ["eager", "inductor"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_on_one_process(workers2: Workers, name: str, stage: int, executor: str) -> None:
    workers2.run(check, name, stage=stage, executor=executor)


class Flattened(nn.Module):
    """To Dynamo the columns of ``head`` are as many as ``4 * ((h - 1) // 2 + 1) * ...`` once a second height came."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.Linear(4 * 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.stem(x)).flatten(1)).square().mean()


def check_heights(**options: Any) -> None:
    torch.manual_seed(0)
    plain, module = Flattened(), Flattened()
    module.load_state_dict(plain.state_dict())
    torch._dynamo.reset()
    zerofx.compile(module, groups=zerofx.Grouping(min_bytes=0), **options)
    for height, width in ((7, 8), (8, 8), (8, 7)):
        x = torch.randn(4, 1, height, width, generator=torch.Generator().manual_seed(height))
        module(x.chunk(dist.get_world_size())[dist.get_rank()]).backward()
        plain(x).backward()
    for (which, p), q in zip(module.named_parameters(), plain.parameters()):
        torch.testing.assert_close(full(p.grad), q.grad, msg=f"{which}: {{}}".format, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("executor", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_gradient_has_its_parameters_shape_where_that_was_compared_with_symbols(
    workers2: Workers, stage: int, executor: str
) -> None:
    workers2.run(check_heights, stage=stage, executor=executor)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, self.left, self.right, (x,)).square().mean()


class Drawn(nn.Linear):
    """Its dropout draws once more in backward, from a state of the generator that forward saves."""

    def __init__(self) -> None:
        super().__init__(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: F.dropout(super(Drawn, self).forward(x)).tanh(), x, use_reentrant=False).mean()


@pytest.mark.parametrize("build", [Solved, Branching, Drawn])
def test_with_memory_operators_of_a_higher_order_are_followed(fake_world: Any, build: Callable[[], nn.Module]) -> None:
    fake_world(2)
    module = zerofx.compile(build(), memory=10**9, executor="eager")
    module(torch.randn(4, 6)).backward()
    assert zerofx.predict(module, zerofx.Rates(1e9, 1e-5, 1e10, 1e10)).peak_bytes > 0


ASKING: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "rms_norm": lambda x, weight: F.rms_norm(x, (8,), weight),
    "pad": lambda x, weight: F.pad(weight, (1, -1)) * x,
    "1 - weight": lambda x, weight: (1 - weight) * x,
    "weight ** 2": lambda x, weight: weight**2 * x,
    "weight.norm()": lambda x, weight: weight.norm() * x,
    "weight.split()": lambda x, weight: torch.cat(weight.split(4)[::-1]) * x,
    "weight.__iter__": lambda x, weight: sum(part.exp() for part in weight.view(2, 4)) * x[:, :4],
}


@pytest.mark.parametrize("name", ASKING)
def test_functions_and_methods_that_ask_who_overrides_them_break_no_graph(fake_world: Any, name: str) -> None:
    class Asking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ASKING[name](x, self.bias)

    fake_world(1)
    torch.manual_seed(0)
    plain, x = Asking(8, 8), torch.rand(4, 8)
    module = zerofx.compile(copy.deepcopy(plain), executor="eager", fullgraph=True)
    for net in (plain, module):
        net(x).square().sum().backward()
    torch.testing.assert_close(full(module.bias.grad), plain.bias.grad)
