"""What `zerofx.predict` says of files, beside what they really read and write, and what the allocator counts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import zerofx
from tests import models
from tests.memory import allocated_peak
from tests.test_offload import EACH_LAYER, Net, small
from tests.test_offload_costs import Counter, offload
from tests.test_predict import INSTANT, ONE_PER_PRODUCT, mlp
from tests.workers import Workers
from zerofx.inspect.predict.predict import on_the_clock
from zerofx.inspect.predict.rehearsal import rehearse, rehearse_micro_batches
from zerofx.runtime.state import state_file

WHOLE = {"chunk": state_file.CHUNK, "buffer": state_file.BUFFER}
"""Chunks as they are: of smaller ones some of a gradient may be zeros, which a new file has already."""


def step_of(folder: str, stage: int, parts: str, executor: str) -> tuple[dict[str, Any], Any]:
    """One rank's step, counted and measured, and what is predicted for it."""
    model, batch = models.build("gpt"), models.make_batch("gpt", 3)
    options = {"executor": executor, "groups": zerofx.Grouping(min_bytes=0), "offload": offload(folder, parts)}
    with small(**WHOLE), pytest.MonkeyPatch.context() as patch:
        model = zerofx.compile(model, stage=stage, **options)
        optimizer, counter = zerofx.AdamW(model.parameters(), lr=1e-2), Counter(patch)

        def step() -> None:
            models.loss_of(model, batch).backward()

        found: dict[str, Any] = {"peaks": []}
        for _ in range(3):
            counter.moved = {"read": 0, "written": 0}
            found["peaks"].append(allocated_peak(step))
            found["graphs"], counter.moved = counter.moved, {"read": 0, "written": 0}
            optimizer.step()
            found["at rest"] = zerofx.memory_summary(model, optimizer).on_disk
            optimizer.zero_grad()
            found["optimizer"] = counter.moved
        held = zerofx.memory_summary(model).nbytes
        found["held"] = held["shards"] + held["replicas"]
        return found, zerofx.predict(model)


CASES = [
    pytest.param(stage, parts, executor, marks=pytest.mark.slow if executor == "inductor" or parts == "m" else ())
    for stage, parts in [(1, "m"), (1, "mg"), (2, "mg"), (3, "m"), (3, "mw"), (3, "mwg")]
    for executor in ("eager", "inductor")
]


@pytest.mark.parametrize(("stage", "parts", "executor"), CASES)
def test_bytes_through_a_file_are_those_that_it_moves_and_live_bytes_the_allocators(
    workers2: Workers, tmp_path: Path, stage: int, parts: str, executor: str
) -> None:
    for found, said in workers2.run(step_of, str(tmp_path), stage, parts, executor, timeout=250):
        assert (said.file_read, said.file_written) == tuple(found["graphs"].values())
        assert (said.file_read > 0, said.file_written > 0) == ("w" in parts, "g" in parts)
        assert (said.files.read, said.files.written) == tuple(found["optimizer"].values())
        assert sum(said.files.at_rest.values()) == found["at rest"]
        assert said.held_bytes == found["held"]
        assert said.peak_bytes == pytest.approx(min(found["peaks"]), rel=0.03)


def accumulated(folder: str, stage: int, parts: str, kept: int) -> list[tuple[dict[str, int], tuple[int, int]]]:
    """Bytes that the graphs of up to three micro-batches moved, and what is said of them; behind each."""
    with small(**WHOLE, kept=kept), pytest.MonkeyPatch.context() as patch:
        options = {"executor": "eager", "groups": EACH_LAYER, "offload": offload(folder, parts)}
        model = zerofx.compile(Net(), stage=stage, **options)
        optimizer, counter = zerofx.AdamW(model.parameters(), lr=1e-2), Counter(patch)
        found, pairs = [], []
        for i in range(4):
            pairs.append(dict(counter.moved))
            model(torch.full((2, 91), 1.0 + i)).square().mean().backward()
            if i == 0:
                optimizer.step()
                optimizer.zero_grad()
                counter.moved = {"read": 0, "written": 0}
                pairs.clear()
        pairs.append(dict(counter.moved))
        (record,) = zerofx.graphs(model)
        for k, moved in enumerate(pairs[1:], 1):
            phases = rehearse_micro_batches(record.forward, [record.backward] * k)  # type: ignore[arg-type, list-item]
            operations = [o for phase in phases for o in phase.operations]
            found.append((moved, (sum(o.read for o in operations), sum(o.written for o in operations))))
    return found


