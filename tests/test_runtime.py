"""A compiled module trains, evaluates and refuses. Compiling is slow: checks share a worker call, each is a test."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zerofx
from tests.workers import Workers
from zerofx import ShardedTensor

EXECUTORS = ["eager", "inductor"]
EACH_GROUP = zerofx.Grouping(min_bytes=0)


class Net(nn.Module):
    """Tied, frozen, unused and scalar parameters, a buffer, blocks; no size divides by 2."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(7, 11, bias=False)
        self.blocks = nn.ModuleList([nn.Linear(11, 11), nn.Linear(11, 11)])
        self.blocks[1].bias.requires_grad_(False)
        self.norm = nn.LayerNorm(11)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.randn(11))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.embedding.weight)
        for block in self.blocks:
            y = y + torch.tanh(block(y))
        y = self.norm(y) * self.scale + self.shift
        return ((y @ self.head.weight) ** 2).mean()


class Pair:
    """A compiled module and a plain one with the same weights; each rank has a part of each batch."""

    def __init__(self, executor: str) -> None:
        torch.manual_seed(0)
        self.plain, self.module = Net(), Net()
        self.module.load_state_dict(self.plain.state_dict())
        self.start = {name: value.clone() for name, value in self.plain.state_dict().items()}
        zerofx.compile(self.module, executor=executor, groups=EACH_GROUP)
        self.batches = torch.randn(4, 2 * dist.get_world_size(), 7)
        self.parameters = dict(self.module.named_parameters())
        self.references = dict(self.plain.named_parameters())

    def reset(self) -> None:
        for module in (self.module, self.plain):
            module.load_state_dict(self.start)
            module.zero_grad()
            module.train()
            for p in module.parameters():
                (p._post_accumulate_grad_hooks or {}).clear()

    def part(self, i: int = 0) -> torch.Tensor:
        return self.batches[i].chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()

    def loss(self, i: int = 0) -> torch.Tensor:
        return self.module(self.part(i))

    def reference(self, i: int = 0) -> torch.Tensor:
        return self.plain(self.batches[i])

    def check_gradients(self, factor: float = 1.0) -> None:
        for name, q in self.references.items():
            p = self.parameters[name]
            if q.grad is None:
                assert p.grad is None, name
                continue
            assert isinstance(p.grad, ShardedTensor) and p.grad.shape == q.shape, name
            value = q.grad * factor
            torch.testing.assert_close(p.grad.full_tensor(), value, rtol=1e-4, atol=1e-6, msg=f"{name}: {{}}".format)


def gradients_accumulate_over_backwards(pair: Pair) -> None:
    for i in range(3):
        pair.loss(i).backward()
        pair.reference(i).backward()
        pair.check_gradients()
    assert pair.parameters["unused.weight"].grad is None and pair.parameters["blocks.1.bias"].grad is None
    assert "head.weight" not in pair.parameters  # tied: one parameter
    pair.module.zero_grad(set_to_none=False)
    pair.plain.zero_grad(set_to_none=False)
    pair.loss(0).backward()
    pair.reference(0).backward()
    pair.check_gradients()


def losses_and_input_gradients_are_those_of_the_plain_module(pair: Pair) -> None:
    x, y = pair.part(), pair.part()
    loss, expected = pair.module(x), pair.plain(y)
    torch.testing.assert_close(loss, expected)
    (loss * 3).backward()
    (expected * 3).backward()
    torch.testing.assert_close(x.grad, y.grad)


def two_forwards_before_one_backward_are_both_counted(pair: Pair) -> None:
    (pair.loss(0) + 2 * pair.loss(1)).backward()
    (pair.reference(0) + 2 * pair.reference(1)).backward()
    pair.check_gradients()
    first, second = pair.loss(2), pair.loss(3)
    second.backward()
    first.backward()
    (pair.reference(2) + pair.reference(3)).backward()
    pair.check_gradients()


def an_optimizer_step_is_seen_by_the_next_forward(pair: Pair) -> None:
    mine = torch.optim.AdamW(pair.module.parameters(), lr=0.05)
    theirs = torch.optim.AdamW(pair.plain.parameters(), lr=0.05)
    for i in range(4):
        loss, expected = pair.loss(i), pair.reference(i)
        loss.backward()
        expected.backward()
        mine.step()
        theirs.step()
        mine.zero_grad()
        theirs.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / dist.get_world_size(), expected.detach())
    for name, q in pair.references.items():
        torch.testing.assert_close(pair.parameters[name].full_tensor(), q.detach(), rtol=1e-4, atol=1e-5)


def a_weight_changed_between_forward_and_backward_raises(pair: Pair) -> None:
    weight = pair.parameters["blocks.0.weight"]
    optimizer = torch.optim.SGD(pair.module.parameters(), lr=0.1)
    pair.loss().backward()
    writes: dict[str, Callable[[], Any]] = {
        "step": optimizer.step,
        "in place": lambda: weight.mul_(2),
        "alias": lambda: weight.detach().zero_(),
        "load_state_dict": lambda: pair.module.load_state_dict(pair.start),
        "foreach": lambda: torch._foreach_mul_([weight], 2),
    }
    for what, write in writes.items():
        loss = pair.loss()
        with torch.no_grad():
            write()
        before = weight.grad.full_tensor()  # type: ignore[union-attr]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        assert torch.equal(weight.grad.full_tensor(), before), what  # type: ignore[union-attr]
    pair.reset()
    pair.loss().backward()  # and it goes on working
    pair.reference().backward()
    pair.check_gradients()


