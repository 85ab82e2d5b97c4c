"""Runs whose ranks are killed go on from the last checkpoint as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint import faults
from tests.checkpoint.resumable import train
from tests.workers import Workers

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "sizes", "kills", "offload"), [(3, (2,), 5, False), (2, (2, 1, 3), 5, False), (3, (2,), 10, True)]
)
def test_nothing_is_lost_or_hangs_when_ranks_are_killed_at_random_moments(
    tmp_path: Path, stage: int, sizes: tuple[int, ...], kills: int, offload: bool
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    faults.check(tmp_path, kills=kills, seed=seed, stage=stage, sizes=sizes, offload=offload, say=print)


def torchrun(size: int, *program: object, restarts: int = 0) -> tuple[int, str]:
    """Runs a program on ``size`` ranks; returns its exit status, and what it wrote."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--max-restarts", restarts, "--nproc-per-node", size]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # see docs/checkpoints.md
    command = [sys.executable, *map(str, [*launcher, *program])]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=450)
    return done.returncode, done.stdout + done.stderr


def resumable(folder: Path, size: int, *, steps: int, kill_at: int = -1, fail_at: int = -1, restarts: int = 0) -> str:
    """Runs tests/checkpoint/resumable.py; returns its exit status and what it wrote."""
    status, text = torchrun(
        size, ROOT / "tests" / "checkpoint" / "resumable.py", folder, steps, kill_at, fail_at, restarts=restarts
    )
    return f"{status}\n{text}"


def losses(folder: Path) -> dict[int, set[float]]:
    found: dict[int, set[float]] = {}
    for line in (folder / "losses").read_text().splitlines():
        step, loss = json.loads(line)
        found.setdefault(step, set()).add(loss)
    return found


@pytest.mark.slow
def test_torchrun_restarts_a_killed_rank_and_losses_are_those_of_an_undisturbed_run_at_any_world_size(
    make_workers: Callable[[int], Workers], tmp_path: Path
) -> None:
    make_workers(2).run(train, tmp_path / "quiet" / "c", 8)
    said = resumable(tmp_path / "killed" / "c", 2, steps=6, kill_at=4, restarts=1)
    assert said.startswith("0\n"), said
    quiet, killed = losses(tmp_path / "quiet"), losses(tmp_path / "killed")
    assert killed == {step: quiet[step] for step in range(6)}  # step 4 twice, bit for bit
    make_workers(1).run(train, tmp_path / "killed" / "c", 8)
    elastic = losses(tmp_path / "killed")
    assert elastic.keys() == quiet.keys()
    for step in (6, 7):
        assert [*elastic[step]] == pytest.approx([*quiet[step]], rel=1e-6)


def test_an_exception_in_one_ranks_step_ends_all_ranks(tmp_path: Path) -> None:
    said = resumable(tmp_path / "c", 2, steps=6, fail_at=3)
    assert said.startswith("1\n") and "this rank's data is broken" in said


@pytest.mark.slow
def test_the_example_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    options = ["--executor", "eager", "--folder", tmp_path / "c", "--steps", 20, "--save-every", 4, "--kill-at", 10]
    status, said = torchrun(2, "examples/resume.py", *options, restarts=1)
    assert status == 0, said
    assert "resumed from step 8" in said or "resumed from step 4" in said, said  # that of step 8 was being written
    seen = re.findall(r"^step +(\d+) +loss ([\d.]+)$", said, re.M)
    assert {step for step, _ in seen} == {"5", "10", "15", "20"}
    assert len(set(seen)) == 4, "a step that was done again had another loss"
    assert float(seen[-1][1]) < float(seen[0][1])
    assert (tmp_path / "c" / "safetensors" / "model.safetensors").is_file()
