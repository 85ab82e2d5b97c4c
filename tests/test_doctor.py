"""python -m zerofx doctor: what works is a line, and so is what fails, hangs or cannot be looked at."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from zerofx.__main__ import main
from zerofx.inspect.doctor import examine, looks, trials
from zerofx.inspect.doctor.looks import Finding


@pytest.mark.slow
def test_a_machine_that_runs_these_tests_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--timeout", "250s"])
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("   ")]
    states = {line[7:19].strip(): line[:5].strip() for line in lines[:-1]}
    # Cores and shared memory are the machine's own affair.
    assert {name for name, state in states.items() if state == "FAILS"} <= {"cores", "shm"}, lines
    assert status == ("FAILS" in states.values())
    assert {"python", "torch", "gpu", "triton", "compiler", "backends", "code cpu", "ranks gloo"} <= states.keys()


def trial(folder: Path, name: str, *command: str) -> trials.Trial:
    started = trials.Trial(name, "something", [command], "do this", folder)
    started.start()
    return started


@pytest.mark.slow
def test_a_trial_that_fails_and_one_that_hangs_are_lines_with_what_to_do(tmp_path: Path) -> None:
    failing = trial(tmp_path, "failing", "generated", "no-such-device")
    alone = trial(tmp_path, "alone", "rank", "cpu", "gloo", str(tmp_path / "store"), "0")  # the other rank never comes
    failed = failing.finish(time.monotonic() + 200)
    assert failed.state == "FAILS" and failed.do == "do this"
    assert "something: process 0: RuntimeError" in failed.found and "no-such-device" in failed.found
    hung = alone.finish(time.monotonic() + 0.1)
    assert hung.state == "FAILS" and "not through in time" in hung.found and hung.do.endswith("do this")
    assert all(process.poll() is not None for process in alone.processes), "it still runs"


def test_it_stops_at_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> NoReturn:
        raise OSError("no such thing")

    monkeypatch.setattr(looks, "LOOKS", (looks.python, broken, looks.pytorch))
    monkeypatch.setattr(examine, "trials", lambda folder: [])
    assert examine.doctor() == 1
    said = capsys.readouterr().out
    assert "FAILS  broken      could not be looked at: OSError: no such thing" in said
    assert said.index("python") < said.index("broken") < said.index("torch")
    assert said.endswith("1 of these fail; what to do is below each\n")


def test_what_is_missing_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "1.9.0")
    monkeypatch.setattr(looks.shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    old, without = looks.pytorch(), looks.compiler()
    assert (old.state, without.state) == ("FAILS", "FAILS")
    assert "pip install 'torch==2.15.*'" in old.do and 'executor="eager"' in without.do
    monkeypatch.setattr(looks.torch, "get_num_threads", lambda: 4096)
    assert "OMP_NUM_THREADS=" in looks.processors().do


def test_a_finding_is_a_line_and_what_to_do_one_below() -> None:
    assert str(Finding("gpu", "none", "there is none", "buy one")) == (
        "none   gpu         there is none\n                   buy one"
    )


@pytest.mark.parametrize(
    ("version", "state", "said"),
    [
        ("2.13.0+cpu", "ok", "2.13.0+cpu"),
        ("2.12.1", "ok", "zerofx's own tests run on 2.11, 2.13, 2.15"),
        ("2.16.0", "FAILS", "with which zerofx does not work"),
        ("2.10.0", "FAILS", "with which zerofx does not work"),
    ],
)
def test_versions_of_torch_between_those_that_are_tested_are_well(
    monkeypatch: pytest.MonkeyPatch, version: str, state: str, said: str
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    found = looks.pytorch()
    assert found.state == state and said in found.found
