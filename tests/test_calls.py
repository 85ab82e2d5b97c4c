"""Calls that every rank must make, and steps that every rank must take: an error on all ranks where one is alone."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.slow import slow
from tests.test_watch import EACH_LAYER, build, outcome, train
from tests.workers import ROOT, Workers
from zerofx.runtime.ranks import lookout

CALLS: dict[str, Any] = {
    "zerofx.full_state_dict": lambda model, path: zerofx.full_state_dict(model),
    "zerofx.save": lambda model, path: zerofx.save(path, model),
    "zerofx.export_safetensors": lambda model, path: zerofx.export_safetensors(model, path),
    "zerofx.unsharded": lambda model, path: zerofx.unsharded(model).__enter__(),
}

# ---- calls ----------------------------------------------------------------------------------------------------------


def call_alone(what: str, stage: int, path: str, other: str) -> tuple[str, str, float]:
    """Rank 0 calls; rank 1 trains on, or waits in a collective of its own."""
    model, lookout.PATIENCE = build(stage=stage), 2.0
    train(model, 2)
    if dist.get_rank() == 0:
        return outcome(lambda: CALLS[what](model, path))
    return outcome(lambda: train(model, 3000) if other == "trains" else dist.barrier())


@pytest.mark.parametrize(
    ("what", "stage"),
    [
        ("zerofx.full_state_dict", 3),
        ("zerofx.save", 0),
        slow("zerofx.full_state_dict", 1),
        slow("zerofx.save", 3),
        slow("zerofx.export_safetensors", 2),
        slow("zerofx.unsharded", 3),
    ],
)
def test_a_call_on_one_rank_alone_is_an_error_on_both_that_names_it(
    what: str, stage: int, workers2: Workers, tmp_path: Path
) -> None:
    for kind, message, seconds in workers2.run(call_alone, what, stage, str(tmp_path / "new"), "trains", timeout=60):
        assert kind == "OutOfStepError", (kind, message)
        assert seconds < 20, seconds
        assert what in message and re.search("rank 1 (is )?in (for|back)ward: (all-|reduce-)", message), message
        assert f"Call {what} on every rank" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stage", [3, slow(0)])
def test_a_rank_that_waits_in_a_collective_of_its_own_meanwhile_is_named(
    stage: int, workers2: Workers, tmp_path: Path
) -> None:
    (kind, message, seconds), (other, _, _) = workers2.run(
        call_alone, "zerofx.save", stage, str(tmp_path / "new"), "waits", timeout=60
    )
    assert kind == "OutOfStepError", (kind, message)
    assert re.search(r"rank 0 has been in zerofx.save for \d+ s; rank 1 has been in torch.distributed.barrier", message)
    assert seconds < 20 and other == "RuntimeError"  # gloo's: the barrier is the program's own


def call_late() -> tuple[tuple[str, str, float], str]:
    model, lookout.PATIENCE = build(), 1.0
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        if dist.get_rank():
            time.sleep(5)
        found = outcome(lambda: zerofx.full_state_dict(model))
    return found, said.getvalue()


def test_a_rank_that_comes_late_is_waited_for_and_both_print_where_it_is(workers2: Workers) -> None:
    for (kind, message, _), said in workers2.run(call_late, timeout=60):
        assert not kind, message
        assert re.search(r"rank 0 has been in zerofx.full_state_dict for \d s, and rank 1 is at test_calls.py", said)


# ---- steps ----------------------------------------------------------------------------------------------------------


def skip_the_last(stage: int, path: str) -> list[tuple[str, str, float]]:
    """What is made of two different steps."""
    model = build(stage=stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, 1)
    optimizer.step()
    zerofx.save(path, model, optimizer)
    train(model, 1)
    if dist.get_rank() == 0:
        optimizer.step()
    found = [outcome(lambda: zerofx.save(f"{path}-new", model, optimizer))]
    if stage:
        found.append(outcome(lambda: zerofx.full_state_dict(model)))
        found.append(outcome(lambda: zerofx.export_safetensors(model, f"{path}-new")))
        found.append(outcome(lambda: zerofx.load(path, model, optimizer)))
    return found


@pytest.mark.parametrize("stage", [0, slow(1), 3])
def test_no_checkpoint_is_made_of_two_different_steps(stage: int, workers2: Workers, tmp_path: Path) -> None:
    for found in workers2.run(skip_the_last, stage, str(tmp_path / "checkpoint"), timeout=60):
        assert len(found) == (4 if stage else 1)
        for kind, message, _ in found:
            assert kind == "OutOfStepError", (kind, message)
            # Of the call, or of the watchdog, whichever is first.
            assert re.search(r"stepped (group '.*'|its optimizers) (once|\d+ times).* rank \d", message), message
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def step_and_broadcast(path: str) -> dict[str, torch.Tensor]:
    model = build(stage=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, 1)
    if dist.get_rank() == 0:
        optimizer.step()
    with torch.no_grad():
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)
    zerofx.save(path, model)
    return zerofx.full_state_dict(model)


def test_in_stage_0_a_rank_may_step_alone_and_broadcast(workers2: Workers, tmp_path: Path) -> None:
    state, _ = workers2.run(step_and_broadcast, str(tmp_path / "checkpoint"))
    plain = build_plain()
    zerofx.load(tmp_path / "checkpoint", plain)
    assert all(torch.equal(plain.state_dict()[name], value) for name, value in state.items())


def build_plain() -> nn.Module:
    from tests.test_watch import Skips

    return Skips()


def freeze_alone(stage: int, executor: str) -> tuple[str, str, float]:
    from tests.test_watch import Skips, watch

    watch.TICK = 0.25
    torch.manual_seed(0)
    model = zerofx.compile(Skips(), stage=stage, executor=executor, groups=EACH_LAYER)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if dist.get_rank():
        model.layers[1].weight.requires_grad_(False)

    def steps() -> None:
        for _ in range(3000):
            train(model, 1)
            optimizer.step()
            optimizer.zero_grad()

    return outcome(steps)


@pytest.mark.parametrize(
    ("stage", "executor"),
    [(3, "eager"), *(slow(stage, "inductor") for stage in (1, 2, 3))],
)
def test_a_parameter_that_is_frozen_on_one_rank_alone_is_named(stage: int, executor: str, workers2: Workers) -> None:
    for kind, message, _ in workers2.run(freeze_alone, stage, executor, timeout=90):
        assert kind == "OutOfStepError", (kind, message)
        assert "'layers.1.weight' requires no gradient on rank 1, and does on rank 0" in message, message


# ---- the end of the program -----------------------------------------------------------------------------------------

PROGRAM = """
import sys
import torch
import torch.distributed as dist
import zerofx

