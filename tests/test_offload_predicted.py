"""What `zerofx.predict` says of files, beside what they really read and write, and what the allocator counts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerofx
from tests import models
from tests.memory import allocated_peak
from tests.models import GPT
from tests.slow import quick_if
from tests.test_explain import said as answers_of
from tests.test_offload import EACH_LAYER, Net, small
from tests.test_offload_costs import Counter, offload
from tests.test_predict import INSTANT, ONE_PER_PRODUCT, mlp
from tests.test_report import Page, place, value
from tests.workers import Workers
from zerofx.model.units import format_bytes
from zerofx.passes import edit
from zerofx.runtime.state import state_file
from zerofx.runtime.state.account import AtRest
from zerofx.simulate.clock import on_the_clock
from zerofx.simulate.rehearsal import rehearse, rehearse_micro_batches

NOWHERE = "/no/such/folder"
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
        if executor == "eager":
            options["offload"] = offload(NOWHERE, parts)
            dry = zerofx.dry_run(models.build("gpt"), call=batch, world_size=2, stage=stage, **options)
            found["dry"] = zerofx.predict(dry)
        return found, zerofx.predict(model)


def facts(prediction: Any) -> list[Any]:
    return [(phase.file_read, phase.file_written, phase.wire_bytes, phase.peak) for phase in prediction.phases]


CASES = [
    (stage, parts, executor)
    for stage, parts in [(1, "m"), (1, "mg"), (2, "mg"), (3, "m"), (3, "mw"), (3, "mwg")]
    for executor in ("eager", "inductor")
]


@quick_if(lambda stage, parts, executor: (stage, parts, executor) == (2, "mg", "eager"))
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
        if "dry" in found:
            assert facts(found["dry"]) == facts(said)
            assert found["dry"].held_bytes == said.held_bytes
    assert not Path(NOWHERE).exists()


def step_inside(folder: str, stage: int, parts: str, executor: str) -> tuple[dict[str, Any], Any, Any]:
    """One rank's step inside of backward, counted and measured, what is predicted for it, and for one behind it."""
    model, batch = models.build("gpt"), models.make_batch("gpt", 3)
    options = {"executor": executor, "groups": zerofx.Grouping(min_bytes=0), "offload": offload(folder, parts)}
    with small(**WHOLE, kept=0), pytest.MonkeyPatch.context() as patch:
        model = zerofx.compile(model, stage=stage, **options)
        optimizer, counter = zerofx.AdamW(model.parameters(), lr=1e-2), Counter(patch)

        def step() -> None:
            loss = models.loss_of(model, batch)
            with zerofx.step_in_backward(optimizer):
                loss.backward()

        found: dict[str, Any] = {"peaks": []}
        for _ in range(3):
            counter.moved = {"read": 0, "written": 0}
            found["peaks"].append(allocated_peak(step))
        found["moved"] = dict(counter.moved)
        inside = zerofx.predict(model)
        models.loss_of(model, batch).backward()  # the other way round: both are compiled now
        assert facts(zerofx.predict(model, step_in_backward=True)) == facts(inside)
        return found, inside, zerofx.predict(model)


INSIDE = [
    (1, "m", "eager"),
    (2, "mg", "eager"),
    (2, "mg", "inductor"),
    (3, "mw", "eager"),
    (3, "mwg", "eager"),
    (3, "mwg", "inductor"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "parts", "executor"), INSIDE)
def test_updates_inside_of_backward_move_what_is_predicted_and_no_gradient(
    workers2: Workers, tmp_path: Path, stage: int, parts: str, executor: str
) -> None:
    for found, said, behind in workers2.run(step_inside, str(tmp_path), stage, parts, executor, timeout=250):
        assert (said.file_read, said.file_written) == tuple(found["moved"].values())
        assert (said.files.read, said.files.written, said.files.clipping) == (0, 0, 0), "nothing is left to the step"
        assert said.peak_bytes == pytest.approx(min(found["peaks"]), rel=0.03)
        apart = behind.file_read + behind.files.read, behind.file_written + behind.files.written
        gradients = behind.files.clipping  # which are written and read where the step comes behind backward
        assert (apart[0] - said.file_read, apart[1] - said.file_written) == (gradients, gradients)
        assert bool(gradients) == ("g" in parts)
        assert f"zerofx.AdamW's updates of {len(said.files.updates)} groups (zerofx.step_in_backward)" in str(said)
        assert "zerofx.AdamW reads" not in str(said) and "zerofx.AdamW reads" in str(behind)


