"""step_in_backward: the numbers of backward and step, whatever is updated where; what it cannot do is an error."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerofx
from tests.counting import count_collectives
from tests.slow import quick_if, slow_if
from tests.workers import Workers
from zerofx.runtime.state.group import groups_of

EACH_LAYER = zerofx.Grouping(blocks=(nn.Linear,), min_bytes=0)
MIXED = zerofx.MixedPrecision(torch.bfloat16, torch.float32)


class Net(nn.Module):
    """Four layers; of one kind of data the last is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(9, 9) for _ in range(4)])
        self.broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if self.broken:
            torch._dynamo.graph_break()
            x = self.layers[3](x)
        return x.square().mean()


def compiled(**options: Any) -> Net:
    torch.manual_seed(0)
    return zerofx.compile(Net(), **{"executor": "eager", "groups": EACH_LAYER} | options)


def batch(i: int) -> torch.Tensor:
    return torch.randn(5, 9, generator=torch.Generator().manual_seed(10 * i + dist.get_rank()))


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor() if isinstance(p, zerofx.ShardedTensor) else p.detach().clone() for p in model.parameters()]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "zerofx.AdamW": lambda params: zerofx.AdamW(params, lr=0.01),
    "bf16 moments": lambda params: zerofx.AdamW(params, lr=0.01, moments=torch.bfloat16),
    "torch.optim.AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "two groups": lambda params: torch.optim.Adam(
        [{"params": (params := list(params))[::2]}, {"params": params[1::2], "lr": 0.05}], lr=0.01
    ),
}


def both_ways(optimizer: str, micro_batches: int, no_sync: bool, broken: bool, options: dict[str, Any]) -> list[str]:
    """The groups that graphs updated in the last step; weights and losses must be equal, bit by bit."""
    found = []
    updated: list[str] = []
    for inside in (False, True):
        model = compiled(**options)
        model.broken = broken
        optim = OPTIMIZERS[optimizer](model.parameters())
        losses = []
        for i in range(3):
            for k in range(micro_batches - 1):
                if no_sync:
                    with zerofx.no_sync(model):
                        model(batch(100 + i + k)).backward()
                else:
                    model(batch(100 + i + k)).backward()
            loss = model(batch(i))
            losses.append(loss.item())
            if inside:
                with zerofx.step_in_backward(optim):
                    loss.backward()
                    updated = [group.layout.name for group in groups_of(model) if group.stepped]
            else:
                loss.backward()
                optim.step()
                optim.zero_grad()
            assert all(p.grad is None for p in model.parameters())
        found.append((losses, weights(model)))
    (losses, wanted), (also, got) = found
    assert losses == also
    assert all(a.equal(b) for a, b in zip(wanted, got, strict=True))
    return updated


ALL = [f"layers.{i}" for i in range(4)]


@quick_if(lambda stage, optimizer: stage == 3 or optimizer == "zerofx.AdamW")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_numbers_are_those_of_backward_and_step(workers2: Workers, stage: int, optimizer: str) -> None:
    updated = workers2.run(both_ways, optimizer, 1, False, False, {"stage": stage})
    assert updated == [ALL if stage else []] * 2


@quick_if(lambda precision, no_sync, stage: stage == 2 if no_sync else precision is None)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("precision", [None, MIXED])
def test_gradients_that_were_accumulated_before_are_in_the_step(workers2, stage, no_sync, precision) -> None:
    options = {"stage": stage, "mixed_precision": precision}
    assert workers2.run(both_ways, "zerofx.AdamW", 3, no_sync, False, options) == [ALL] * 2


@pytest.mark.parametrize("stage", [2, 3])
def test_a_group_of_two_graphs_is_updated_in_that_which_brings_the_rest_of_its_gradient(workers2, stage) -> None:
    assert workers2.run(both_ways, "zerofx.AdamW", 1, False, True, {"stage": stage}) == [ALL] * 2


