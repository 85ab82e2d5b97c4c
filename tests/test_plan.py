"""zerofx.plan is zerofx.inspect.predict.cost with a module's numbers, and allocates nothing."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest
import torch
from torch import nn

import zerofx
from tests.models import GPT
from zerofx.runtime.ranks.sharing import PretendedRanks, Sharing

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
    assert title == "7,663,476,736 parameters in 76 groups, 64 ranks, Adam with two moments"
    assert head.split()[:5] == ["stage", "weights", "gradients", "master", "moments"]
    assert [row.split()[0] for row in rows] == ["2", "3"]
    assert "17.0 GB" in rows[0] and "1.9 GB" in rows[1]
    assert len({len(line) for line in [head, *rows]}) == 1


@pytest.mark.parametrize(("options", "message"), [({"world_size": 0}, "world_size=0"), ({"stages": [4]}, "stage=4")])
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zerofx.plan(nn.Linear(2, 2), **{"world_size": 2, **options})


PAPERS_TABLE_1 = {  # ranks -> GB for 7.5, 128 and 1000 billion parameters, with Pos, Pos+g, Pos+g+p
    1: [(120, 120, 120), (2048, 2048, 2048), (16000, 16000, 16000)],
    4: [(52.5, 41.3, 30), (896, 704, 512), (7000, 5500, 4000)],
    16: [(35.6, 21.6, 7.5), (608, 368, 128), (4750, 2875, 1000)],
    64: [(31.4, 16.6, 1.88), (536, 284, 32), (4187, 2218, 250)],
    256: [(30.4, 15.4, 0.47), (518, 263, 8), (4046, 2054, 62.5)],
    1024: [(30.1, 15.1, 0.12), (513, 257, 2), (4011, 2013, 15.6)],
}


class Billions(nn.Module):
    def __init__(self, billions: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(int(billions * 1e9), dtype=torch.bfloat16, device="meta"))


@pytest.mark.parametrize("ranks", PAPERS_TABLE_1)
def test_the_rows_of_the_papers_table_1(ranks: int) -> None:
    for billions, row in zip((7.5, 128, 1000), PAPERS_TABLE_1[ranks], strict=True):
        # The paper's stage 1 keeps whole gradients, which zerofx does while they accumulate; 2 and 3 do not.
        once = totals(zerofx.plan(Billions(billions), world_size=ranks))
        accumulating = totals(zerofx.plan(Billions(billions), world_size=ranks, micro_batches=2, no_sync=True))
        planned = [x / GB for x in (accumulating[1], once[2], once[3])]
        assert planned == pytest.approx(row, rel=0.003, abs=0.005)


def test_figure_1_of_the_paper_with_exactly_7_5_billion_parameters() -> None:
    accumulating = zerofx.plan(Billions(7.5), world_size=64, micro_batches=2, no_sync=True)
    once = zerofx.plan(Billions(7.5), world_size=64)
    gigabytes = [totals(once)[0], totals(accumulating)[1], totals(once)[2], totals(once)[3]]
    assert [round(x / GB, 1) for x in gigabytes] == [120.0, 31.4, 16.6, 1.9]


def test_the_lowest_stage_that_fits_is_recommended_with_what_is_left() -> None:
    def recommended(memory: float, **options: Any) -> int | None:
        plan = zerofx.plan(gpt(torch.bfloat16), world_size=64, memory=memory, **options)
        return None if plan.recommended is None else plan.recommended.stage

    assert recommended(130 * GB) == 0
    assert recommended(30 * GB) == 1
    assert recommended(30 * GB, micro_batches=2, no_sync=True) == 3  # 2 N of gradients come to the 2 N of weights
    assert recommended(10 * GB) == 3
    assert recommended(10 * GB, micro_batches=2, no_sync=True) is None  # gradients stay whole in stage 3, too
    assert recommended(10 * GB, stages=(0, 1)) is None
    plan = zerofx.plan(gpt(torch.bfloat16), world_size=64, memory=30 * GB)
    assert plan.recommended is not None and plan.recommended.stage == 1
    left = 30 * GB - float(plan.recommended.memory.total) - plan.recommended.buffers
    assert str(plan).splitlines()[-1] == (
        f"recommended: stage 1, the lowest that fits; {left / GB:.1f} GB of 30.0 GB are left for activations"
    )
    assert [row.split()[-1] for row in str(plan).splitlines()[2:6]] == ["no", "yes", "yes", "yes"]
    unasked = zerofx.plan(gpt(torch.bfloat16), world_size=64)
    assert (unasked.recommended, unasked.recommendation, unasked.least_ranks) == (None, "", None)


def test_where_nothing_fits_the_least_number_of_ranks_is_named_and_does_fit() -> None:
    plan = zerofx.plan(gpt(), world_size=4, memory=10 * GB)
    assert plan.recommended is None and plan.least_ranks is not None
    assert f"no stage fits into 10.0 GB on 4 ranks; stage 3 does from {plan.least_ranks} ranks on" in str(plan)
    ranks = plan.least_ranks
    for world_size, stage in ((ranks, 3), (ranks - 1, None)):
        chosen = zerofx.plan(gpt(), world_size=world_size, memory=10 * GB).recommended
        assert (None if chosen is None else chosen.stage) == stage
    never = zerofx.plan(gpt(), world_size=4, memory=0.1 * GB)  # two groups, whole, are more than that
    assert never.least_ranks is None and "more ranks do not help" in str(never)


@pytest.mark.parametrize("world_size", [2, 64])
def test_what_stage_3_gathers_at_once_is_what_the_compiled_graph_does(world_size: int) -> None:
    with torch.device("meta"):
        model, x = GPT(3, 64, 4, 500, 32), torch.zeros(2, 32, dtype=torch.long)
    grouping = zerofx.Grouping(min_bytes=0)
    (stage,) = zerofx.plan(model, world_size=world_size, stages=[3], groups=grouping).stages
    record = zerofx.dry_run(model, x, x, world_size=world_size, stage=3, groups=grouping)
    assert record.forward is not None
    assert stage.gathered == record.forward.context.found.gathered_bytes


def test_codes_are_planned_with_the_bytes_of_their_rows_and_the_time_they_take_to_write_and_read() -> None:
    model, wire = nn.Sequential(*(nn.Linear(256, 256, device="meta") for _ in range(4))), zerofx.Wire("int8", "int4")
    options: dict[str, Any] = {"world_size": 2, "groups": zerofx.Grouping(blocks=(nn.Linear,), min_bytes=0)}
    options |= {"bandwidth": 1e6, "flops": 1e9, "tokens": 1.0, "stages": (1, 3)}
    plain, coded = zerofx.plan(model, **options), zerofx.plan(model, **options, wire=wire)
    for a, b in zip(plain.stages, coded.stages, strict=True):
        for now, before, code in (
            (b.traffic.gathered, a.traffic.gathered, 8),
            (b.traffic.reduced, a.traffic.reduced, 4),
        ):
            bits = code + 32 / 256  # and room for the bias, which travels as it is, in either rank's row
            assert float(now / before) == pytest.approx((65792 * bits + 2 * 256 * 32) / (65792 * 32), rel=0.01)
        assert b.time is not None and a.time is not None and float(b.time.wire) < 0.27 * float(a.time.wire)
        assert b.time.compute == a.time.compute
    slow = zerofx.plan(model, **options, wire=wire, memory_bandwidth=1e9)
    fast = [float(each.time.compute) for each in coded.stages if each.time]
    gather, reduction = (4 * 65792 * x / 1e9 for x in (1.5 * 5.02, 0.5 * (4 + 1.04 + 8 + 12)))
    taken = [float(each.time.compute) - before for each, before in zip(slow.stages, fast) if each.time]
    assert taken == pytest.approx([gather + reduction, 2 * gather + reduction], rel=0.02)
    fed = zerofx.plan(model, **options, wire=zerofx.Wire("int8", "int4", error_feedback=True))
    extra = [float(x.memory.gradients - y.memory.gradients) for x, y in zip(fed.stages, plain.stages)]
    assert extra == [4 * 4 * 65792 / 2] * 2
    with pytest.raises(ValueError, match="with 2 replicas: a gradient would be written in codes twice"):
        zerofx.plan(model, world_size=(2, 2), wire=wire)


def test_codes_of_changes_are_planned_where_they_are_built() -> None:
    model, options = nn.Linear(256, 256, device="meta"), {"world_size": 2, "stages": (0, 1, 2, 3)}
    plans = [zerofx.plan(model, **options, wire=wire).stages for wire in (None, zerofx.Wire("int4"))]  # type: ignore[arg-type]
    ratios = [float(b.traffic.gathered / a.traffic.gathered) for a, b in zip(*plans, strict=True) if a.stage]
    assert ratios == [pytest.approx(4.125 / 32, rel=0.1)] * 2 + [1]


def test_codes_between_nodes_change_the_bytes_between_them_alone() -> None:
    model = nn.Linear(256, 256, device="meta")
    for replicas in (2, 4):
        options: Any = {"world_size": (replicas, 2), "stages": (2, 3), "bandwidth": 1e9}
        options["sharding"] = zerofx.Sharding()
        wire = zerofx.Wire(None, "int8", error_feedback=True, between="nodes")
        for a, b in zip(zerofx.plan(model, **options).stages, zerofx.plan(model, **options, wire=wire).stages):
            assert b.traffic.gathered == a.traffic.gathered and b.traffic.reduced == a.traffic.reduced
            whole = 65792 * (8 + 32 / 256) + 2 * 256 * 32  # bits; the bias travels as it is
            assert float(b.traffic.between) == pytest.approx((replicas - 1) * whole / 8 / 2, rel=0.02)
            assert float(b.memory.gradients - a.memory.gradients) == 4 * 65792 / 2
            assert a.time is not None and b.time is not None and float(b.time.wire) < float(a.time.wire)
    with pytest.raises(ValueError, match="on one dimension: which ranks are on one node is not known"):
        zerofx.plan(model, world_size=4, wire=zerofx.Wire("int8", between="nodes"))


def test_a_module_without_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="ReLU has no parameters"):
        zerofx.plan(nn.ReLU(), world_size=2)


class Nodes(Sharing):
    """Weights are divided over a node of four ranks; gradients and the optimizer's state over all."""

    def __init__(self, world_size: int) -> None:
        self.gradients = self.optimizer = self.everyone = PretendedRanks(world_size, "")
        self.weights = PretendedRanks(min(world_size, 4), "")


