"""Code that no compiler sees: weights are gathered at each use; right, with a warning, and nothing is lost silently."""

from __future__ import annotations

import inspect
import warnings
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
from tests.workers import Workers
from zerofx import ShardedTensor

EACH_GROUP = zerofx.Grouping(min_bytes=0)


def quiet(fn: Callable[..., Any], *args: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fn(*args)


def mine(batch: models.Batch) -> models.Batch:
    return models.slice_batch(batch, dist.get_rank(), dist.get_world_size())


def check_gradients(module: nn.Module, plain: nn.Module, **tolerance: float) -> None:
    for (name, p), q in zip(module.named_parameters(), plain.parameters()):
        if q.grad is None:
            assert p.grad is None, name
            continue
        assert isinstance(p.grad, ShardedTensor), name
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=f"{name}: {{}}".format, **tolerance)


# -- training


def check_training(name: str) -> None:
    expected, weights = models.reference_run(name, batch=6)
    module = zerofx.shard(models.build(name), groups=EACH_GROUP)
    optimizer, losses = models.sgd(module.parameters()), []
    for step in range(3):
        loss = models.loss_of(module, mine(models.make_batch(name, 6, seed=step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        losses.append(whole.item() / dist.get_world_size())
    assert losses == pytest.approx(expected, rel=1e-5)
    for key, p in module.named_parameters():
        torch.testing.assert_close(p.full_tensor(), weights[key], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["mlp", "tied", "gpt"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_training_without_a_compiler_matches_one_process(
    make_workers: Callable[[int], Workers], world_size: int, name: str
) -> None:
    make_workers(world_size).run(quiet, check_training, name)


class Uses(nn.Module):
    """One weight many times: in a product, transposed, a slice, elementwise, in a branch, under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(13, 13))
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.frozen = nn.Parameter(torch.randn(13), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight + F.linear(x, self.weight.t()) * self.gain
        y = y + self.weight[2] * 2 - self.weight.sum() / 100 + (self.weight * self.weight).mean()
        if self.gain > 0:
            y = y * self.gain + self.frozen
        with torch.no_grad():
            size = self.weight.norm() + (self.weight + 1).abs().max()
        y = y + checkpoint(lambda v: torch.tanh(v @ self.weight), x, use_reentrant=False)
        return (y**2).mean() / size


def check_uses() -> None:
    plain, x = Uses(), torch.randn(6, 13)
    module = Uses()
    module.load_state_dict(plain.state_dict())
    zerofx.shard(module)
    part = x.chunk(dist.get_world_size())[dist.get_rank()]
    for _ in range(2):  # the second time adds to the gradients
        module(part).backward()
        plain(x).backward()
        check_gradients(module, plain, rtol=1e-4, atol=1e-6)

    # Two uses and a gradient that comes back to the input as well.
    x.requires_grad_()
    part = part.detach().requires_grad_()
    (module(part) + module(part * 2)).backward()
    (plain(x) + plain(x * 2)).backward()
    rows = x.grad.chunk(dist.get_world_size())[dist.get_rank()]  # type: ignore[union-attr]
    torch.testing.assert_close(part.grad, rows * dist.get_world_size(), rtol=1e-4, atol=1e-6)
    check_gradients(module, plain, rtol=1e-4, atol=1e-6)

    expected = plain(x)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(module(x), expected.detach())
    assert not module(part).isnan() and module(part).requires_grad

    hooks: list[float] = []
    module.weight.grad = plain.weight.grad = None
    module.weight.register_post_accumulate_grad_hook(lambda p: hooks.append(p.grad.sum().item()))
    module(part.detach()).backward()
    plain(x.detach()).backward()
    assert len(hooks) > 0 and hooks[-1] == pytest.approx(plain.weight.grad.sum().item(), rel=1e-3)  # type: ignore


def test_every_use_of_a_weight_adds_its_gradient(workers3: Workers) -> None:
    workers3.run(quiet, check_uses)


def check_inputs() -> None:
    module = zerofx.shard(nn.Linear(13, 13))
    module(torch.ones(2, 13)).sum().backward(inputs=[module.bias])
    assert module.weight.grad is None
    torch.testing.assert_close(module.bias.grad.full_tensor(), torch.full((13,), 2.0))  # type: ignore
    module(torch.ones(2, 13)).sum().backward(inputs=module.weight)
    torch.testing.assert_close(module.weight.grad.full_tensor(), torch.full((13, 13), 2.0))  # type: ignore
    torch.testing.assert_close(module.bias.grad.full_tensor(), torch.full((13,), 2.0))  # type: ignore


def test_backward_with_inputs_accumulates_only_there(workers2: Workers) -> None:
    workers2.run(quiet, check_inputs)


# -- warnings


def warn_here(weight: torch.Tensor) -> tuple[int, int]:
    """Two places that gather, three times each, and their lines."""
    line = inspect.currentframe().f_lineno  # type: ignore[union-attr]
    for _ in range(3):
        weight @ weight
        weight.sum(dim=0)
    return line + 2, line + 3


def check_warnings() -> None:
    module = zerofx.shard(nn.Linear(13, 13, bias=False))
    for filter in ("always", "error"):  # the second time there is nothing left to warn of
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(filter)
            first, second = warn_here(module.weight)
            if filter == "always" and dist.get_rank():
                assert not caught, "one rank speaks for all"
            elif filter == "always":
                assert [w.lineno for w in caught] == [first, second]
                assert all(w.filename == __file__ and w.category is UserWarning for w in caught)
                for w, name in zip(caught, ("matmul", "sum")):
                    text = str(w.message)
                    assert "'weight'" in text and name in text and "gathered" in text and "compile" in text
                    assert "676 B from all 2 ranks" in text

    with warnings.catch_warnings(record=True) as caught:  # nothing is gathered, nothing to warn of
        warnings.simplefilter("always")
        optimizer = torch.optim.AdamW(module.parameters())
        module.weight.grad = torch.ones(13, 13)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        module.load_state_dict(module.state_dict())
        repr(module.weight)
        module.weight.full_tensor()
    assert not caught, [str(w.message) for w in caught]


def test_each_place_that_gathers_warns_once_and_is_named(workers2: Workers) -> None:
    workers2.run(check_warnings)


# -- writes through views


def check_writes(direct: bool) -> None:
    module = zerofx.shard(nn.Linear(13, 13))
    writes: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
        lambda weight, bias: weight[0].zero_(),
        lambda weight, bias: weight[:, 1:3].mul_(2),
        lambda weight, bias: weight.t().copy_(torch.ones(13, 13)),
        lambda weight, bias: weight.view(-1)[3].fill_(1.5),
        lambda weight, bias: weight.unsqueeze(0).add_(1),
        lambda weight, bias: weight.data[2].zero_(),
        lambda weight, bias: weight.detach()[1:].mul_(3),
        lambda weight, bias: weight.T.add_(1),
        lambda weight, bias: weight.chunk(2)[0].zero_(),
        lambda weight, bias: weight.diagonal().fill_(0.5),
        lambda weight, bias: weight.unbind()[0].zero_(),
        lambda weight, bias: nn.init.ones_(weight[0]),
        lambda weight, bias: weight[0].__setitem__(0, 2.0),
        lambda weight, bias: weight[0].__iadd__(1.0),
    ]
    if not direct:
        writes = [
            lambda weight, bias: torch.add(weight[0], 1, out=weight[0]),
            lambda weight, bias: torch.zeros(13, out=weight[0]),
            lambda weight, bias: torch._foreach_zero_([weight[0]]),
            lambda weight, bias: torch._foreach_add_([weight[0], bias[:3]], 1.0),
        ]
    done = 0
    with torch.no_grad():
        for i, write in enumerate(writes):
            before = [p.full_tensor() for p in module.parameters()]
            wanted = [whole.clone() for whole in before]
            try:
                write(module.weight, module.bias)
            except RuntimeError as e:
                assert "write" in str(e) or "lost" in str(e) or "sharded" in str(e), (i, str(e))
                wanted = before
            else:
                write(*wanted)
                done += 1
            for p, whole in zip(module.parameters(), wanted, strict=True):
                assert torch.equal(p.full_tensor(), whole), f"write {i} on rank {dist.get_rank()}"
        whole = module.weight.full_tensor()
        torch.testing.assert_close(module.weight[0] + 1, whole[0] + 1)  # reading a view is fine
        module.weight[0].clone().zero_()  # and so is writing to a copy
        assert torch.equal(module.weight.full_tensor(), whole)
    assert done >= (8 if direct else 3), "nearly all have one right meaning"
    with pytest.raises(RuntimeError):  # as of any leaf that is trained
        module.weight[0].zero_()
    assert torch.equal(module.weight.full_tensor(), whole)


def test_writes_through_views_go_to_the_weight_or_are_refused(workers2: Workers) -> None:
    workers2.run(quiet, check_writes, True)


def test_writes_through_views_as_out_or_in_a_list_do_so_too(workers2: Workers) -> None:
    workers2.run(quiet, check_writes, False)


def check_double_backward() -> None:
    module = zerofx.shard(nn.Linear(13, 13))
    loss = module(torch.randn(2, 13)).square().sum()
    with pytest.raises(RuntimeError, match=r"double backward.*weight|double backward.*bias"):
        loss.backward(create_graph=True)
    assert module.weight.grad is None and module.bias.grad is None
    loss = module(torch.randn(2, 13)).square().sum()
    with pytest.raises(RuntimeError, match=r"autograd\.grad.*\.grad"):
        torch.autograd.grad(loss, list(module.parameters()))
    with pytest.raises(RuntimeError, match=r"autograd\.grad.*\.grad"):
        torch.autograd.grad(loss, module.weight)
    assert module.weight.grad is None

    x = torch.randn(2, 13, requires_grad=True)  # of an input it is fine, and leaves the parameters alone
    (grad,) = torch.autograd.grad(module(x).sum(), x)
    torch.testing.assert_close(grad, module.weight.full_tensor().sum(0).expand(2, 13))
    assert module.weight.grad is None


def test_gradients_of_gradients_are_refused(workers2: Workers) -> None:
    workers2.run(quiet, check_double_backward)


class Doubled(torch.autograd.Function):
    """Sees the parameter itself: autograd is handed its whole gradient without a word to zerofx."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.shape = weight.shape
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return 2 * gradient, torch.full(ctx.shape, 1.0 + dist.get_rank())


def check_custom_functions() -> None:
    weight = zerofx.shard(nn.Linear(13, 13, bias=False)).weight
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"torch.autograd.grad .* Call loss.backward\(\)"):
        torch.autograd.grad(Doubled.apply(x, weight).sum(), weight)
    assert weight.grad is None
    for calls in (1, 2):  # and nothing is left of it
        Doubled.apply(x, weight).sum().backward()
        assert weight.grad is not None and weight.grad.full_tensor().eq(1.5 * calls).all()
    Doubled.apply(x, weight).sum().backward(inputs=[x])
    assert weight.grad.full_tensor().eq(3.0).all()


def test_gradients_that_a_custom_function_brings_are_averaged_and_autograd_grad_is_refused(workers2: Workers) -> None:
    workers2.run(quiet, check_custom_functions)
