"""What `offload=` costs: a disk is measured; plans and predictions beside what a file really reads and writes."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerofx
from tests.test_offload import EACH_LAYER, small
from tests.workers import Workers
from zerofx.inspect.predict import disk
from zerofx.runtime.ranks.sharing import PretendedRanks
from zerofx.runtime.state.state_file import StateFile


class Counter:
    """Bytes that files read and write, by what is done; ``pace``: no faster than so many bytes per second each."""

    def __init__(self, patch: pytest.MonkeyPatch, pace: float = 0.0) -> None:
        self.moved = {"read": 0, "written": 0}
        self.order: list[str] = []
        transfer = StateFile._transfer

        def counted(file: StateFile, move: Any, buffer: memoryview, at: int, what: str) -> None:
            start = time.perf_counter()
            transfer(file, move, buffer, at, what)
            self.moved[what] += len(buffer)
            self.order.append(what)
            if pace:
                time.sleep(max(0.0, len(buffer) / pace - (time.perf_counter() - start)))

        patch.setattr(StateFile, "_transfer", counted)


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def test_a_disk_is_measured_by_what_passes_through_a_file_both_ways(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(disk, "FILE", 1 << 24)
    counter = Counter(patch, pace=50e6)
    rate = 1 / disk.seconds_per_byte(tmp_path, PretendedRanks(1, "gloo"))
    assert counter.moved == {"read": disk.RUNS << 24, "written": (1 + disk.RUNS) << 24}
    assert rate < 100e6  # 50 MB/s each way
    last = counter.order[-len(counter.order) // (1 + disk.RUNS) :]
    assert last.index("written") < len(last) - last[::-1].index("read")  # it writes before all is read
    assert not list(tmp_path.iterdir())


def calibrated(folder: str, bad: int) -> Any:
    """Rates; or the error of a folder that rank ``bad`` cannot make."""
    path = Path(folder, str(dist.get_rank()))
    if dist.get_rank() == bad:
        path.write_text("no folder")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "FILE", 1 << 22)
        for name in ("_product", "_copy"):
            patch.setattr(importlib.import_module("zerofx.inspect.predict.calibrate"), name, lambda device: 1e-10)
        try:
            return zerofx.calibrate(path=path)
        except zerofx.OffloadError as e:
            return str(e)


def test_all_ranks_have_one_rate_of_the_disk_or_one_error(workers2: Workers, tmp_path: Path) -> None:
    first, second = workers2.run(calibrated, str(tmp_path), -1)
    assert first == second and first.disk_bytes_per_s > 0
    (tmp_path / "1").rmdir()
    for error in workers2.run(calibrated, str(tmp_path), 1):
        assert error.startswith("zerofx.calibrate(path=) on rank 1: ") and "cannot be made" in error


def net(layers: int = 3) -> nn.Sequential:
    """Shards of whole pages and chunks, so that formulas are exact."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(layers)))


CASES = [(1, "m", 1), (2, "mg", 2), (3, "mw", 1), (3, "mwg", 1), (3, "mwg", 3)]
"""Stage, what moves, and micro-batches."""


def offload(folder: str, parts: str, **options: Any) -> zerofx.Offload:
    return zerofx.Offload(folder, folder if "g" in parts else None, folder if "w" in parts else None, **options)


def step_of(folder: str, stage: int, parts: str, micro_batches: int, **options: Any) -> list[int]:
    """Bytes at rest, and those that forwards, backwards and the optimizer move, of this rank."""
    with small(), pytest.MonkeyPatch.context() as patch:
        where = offload(folder, parts, **options)
        model = zerofx.compile(net(), stage=stage, executor="eager", groups=EACH_LAYER, offload=where)
        optimizer, counter = zerofx.AdamW(model.parameters(), lr=1e-2), Counter(patch)
        for _ in range(2):
            moved = [0, 0, 0]

            def count(i: int, moved: list[int] = moved) -> None:
                moved[i] += sum(counter.moved.values())
                counter.moved = dict.fromkeys(counter.moved, 0)

            count(0)
            moved[0] = 0
            for i in range(micro_batches):
                loss = model(torch.full((2, 128), 1.0 + i)).square().mean()
                count(0)
                loss.backward()
                count(1)
            optimizer.step()
            count(2)
            at_rest = zerofx.memory_summary(model, optimizer).on_disk
            optimizer.zero_grad()
            assert not any(counter.moved.values()), "nobody looks at elements"
    return [at_rest, *moved]


