"""The report of ``make gpu``: it runs where there is no GPU, and goes on behind a failure."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import KINDS, report
from benchmarks.gpu.__main__ import module_of, run_apart
from benchmarks.gpu.kinds import probes
from benchmarks.gpu.lines import Line, Setting, at_least, at_most, attempt
from tests.slow import slow_if

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks" / "gpu"
BROKEN = "tests.broken_kinds"


def setting(tmp_path: Path) -> Setting:
    return Setting("cpu", 1, str(tmp_path / "left"))


@pytest.mark.slow
def test_a_report_is_written_without_a_gpu_and_says_what_was_not_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--device=cpu", "--ranks=1", "--seconds=250", "--patience=2"]
    command += ["--kinds", "kernels", "cuda_graph", f"--out={tmp_path / 'report'}"]
    command += [f"--folder={tmp_path}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "report.json").read_text())
    by_name = {line["name"]: line for line in found["lines"]}
    assert not [line for line in found["lines"] if line["verdict"] in ("otherwise", "failed")]
    assert by_name["AdamW, float32: off float64's way"]["verdict"] == "as expected"
    assert by_name["stage 3: a captured step"]["found"] == "not run: no device"
    page = (tmp_path / "report.md").read_text()
    assert all(name.replace("|", "\\|") in page for name in by_name)
    assert {line["kind"] for line in found["lines"]} == {"kernels", "cuda_graph"}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_kind_runs_small_without_a_gpu(tmp_path: Path, ranks: int) -> None:
    where = Setting("cpu", ranks, str(tmp_path))
    for kind in KINDS:
        lines = list(run_apart(kind, where, 250))
        assert lines and not [line for line in lines if line.verdict in ("otherwise", "failed")], (kind, lines)


@slow_if(lambda kind: kind == "hangs")
@pytest.mark.parametrize(
    ("kind", "found"),
    [("raises", "ZeroDivisionError"), ("crashes", "died: SIGKILL"), ("hangs", "ended at its limit of 8 s")],
)
def test_what_fails_is_a_line_behind_those_that_were_found(tmp_path: Path, kind: str, found: str) -> None:
    first, last = run_apart(f"{BROKEN}.{kind}", setting(tmp_path), 100)
    assert (first.name, first.verdict) == ("before", "told")
    assert last.verdict == "failed" and found in last.found


def test_a_kind_that_no_time_is_left_for_says_so(tmp_path: Path) -> None:
    (line,) = run_apart("kernels", setting(tmp_path), 0)
    assert line.found == "not run: no time left"


def test_a_line_is_judged_and_not_a_number_is_never_as_expected() -> None:
    nan = float("nan")
    assert [at_most("", x, 1.0).verdict for x in (1.0, 1.1, nan)] == ["as expected", "otherwise", "otherwise"]
    assert [at_least("", x, 1.0).verdict for x in (1.0, 0.9, nan)] == ["as expected", "otherwise", "otherwise"]
    assert at_most("", 2.0, 1.0, judged=False).verdict == "told"
    json.dumps(at_most("", nan, 1.0).value, allow_nan=False)

    def broken() -> Line:
        raise ValueError("of no use")

    (line,) = attempt("name", "expected", broken)
    assert (line.found, line.verdict) == ("ValueError: of no use", "failed")


@pytest.mark.slow
def test_a_case_that_ends_its_rank_is_a_line_and_the_next_goes_on(tmp_path: Path) -> None:
    lines = list(run_apart(f"{BROKEN}.cases", setting(tmp_path), 200, patience=2))
    assert [(line.name, line.verdict) for line in lines] == [
        ("fine", "told"),
        ("raises", "failed"),
        ("dies", "failed"),
        ("fine again", "told"),
    ]


def test_the_page_shows_each_line_and_what_failed() -> None:
    lines = {"a_kind": [Line("a | b", "1", "2", "otherwise"), Line("c", "", "no", "failed", detail="Traceback")]}
    page = report.page(lines, {"device": "no GPU", "command": "x", "date": "today"})
    assert "| a \\| b | 1 | 2 | **no** |" in page and "### c" in page and "Traceback" in page


def test_a_probe_that_dies_or_hangs_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (died,) = probes._asked(setting(tmp_path), "no_such_probe", tmp_path)
    assert died.verdict == "failed" and "no_such_probe" in died.found
    monkeypatch.setattr(probes, "EACH", 0.1)
    (hung,) = probes._asked(setting(tmp_path), "same_bits", tmp_path)
    assert (hung.name, hung.verdict) == ("same_bits", "failed") and "hung" in hung.found


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_limit_and_lines(kind: str) -> None:
    module = module_of(kind)
    assert 0 < module.LIMIT <= 200 and callable(module.lines)


def test_every_name_of_torch_that_the_report_uses_exists() -> None:
    """It cannot be run here on a GPU: at least no call goes to what is not there."""
    missing = set()
    for path in FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if name.startswith("torch.") and name.replace(".", "").replace("_", "").isalnum():
                found: object = torch
                for part in name.split(".")[1:]:
                    found = getattr(found, part, None)
                    if found is None and name not in ("torch.version.cuda",):  # None in a build without CUDA
                        missing.add(name)
    assert not missing