skips, destroys = map(int, sys.argv[1:])
dist.init_process_group("gloo")
model = zerofx.compile(torch.nn.Linear(8, 8), executor="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(3):
    model(torch.randn(4, 8)).sum().backward()
    if i < 2 or not (skips and dist.get_rank()):
        optimizer.step()
if destroys:
    dist.destroy_process_group()
"""


def ran(folder: Path, skips: bool, destroys: bool) -> list[str]:
    """What two ranks print."""
    (folder / "program.py").write_text(textwrap.dedent(PROGRAM))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    env |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(folder / "program.py"), str(int(skips)), str(int(destroys))],
            env=env | {"RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=270)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    return said


@pytest.mark.parametrize("destroys", [False, slow(True)])
def test_a_program_that_ends_at_two_different_steps_says_so(destroys: bool, tmp_path: Path) -> None:
    for said in ran(tmp_path, True, destroys):
        assert re.search("the program ends, and rank . has stepped its optimizers . times and rank . . times", said)


@pytest.mark.slow
def test_a_program_that_ends_well_says_nothing(tmp_path: Path) -> None:
    assert not any("the program ends" in said for said in ran(tmp_path, False, True))


# ---- collectives of gloo's own, which end the process where sizes differ --------------------------------------------


class Heads(nn.Module):
    """One trunk, three heads of three sizes, one scale."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(32, 32), 0
        self.heads = nn.ModuleList([nn.Linear(32, 4 + i) for i in range(3)])
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.heads[self.head](torch.tanh(self.trunk(x))) * self.scale).square().mean()


def by_turns(executor: str) -> tuple[str, str, float]:
    build()
    model = zerofx.compile(Heads(), stage=0, executor=executor, groups=EACH_LAYER)

    def steps() -> None:
        for i in range(30):
            model.head = (i + dist.get_rank()) % 3
            train(model, 1)

    return outcome(steps)


@pytest.mark.parametrize("executor", ["eager", slow("inductor")])
def test_in_stage_0_heads_by_turns_are_an_error_before_gloo_compares_sizes(executor: str, workers2: Workers) -> None:
    for kind, message, _ in workers2.run(by_turns, executor, timeout=90):
        assert kind == "OutOfStepError" and re.search(r"rank \d has .*; rank \d has .*", message), (kind, message)


class Breaks(nn.Module):
    """Dynamo breaks its graph on rank 1 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        if dist.get_rank():
            float(x.mean())
        return self.layers[1](x).square().mean()


def break_alone(stage: int, executor: str) -> tuple[str, str, float]:
    build()
    model = zerofx.compile(Breaks(), stage=stage, executor=executor, groups=EACH_LAYER)
    return outcome(lambda: train(model, 3000))


@pytest.mark.parametrize(
    ("stage", "executor"),
    [(0, "eager"), (1, "eager"), *(slow(s, "inductor") for s in (0, 1, 2, 3))],
)
def test_a_graph_break_on_one_rank_alone_is_an_error_on_both(stage: int, executor: str, workers2: Workers) -> None:
    for kind, message, _ in workers2.run(break_alone, stage, executor, timeout=90):
        assert kind == "OutOfStepError" and re.search(r"rank \d has .*; rank \d has .*", message), (kind, message)
