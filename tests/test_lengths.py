"""Sequence lengths: no more captures than plain `torch.compile`, the numbers of one process; `memory=` holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests import models
from tests.agreement import assert_ranks_agree
from tests.models import GPT
from tests.slow import quick_if
from tests.workers import Workers

LENGTHS = (6, 12, 8, 7, 14, 9, 10, 5)
LONGEST, ROWS, EACH_GROUP = max(LENGTHS), 4, zerofx.Grouping(min_bytes=0)
PLENTY = 10**9

CAPTURES = {"": 2, "max": 1, "dynamic": 1}
"""What is stated of lengths ahead -> graphs of eight lengths that are trained with; as many again to evaluate."""

OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "memory": {"memory": PLENTY},
    "activation_budget": {"activation_budget": 0.3},
    "bfloat16": {"mixed_precision": zerofx.MixedPrecision(torch.bfloat16, torch.float32)},
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return GPT(1, 24, 2, models.VOCAB, LONGEST) if name == "gpt" else models.build(name)


def batch(name: str, length: int, rank: int, ranks: int, stated: str) -> dict[str, torch.Tensor]:
    """One rank's rows of a batch that all share; every other row is padded where the model takes a mask."""
    tokens = torch.randint(models.VOCAB, (2, ROWS, length), generator=torch.Generator().manual_seed(length))
    if name == "gpt":
        whole = {"x": tokens[0], "y": tokens[1]}
    else:
        mask = torch.ones_like(tokens[0])
        mask[::2, -2:] = 0
        whole = {"input_ids": tokens[0], "labels": tokens[1], "attention_mask": mask}
    mine = {key: x.chunk(ranks)[rank].clone() for key, x in whole.items()}
    if stated == "max":
        for x in mine.values():
            torch._dynamo.mark_dynamic(x, 1, min=2, max=LONGEST)
    return mine


def trained(net: nn.Module, name: str, stated: str, rank: int = 0, ranks: int = 1) -> tuple[list[float], int]:
    """Losses of a step of each length, and of an evaluation behind it; and how many graphs were captured."""
    from torch._dynamo.utils import counters

    optimizer, losses, before = torch.optim.SGD(net.parameters(), lr=0.1), [], counters["stats"]["unique_graphs"]
    for length in LENGTHS:
        given = batch(name, length, rank, ranks, stated)
        loss = models.loss_of(net, given)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses += [loss.item(), models.loss_of(net, given).item()]
    return losses, counters["stats"]["unique_graphs"] - before


def beside(name: str, stated: str, option: str, stage: int, executor: str) -> tuple[Any, Any, int]:
    """What one process makes of it, what ranks do, and how many records there are."""
    torch._dynamo.reset()
    dynamic, (plain, net) = True if stated == "dynamic" else None, (build(name), build(name))
    plain.compile(backend="eager", dynamic=dynamic)
    alone = trained(plain, name, stated)
    zerofx.compile(net, stage=stage, executor=executor, groups=EACH_GROUP, dynamic=dynamic, **OPTIONS[option])
    together = trained(net, name, stated, dist.get_rank(), dist.get_world_size())
    assert_ranks_agree(net)
    return alone, together, len(zerofx.graphs(net))


@quick_if(lambda stated, option, stage, executor: (stated, option, stage, executor) == ("max", "", 3, "eager"))
@pytest.mark.parametrize(
    ("name", "option", "stage", "executor"),
    [
        *(("gpt", "", stage, "eager") for stage in (3, 2, 1, 0)),
        ("gpt", "", 3, "inductor"),
        ("gpt", "", 0, "inductor"),
        ("gpt", "", 3, "regional"),
        ("gpt", "activation_budget", 3, "eager"),
        ("gpt", "bfloat16", 3, "eager"),
        ("llama", "", 2, "eager"),
        ("gpt2", "", 0, "eager"),
    ],
)
@pytest.mark.parametrize("stated", CAPTURES)
def test_lengths_cost_as_many_captures_as_in_one_process_and_give_its_losses(
    workers2: Workers, name: str, stated: str, option: str, stage: int, executor: str
) -> None:
    ranks = workers2.run(beside, name, stated, option, stage, executor, timeout=550)
    for (wanted, plain), (_, captures), records in ranks:
        assert captures == plain == records == 2 * CAPTURES[stated]
        losses = [sum(each) / len(ranks) for each in zip(*(rank[1][0] for rank in ranks), strict=True)]
        assert losses == pytest.approx(wanted, abs=5e-2 if option == "bfloat16" else 3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_with_memory_a_stated_bound_costs_one_capture_and_gives_the_same_losses(
    workers2: Workers, executor: str
) -> None:
    ranks = workers2.run(beside, "gpt", "max", "memory", 3, executor, timeout=550)
    for (wanted, _), (_, captures), records in ranks:
        assert captures == records == 2
        losses = [sum(each) / len(ranks) for each in zip(*(rank[1][0] for rank in ranks), strict=True)]
        assert losses == pytest.approx(wanted, abs=3e-6)


def divisions(lengths: tuple[int, ...], stated: str) -> list[int]:
    """What a step needs by each division that `memory=` has chosen, where these lengths come one after the other."""
    torch._dynamo.reset()
    net = zerofx.compile(build("gpt"), executor="eager", groups=EACH_GROUP, memory=PLENTY)
    for length in lengths:
        models.loss_of(net, batch("gpt", length, 0, 1, stated)).backward()
    found = [record.forward.division for record in zerofx.graphs(net) if record.forward is not None]
    return [division.at_rest + division.peak_bytes for division in found if division is not None]


def test_memory_counts_the_longest_that_is_stated(fake_world: Any) -> None:
    fake_world(2)
    (longest,), (shortest,) = divisions((LONGEST,), ""), divisions((6,), "")
    (stated,) = divisions((6, LONGEST, 8), "max")
    assert shortest < stated == longest


@pytest.mark.slow
def test_memory_divides_anew_for_what_is_longer_than_it_has_counted(fake_world: Any) -> None:
    fake_world(2)
    first, second, third = divisions((6, 9, 8, LONGEST, 10), "")
    assert first < second < third == divisions((LONGEST,), "")[0]
