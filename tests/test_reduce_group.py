"""Reductions in a process group of their own: the same numbers, nothing in the wrong group, one watch over both."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.counting import count_collectives
from tests.slow import quick_if
from tests.workers import Workers
from zerofx.runtime.ranks import watch
from zerofx.runtime.ranks.agree import OutOfStepError

EACH_LAYER = zerofx.Grouping(blocks=(nn.Linear,), min_bytes=0)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 13), nn.Tanh(), nn.Linear(13, 3))


def train(model: nn.Module) -> list[torch.Tensor]:
    """Whole weights after three steps of two micro-batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(6, 4, 7, generator=torch.Generator().manual_seed(dist.get_rank()))
    for first, second in x.view(3, 2, 4, 7):
        with zerofx.no_sync(model):
            model(first).square().mean().backward()
        model(second).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() if isinstance(p, zerofx.ShardedTensor) else p.detach() for p in model.parameters()]


def train_both_ways(stage: int, executor: str) -> dict[str, set[str]]:
    """Kinds of collectives by the group they ran in, once the weights were seen to be equal."""
    options: dict[str, Any] = {"stage": stage, "executor": executor, "groups": EACH_LAYER}
    wanted = train(zerofx.compile(net(), **options))
    second = dist.new_group()
    model = zerofx.compile(net(), reduce_group=second, **options)
    with count_collectives() as log:
        for got, expected in zip(train(model), wanted, strict=True):
            assert got.equal(expected)
    kinds = defaultdict(set)
    for event in log.events:
        kinds["second" if event.group == second.group_name else "first"].add(event.name.rpartition("_")[0])
    return dict(kinds)


@quick_if(lambda stage: stage < 3)
@pytest.mark.parametrize(("stage", "executor"), [(0, "eager"), (2, "eager"), (3, "eager"), (3, "inductor")])
def test_numbers_are_the_same_and_only_reductions_run_there(workers2: Workers, stage: int, executor: str) -> None:
    for kinds in workers2.run(train_both_ways, stage, executor):
        # `full_tensor` broadcasts
        assert kinds["second"] == ({"all"} if stage == 0 else {"all_to_all"})
        assert kinds.get("first", set()) - {""} == ({"all_gather"} if stage else set())


def come_late_to_backward() -> str:
    watch.TICK, watch.SILENT = 0.25, 2.0
    model = zerofx.compile(net(), stage=2, executor="eager", reduce_group=dist.new_group(), timeout=4)
    model(torch.ones(2, 7)).mean().backward()
    loss = model(torch.ones(2, 7)).mean()
    if dist.get_rank():
        time.sleep(9)
    try:
        loss.backward()
    except OutOfStepError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_rank_that_does_not_come_to_a_reduction_is_named(workers2: Workers) -> None:
    message, _ = workers2.run(come_late_to_backward, timeout=60)
    assert re.search(r"rank 0 has waited 4 s for backward: reduce-scatter.*; missing: rank 1", message), message


def refusals() -> list[str]:
    found = []
    for group in (dist.new_group([0, 1]), "nobody", 5):
        model = net()
        with pytest.raises((ValueError, RuntimeError)) as error:
            zerofx.compile(model, reduce_group=group)
        assert all(type(p) is nn.Parameter for p in model.parameters())
        found.append(str(error.value))
    return found


def test_a_group_of_other_ranks_and_what_is_no_group_are_refused(workers3: Workers) -> None:
    others, unknown, no_group = workers3.run(refusals)[0]
    assert re.search(r"reduce_group has the ranks \[0, 1\]: expected \[0, 1, 2\]", others)
    assert "reduce_group='nobody': rank 0 is in no process group of that name" in unknown
    assert "reduce_group=5: expected a process group, its name, or None" in no_group