def all_steps(folder: str) -> list[list[int]]:
    return [step_of(folder, *case) for case in CASES]


def test_a_plan_has_the_bytes_that_a_file_really_keeps_reads_and_writes(workers2: Workers, tmp_path: Path) -> None:
    first, second = workers2.run(all_steps, str(tmp_path))
    assert first == second
    for (stage, parts, k), counted in zip(CASES, first, strict=True):
        (planned,) = zerofx.plan(
            net(), world_size=2, stages=[stage], groups=EACH_LAYER, offload=offload("/x", parts), micro_batches=k
        ).stages
        files = planned.files
        assert files is not None
        said = [int(x) for x in (files.at_rest, files.forward, files.backward, files.optimizer)]
        assert said[0] == counted[0], (stage, parts, k)
        assert said[1] == counted[1], (stage, parts, k, said, counted)
        if "w" in parts:  # backwards read fewer: not what is kept gathered, nor the first layer
            assert 0.85 * sum(said) <= sum(counted) <= sum(said), (stage, parts, k, said, counted)
            assert k > 1 or said[3] == counted[3], (stage, parts, k, said, counted)
        else:  # the last sum of gradients is written when the optimizer comes
            assert sum(said) == sum(counted), (stage, parts, k, said, counted)


def test_memory_and_disk_are_together_what_memory_was() -> None:
    for options in ({}, {"mixed_precision": zerofx.MixedPrecision(torch.bfloat16)}, {"no_sync": True}):
        for model in (net(), net().bfloat16()):
            for where in (offload("/x", "m"), offload("/x", "mwg"), offload("/x", "mwg", groups=("0", "1"))):
                plans = [
                    zerofx.plan(model, world_size=2, micro_batches=2, groups=EACH_LAYER, offload=each, **options)
                    for each in (None, where)
                ]
                for held, left in zip(*(plan.stages for plan in plans), strict=True):
                    assert left.files is not None and float(left.files.at_rest) >= 0
                    assert float(held.memory.total) == float(left.memory.total + left.files.at_rest)
                    assert (left.files.at_rest == 0) == (left.stage == 0)


def test_stage_3_of_which_all_is_on_disk_holds_nothing_at_rest_but_what_is_not_chosen() -> None:
    (whole,) = zerofx.plan(net(), world_size=2, stages=[3], groups=EACH_LAYER, offload=offload("/x", "mwg")).stages
    (third,) = zerofx.plan(
        net(), world_size=2, stages=[3], groups=EACH_LAYER, offload=offload("/x", "mwg", fraction=1 / 3)
    ).stages
    assert whole.files is not None and third.files is not None
    assert (float(whole.memory.total), float(whole.files.at_rest)) == (0, 16 * 3 * 128**2 / 2)
    assert float(third.memory.total) == 2 * float(third.files.at_rest) == 16 * 2 * 128**2 / 2


def test_what_fits_by_a_disk_is_recommended_and_its_step_takes_as_long_as_the_disk() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(64)))
    n, rates = 64 * 1024**2, {"bandwidth": 1e9, "flops": 1e12, "tokens": 64}
    memory = 300e6  # at rest in stage 3: 16 N/8 = 134 MB; in stage 1 4 N and more
    assert zerofx.plan(model, world_size=1, memory=memory).least_ranks > 1  # type: ignore[operator]
    plan = zerofx.plan(
        model, world_size=1, memory=memory, offload=offload("/x", "mwg"), disk_bandwidth=1e8, stages=[3], **rates
    )
    assert plan.least_ranks == 1 and plan.recommended is not None and plan.recommended.stage == 3
    time = plan.recommended.time
    assert time is not None and float(time.optimizer) == pytest.approx(28 * n / 1e8)
    assert float(time.step) == pytest.approx(3 * 4 * n / 1e8)  # weights twice, gradients once
    text = str(plan)
    assert "on disk" in text and "through it" in text and "a disk of 100.0 MB/s" in text and "optimizer" in text
    slow_memory = zerofx.plan(
        model, world_size=1, offload="/x", disk_bandwidth=1e12, memory_bandwidth=1e9, stages=[0, 3], **rates
    )
    for each in slow_memory.stages:  # in stage 0, too: else it would be the fastest for what nobody counted
        assert each.time is not None and float(each.time.optimizer) == pytest.approx(28 * n / 1e9)


