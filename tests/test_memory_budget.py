"""`memory_budget`: never more gathered bytes than it says, fewer gathers the larger it is, and the same numbers."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

import zerofx
from tests.counting import count_collectives
from tests.models import GPT, Block
from tests.workers import Workers

LAYERS, VOCAB, LENGTH = 4, 61, 12


def build(executor: str, budget: float | None) -> tuple[GPT, GPT, torch.Tensor]:
    torch.manual_seed(0)
    plain = GPT(LAYERS, 32, 4, VOCAB, LENGTH)
    groups = zerofx.Grouping(blocks=(Block,), min_bytes=0)
    net = zerofx.compile(copy.deepcopy(plain), executor=executor, memory_budget=budget, groups=groups)
    generator = torch.Generator().manual_seed(1)
    return net, plain, torch.randint(VOCAB, (2, 2, LENGTH), generator=generator)


def train(executor: str, budget: float | None) -> dict[str, Any]:
    net, plain, (x, y) = build(executor, budget)
    losses: list[list[float]] = []
    for model in (net, plain):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(3):
            with count_collectives() as log:
                loss = model(x, y)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
        if model is net:
            gathers = log.calls["all_gather_recv"]
    (record,) = zerofx.graphs(net)
    contexts = [trace.context for trace in record.traces()]
    return {
        "losses": losses,
        "gathers": gathers,
        "kept": list(contexts[0].kept_gathered),
        "live": max(context.gathered_bytes for context in contexts),
    }


GROUPS = ["tokens", *(f"blocks.{i}" for i in range(LAYERS)), "norm"]


@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_an_unlimited_budget_gathers_every_group_once_and_changes_no_number(workers2: Workers, executor: str) -> None:
    for result in workers2.run(train, executor, math.inf, timeout=250):
        got, wanted = result["losses"]
        assert got == pytest.approx(wanted, rel=1e-5)
        assert result["gathers"] == len(GROUPS)
        assert set(result["kept"]) >= set(GROUPS[1:])


def train_at_many_budgets(count: int) -> list[tuple[float, dict[str, Any]]]:
    least = train("eager", None)["live"]
    whole = train("eager", math.inf)["live"]
    return [(b, train("eager", b)) for b in (round(least + (whole - least) * i / count) for i in range(count + 1))]


def test_over_ten_budgets_none_is_exceeded_and_gathers_get_fewer_as_it_grows(workers2: Workers) -> None:
    results = workers2.run(train_at_many_budgets, 10, timeout=250)[0]
    gathers = [result["gathers"] for _, result in results]
    assert gathers == sorted(gathers, reverse=True)
    assert gathers[-1] == len(GROUPS) < gathers[0]
    for budget, result in results:
        assert result["live"] <= budget
        assert result["losses"] == results[0][1]["losses"]