def test_each_purpose_has_the_ranks_that_its_sharing_says() -> None:
    model = nn.Linear(64, 64, bias=False, device="meta")
    n, plan = 64 * 64, zerofx.plan(model, world_size=16, sharing=Nodes)
    two, three = plan.stages[2:]
    assert [float(x) for x in astuple(two.memory)] == [4 * n, 4 * n / 16, 0, 8 * n / 16]
    assert [float(x) for x in astuple(three.memory)] == [4 * n / 4, 4 * n / 16, 0, 8 * n / 16]
    assert float(three.traffic.gathered) == 2 * 4 * n * 3 / 4
    assert float(three.traffic.reduced) == 4 * n * 15 / 16
    links: Any = {"bandwidth": 1e9, "node_bandwidth": 1e10, "ranks_per_node": 4}
    timed = zerofx.plan(model, world_size=16, sharing=Nodes, **links)
    assert timed.speed is not None and timed.speed.bandwidth == 1e9  # gradients leave the node
    assert timed.stages[3].time is not None
    assert float(timed.stages[3].time.wire) == pytest.approx(float(three.traffic.total) / 1e9)


def test_the_ranks_from_which_stage_3_fits_are_searched_with_the_sharing() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False, device="meta") for _ in range(16)))
    groups = zerofx.Grouping(blocks=(nn.Linear,), min_bytes=0)
    n, buffers = 16 * 64 * 64, 2 * 3 * 4 * 64 * 64
    memory = n + 12 * n / 16 + buffers + 1  # weights take 4 n / 4 in a node of four, whatever else there is
    assert zerofx.plan(model, world_size=4, memory=memory, groups=groups, sharing=Nodes).least_ranks == 16
    least = zerofx.plan(model, world_size=4, memory=memory, groups=groups).least_ranks
    assert least is not None and least < 16
