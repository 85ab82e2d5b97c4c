"""zerofx.plan is zerofx.cost with a module's numbers, and allocates nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zerofx
from tests.models import GPT

GB = 1e9


def gpt(dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.device("meta"):
        return GPT(36, 4096, 32, 50000, 1024).to(dtype)


def totals(plan: Any) -> list[float]:
    return [float(each.memory.total) for each in plan.stages]


def test_a_model_of_7_5_billion_parameters_on_64_ranks_has_the_papers_figure_1() -> None:
    plan = zerofx.plan(gpt(torch.bfloat16), world_size=64)
    assert plan.parameters == pytest.approx(7.5e9, rel=0.03)
    n = plan.parameters
    stage_1 = 2 * n + 14 * n / 64  # with whole gradients while they accumulate: the paper's
    assert totals(plan) == pytest.approx([16 * n, stage_1, 2 * n + 14 * n / 64, 16 * n / 64])
    accumulating = zerofx.plan(gpt(torch.bfloat16), world_size=64, micro_batches=4, no_sync=True)
    assert totals(accumulating)[1] == pytest.approx(4 * n + 12 * n / 64)
    assert [round(x / GB * 7.5e9 / n, 1) for x in totals(plan)] == [120.0, 16.6, 16.6, 1.9]


def test_in_full_precision_a_parameter_takes_16_bytes_and_stage_3_divides_all_of_them() -> None:
    plan = zerofx.plan(gpt(), world_size=8)
    n = plan.parameters
    assert totals(plan) == pytest.approx([16 * n, 4 * n + 12 * n / 8, 4 * n + 12 * n / 8, 2 * n])
    sent = [float(each.traffic.total) for each in plan.stages]
    assert sent == pytest.approx([x * 4 * n * 7 / 8 for x in (2, 2, 2, 3)])
    assert [int(each.traffic.collectives) for each in plan.stages] == [plan.groups * x for x in (1, 2, 2, 3)]


def test_mixed_precision_halves_what_travels() -> None:
    full = zerofx.plan(gpt(), world_size=8)
    low = zerofx.plan(gpt(), world_size=8, mixed_precision=zerofx.MixedPrecision(torch.bfloat16))
    for a, b in zip(full.stages, low.stages, strict=True):
        assert float(b.traffic.total) == float(a.traffic.total) / 2


def test_frozen_parameters_have_weights_and_nothing_else() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model[0].requires_grad_(False)
    plan = zerofx.plan(model, world_size=4, groups=zerofx.Grouping(min_bytes=0))
    n, share = 64 * 64, 3 / 4
    assert totals(plan) == [(4 + 16) * n, 4 * n + 4 * n + 3 * n, 4 * n + 4 * n + 3 * n, n + 4 * n]
    sent = [float(each.traffic.total) for each in plan.stages]
    assert sent == [x * 4 * n * share for x in (2, 2, 2, 5)]  # stage 3: two gathers of both, one reduction
    assert [int(each.traffic.collectives) for each in plan.stages] == [1, 2, 2, 5]


def test_it_prints_a_row_per_stage() -> None:
    text = str(zerofx.plan(gpt(torch.bfloat16), world_size=64, stages=(2, 3)))
    title, head, *rows = text.splitlines()
    assert title == "7,663,476,736 parameters in 112 groups, 64 ranks, Adam with two moments"
    assert head.split()[:5] == ["stage", "weights", "gradients", "master", "moments"]
    assert [row.split()[0] for row in rows] == ["2", "3"]
    assert "17.0 GB" in rows[0] and "1.9 GB" in rows[1]
    assert len({len(line) for line in [head, *rows]}) == 1


@pytest.mark.parametrize(("options", "message"), [({"world_size": 0}, "world_size=0"), ({"stages": [4]}, "stage=4")])
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zerofx.plan(nn.Linear(2, 2), **{"world_size": 2, **options})