def gradients_of_gradients_are_refused(pair: Pair) -> None:
    with pytest.raises(RuntimeError, match=r"double backward \(create_graph=True\)"):
        pair.loss().backward(create_graph=True)
    loss, x = pair.loss(), pair.part()
    with pytest.raises(RuntimeError, match=r"autograd\.grad.*\.grad"):
        torch.autograd.grad(loss, list(pair.module.parameters()), allow_unused=True)
    with pytest.raises(RuntimeError, match=r"double backward|create_graph"):
        torch.autograd.grad(pair.module(x), x, create_graph=True)
    assert all(p.grad is None for p in pair.parameters.values())


def autograd_grad_of_an_input_leaves_the_parameters_alone(pair: Pair) -> None:
    x, y = pair.part(), pair.part()
    (mine,) = torch.autograd.grad(pair.module(x), x)
    (theirs,) = torch.autograd.grad(pair.plain(y), y)
    torch.testing.assert_close(mine, theirs)
    pair.module(x).backward(inputs=[x])
    torch.testing.assert_close(x.grad, theirs)
    assert all(p.grad is None for p in pair.parameters.values())


def backward_with_inputs_accumulates_only_there(pair: Pair) -> None:
    for name in ("blocks.0.weight", "scale"):
        pair.loss().backward(inputs=[pair.parameters[name]])
        pair.reference().backward(inputs=[pair.references[name]])
        pair.check_gradients()


def a_retained_graph_gives_the_same_gradients_again_or_is_refused(pair: Pair) -> None:
    loss = pair.loss()
    try:
        loss.backward(retain_graph=True)
        loss.backward()
        times = 2.0
    except RuntimeError as e:
        assert "retain_graph" in str(e)
        times = 0.0
    if times:
        pair.reference().backward()
        pair.check_gradients(times)
    loss = pair.loss()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def hooks_after_accumulation_see_the_whole_sum_once(pair: Pair) -> None:
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in pair.parameters}
    expected: dict[str, list[torch.Tensor]] = {name: [] for name in pair.parameters}
    for parameters, log in ((pair.parameters, seen), (pair.references, expected)):
        for name, p in parameters.items():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(
                    lambda p, log=log, name=name: log[name].append(getattr(p.grad, "_local", p.grad).clone())
                )
    for i in range(2):
        pair.loss(i).backward()
        pair.reference(i).backward()
    for name, gradients in expected.items():
        assert (name, len(seen[name])) == (name, len(gradients))
        for times, (local, whole) in enumerate(zip(seen[name], gradients), start=1):
            p = pair.parameters[name]
            cut = torch.zeros_like(p, requires_grad=False).copy_(whole).to_local()  # type: ignore
            torch.testing.assert_close(local, cut, rtol=1e-4, atol=1e-6, msg=f"{name}, backward {times}: {{}}".format)


def an_optimizer_may_step_inside_of_backward(pair: Pair) -> None:
    for parameters in (pair.parameters, pair.references):
        for p in parameters.values():
            if p.requires_grad:
                optimizer = torch.optim.SGD([p], lr=0.1)

                def step(p: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                    optimizer.step()
                    optimizer.zero_grad()

                p.register_post_accumulate_grad_hook(step)
    for i in range(3):
        pair.loss(i).backward()
        pair.reference(i).backward()
    for name, q in pair.references.items():
        assert pair.parameters[name].grad is None
        torch.testing.assert_close(pair.parameters[name].full_tensor(), q.detach(), rtol=1e-4, atol=1e-5)


def evaluation_gives_the_same_numbers_in_every_mode(pair: Pair) -> None:
    expected = pair.plain(pair.part()).detach()
    pair.module.eval()
    loss = pair.loss()
    assert loss.requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            result = pair.module(pair.part().detach())
            torch.testing.assert_close(result, expected)
            assert not result.requires_grad
    loss.backward()
    pair.reference().backward()
    torch.testing.assert_close(loss.detach(), expected)
    pair.check_gradients()


CHECKS = [
    losses_and_input_gradients_are_those_of_the_plain_module,
    gradients_accumulate_over_backwards,
    two_forwards_before_one_backward_are_both_counted,
    an_optimizer_step_is_seen_by_the_next_forward,
    a_weight_changed_between_forward_and_backward_raises,
    gradients_of_gradients_are_refused,
    autograd_grad_of_an_input_leaves_the_parameters_alone,
    backward_with_inputs_accumulates_only_there,
    a_retained_graph_gives_the_same_gradients_again_or_is_refused,
    hooks_after_accumulation_see_the_whole_sum_once,
    an_optimizer_may_step_inside_of_backward,
    evaluation_gives_the_same_numbers_in_every_mode,
]


def run_checks(executor: str) -> dict[str, str]:
    pair, failures = Pair(executor), {}
    for check in CHECKS:
        pair.reset()
        try:
            check(pair)
        except (Exception, pytest.fail.Exception):
            failures[check.__name__] = traceback.format_exc()
    return failures


@pytest.fixture(scope="module", params=EXECUTORS)
def failures(request: pytest.FixtureRequest, workers2: Workers) -> list[dict[str, str]]:
    return workers2.run(run_checks, request.param)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_compiled_module(failures: list[dict[str, str]], check: Callable[..., Any]) -> None:
    reports = [f"rank {rank}: {each[check.__name__]}" for rank, each in enumerate(failures) if check.__name__ in each]
    assert not reports, "\n".join(reports)