@quick_if(lambda stage: stage == 3)
@pytest.mark.parametrize("stage", [2, 3])
def test_inductor_does_the_same(workers2: Workers, stage: int) -> None:
    options = {"stage": stage, "executor": "inductor"}
    assert workers2.run(both_ways, "zerofx.AdamW", 2, True, False, options, timeout=250) == [ALL] * 2


def test_one_rank_does_the_same(make_workers: Callable[[int], Workers]) -> None:
    assert make_workers(1).run(both_ways, "zerofx.AdamW", 2, True, False, {"stage": 3}) == [ALL]


def one_step(reason: str, inside: bool) -> tuple[list[str], list[torch.Tensor]]:
    """The groups that graphs updated, and the weights after the step."""
    model = compiled(stage=3)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[bool] = []
    if reason == "hook":
        model.layers[1].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    loss, updated = model(batch(0)), []
    if reason == "eager":
        loss = loss + model.layers[2].weight.square().sum()
    if reason == "two forwards":
        loss = loss + model(batch(1))
    if inside:
        with zerofx.step_in_backward(optim):
            loss.backward()
            updated = [group.layout.name for group in groups_of(model) if group.stepped]
    else:
        loss.backward()
        optim.step()
    assert seen == ([True] if reason == "hook" else [])
    return updated, weights(model)


def what_waits_for_the_end(reason: str) -> tuple[list[str], bool]:
    _, wanted = one_step(reason, False)
    updated, got = one_step(reason, True)
    return updated, all(a.equal(b) for a, b in zip(wanted, got, strict=True))


@slow_if(lambda reason: reason == "two forwards")
@pytest.mark.filterwarnings("ignore:.*outside of a compiled graph")
@pytest.mark.parametrize(
    ("reason", "updated"),
    [("hook", [ALL[0], *ALL[2:]]), ("eager", [*ALL[:2], ALL[3]]), ("two forwards", ALL), ("nothing", ALL)],
)
def test_what_a_graph_cannot_know_to_be_complete_waits_for_the_end(workers2, reason, updated) -> None:
    assert workers2.run(what_waits_for_the_end, reason) == [(updated, True)] * 2


class Watching(zerofx.AdamW):
    """Notes of how many groups there are gradients when it steps."""

    most = 0

    def step_group(self, group: Any) -> None:
        parameters = self.param_groups[0]["params"]
        self.most = max(self.most, len({p._group for p in parameters if p.grad is not None}))
        super().step_group(group)


def count(stage: int) -> tuple[list[str], list[str], int]:
    """Collectives of one step and forward both ways; the most gradients that were there at once in the second."""
    logs = []
    for inside in (False, True):
        model = compiled(stage=stage)
        optim = Watching(model.parameters(), lr=0.01)
        loss = model(batch(0))
        with count_collectives() as log:
            if inside:
                with zerofx.step_in_backward(optim):
                    loss.backward()
            else:
                loss.backward()
                optim.step()
            model(batch(1))
        logs.append(sorted(event.name for event in log.events))
    return logs[0], logs[1], optim.most


@pytest.mark.parametrize("stage", [2, 3])
def test_no_collective_is_added_and_one_gradient_is_there_at_a_time(workers2: Workers, stage: int) -> None:
    for plain, inside, most in workers2.run(count, stage):
        assert plain == inside and plain
        assert most == 1


