"""Ranks that are out of step, or gone: an error on every rank that is left, within seconds, that says what and who."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
import types
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.slow import slow, slow_if
from tests.workers import Workers
from zerofx.runtime.ranks import agree, watch
from zerofx.runtime.ranks.agree import Collective, OutOfStepError, Schedule, difference
from zerofx.runtime.ranks.steps import Steps

EACH_LAYER = zerofx.Grouping(blocks=(nn.Linear,), min_bytes=0)


class Skips(nn.Module):
    """Layers of one size, of which a rank may leave one out; a plain attribute decides."""

    def __init__(self, skip: int | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])
        self.skip = skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if i != self.skip:
                x = torch.tanh(layer(x))
        return x.square().mean()


def build(skip: int | None = None, **options: Any) -> Skips:
    watch.TICK, watch.SILENT = 0.25, 2.0
    torch.manual_seed(0)
    return zerofx.compile(Skips(skip), executor="eager", groups=EACH_LAYER, **options)  # type: ignore[return-value]


def outcome(steps: Any) -> tuple[str, str, float]:
    """The type and the message of what ``steps`` raises, and after how many seconds."""
    began = time.monotonic()
    try:
        steps()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def train(model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(4, 32)).backward()


def skip_a_layer(stage: int) -> tuple[str, str, float]:
    model = build(1 if dist.get_rank() else None, stage=stage)
    return outcome(lambda: train(model, 3000))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_skipped_layer_is_an_error_that_names_both_collectives(stage: int, workers2: Workers) -> None:
    """Without the watchdog the two hang, or worse: messages of equal sizes meet, and train on nonsense."""
    found = workers2.run(skip_a_layer, stage, timeout=60)
    for kind, message, seconds in found:
        assert kind == "OutOfStepError", (kind, message)
        assert seconds < 40, seconds
        assert re.search(r"out of step.*first coll.*rank \d has (for|back)ward.*; rank \d has (for|back)ward", message)
        assert "leaf_modules=" in message  # what to do where data decide


def run_eagerly_on_one_rank() -> tuple[str, str, float]:
    """As if Dynamo had given up on what it captured on the other."""
    model = build()
    stance = "force_eager" if dist.get_rank() else "default"

    def steps() -> None:
        with torch.compiler.set_stance(stance), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(model, 3000)

    return outcome(steps)


def test_code_that_was_captured_on_one_rank_alone_is_an_error_that_says_so(workers2: Workers) -> None:
    for kind, message, seconds in workers2.run(run_eagerly_on_one_rank, timeout=60):
        assert kind == "OutOfStepError", (kind, message)
        assert seconds < 40, seconds
        mine, theirs = "rank 0 has forward: all-gather", "rank 1 has on demand: gather"
        assert mine in message and theirs in message
        assert "graph break" in message and "leaf_modules" not in message


def skip_a_step(stage: int) -> tuple[str, str, float]:
    """On rank 1 the fourth step raises, and somebody swallows that."""
    model = build(stage=stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps() -> None:
        for i in range(3000):
            train(model, 1)
            if not (dist.get_rank() == 1 and i == 3):
                optimizer.step()
            optimizer.zero_grad()

    return outcome(steps)


@pytest.mark.parametrize("stage", [slow(2), 3])
def test_a_step_that_one_rank_does_not_take_is_an_error_that_names_it(stage: int, workers2: Workers) -> None:
    """It runs the same graphs ever after, and trains on weights that are of two steps."""
    found = workers2.run(skip_a_step, stage, timeout=60)
    for kind, message, seconds in found:
        assert kind == "OutOfStepError", (kind, message)
        assert seconds < 40, seconds
        assert re.search(r"before graph number \d+ rank \d has stepped its optimizers \d+ times and rank", message)


def steps_that_are_legal() -> list[int]:
    """How many steps each run was noted with, whatever the optimizers are."""
    model, world = build(), dist.group.WORLD.group_name
    names = [name for name, _ in model.named_parameters()]
    sgd = torch.optim.SGD([p for name, p in model.named_parameters() if name == names[-1]])  # a bias: of one rank
    adams = [zerofx.AdamW([p], lr=0.1) for p in model.layers[0].parameters()]  # one for each parameter
    own = torch.optim.SGD(nn.Linear(2, 2).parameters())  # not sharded: a rank may step it alone
    seen = watch.watch_of(world)
    assert seen is not None
    start, before = len(seen._runs), seen.steps.count
    train(model, 1)
    if dist.get_rank():
        own.step()
    train(model, 1)
    sgd.step()
    train(model, 1)
    for adam in adams:
        adam.step()
    train(model, 1)
    told = [run.partition("+")[2] for _, run in list(seen._runs)[start:]]
    return [int(steps.partition(".")[0]) - before for steps in told]


def test_a_graph_is_noted_with_the_steps_before_it_whatever_part_of_them_a_rank_had_to_do(workers2: Workers) -> None:
    for noted in workers2.run(steps_that_are_legal):
        assert noted == [0, 0, 0, 0, 1, 1, 3, 3]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_step_counts_for_the_process_groups_that_share_the_optimizers_parameters(
    stage: int, fake_world: Any, monkeypatch: Any
) -> None:
    """A rank of two process groups steps a model of one of them: the ranks of the other have nothing to do with it."""
    fake_world(2)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(2))])
    zerofx.shard(model, stage=stage, init_sync=False)
    mine, another = (types.SimpleNamespace(steps=Steps(dist.HashStore()), check=lambda: None) for _ in range(2))
    monkeypatch.setattr(watch, "_watches", {dist.group.WORLD.group_name: mine, "another": another})
    optimizer.step()
    assert mine.steps.count == (stage > 0)  # plain data parallelism: a rank may step, and broadcast
    assert not another.steps.count
    torch.optim.SGD(nn.Linear(2, 2).parameters()).step()
    assert mine.steps.count == (stage > 0)


def differing(what: dict[str, list[Any]]) -> tuple[str, str, float]:
    rank = dist.get_rank()
    return outcome(lambda: build(**{name: values[rank] for name, values in what.items()}))


DIFFERENT: dict[str, dict[str, list[Any]]] = {
    "stage": {"stage": [2, 3]},
    "mixed_precision": {"mixed_precision": [None, zerofx.MixedPrecision(torch.bfloat16)]},
    "memory_budget": {"memory_budget": [None, 1e6]},
    "buckets": {"stage": [0, 0], "buckets": ["group", "all"]},
}


@pytest.mark.parametrize("option", DIFFERENT)
def test_another_option_is_refused_on_all_ranks_when_the_module_is_sharded(option: str, workers2: Workers) -> None:
    for kind, message, _ in workers2.run(differing, DIFFERENT[option]):
        assert kind == "RuntimeError" and f"the option {option}" in message, message


def another_grouping() -> tuple[str, str, float]:
    groups = zerofx.Grouping(min_bytes=1 << 30) if dist.get_rank() else EACH_LAYER
    return outcome(lambda: zerofx.compile(Skips(), executor="eager", groups=groups))


def test_another_grouping_is_refused_on_all_ranks_when_the_module_is_sharded(workers2: Workers) -> None:
    for kind, message, _ in workers2.run(another_grouping):
        assert kind == "RuntimeError" and re.search(r"differ in (group|the number of groups)", message), message


def astray(way: str) -> tuple[str, str, float]:
    """Both ranks train; from the fourth step on, rank 1 does it in another way."""
    model, odd = build(timeout=10), dist.get_rank() == 1

    def steps() -> None:
        for i in range(3000):
            other = odd and i >= 3
            if other and way == "no_grad":
                with torch.no_grad():
                    model(torch.randn(4, 32))
                continue
            with torch.autocast("cpu", torch.bfloat16, enabled=other and way == "autocast"):
                loss = model(torch.randn(4, 32))
            with zerofx.no_sync(model) if other and way == "no_sync" else contextlib.nullcontext():
                loss.backward()

    return outcome(steps)


# Under autocast weights travel in 16 bits: a gather of half the bytes.
@slow_if(lambda way: way == "autocast")
@pytest.mark.parametrize("way", ["no_grad", "autocast", "no_sync"])
def test_a_rank_that_goes_astray_is_an_error_on_both_that_says_where(way: str, workers2: Workers) -> None:
    found = workers2.run(astray, way, timeout=60)
    for kind, message, seconds in found:
        assert kind == "OutOfStepError", (kind, message)
        assert seconds < 40, seconds
        assert re.search(r"(for|back)ward", message) and re.search(r"rank \d", message), message


def another_dtype() -> tuple[str, str, float]:
    torch.manual_seed(0)
    model = Skips().to(torch.bfloat16 if dist.get_rank() else torch.float32)
    return outcome(lambda: zerofx.compile(model, executor="eager"))


def test_a_model_of_another_dtype_is_refused_on_all_ranks(workers2: Workers) -> None:
    for kind, message, _ in workers2.run(another_dtype):
        assert kind == "RuntimeError" and "different models" in message


def stay_away() -> tuple[str, str, float]:
    model = build(timeout=4)
    train(model, 2)
    if dist.get_rank():
        return outcome(lambda: time.sleep(9))
    return outcome(lambda: train(model, 1))


def test_a_rank_that_does_not_come_is_named_after_the_timeout(workers2: Workers) -> None:
    (kind, message, seconds), _ = workers2.run(stay_away, timeout=60)
    assert kind == "OutOfStepError", message
    assert "rank 0 has waited 4 s for forward: all-gather of 'layers.0'" in message
    assert re.search(r"missing: rank 1 \(last at backward: reduce-scatter of 'layers.0'", message), message
    assert 3 < seconds < 14


def killed(victim: int) -> tuple[str, str, float]:
    model = build()
    train(model, 2)
    if dist.get_rank() == victim:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return outcome(lambda: train(model, 1_000_000))


def report(victim: int, path: str) -> None:
    kind, message, _ = killed(victim)
    with open(f"{path}/rank{dist.get_rank()}", "w") as file:
        file.write(f"{kind} {message}")


def test_a_killed_rank_is_named_by_the_others(make_workers: Any, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("tests.workers.GRACE_SECONDS", 30.0)  # the others shall have their say
    with pytest.raises(AssertionError, match="SIGKILL"):
        make_workers(3).run(report, 1, str(tmp_path), timeout=90)
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found.keys() == {"rank0", "rank2"}
    for text in found.values():
        assert re.search(r"OutOfStepError .*waited for (for|back)ward: .* which failed: rank 1 was not heard of", text)


# ---- comparing, without processes -----------------------------------------------------------------------------------


def schedule(*groups: str, phase: str = "forward") -> Schedule:
    return Schedule(phase, tuple(Collective("all-gather", group, 64, "float32") for group in groups))


def test_the_first_difference_is_named() -> None:
    text = difference(schedule("a", "b", "c"), schedule("a", "c"), 0, 3)
    assert "number 2" in text and "rank 0 has forward: all-gather of 'b'" in text and "rank 3 has forward" in text
    assert "nothing more" in difference(schedule("a", "b"), schedule("a"), 0, 1)
    assert "number 1" in difference(schedule("a"), schedule("a", phase="backward"), 0, 1)


def test_a_schedule_survives_the_store_and_its_digest_tells_all() -> None:
    a = schedule("a", "b")
    assert Schedule.from_json(a.to_json()) == a
    others = [schedule("b", "a"), schedule("a"), schedule("a", "b", phase="backward")]
    assert len({x.digest for x in [a, *others]}) == 4
    assert (
        schedule("a", "b", phase="inference").digest == a.digest
    )  # one rank may need gradients where another does not


def test_publishing_waits_for_nobody_and_compares_with_who_was_there() -> None:
    store = dist.HashStore()
    agree.publish(store, schedule("a", "b"), "graph", 1, 4)
    agree.publish(store, schedule("a", "b"), "graph", 3, 4)
    agree.publish(store, schedule("b", "a"), "another graph", 0, 4)
    with pytest.raises(OutOfStepError, match=r"ranks 0 and 1 .*number 1: rank 0 has .*'b'.*rank 1 has .*'a'"):
        agree.publish(store, schedule("b", "a"), "graph", 0, 4)


def test_a_later_process_group_finds_nothing_of_an_earlier_one() -> None:
    """torchrun's store outlives process groups."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for group in range(3):
        zero, one = (agree.own_part(server, "zerofx/0/2", 2) for _ in range(2))
        assert not zero.check(["failed"]), group
        zero.set("failed", f"in group {group}")
        assert one.get("failed") == f"in group {group}".encode()


def compile_alone() -> tuple[list[str], list[str]]:
    """One rank compiles for another shape, alone, and publishes what the other has."""
    model = build()
    train(model, 1)
    seen = watch.watch_of(dist.group.WORLD.group_name)
    assert seen is not None
    before = len(zerofx.graphs(model))
    rows = 4 if dist.get_rank() else 8
    torch._dynamo.reset()
    model(torch.randn(rows, 32)).backward()
    dist.barrier()
    return [str(before), str(len(zerofx.graphs(model)))], [digest for _, digest in seen._runs]


def test_a_rank_that_recompiles_alone_is_in_step(workers2: Workers) -> None:
    (_, runs), (_, others) = workers2.run(compile_alone)
    assert runs == others and runs[:2] == runs[2:]
