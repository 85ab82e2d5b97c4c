"""The formulas' seconds: worked by hand, beside the clock of zerofx.predict, and in zerofx.plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import zerofx
from tests import models
from tests.models import GPT
from tests.test_predict import INSTANT, mlp
from tests.test_zero_table import blocks_and_the_rest
from zerofx.inspect.predict import cost, shapes
from zerofx.inspect.predict.flops import flops_per_token
from zerofx.runtime.state.group import groups_of
from zerofx.simulate.clock import on_the_clock
from zerofx.simulate.rehearsal import rehearse

# ------------------------------------------------------------------ by hand

# Two ranks and four groups of 100 elements of 4 bytes: a gather brings 200 bytes, as many as a reduction. At 200 bytes
# a second each takes one. 40 operations in forward and 80 in backward are 10 and 20 of a group.
HAND = dict(N=400, M=2, n=4, k=1, m=4, F=40, B=80, b=200)


@pytest.mark.parametrize(
    ("stage", "rate", "wire", "compute", "step"),
    [
        # Compute bound: forward of a group takes 2 seconds, backward 4. 8 + 16, and what no compute hides:
        (0, 5, 8, 24, 8 + (16 + 2)),  # the last all-reduce, which takes two
        (1, 5, 8, 24, (8 + 1) + (16 + 1)),  # the first gather; the last reduction
        (2, 5, 8, 24, (8 + 1) + (16 + 1)),
        (3, 5, 12, 24, (8 + 1) + (16 + 1 + 1)),  # backward gathers, too
        # Wire bound: forward of a group takes 1/4 of a second, backward 1/2. What no collective hides:
        (0, 40, 8, 3, 1 + (8 + 0.5)),  # all of forward; the first backward
        (1, 40, 8, 3, (4 + 0.25) + (4 + 0.5)),  # the last forward; the first backward
        (2, 40, 8, 3, (4 + 0.25) + (4 + 0.5)),
        (3, 40, 12, 3, (4 + 0.25) + 8),  # backward of a group passes while another gather, or reduction, travels
    ],
)
def test_a_step_by_hand(stage: int, rate: float, wire: float, compute: float, step: float) -> None:
    time = cost.time(stage).at(**HAND, c=rate, a=0)
    assert [float(x) for x in (time.wire, time.compute, time.step)] == [wire, compute, step]
    assert float(time.exposed) == step - compute
    assert time.bound == max(wire, compute) <= time.step <= wire + compute


def test_a_collective_takes_its_latency_and_nothing_else_does() -> None:
    for stage, collectives in ((0, 4), (1, 8), (3, 12)):
        one, free = (cost.time(stage).at(**HAND, c=5, a=latency) for latency in (0.125, 0))
        assert one.wire - free.wire == collectives * 0.125
        assert one.compute == free.compute
    # five groups are gathered, four reduced; what is waited for at the ends is one of each, with its latency
    frozen = cost.time(3, frozen=(100, 1)).at(**HAND, c=5, a=0.125)
    assert float(frozen.step) == (8 + 1.125) + (16 + 1.125 + 1.125)
    kept = cost.time(3, kept=(100, 1)).at(**HAND, c=40, a=0.125)
    assert float(kept.step) == (4 * 1.125 + 0.25) + 7 * 1.125


def test_micro_batches_repeat_what_travels_each_time_and_no_sync_keeps_gradients_off_the_wire() -> None:
    four = HAND | {"k": 4}
    assert float(cost.time(2).at(**four, c=5, a=0).step) == (8 + 1) + 3 * 8 + 4 * (
        16 + 1
    )  # one gather, four reductions
    assert float(cost.time(1, no_sync=True).at(**four, c=5, a=0).step) == (8 + 1) + 3 * 8 + 3 * 16 + (16 + 1)
    assert float(cost.time(0, no_sync=True).at(**four, c=5, a=0).step) == 4 * 8 + 3 * 16 + (16 + 2)
    assert float(cost.time(3).at(**four, c=5, a=0).step) == 4 * 27
    # backward gathers all the same, and the first gather has it wait
    assert float(cost.time(3, no_sync=True).at(**four, c=5, a=0).step) == 4 * (8 + 1) + 3 * (16 + 1) + (16 + 1 + 1)
    assert float(cost.time(3, no_sync=True).at(**four, c=40, a=0).step) == 4 * 4.25 + 3 * 4.5 + 8


def test_a_group_that_stays_gathered_is_not_waited_for_in_backward() -> None:
    time = cost.time(3, kept=(100, 1)).at(**HAND, c=5, a=0)
    assert (float(time.wire), float(time.step)) == (11, (8 + 1) + (16 + 1))
    assert float(cost.time(3, kept=(100, 1)).at(**HAND, c=40, a=0).step) == (4 + 0.25) + 7


def test_frozen_groups_travel_in_stage_3_alone_and_are_not_reduced() -> None:
    for stage in (0, 1):
        assert cost.time(stage, frozen=(100, 1)).at(**HAND, c=5, a=0) == cost.time(stage).at(**HAND, c=5, a=0)
    time = cost.time(3, frozen=(100, 1)).at(**HAND, c=5, a=0)
    assert (time.wire, time.step) == (5 + 5 + 4, (8 + 1) + (16 + 1 + 1))


# ------------------------------------------------------------------ the clock of zerofx.predict


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_with_groups_of_one_size_the_formulas_are_the_clock(stage: int) -> None:
    one_ahead, n = {"memory_budget": 2 * 512}, 4  # bytes of two groups, gathered
    phases, default = rehearse([mlp("abcd", stage=stage, **one_ahead)]), rehearse([mlp("abcd", stage=stage)])
    elements = 72 if stage == 0 else 128  # of a group; only an all-reduce is not padded
    for link, latency in ((64, 0.0), (128, 1.5), (200, 0.0), (256, 0.3), (384, 0.0), (2560, 1.5)):
        rates = zerofx.Rates(512, INSTANT, link, latency)  # a second for each product
        predicted = on_the_clock(phases, rates)
        letters = dict(N=n * elements, M=2, n=n, k=1, m=4, F=512 * n, B=1024 * n, c=512)
        time = cost.time(stage).at(**letters, a=latency, b=link)
        assert float(time.step) == pytest.approx(predicted.time_s)
        assert float(time.exposed) == pytest.approx(predicted.exposed_s)
        two_ahead = on_the_clock(default, rates).time_s
        assert two_ahead is not None and two_ahead <= float(time.step) * (1 + 1e-9)


MARGIN = 0.06
"""Of a step. The first group, which has the embeddings, and the last are of other sizes than the rest: what is waited
for at the ends of a phase is theirs, and not 1/n of all."""


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_compiled_model_is_predicted_what_the_formulas_say(fake_world, stage: int) -> None:
    fake_world(8)
    model, x = GPT(6, 128, 4, 512, 64), torch.randint(512, (4, 64))
    zerofx.compile(model, stage=stage, executor="eager", groups=blocks_and_the_rest)
    model(x, x).backward()
    (record,) = zerofx.graphs(model)
    assert record.forward is not None
    phases = rehearse([record])
    forward, backward = (sum(o.flops for o in phase.operations) for phase in phases)
    layouts, stays = [group.layout for group in groups_of(model)], record.forward.context.handover.kept_gathered
    kept = [layout.numel for layout in layouts if layout.name in stays]
    assert bool(kept) == (stage == 3)
    n = sum(slot.numel for layout in layouts for slot in layout.slots)
    for ratio in (0.1, 1, 1.5, 10):  # seconds of gathering everything to those of forward
        rates = zerofx.Rates(forward, INSTANT, n * 4 * 7 / 8 / ratio, 0.01)
        letters = dict(N=n, M=8, n=len(layouts), k=1, m=4, F=forward, B=backward)
        time = cost.time(stage, kept=(sum(kept), len(kept))).at(
            **letters, c=rates.flops_per_s, a=rates.link_latency_s, b=rates.link_bytes_per_s
        )
        predicted = on_the_clock(phases, rates)
        assert float(time.step) == pytest.approx(predicted.time_s, rel=MARGIN)
        assert float(time.compute) == pytest.approx(predicted.time_s - predicted.exposed_s)


# ------------------------------------------------------------------ flops


def counted(model: nn.Module, *batch: Any, **call: Any) -> tuple[int, int]:
    """Forward and backward, by PyTorch's counter; attention as plain products, none of which is done twice."""
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            out = model(*batch, **call)
        with FlopCounterMode(display=False) as backward:
            (out if isinstance(out, torch.Tensor) else out.loss).backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("frozen", [False, True])
