"""What is said while graphs are compiled, and that nothing is said where nobody asked."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config
from torch import nn

import zerofx

DONE = r"zerofx: (forward|backward) 1, \d to \d: \d+\.\d s, \d+\.\d s of them passes"


def compile_something(progress: Any) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    groups = zerofx.Grouping([nn.Linear], min_bytes=0)
    zerofx.dry_run(model, torch.zeros(2, 8), world_size=2, executor="eager", groups=groups, progress=progress)


def on_a_terminal(progress: Any = None) -> str:
    """Everything that is written to stderr, which is a terminal."""
    ours, theirs = pty.openpty()
    said: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # the other side is closed
            while chunk := os.read(ours, 4096):
                said.append(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(theirs, "w") as terminal, contextlib.redirect_stderr(terminal):
        compile_something(progress)
    reader.join(10)
    os.close(ours)
    return b"".join(said).decode()


def into_a_file(progress: Any = None) -> str:
    """Everything that is written to stderr, which is no terminal."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        compile_something(progress)
    return said.getvalue()


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZEROFX_PROGRESS", raising=False)


@pytest.mark.parametrize("no_rich", [True, False])
def test_a_terminal_shows_one_line_that_rewrites_itself_and_one_that_stays_for_each_graph(
    no_rich: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    if no_rich:
        monkeypatch.setitem(sys.modules, "rich", None)  # type: ignore[arg-type]
        monkeypatch.setitem(sys.modules, "rich.console", None)  # type: ignore[arg-type]
    else:
        pytest.importorskip("rich")
    said = on_a_terminal()
    assert [m[1] for m in re.finditer(DONE, said)] == ["forward", "backward"]
    assert said.count("\n") < 8 and "\r" in said
    if no_rich:
        assert re.search(r"\rzerofx: forward 1, \d to \d: rematerialize, 1 of \d+ \(0\.\d s\)", said)
        shown = [re.sub(r" +$", "", line.rpartition("\r")[2]) for line in said.split("\n")]
        assert not any(re.search(r" \d+ of \d+ ", line) for line in shown), "a line of progress was left"


def test_without_a_terminal_nothing_is_said() -> None:
    assert into_a_file() == ""


@pytest.mark.parametrize(("progress", "variable"), [(True, None), (None, "1"), (True, "0")])
def test_without_a_terminal_a_line_for_each_graph_where_it_was_asked_for(
    progress: Any, variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("ZEROFX_PROGRESS", variable)
    lines = into_a_file(progress).splitlines()
    assert len(lines) == 2 and all(re.fullmatch(DONE, line) for line in lines), lines


@pytest.mark.parametrize(("progress", "variable"), [(False, None), (None, "0"), (False, "1")])
def test_a_terminal_is_silent_where_that_was_asked_for(
    progress: Any, variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("ZEROFX_PROGRESS", variable)
    assert on_a_terminal(progress) == ""


def _said(capture: Path) -> str:
    """What this rank writes to its stderr while it compiles."""
    import torch.distributed as dist

    file = capture / str(dist.get_rank())
    before = sys.stderr
    with file.open("w") as sys.stderr:
        try:
            model = zerofx.compile(nn.Linear(3, 3), executor="eager", progress=True)
            model(torch.ones(2, 3)).sum().backward()
        finally:
            sys.stderr = before
    return file.read_text()


def test_rank_0_alone_speaks(workers2: Any, tmp_path: Path) -> None:
    first, second = workers2.run(_said, tmp_path)
    assert len(first.splitlines()) == 2 and second == ""


@pytest.mark.parametrize("value", ["yes", "", "2"])
def test_a_variable_that_is_neither_0_nor_1_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROFX_PROGRESS", value)
    with pytest.raises(ValueError, match=f"ZEROFX_PROGRESS='{value}': expected 0 or 1"):
        zerofx.compile(nn.Linear(2, 2))


def test_a_progress_that_is_no_truth_value_is_refused() -> None:
    with pytest.raises(ValueError, match="progress='loud': expected True, False or None"):
        zerofx.compile(nn.Linear(2, 2), progress="loud")


def test_what_came_from_a_cache_is_said_to(
    fake_world: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    fake_world(2)
    with torch._functorch.config.patch(enable_autograd_cache=True):
        for _ in range(2):
            torch._dynamo.reset()
            model = zerofx.compile(nn.Linear(3, 3), executor="eager", progress=True)
            model(torch.ones(2, 3)).sum().backward()
            said = capfd.readouterr().err.splitlines()
    assert [line.split(", ")[0] for line in said] == ["zerofx: forward 1", "zerofx: backward 1"]
    assert all(line.endswith(": from the cache") for line in said)
