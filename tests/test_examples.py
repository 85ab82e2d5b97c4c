"""The examples run as a user runs them, in small."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SMALL = "--steps 12 --layers 2 --dim 32 --heads 2 --batch 2 --context 32".split()


def run(command: list[str], timeout: float = 200) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    done = subprocess.run(
        command, cwd=ROOT, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text"
    path.write_bytes(b"".join(f.read_bytes() for f in sorted((ROOT / "passes").glob("*.py"))))
    return path


@pytest.fixture(scope="module")
def program(text: Path) -> list[str]:
    return ["examples/train_gpt.py", *SMALL, "--executor", "eager", "--data", str(text)]


@pytest.fixture(scope="module")
def out(program: list[str]) -> str:
    """What it prints: stage 3, on ranks of its own."""
    return run([sys.executable, *program, "--print-graphs"])


def losses(out: str) -> list[str]:
    return re.findall(r"(?:loss|held-out loss) +([\d.]+)", out)


def test_train_gpt_launches_its_own_ranks_and_reports_what_it_did(out: str) -> None:
    ratio = re.search(r"([\d.]+) of the [\d.]+ MB of plain data parallelism", out)
    assert ratio and float(ratio[1]) == pytest.approx(0.5, abs=0.03)
    assert re.search(r"^step +10 +loss [\d.]+ +[\d,]+ tokens/s$", out, re.M)
    assert re.search(r"^held-out loss +[\d.]+ nats per byte$", out, re.M)
    assert re.search(r"^bigram entropy +[\d.]+", out, re.M)
    assert "\ndef " in out  # the sample


def test_train_gpt_gives_the_same_losses_under_torchrun_and_in_other_stages(out: str, program: list[str]) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    # Stage 1 runs stage 2's graphs: tests/parity/test_stages.py compares the two bit by bit.
    others = [[*torchrun, *program, "--stage", "2"], [sys.executable, *program, "--stage", "0"]]
    assert len(losses(out)) == 2
    for command in others:
        assert losses(run(command)) == losses(out), command


def test_train_gpt_prints_its_graphs_when_asked(out: str) -> None:
    assert "forward: " in out and "backward: " in out and "discard" in out


LAUNCH = ["sh", "examples/launch/eight_gpus.sh"]


@pytest.mark.slow
def test_the_launch_file_for_gpus_starts_as_many_ranks_as_it_is_told(
    out: str, program: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUS", "2")
    monkeypatch.setenv("PYTHON", sys.executable)
    found = run([*LAUNCH, *program[1:], "--heads", "2", "--lr", "4e-3"])
    assert losses(found) == losses(out)


def test_the_launch_file_for_gpus_says_that_there_is_none(tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"  # lists none
    smi.write_text("#!/bin/sh\n")
    smi.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment.pop("GPUS", None)
    done = subprocess.run(LAUNCH, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "no GPU found" in done.stderr