def test_each_scheme_of_a_mesh_is_planned_with_moments_in_files() -> None:
    rates = {"bandwidth": 1e9, "replica_bandwidth": 1e8, "flops": 1e12, "tokens": 64, "disk_bandwidth": 1e8}
    given = {"world_size": (2, 4), "groups": EACH_LAYER, "micro_batches": 2}
    held = zerofx.plan(net(), **given).stages
    plan, n = zerofx.plan(net(), offload="/x", **given, **rates), 3 * 128**2
    parts = set()
    for one, other in zip(held, plan.stages, strict=True):
        assert other.files is not None and other.time is not None
        moments = float(one.memory.moments) if one.stage else 0.0
        assert float(other.files.at_rest) == float(other.files.moments) == moments
        assert float(one.memory.total) == float(other.memory.total) + moments
        assert float(other.time.optimizer) == pytest.approx(2 * moments / 1e8)
        assert (other.passing > 0) == (other.stage > 0)
        parts.add(8 * n / moments if moments else 0)
    assert parts == {0, 4, 8}, "in stage 3 a scheme divides it over a row, or over all"
    assert "on disk" in str(plan) and "optimizer" in str(plan)


def on_a_mesh(folder: str, sharding: zerofx.Sharding | None) -> list[int]:
    """Bytes at rest, and those that the optimizer moves in its second step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with small(), pytest.MonkeyPatch.context() as patch:
        options = {"executor": "eager", "groups": EACH_LAYER, "offload": folder, "mesh": mesh, "sharding": sharding}
        model = zerofx.compile(net(), stage=3, **options)
        optimizer, counter = zerofx.AdamW(model.parameters(), lr=1e-2), Counter(patch)
        for _ in range(2):
            model(torch.ones(2, 128)).square().mean().backward()
            counter.moved = dict.fromkeys(counter.moved, 0)
            optimizer.step()
            moved = sum(counter.moved.values())
            optimizer.zero_grad()
        return [zerofx.memory_summary(model, optimizer).on_disk, moved]


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [None, zerofx.Sharding(gradients="all", optimizer="all")])
def test_a_plan_of_a_mesh_has_the_bytes_of_its_files(make_workers: Any, tmp_path: Path, sharding: Any) -> None:
    given = {"world_size": (2, 2), "stages": [3], "groups": EACH_LAYER, "offload": "/x"}
    (planned,) = zerofx.plan(net(), sharding=sharding or zerofx.Sharding(), **given).stages
    assert planned.files is not None
    said = [int(planned.files.at_rest), int(planned.files.optimizer)]
    assert make_workers(4).run(on_a_mesh, str(tmp_path), sharding, timeout=200) == [said] * 4


def test_a_plan_refuses_what_a_run_would_and_a_disk_for_nothing() -> None:
    def refused(said: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=said):
            zerofx.plan(net(), **{"world_size": 2, **options})

    refused("disk_bandwidth=1000000000.0 says nothing without a folder in offload=", disk_bandwidth=1e9, bandwidth=1e9)
    refused("disk_bandwidth=1000000000.0 says nothing without bandwidth", disk_bandwidth=1e9, offload="/x")
    refused("gradients= is built for the folder of optimizer= alone", offload=zerofx.Offload("/a", "/b"))
    refused(
        r"with world_size=\(2, 2\): gradients= is not built for that yet",
        world_size=(2, 2),
        offload=offload("/x", "mg"),
    )
    refused("no group has such a name", offload=zerofx.Offload("/x", groups=("nothing",)))