def clipped(folder: str, clip: float | None) -> tuple[int, Any]:
    """Bytes that a step behind backward reads, and what is predicted."""
    model, batch = models.build("gpt"), models.make_batch("gpt", 3)
    options = {"executor": "eager", "groups": zerofx.Grouping(min_bytes=0), "offload": offload(folder, "mg")}
    with small(**WHOLE, kept=0), pytest.MonkeyPatch.context() as patch:
        model = zerofx.compile(model, stage=2, **options)
        optimizer, counter = zerofx.AdamW(model.parameters(), lr=1e-2, max_grad_norm=clip), Counter(patch)
        for _ in range(2):
            models.loss_of(model, batch).backward()
            counter.moved = {"read": 0, "written": 0}
            optimizer.step()
            optimizer.zero_grad()
        return counter.moved["read"], zerofx.predict(model)


def test_clipping_reads_gradients_once_more_and_that_is_said(workers2: Workers, tmp_path: Path) -> None:
    for clip in (None, 1.0):
        for read, said in workers2.run(clipped, str(tmp_path), clip):
            assert read == said.files.read + (said.files.clipping if clip else 0)
            assert said.files.clipping > 0
            assert f"with max_grad_norm it reads {format_bytes(said.files.clipping)} more" in str(said)


def update_on_the_clock(folder: str) -> tuple[Any, Any, str, str]:
    """A step inside of backward by two rates of the disk; what is said of an update, and the report."""
    model, batch = models.build("gpt"), models.make_batch("gpt", 3)
    options = {"executor": "eager", "groups": zerofx.Grouping(min_bytes=0), "offload": offload(folder, "mw")}
    model = zerofx.compile(model, stage=3, **options)
    optimizer = zerofx.AdamW(model.parameters(), lr=1e-2)
    loss = models.loss_of(model, batch)
    with zerofx.step_in_backward(optimizer):
        loss.backward()
    rates = zerofx.Rates(1e10, 1e9, 1e8, 1e-4, disk_bytes_per_s=1e6)
    (record,) = zerofx.graphs(model)
    group = record.backward_step.context.found.reductions[0].layout.name
    page = zerofx.report(model, Path(folder, f"{dist.get_rank()}.html"), rates).read_text()
    said = zerofx.predict(model, rates), zerofx.predict(model, replace(rates, disk_bytes_per_s=1e15))
    return *said, record.backward_step.explain(f"step {group}"), page


@pytest.mark.slow
def test_an_update_waits_for_the_disk_or_for_its_arithmetic(workers2: Workers, tmp_path: Path) -> None:
    slow, fast, answer, page = workers2.run(update_on_the_clock, str(tmp_path))[0]
    updates = [span for span in slow.phases[-1].spans if span.operation.read and span.operation.written]
    assert len(updates) == len(slow.files.updates)
    moved = sum(span.operation.through_file for span in updates)
    assert moved == 2 * sum(each.state for each in slow.files.updates.values())
    assert sum(span.end - span.start for span in updates) == pytest.approx(moved / 1e6)
    assert slow.phases[-1].file_exposed_s > 0.9 * moved / 1e6, "little else computes meanwhile"
    assert fast.phases[-1].file_exposed_s == pytest.approx(0, abs=1e-9)
    arithmetic = sum(each.touched for each in fast.files.updates.values()) / 1e9
    kernels = [s for s in fast.phases[-1].spans if s.operation.kind == "kernel" and s.operation.name.startswith("step")]
    assert sum(span.end - span.start for span in kernels) == pytest.approx(arithmetic)
    assert slow.optimizer_s == 0
    first = updates[0].operation
    assert f"moves    zerofx.AdamW reads {format_bytes(first.read)} and writes as much" in answer
    assert f"update {first.group}: {format_bytes(first.through_file)} through the file" in page
    assert f'data-find="step {first.group}"' in page


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


@quick_if(lambda stage, kept: (stage, kept) in [(3, 50_000), (2, 32 << 20)])
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
    first = next(name for name in at if name.startswith("reload"))
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


def dry(parts: str, stage: int = 3, **options: Any) -> Any:
    model, tokens = GPT(layers=3, dim=16, heads=2, vocab=32, length=8), torch.zeros(2, 8, dtype=torch.long)
    where = offload(NOWHERE, parts, **options)
    given = {"executor": "eager", "groups": zerofx.Grouping(min_bytes=0), "offload": where}
    return zerofx.dry_run(model, tokens, tokens, world_size=4, stage=stage, **given)


