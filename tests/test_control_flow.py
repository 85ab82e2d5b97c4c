"""Control flow and shapes of models that nobody prepared: as on one process, in every stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerofx
from tests import models
from tests.slow import quick_if, slow
from tests.test_parameters import full, mine, same, twins
from tests.workers import Workers


def compare(module: Any, plain: Any, run: Callable[[Any, torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    """``run`` is a mean over the batch: each rank has its part, the plain module all."""
    torch.manual_seed(1)
    run(module, mine(x)).backward()
    torch.manual_seed(1)
    run(plain, x).backward()
    same(module, plain)


class Nested(nn.Module):
    """What it returns is nested; a layer is used twice; a buffer counts."""

    @dataclasses.dataclass
    class Output:
        hidden: torch.Tensor
        parts: dict[str, Any]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(10, 10), nn.Linear(10, 10)])
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor, scale: dict[str, float]) -> Any:
        self.count += 1  # type: ignore[operator]
        hidden = torch.tanh(self.layers[0](x))
        again = torch.tanh(self.layers[0](hidden)) * scale["again"]
        return Nested.Output(hidden, {"again": [again, (self.layers[1](again), None)], "rows": x.shape[0]})


def nested_loss(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = module(x, {"again": 2.0})
    assert isinstance(out, Nested.Output) and out.parts["rows"] == x.shape[0] and out.parts["again"][1][1] is None
    return out.hidden.square().mean() + out.parts["again"][0].mean() + out.parts["again"][1][0].square().mean()


def check_nested(stage: int) -> None:
    module, plain = twins(Nested, stage=stage)
    for seed in range(2):
        x = torch.randn(12, 10, generator=torch.Generator().manual_seed(seed))
        # Several forwards before one backward, which shares them.
        compare(module, plain, lambda m, x: nested_loss(m, x) + nested_loss(m, x * 2), x)
    assert module.count == plain.count == 4


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(lambda v, layer=layer: v + torch.tanh(layer(v)), x, use_reentrant=self.reentrant)
        return x.square().mean()


def check_checkpointing(stage: int) -> None:
    x = torch.randn(12, 10)
    for reentrant in (False, True):
        module, plain = twins(lambda reentrant=reentrant: Checkpointed(reentrant), stage=stage)
        compare(module, plain, lambda m, x: m(x.detach().requires_grad_()), x)
    for reentrant in (False, True):
        module, plain = models.build("gpt2"), models.build("gpt2")
        for m in (module, plain):
            m.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
        zerofx.compile(module, stage=stage, executor="eager")
        batch = models.make_batch("gpt2", 2)
        models.loss_of(module, batch).backward()
        models.loss_of(plain, batch).backward()
        same(module, plain)


class Normalised(nn.Module):
    """Running statistics of this rank's own batches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(10, 10), nn.BatchNorm1d(10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).square().mean()


def check_buffers(stage: int) -> None:
    module, plain = twins(Normalised, stage=stage)
    for seed in range(3):
        x = torch.randn(12, 10, generator=torch.Generator().manual_seed(seed + 10 * dist.get_rank()))
        module(x).backward()
        plain(x).backward()
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(module.get_buffer(name), buffer)
    torch.testing.assert_close(module.eval()(x), plain.eval()(x))


class Squared(torch.autograd.Function):
    """A gradient that autograd would not have found."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight) ** 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        inner = 3 * gradient * F.linear(x, weight)
        return inner @ weight, inner.t() @ x


class Branching(nn.Module):
    """Both branches read weights, one of them as a view; the one that is taken depends on this rank's data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right, self.last = (nn.Linear(10, 10) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, turned = self.first(x), self.last.weight.t()
        h = torch.cond(x.sum() > 0, lambda h: self.left(h).sin(), lambda h: self.right(h).cos() @ turned, (h,))
        return self.last(h).square().mean()


def check_branches(stage: int, executor: str = "eager") -> None:
    module, plain = twins(Branching, stage=stage, executor=executor)
    x = torch.randn(12, 10)
    for sign in (1, -1):
        both = torch.cat([x[:6].abs(), sign * x[6:].abs()])  # both ranks take the left one; then each another
        module(mine(both)).backward()
        for part in both.chunk(2):
            (plain(part) / 2).backward()
        same(module, plain)
        with torch.no_grad():
            torch.testing.assert_close(module(mine(both)), plain(mine(both)))


