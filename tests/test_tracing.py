"""Names of zerofx's work in torch.profiler's traces, and the lines of its log."""

from __future__ import annotations

import logging
import re
from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import zerofx
from tests.models import GPT
from tests.slow import quick_if, slow
from zerofx.passes import edit


def build(stage: int, executor: str = "eager") -> tuple[GPT, torch.Tensor]:
    torch.manual_seed(0)
    model = GPT(layers=2, dim=32, heads=2, vocab=64, length=16)
    zerofx.compile(model, stage=stage, executor=executor, groups=zerofx.Grouping(min_bytes=0))
    return model, torch.randint(64, (2, 16))


def regions(stage: int) -> Counter[str]:
    """How often each region occurs in the trace of a step, a micro-batch and a gather on demand, compiled before."""
    model, x = build(stage)
    optimizer = zerofx.AdamW(model.parameters())
    weight = model.blocks[0].up.weight

    def everything() -> None:
        model(x, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        with zerofx.no_sync(model):
            model(x, x).backward()
        zerofx.drop_kept(model)
        if stage == 3:
            weight.full_tensor()

    everything()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        everything()
    names = [event.name for event in trace.events()]
    return Counter(name for name in names if name.startswith(("zerofx: ", "Optimizer.step")))


@quick_if(lambda stage: stage == 3)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_trace_names_graphs_refreshes_gathers_on_demand_and_the_step(workers2, stage: int) -> None:
    for found in workers2.run(regions, stage, timeout=120):
        found = Counter(
            {name: n for name, n in found.items() if not name.startswith(("zerofx: start", "zerofx: wait"))}
        )
        backward = {name: n for name, n in found.items() if name.startswith("zerofx: backward")}
        expected = {"zerofx: forward tokens to norm": 2, "Optimizer.step#AdamW.step": 1}
        if stage == 2:  # stale before the first forward of the second round, and after its step
            expected |= {f"zerofx: refresh {name}": 1 for name in ("tokens", "blocks.0", "blocks.1", "norm")}
        else:
            expected["zerofx: gather blocks.0.up.weight"] = 1
        assert {name: n for name, n in found.items() if name not in backward} == expected
        assert sum(backward.values()) == 2 and any(name.startswith("zerofx: backward (keep) ") for name in backward)


def collectives(stage: int, executor: str) -> tuple[list[str], list[str]]:
    """What the schedules of a step say is started; and the regions of the collectives of such a step, in order."""
    model, x = build(stage, executor)
    for _ in range(2):
        model(x, x).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        model(x, x).backward()
    events = sorted((e for e in trace.events() if e.name.startswith("zerofx: ")), key=lambda e: e.time_range.start)
    (record,) = zerofx.graphs(model)
    kinds = {"all_gather": "all-gather", "refresh": "all-gather", "reduce_scatter": "reduce-scatter"}
    expected = [
        f"{kinds[node.meta['zerofx'].kind]} {node.meta['zerofx'].group}"
        for each in (record.forward, record.backward)
        for node in edit.tagged(each.before_lower().graph, *kinds)
        if (each.context.phase, node.meta["zerofx"].kind) != ("backward", "refresh")  # it is fresh then
    ]
    return expected, [e.name for e in events if e.name.startswith(("zerofx: start", "zerofx: wait"))]


@pytest.mark.parametrize(("stage", "executor"), [(2, "eager"), slow(3, "inductor")])
def test_a_trace_names_the_group_of_every_collective_of_a_graph_and_of_the_wait_for_it(
    workers2, stage: int, executor: str
) -> None:
    for expected, regions in workers2.run(collectives, stage, executor, timeout=240):
        started = [name.removeprefix("zerofx: start ") for name in regions if name.startswith("zerofx: start ")]
        waited = [name.removeprefix("zerofx: wait for ") for name in regions if name.startswith("zerofx: wait for ")]
        assert started == expected
        assert Counter(waited) == Counter(started)
        assert len(started) == len(set(started)) or stage == 3
        for name in set(started):
            assert regions.index(f"zerofx: start {name}") < regions.index(f"zerofx: wait for {name}")


def test_the_log_has_a_line_per_graph_and_one_per_pass_below_it(fake_world, caplog) -> None:
    fake_world(4)
    with caplog.at_level(logging.DEBUG, logger="zerofx"):
        model, x = build(3)
        model(x, x).backward()
    (record,) = zerofx.graphs(model)
    ours = [r for r in caplog.records if r.name == "zerofx"]
    lines = [r.getMessage() for r in ours if r.levelno == logging.INFO]
    assert len(lines) == 2
    pattern = (
        r"forward: 4 groups; reads [\d.]+ kB of weights, at most [\d.]+ kB gathered at once; rewritten in [\d.]+ s"
    )
    assert re.fullmatch(pattern, lines[0])
    assert re.search(r"^backward: 4 groups; .*; reduces [\d.]+ kB of gradients; rewritten", lines[1])
    passes = [r.getMessage().rpartition(" in ")[0] for r in ours if r.levelno == logging.DEBUG]
    assert passes == [
        f"{trace.context.phase}: {name} made {edits} edits"
        for trace in record.traces()
        for name, edits in trace.edits.items()
    ]


def test_nothing_is_logged_unless_asked_for(fake_world, caplog) -> None:
    fake_world(2)
    model, x = build(3)
    model(x, x).backward()
    assert not [r for r in caplog.records if r.name == "zerofx"]