def test_explain_says_what_a_transfer_is_from_where_and_who_waits() -> None:
    record = dry("mwg", fraction=0.5)
    there = record.forward.context.facts(AtRest).on_disk
    assert (there.which, there.groups) == ("2 of 5 groups (fraction=0.5)", {"blocks.0", "blocks.1"})
    answers = answers_of(record.forward, "reload blocks.1")
    (shard,) = (n for n in edit.tagged(record.forward.before_lower().graph, "shard") if "blocks_1" in n.name)
    assert answers["brings"].startswith(f"{format_bytes(shard.meta['val'].nbytes)}: blocks.1.")
    assert answers["made by"].startswith("reload_weights: ")
    assert answers["waits"] == "wait_reload_default_1: nothing computes meanwhile"  # its gather starts ahead of all
    assert answers["on disk"] == (
        f"its optimizer state, weights and gradients, in {NOWHERE}: as of 2 of 5 groups (fraction=0.5)"
    )
    waits = answers_of(record.forward, "wait_reload blocks.1")
    assert waits["started"].startswith("reload_default_1: ") and waits["then"].startswith("all_gather_into_tensor")
    put, left = answers_of(record.backward, "offload blocks.1"), answers_of(record.backward, "wait_offload blocks.1")
    assert put["takes"] == left["takes"] and "blocks.1.norm1.weight" in put["takes"]
    assert put["waits"].startswith(left["started"].replace("offload", "wait_offload", 1).partition(":")[0])
    other = answers_of(record.forward, "all_gather blocks.2")
    assert other["on disk"] == f"nothing of it: the group is none of the 2 of 5 groups (fraction=0.5) in {NOWHERE}"


def test_explain_counts_what_computes_while_a_gradient_is_written() -> None:
    graph = dry("mg", stage=2).backward.before_lower().graph
    (start,) = (n for n in edit.tagged(graph, "offload") if n.meta["zerofx"].group == "norm")
    (wait,) = start.users
    order = edit.positions(graph)
    between = [n for n in graph.nodes if order[start] < order[n] < order[wait]]
    count = sum(n.op == "call_function" and "zerofx" not in n.meta for n in between)
    assert count > 0
    answer = answers_of(dry("mg", stage=2).backward, "offload norm")["waits"]
    assert answer == f"{wait.name}: {count} of the model's operators compute meanwhile"


def test_a_printed_graph_says_what_is_on_disk() -> None:
    forward, backward = dry("m", stage=1, groups=("blocks.*",)).traces()
    line = f"  on disk  optimizer state of 3 of 5 groups (groups=('blocks.*',)), in {NOWHERE}"
    assert str(forward).splitlines()[1] == str(backward).splitlines()[1] == line
    assert "on disk  optimizer state and weights of all groups" in str(dry("mw"))
    assert answers_of(forward, "refresh blocks.0")["on disk"].startswith("its optimizer state, in ")


@pytest.mark.slow
def test_a_report_has_the_file_on_the_timeline_and_its_bytes(tmp_path: Path) -> None:
    rates = zerofx.Rates(1e10, 1e10, 1e8, 1e-4, disk_bytes_per_s=1e8)
    record = dry("mwg", groups=("blocks.*",))
    page = Page(zerofx.report(record, tmp_path / "out.html", rates).read_text())
    prediction = zerofx.predict(record, rates)
    (step,) = page.find("table", "step")
    for name in ("disk_bytes", "file_read", "file_written", "file_exposed_s", "optimizer_s"):
        assert value(page, step, name) == [prediction.summary()[name]] and prediction.summary()[name]
    for section, phase in zip(page.find("section", "phase"), prediction.phases, strict=True):
        (names,) = page.find("div", "names", section)
        assert names["text"].startswith("computewirefile")
        rows = page.find("div", "row", section)
        bars = sorted(page.find("button", within=rows[-1]), key=place)
        transfers = [o for o in phase.operations if o.through_file]
        assert [bar["text"] for bar in bars] == [o.group for o in transfers]
        for bar, o in zip(bars, transfers, strict=True):
            does = f"{'write' if o.written else 'read'} {o.group}: {format_bytes(o.through_file)}"
            assert bar["title"].startswith(does)
            assert bar["data-find"] == f"{'offload' if o.written else 'reload'} {o.group}"
        assert len(page.find("button", within=rows[-2])) == sum(o.kind == "start" for o in phase.operations) - len(bars)
    (table,) = page.find("table", "groups")
    assert table["text"].count("optimizer state, weights and gradients") == 3
    plain = Page(zerofx.report(dry("m"), tmp_path / "out.html").read_text())
    assert "optimizer state of all groups in /no/such/folder" in plain.all[0]["text"]


def test_a_dry_run_refuses_what_a_run_would() -> None:
    model, x = torch.nn.Linear(4, 4), torch.zeros(2, 4)
    options = {"stage": 3, "executor": "eager"}
    with pytest.raises(ValueError, match="no group has such a name"):
        zerofx.dry_run(model, x, world_size=2, offload=zerofx.Offload(NOWHERE, groups=("nothing",)), **options)
    with pytest.raises(ValueError, match="weights= is not built for that yet"):
        where = offload(NOWHERE, "mw")
        zerofx.dry_run(model, x, world_size=(2, 2), offload=where, **options)
    assert not Path(NOWHERE).exists()
