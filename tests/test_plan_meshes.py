"""A plan of a mesh: each scheme's bytes by link, memory and seconds, beside graphs and measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerofx
from tests.models import GPT
from tests.slow import slow_if
from zerofx.model.sharding import SCHEMES

EACH_LAYER = zerofx.Grouping(blocks=(nn.Linear,), min_bytes=0)
RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "two_hosts-meshes.json"
BETWEEN = zerofx.Sharding(gradients="all", optimizer="all")


def layers(numel: int = 256, count: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(numel, numel, device="meta") for _ in range(count)))


@slow_if(lambda coded, sharding: not coded and sharding.name == "one dimension")
@pytest.mark.parametrize("sharding", SCHEMES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("coded", [False, True])
def test_bytes_of_a_scheme_are_those_of_the_graphs_by_link(sharding: zerofx.Sharding, coded: bool) -> None:
    weights: Any = None if sharding == zerofx.Sharding() else "int8"
    wire = zerofx.Wire(weights, "int8", between="nodes") if coded else None
    options: dict[str, Any] = {"world_size": (3, 2), "groups": EACH_LAYER, "sharding": sharding, "wire": wire}
    (stage,) = zerofx.plan(layers(), stages=[3], **options).stages
    model, x = layers(), torch.zeros(2, 256, device="meta", requires_grad=True)  # all of backward gathers
    record = zerofx.dry_run(model, x, executor="eager", backend="gloo", memory_budget=300_000, **options)
    predicted = zerofx.predict(record)
    kept = 4 * 256 * 257  # forward's last group is there as backward begins
    near = float(stage.traffic.total - stage.traffic.between) - predicted.wire_bytes + predicted.replica_bytes
    far = float(stage.traffic.between) - predicted.replica_bytes
    assert -0.01 * predicted.wire_bytes < near < kept
    assert -0.01 * predicted.wire_bytes < far < kept


def test_a_scheme_holds_its_part_of_each_kind() -> None:
    numel = 4 * 256 * 257
    plan = zerofx.plan(layers(), world_size=(3, 2), groups=EACH_LAYER, memory=1e9)
    assert [each.sharding and each.sharding.name for each in plan.stages] == ["HSDP"] * 3 + [s.name for s in SCHEMES]
    for stage, (weights, rest) in zip(plan.stages[3:], [(2, 2), (2, 6), (6, 6), (6, 6)], strict=True):
        assert float(stage.memory.weights) == pytest.approx(4 * numel / weights)
        assert float(stage.memory.gradients) == pytest.approx(4 * numel / rest)
        assert float(stage.memory.moments) == pytest.approx(8 * numel / rest)
    near, line = plan.stages[5:]
    assert near.buffers - line.buffers == 4 * numel // 2  # what backward gathers from
    assert "recommended: stage 0, the lowest that fits" in str(plan) and "ZeRO-1 between replicas" in str(plan)
    wire = zerofx.Wire("int8", "int4", error_feedback=True, between="nodes")
    (coded,) = zerofx.plan(
        layers(), world_size=(3, 2), groups=EACH_LAYER, stages=[3], sharding=BETWEEN, wire=wire
    ).stages
    assert float(coded.memory.master) == pytest.approx(4 * numel / 6)  # a shard beside the copy that was sent
    assert float(coded.memory.gradients - plan.stages[4].memory.gradients) == pytest.approx(4 * numel / 2 * 2 / 3)


def test_seconds_of_the_schemes_are_those_that_were_measured_on_two_hosts() -> None:
    """GPT of the benchmark's size, 16 tokens a rank; the links' rates, and the processor's seconds, as measured."""
    run = json.loads(RESULTS.read_text())["runs"]["few-tokens at 250mbit"]
    measured = {name: run["contenders"][f"zerofx-{name}-eager"] for name in ("rows", "between", "near", "line")}
    link, settings = run["link_bytes_per_s"] / run["ranks_per_host"], run["settings"]
    with torch.device("meta"):
        model = GPT(settings["layers"], settings["dim"], settings["heads"], settings["vocab"], settings["length"])
    seconds = measured["rows"]["processor_s"]
    options: dict[str, Any] = {"bandwidth": 2e9, "replica_bandwidth": link, "tokens": 1.0, "flops_per_token": seconds}
    plan = zerofx.plan(model, world_size=(2, 2), stages=[3], memory=1e9, flops=1.0, **options)
    found = [float(each.time.step) for each in plan.stages if each.time]
    wanted = [each["median_s"] for each in measured.values()]
    assert found == pytest.approx(wanted, rel=0.1)
    rows, between, near, line = found  # the same bytes cross in the first three; the fourth gathers from afar twice
    assert line > 1.3 * max(rows, between, near) and 1.3 * max(wanted[:3]) < wanted[3]
    assert between == pytest.approx(near, rel=0.01) and wanted[1] == pytest.approx(wanted[2], rel=0.01)
    assert between < rows and wanted[1] < wanted[0]
    assert plan.recommended is plan.stages[1]
    assert "recommended: stage 3, ZeRO-1 between replicas, the fastest that fits" in str(plan)
    assert "2.0 GB/s in a row, 15.1 MB/s between rows" in str(plan)


def test_with_one_rate_both_links_are_one_and_codes_take_time() -> None:
    options: dict[str, Any] = {"world_size": (2, 2), "stages": [3], "groups": EACH_LAYER, "bandwidth": 1e6}
    for stage in zerofx.plan(layers(), **options).stages:
        assert stage.time is not None
        assert float(stage.time.wire) == pytest.approx(float(stage.traffic.total) / 1e6)
    options |= {"flops": 1e9, "tokens": 1.0, "wire": zerofx.Wire("int8", "int8", between="nodes")}
    fast, slow = zerofx.plan(layers(), **options).stages, zerofx.plan(layers(), **options, memory_bandwidth=1e9).stages
    for a, b in zip(fast, slow, strict=True):
        assert a.time is not None and b.time is not None and a.time.compute < b.time.compute
    folded = zerofx.plan(layers(), **options, micro_batches=3, no_sync=True).stages
    for a, b in zip(fast, folded, strict=True):
        assert a.time is not None and b.time is not None and 1 < b.time.wire / a.time.wire < 3


def test_one_rank_in_a_row_has_no_near_scheme_and_a_scheme_needs_a_mesh() -> None:
    names = [each.sharding and each.sharding.name for each in zerofx.plan(layers(), world_size=(2, 1)).stages]
    assert "hpZ" not in names and names[-1] == "one dimension"
    with pytest.raises(ValueError, match=r"sharding= with world_size=4: expected two numbers"):
        zerofx.plan(layers(), world_size=4, sharding=BETWEEN)
    with pytest.raises(ValueError, match=r"sharding= with world_size=4: expected two numbers"):
        zerofx.dry_run(layers(), torch.zeros(2, 256, device="meta"), world_size=4, sharding=BETWEEN)
    with pytest.raises(ValueError, match="sharding='all': expected"):
        zerofx.dry_run(layers(), torch.zeros(2, 256, device="meta"), world_size=(2, 2), sharding="all")
    with pytest.raises(ValueError, match="says nothing without bandwidth"):
        zerofx.plan(layers(), world_size=(2, 2), replica_bandwidth=1e6)
