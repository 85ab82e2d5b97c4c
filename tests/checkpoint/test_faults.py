"""Runs whose ranks are killed go on from the last checkpoint as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint import faults

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize(("stage", "sizes", "kills"), [(3, (2,), 5), (2, (2, 1, 3), 5)])
def test_nothing_is_lost_or_hangs_when_ranks_are_killed_at_random_moments(
    tmp_path: Path, stage: int, sizes: tuple[int, ...], kills: int
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    faults.check(tmp_path, kills=kills, seed=seed, stage=stage, sizes=sizes, say=print)


def torchrun(
    folder: Path, size: int, *, steps: int = 6, kill_at: int = -1, fail_at: int = -1, restarts: int = 0
) -> str:
    """Runs tests/checkpoint/resumable.py; returns what it wrote to stderr, after its exit status."""
    program = [ROOT / "tests" / "checkpoint" / "resumable.py", folder, steps, kill_at, fail_at]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--max-restarts", restarts, "--nproc-per-node", size]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *map(str, [*launcher, *program])]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150)
    return f"{done.returncode}\n{done.stderr}"


def losses(folder: Path) -> dict[int, set[float]]:
    found: dict[int, set[float]] = {}
    for line in (folder / "losses").read_text().splitlines():
        step, loss = json.loads(line)
        found.setdefault(step, set()).add(loss)
    return found


def test_torchrun_restarts_a_killed_rank_and_losses_are_those_of_an_undisturbed_run_at_any_world_size(
    tmp_path: Path,
) -> None:
    said = torchrun(tmp_path / "quiet" / "c", 2)
    assert said.startswith("0\n"), said
    said = torchrun(tmp_path / "killed" / "c", 2, kill_at=4, restarts=1)
    assert said.startswith("0\n"), said
    assert losses(tmp_path / "killed") == losses(tmp_path / "quiet")  # step 4 twice, bit for bit
    said = torchrun(tmp_path / "elastic" / "c", 2, kill_at=4)
    assert said.startswith("1\n"), said
    said = torchrun(tmp_path / "elastic" / "c", 1)
    assert said.startswith("0\n"), said
    quiet, elastic = losses(tmp_path / "quiet"), losses(tmp_path / "elastic")
    assert quiet.keys() == elastic.keys()
    for step, (loss,) in quiet.items():
        assert list(elastic[step]) == pytest.approx([loss] * len(elastic[step]), rel=1e-6)


def test_an_exception_in_one_ranks_step_ends_all_ranks(tmp_path: Path) -> None:
    said = torchrun(tmp_path / "c", 2, fail_at=3)
    assert said.startswith("1\n") and "this rank's data is broken" in said