@pytest.mark.parametrize(("stage", "parts"), [(2, "mg"), (3, "mwg")])
@pytest.mark.parametrize("kept", [0, 50_000, 32 << 20])
def test_sums_of_micro_batches_stay_in_memory_as_long_as_there_is_room(
    workers2: Workers, tmp_path: Path, stage: int, parts: str, kept: int
) -> None:
    for found in workers2.run(accumulated, str(tmp_path), stage, parts, kept):
        assert len(found) == 3
        for moved, said in found:
            assert said == (moved["read"], moved["written"])


# ------------------------------------------------------------------ the clock


def phases(away: str, name: str, **rates: float) -> Any:
    """Products of a second each; a shard of 256 bytes is a page in a file. One group is gathered at a time."""
    options = {"weights_away": frozenset("abcdef")} if away == "w" else {"gradients_away": frozenset("abcdef")}
    on = replace(ONE_PER_PRODUCT, link_bytes_per_s=INSTANT, **rates)
    record = mlp("abcdef", memory_budget=512, **options)
    return next(phase for phase in on_the_clock(rehearse([record]), on).phases if phase.name == name)


@pytest.mark.parametrize(
    ("pages_per_s", "time", "exposed"),
    [
        (10, 6.1, 0.1),  # only the first shard is waited for: the next comes while a product runs
        (1, 7, 1),
        (0.5, 13, 7),  # six reads one after the other, and the last product
    ],
)
def test_a_shard_is_read_while_the_group_before_it_computes(pages_per_s: float, time: float, exposed: float) -> None:
    phase = phases("w", "forward", disk_bytes_per_s=pages_per_s * 4096)
    assert (phase.time_s, phase.exposed_s) == (pytest.approx(time), pytest.approx(exposed))
    assert phase.file_exposed_s == phase.exposed_s
    assert (phase.file_read, phase.file_written, phase.wire_bytes) == (6 * 4096, 0, 6 * 256)


def test_a_gradient_is_written_while_the_group_before_it_computes() -> None:
    fast, slow = (phases("g", "backward", disk_bytes_per_s=rate * 4096) for rate in (4, 1 / 6))
    # Twelve products. Of the last groups three gradients are there at the end, and leave one after the other.
    assert fast.time_s == pytest.approx(12 + fast.file_exposed_s)
    assert fast.file_exposed_s < 1
    assert (fast.file_read, fast.file_written) == (0, 6 * 4096)
    first = next(span.start for span in slow.spans if span.operation.through_file) - slow.spans[0].start
    assert slow.time_s == pytest.approx(first + 6 * 6), "from the first gradient on the file is never at rest"
    for phase in (fast, slow):
        spans = [span for span in phase.spans if span.operation.through_file]
        assert all(a.end <= b.start for a, b in itertools.pairwise(spans))


def test_waits_for_the_wire_are_not_waits_for_a_file() -> None:
    rates = replace(ONE_PER_PRODUCT, disk_bytes_per_s=INSTANT)
    prediction = on_the_clock(rehearse([mlp(weights_away=frozenset("abc"))]), rates)
    assert prediction.exposed_s and prediction.exposed_s > 0.9
    assert prediction.file_exposed_s == pytest.approx(0)


def test_live_bytes_of_a_fetch_begin_with_it_and_of_a_put_end_with_its_wait() -> None:
    record = mlp(weights_away=frozenset("abc"), gradients_away=frozenset("abc"))
    forward, backward = on_the_clock(rehearse([record])).phases
    plain, _ = on_the_clock(rehearse([mlp()])).phases
    shard, at = 256, dict(zip((o.name for o in forward.operations), forward.live, strict=False))
    first = next(name for name in at if name.startswith("fetch"))
    assert at[first]["weights"] == shard
    # Two are on their way at most, and one is sent: a shard more than is gathered at once.
    assert plain.peak["weights"] < forward.peak["weights"] <= plain.peak["weights"] + 3 * shard
    assert forward.live[-1]["weights"] == 0
    assert backward.live[-1]["gradients"] == shard, "for a moment, while views of one are made: none stays"


# ------------------------------------------------------------------ what is said


def test_rates_without_a_disk_are_refused_where_graphs_use_one() -> None:
    with pytest.raises(ValueError, match=r"rates without disk_bytes_per_s.*calibrate\(path"):
        on_the_clock(rehearse([mlp(weights_away=frozenset("a"))]), ONE_PER_PRODUCT)
    assert on_the_clock(rehearse([mlp()]), ONE_PER_PRODUCT).file_exposed_s == 0