class Region(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(10, 10), nn.Parameter(torch.ones(10))

    @torch.compiler.nested_compile_region
    def forward(self, x: torch.Tensor, branch: bool) -> torch.Tensor:
        h = torch.tanh(self.linear(x)) * self.gain
        return torch.cond(x.sum() > 0, lambda h: h * self.gain, lambda h: -h, (h,)) if branch else h


class Regions(nn.Module):
    """One code, several layers, one of them twice; a branch inside of a region; one in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Region() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.layers[0]):
            x = layer(x, False)
        x = self.layers[1](x, True)
        return checkpoint(self.layers[2], x, False, use_reentrant=False).square().mean()  # type: ignore[union-attr]


def check_regions(stage: int, executor: str = "eager") -> None:
    module, plain = twins(Regions, stage=stage, executor=executor)
    x = torch.randn(12, 10)
    module(mine(x)).backward()
    for part in x.chunk(2):
        (plain(part) / 2).backward()
    same(module, plain)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, 10) / 10)
        self.head = nn.Linear(10, 10)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(Squared.apply(self.head(x), self.weight)).mean()


def check_custom(stage: int) -> None:
    module, plain = twins(Custom, stage=stage)
    compare(module, plain, lambda m, x: m(x), torch.randn(12, 10))


class Filled(torch.autograd.Function):
    """A fused loss: forward fills the gradients, rows by rows, and backward scales them in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        gradients = [torch.zeros_like(each) for each in (x, weight, bias)]
        loss = x.new_zeros(())
        for rows, of_x in zip(x.split(4), gradients[0].split(4)):
            out = torch.tanh(torch.addmm(bias, rows, weight.t()))
            loss += out.sum()
            slope = 1 - out * out
            of_x.copy_(slope @ weight)
            gradients[1].addmm_(slope.t(), rows)
            torch.add(gradients[2], slope.sum(0), out=gradients[2])
        ctx.save_for_backward(*gradients)
        return loss / x.shape[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        scale = gradient / ctx.saved_tensors[0].shape[0]
        return tuple(each.mul_(scale) for each in ctx.saved_tensors)


class Fused(nn.Module):
    """One such loss in the graph, and one outside."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.other = (nn.Linear(10, 10) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.body(x))
        return Filled.apply(x, self.head.weight, self.head.bias) + self.outside(x)

    @torch.compiler.disable
    def outside(self, x: torch.Tensor) -> torch.Tensor:
        return Filled.apply(x, self.other.weight, self.other.bias)


def check_fused(stage: int, executor: str = "eager") -> None:
    module, plain = twins(Fused, stage=stage, executor=executor)
    compare(module, plain, lambda m, x: m(x), torch.randn(12, 10))


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 400)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.linear(x), 0.5, self.training)


def check_dropout(stage: int) -> None:
    """Half of the elements, the rest doubled, and the gradient through the same mask."""
    module, plain = twins(Dropped, stage=stage)
    x = torch.randn(12, 10)
    out = module(x)
    kept = out != 0
    assert 0.4 < kept.double().mean() < 0.6
    with torch.no_grad():
        torch.testing.assert_close(out[kept], 2 * plain.linear(x)[kept])
        assert torch.equal(module.eval()(x), module(x))
    out.sum().backward()
    average = kept.float().sum(0) * 2
    dist.all_reduce(average)
    torch.testing.assert_close(full(module.linear.bias.grad), average / dist.get_world_size())


def check_functional_call(stage: int) -> None:
    """With tensors of the caller's in the place of some parameters; the module's own are as they were."""
    module, plain = twins(Custom, stage=stage)
    x, weight = torch.randn(4, 10), torch.randn(10, 10)
    given = [weight.clone().requires_grad_() for _ in range(2)]
    for m, w in zip((module, plain), given):
        torch.func.functional_call(m, {"head.weight": w}, (x,)).backward()
    torch.testing.assert_close(given[0].grad, given[1].grad)
    same(module, plain)


CHECKS = [check_nested, check_checkpointing, check_buffers, check_custom, check_dropout, check_functional_call]
CHECKS += [check_branches, check_regions, check_fused]


@quick_if(lambda check, stage: stage > 0 and check is not check_checkpointing)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("check", CHECKS)
def test_a_model_with(workers2: Workers, check: Callable[[int], None], stage: int) -> None:
    workers2.run(check, stage)


@pytest.mark.parametrize("check", [slow(check_branches), slow(check_regions), check_fused])
@pytest.mark.parametrize("stage", [slow(0), 3])
def test_with_inductor_a_model_with(workers2: Workers, check: Callable[[int, str], None], stage: int) -> None:
    workers2.run(check, stage, "inductor")


class Experts(nn.Module):
    """Each row goes to the expert that it scores highest: ranks use different ones, perhaps none of some."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(10, 4)
        self.experts = nn.ModuleList(nn.Linear(10, 10) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        score, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):  # every expert on every rank, on no rows if need be
            rows = (chosen == i).nonzero().squeeze(1)
            out = out.index_add(0, rows, expert(x[rows]) * score[rows, None])
        return out.square().mean()


def check_experts(stage: int) -> None:
    module, plain = twins(Experts, stage=stage)
    for seed in range(2):
        x = torch.randn(12, 10, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            chosen = plain.router(x).argmax(-1)
            x = x[chosen.argsort()]  # so that a rank's part of the batch knows only some experts
            parts = [set(part.tolist()) for part in plain.router(x).argmax(-1).chunk(2)]
        assert parts[0] != parts[1] and {0, 1, 2, 3} - parts[0]
        compare(module, plain, lambda m, x: m(x), x)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_experts_that_some_rank_gives_no_rows_do_not_hang(workers2: Workers, stage: int) -> None:
    workers2.run(check_experts, stage, timeout=100)


class Contrast(nn.Module):
    """A loss of all ranks' features, gathered by ``dist.all_gather``; the plain twin has all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 4)

    def forward(self, x: torch.Tensor, cut_off: bool) -> torch.Tensor:
        features = self.layer(x)
        if len(x) == 2:
            parts = [torch.zeros_like(features) for _ in range(2)]
            dist.all_gather(parts, features)
            if cut_off:
                parts = [part.detach() for part in parts]
                parts[dist.get_rank()] = features
            features = torch.cat(parts)
        return (features @ features.T).square().mean()


def check_gathered_features(stage: int) -> None:
    x = torch.randn(4, 10, generator=torch.Generator().manual_seed(1))
    for cut_off in (False, True):
        module, plain = twins(Contrast, stage=stage)
        module(mine(x), cut_off).backward()
        (plain(x, cut_off) * (0.5 if cut_off else 1)).backward()  # a rank's own rows alone, divided by two ranks
        same(module, plain)


@pytest.mark.parametrize("stage", [slow(0), 2, slow(3)])
def test_gradients_flow_to_other_ranks_through_features_gathered_in_forward(workers2: Workers, stage: int) -> None:
    workers2.run(check_gathered_features, stage)