def test_flops_of_a_decoder_are_those_that_are_counted(frozen: bool) -> None:
    model, x = GPT(2, 32, 2, 64, 16), torch.randint(64, (3, 16))
    model.head.requires_grad_(not frozen)
    forward, backward = counted(model, x, x)
    found, attention = flops_per_token(model), 4 * 16 * 2 * 32
    assert 48 * (found.forward + attention) == forward
    assert 48 * (found.backward + 2 * attention) == backward


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_attention_is_as_wide_as_the_configuration_says(name: str) -> None:
    pytest.importorskip("transformers")
    model, batch, length = models.build(name), models.make_batch(name, 3), models.LENGTH
    forward, backward = counted(model, **batch)
    found = flops_per_token(model, length)
    # Rotary positions have a product of their own, without a weight: less than a thousandth.
    assert 3 * length * found.forward == pytest.approx(forward, rel=0.001)
    assert 3 * length * found.backward == pytest.approx(backward, rel=0.001)


def test_a_token_meets_the_experts_that_it_is_sent_to_and_no_table() -> None:
    pytest.importorskip("transformers")
    active = flops_per_token(shapes.build("mixtral-8x7b")).forward / 2
    assert active == pytest.approx(12.9e9 - 32000 * 4096, rel=0.005)  # "12.9B active", of which one table
    tied, untied = models.Tied(), models.GPT(0, 32, 2, 64, 16)
    assert flops_per_token(tied).forward == 2 * (models.VOCAB * models.HIDDEN + models.HIDDEN**2)
    assert flops_per_token(untied).forward == 2 * 32 * 64


