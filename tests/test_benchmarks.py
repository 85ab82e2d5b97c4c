"""Every benchmark runs, on a small model, and writes what it found. Speed is not looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
TINY = ["--layers=1", "--dim=16", "--heads=2", "--vocab=64", "--rounds=1"]


def run(tmp_path: Path, name: str, *args: str) -> dict[str, Any]:
    out = tmp_path / "result.json"
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *TINY, *args, f"--out={out}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.slow
def test_the_optimizers_step_is_timed(tmp_path: Path) -> None:
    names = ["copy", "fused kernel", "zerofx", "zerofx unclipped", "torch foreach", "torch fused mixed", "fsdp2"]
    found = run(tmp_path, "optimizer", "--warmup=1", f"--contenders={','.join(names)}")
    assert list(found["contenders"]) == names
    for name, row in found["contenders"].items():
        assert row["n"] == 1 and row["median_s"] > 0, name
    assert found["contenders"]["zerofx"]["times_as_long_as"]["zerofx"] == 1.0


@pytest.mark.slow
def test_a_training_step_is_timed_and_losses_agree(tmp_path: Path) -> None:
    names = "zerofx-eager,ddp,fsdp2,alone+bytes-3"
    found = run(tmp_path, "step", f"--contenders={names}", "--length=8", "--batch=1", "--warmup=1")
    rows = found["contenders"]
    assert set(rows) == set(names.split(","))
    assert found["largest_relative_difference_of_losses"] < 1e-4
    sent = {name: rows[name]["wire_bytes_per_step"] for name in rows}
    assert 1.0 <= sent["alone+bytes-3"] / sent["fsdp2"] < 1.2  # what ZeRO-3 sends; FSDP2 keeps the last group


@pytest.mark.slow
def test_held_out_losses_are_taken_with_and_without_codes(tmp_path: Path) -> None:
    out = tmp_path / "curves.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "curves.py"), "--contenders", "none", "int4, feedback"]
    command += ["--seeds", "3", "--steps=2", f"--out={out}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    curves = json.loads(out.read_text())["curves"]
    (plain,), (coded,) = curves["none"]["3"], curves["int4, feedback"]["3"]
    assert plain[0] == coded[0] == 2 and 4 < plain[1] < 6
    assert 0 < abs(coded[1] / plain[1] - 1) < 0.02


@pytest.mark.slow
def test_saving_and_loading_are_timed(tmp_path: Path) -> None:
    found = run(tmp_path, "checkpoint", f"--folder={tmp_path}")
    assert {name: set(row) for name, row in found["contenders"].items()} == {
        name: {"save", "load", "stops"} for name in ("zerofx", "fsdp2")
    }


@pytest.mark.slow
def test_whole_weights_for_another_program_are_timed_and_compared(tmp_path: Path) -> None:
    found = run(tmp_path, "full_parameters", "--warmup=1")
    names = ["zerofx", "zerofx bf16", "zerofx rank 0", "zerofx full_state_dict"]
    assert list(found["contenders"]) == [*names, "fsdp2 full_tensor", "fsdp2 full_tensor bf16", "fsdp2 state dict"]
    assert all(row["n"] == 1 and row["median_s"] > 0 for row in found["contenders"].values())
    assert found["contenders"]["zerofx"]["times_as_long_as_zerofx"] == 1.0


@pytest.mark.slow
def test_an_optimizers_step_through_a_file_is_timed(tmp_path: Path) -> None:
    out = tmp_path / "offload.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "offload.py"), f"--path={tmp_path}", "--millions=1"]
    command += ["--dim=256", "--rounds=1", f"--out={out}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (size,) = json.loads(out.read_text())["sizes"]
    assert size["parameters"] == 15 * 256**2 and len(size["ratio"]) == 1
    assert all(len(times) == 1 and times[0] > 0 for times in size["seconds"].values())


@pytest.mark.slow
def test_a_step_is_timed_under_two_settings_of_malloc(tmp_path: Path) -> None:
    found = run(tmp_path, "malloc", "--runs=1", "--length=8", "--batch=1")["contenders"]
    assert len(found) == 4
    for name, row in found.items():
        assert row["median_s"] > 0 and row["resident_bytes"] > 1 << 26, name