def refusals() -> dict[str, str]:
    said = {}

    def told(name: str, run: Callable[[], Any]) -> None:
        try:
            run()
            said[name] = "nothing"
        except (RuntimeError, ValueError) as e:
            said[name] = str(e)

    model = compiled(stage=3)
    optim = zerofx.AdamW(model.parameters(), lr=0.01)

    def nested() -> None:
        with zerofx.step_in_backward(optim), zerofx.step_in_backward(optim):
            pass

    def twice() -> None:
        loss = model(batch(0))
        with zerofx.step_in_backward(optim):
            loss.backward(retain_graph=True)
            loss.backward()

    def shared() -> None:
        """A model in two reentrant checkpoints: the second backward runs it again, with weights of the first's step."""
        layer = zerofx.compile(nn.Sequential(nn.Linear(9, 9), nn.Tanh()), stage=2, executor="eager")
        x = batch(0).requires_grad_()
        for _ in range(2):
            x = checkpoint(layer, x, use_reentrant=True)
        with zerofx.step_in_backward(zerofx.AdamW(layer.parameters(), lr=0.01)):
            x.sum().backward()

    def clipped() -> None:
        with zerofx.step_in_backward(zerofx.AdamW(model.parameters(), max_grad_norm=1.0)):
            pass

    def fails_in_backward() -> None:
        loss = model(batch(0))
        loss.register_hook(lambda gradient: 1 / 0)
        with zerofx.step_in_backward(optim):
            loss.backward()

    for each in (nested, clipped, twice, shared):
        told(each.__name__, each)
    before = weights(model)
    with pytest.raises(ZeroDivisionError):
        fails_in_backward()
    assert all(a.equal(b) for a, b in zip(before, weights(model), strict=True)), "it stepped"
    families = {group.family for group in groups_of(model)}
    assert all(family.stepper is None for family in families)
    assert not any(group.stepped or group.pending for group in groups_of(model))
    return said


@pytest.mark.filterwarnings("ignore:.*outside of a compiled graph")
def test_what_it_cannot_do_is_an_error_and_leaves_no_trace(workers2: Workers) -> None:
    for said in workers2.run(refusals):
        assert "step_in_backward inside of another" in said["nested"]
        assert "max_grad_norm=1.0" in said["clipped"] and "optimizer.step() after backward" in said["clipped"]
        assert "updated" in said["twice"] or "modified by an inplace operation" in said["twice"]
        assert "reentrant" in said["shared"]


def scheduled_and_hooked() -> tuple[int, list[float]]:
    """How often hooks of the step ran in two steps, and the learning rates."""
    model = compiled(stage=2)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optim, 1, gamma=0.5)
    ran = []
    optim.register_step_post_hook(lambda *_: ran.append(1))
    rates = []
    for i in range(2):
        loss = model(batch(i))
        with zerofx.step_in_backward(optim):
            loss.backward()
        schedule.step()
        rates.append(optim.param_groups[0]["lr"])
    return len(ran), rates


@pytest.mark.filterwarnings("error:.*lr_scheduler.step")
def test_schedulers_and_hooks_of_the_step_see_one_step(workers2: Workers) -> None:
    assert workers2.run(scheduled_and_hooked) == [(2, [0.05, 0.025])] * 2


def forget() -> bool:
    model = compiled(stage=2)
    optim = zerofx.AdamW(model.parameters(), lr=0.01)
    loss = model(batch(0))
    with zerofx.step_in_backward(optim):
        loss.backward()
    group = weakref.ref(groups_of(model)[0])
    del model, optim, loss
    gc.collect()
    return group() is None


def test_a_model_is_free_when_nothing_holds_it_after_such_a_step(workers2: Workers) -> None:
    assert workers2.run(forget) == [True, True]


def under_way_behind_a_step(profiled: bool) -> tuple[int, float]:
    """Groups whose refresh is still on its way when a step has ended; and the loss of the next forward."""
    model = compiled(stage=2)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) if profiled else contextlib.nullcontext():
        loss = model(batch(0))
        with zerofx.step_in_backward(optim):
            loss.backward()
        under_way = sum(bool(group.weights.ahead) for group in groups_of(model))
    return under_way, model(batch(1)).item()


def test_no_refresh_outlives_a_profiler(workers2: Workers) -> None:
    """What starts under PyTorch's profiler and is waited for when that has stopped corrupts memory."""
    plain, profiled = (workers2.run(under_way_behind_a_step, profiled) for profiled in (False, True))
    for (left, loss), (none, same) in zip(plain, profiled, strict=True):
        assert left > 0 and none == 0
        assert loss == same