def test_attention_of_unknown_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"how wide attention is in MLP is not known.*flops_per_token"):
        flops_per_token(models.MLP(), 16)
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="T5ForConditionalGeneration"):
        flops_per_token(shapes.build("t5-11b"), 16)


# ------------------------------------------------------------------ the plan


def meta(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    with torch.device("meta"):
        return GPT(8, 1024, 8, 5000, 128).to(dtype)


def steps(plan: Any) -> list[float]:
    return [float(each.time.step) for each in plan.stages]


def test_a_plans_seconds_are_the_formulas_with_the_modules_numbers() -> None:
    model = meta()
    plan = zerofx.plan(model, world_size=16, micro_batches=3, bandwidth=1e9, latency=1e-4, flops=1e13, tokens=4096)
    found, two = flops_per_token(model), cost.Sizes.of(None, torch.bfloat16)
    letters = dict(N=plan.parameters, M=16, n=plan.groups, k=3, c=1e13, a=1e-4, b=1e9)
    work = dict(F=4096 * found.forward, B=4096 * found.backward)
    for each in plan.stages:
        assert each.time == cost.time(each.stage, two).at(**letters, **work)
    given = zerofx.plan(model, world_size=16, bandwidth=1e9, flops=1e13, tokens=4096, flops_per_token=3e9)
    assert [float(each.time.compute) for each in given.stages] == pytest.approx([3e9 * 4096 / 1e13] * 4)
    assert given.speed is not None and given.speed.backward == pytest.approx(2 * given.speed.forward)


@pytest.mark.parametrize(
    ("world_size", "options", "rate"),
    [
        (16, {}, 1e9),
        (8, {"node_bandwidth": 1e10, "ranks_per_node": 8}, 1e10),  # all in one node
        (9, {"node_bandwidth": 1e10, "ranks_per_node": 8}, 1e9),  # the link between two is the slower one
        (16, {"node_bandwidth": 1e8, "ranks_per_node": 8}, 1e8),  # the links inside are
    ],
)
def test_the_slowest_link_of_the_ring_says_how_long_the_bytes_take(
    world_size: int, options: dict[str, Any], rate: float
) -> None:
    plan = zerofx.plan(meta(), world_size=world_size, bandwidth=1e9, **options)
    for each in plan.stages:
        assert float(each.time.wire) == pytest.approx(float(each.traffic.total) / rate)


def test_a_latency_of_zero_is_one() -> None:
    asked, unasked = (zerofx.plan(meta(), world_size=16, bandwidth=1e9, **each) for each in ({"latency": 0}, {}))
    assert asked == unasked


def test_one_rank_waits_for_nothing() -> None:
    plan = zerofx.plan(meta(), world_size=1, bandwidth=1e9, latency=1e-3, flops=1e13, tokens=4096)
    assert [float(each.time.exposed) for each in plan.stages] == pytest.approx([0] * 4)
    assert [float(each.time.wire) for each in plan.stages] == [0] * 4


def test_the_fastest_stage_that_fits_is_recommended() -> None:
    def recommended(memory: float = 1e12, **options: Any) -> Any:
        plan = zerofx.plan(meta(), world_size=16, memory=memory, **{"bandwidth": 1e9, "micro_batches": 4} | options)
        assert plan.recommended is None or "the fastest that fits" in str(plan)
        return None if plan.recommended is None else plan.recommended.stage

    # Stage 0 sends 8 units, stages 1 and 2 send 5, stage 3 sends 12.
    assert recommended() == 1
    assert recommended(no_sync=True) == 0  # 2, 2 and 9: of those alike the lowest
    assert recommended(flops=1e13, tokens=65536) == 0  # compute hides all of it
    assert recommended(flops=1e13, tokens=64) == 1
    plan = zerofx.plan(meta(), world_size=16)
    in_stage_3 = plan.stages[3].needed
    assert recommended(memory=in_stage_3 * 1.01) == 3
    assert recommended(memory=in_stage_3) is None


def test_columns_come_with_what_they_rest_on() -> None:
    def head_and_rest(**options: Any) -> tuple[str, list[str]]:
        _, head, *rest = str(zerofx.plan(meta(), world_size=16, **options)).splitlines()
        assert len({len(line) for line in [head, *rest[:4]]}) == 1
        return head, rest[4:]

    bytes_alone, nothing = head_and_rest()
    assert bytes_alone.endswith("collectives") and not nothing
    wire, rests_on = head_and_rest(bandwidth=5e10)
    assert wire.endswith("collectives  on the wire")
    assert rests_on == ["at 50.0 GB/s, 0 s per collective"]
    step, rests_on = head_and_rest(bandwidth=5e10, latency=2e-5, flops=4e14, tokens=8192, flops_per_token=1e9)
    assert step.split()[-6:] == ["on", "the", "wire", "computing", "step", "exposed"]
    assert rests_on == ["at 50.0 GB/s, 20.0 µs per collective; 8.19 Tflop per micro-batch, 400.00 Tflop/s"]
    plan = zerofx.plan(meta(), world_size=16, bandwidth=5e10, flops=4e14, tokens=8192)
    row, time = str(plan).splitlines()[5], plan.stages[3].time
    cells = [f"{1e3 * float(x):.2f} ms" for x in (time.wire, time.compute, time.step)]
    assert " ".join(cells) in " ".join(row.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bandwidth": 0}, "bandwidth=0: expected more than 0"),
        ({"bandwidth": 1e9, "latency": -1.0}, "latency=-1.0: expected 0 or more"),
        ({"latency": 0.1}, "latency=0.1 says nothing without bandwidth"),
        ({"node_bandwidth": 1e9}, "node_bandwidth=1000000000.0 says nothing without bandwidth and ranks_per_node"),
        ({"bandwidth": 1e9, "ranks_per_node": 8}, "ranks_per_node=8 says nothing without node_bandwidth"),
        ({"bandwidth": 1e9, "flops": 1e12}, "flops=.* without tokens"),
        ({"flops": 1e12, "tokens": 1}, "flops=.* without bandwidth"),
        ({"bandwidth": 1e9, "tokens": 8}, "tokens=8 says nothing without flops"),
        ({"bandwidth": 1e9, "sequence_length": 8}, "sequence_length=8 says nothing without tokens"),
        ({"bandwidth": 1e9, "flops_per_token": 9.0}, r"flops_per_token=9.0 says nothing without tokens"),
        (
            {"bandwidth": 1e9, "flops": 1e12, "tokens": 8, "sequence_length": 8, "flops_per_token": 9.0},
            "sequence_length beside flops_per_token",
        ),
    ],
)
def test_options_that_say_nothing_or_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zerofx.plan(nn.Linear(2, 2), world_size=2, **options)


def test_where_nothing_is_trained_there_is_no_step_to_time() -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    assert zerofx.plan(frozen, world_size=2).stages[3].time is None
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        zerofx.plan(frozen, world_size=2, bandwidth=1e9)
