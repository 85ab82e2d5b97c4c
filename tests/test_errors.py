"""Every refusal has a row in docs/errors.md and a test that names it; what is mistyped is told the nearest name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerofx
from tests.refusals import GAP, INTERNAL, Refusal, named, refusals, test_pieces
from zerofx.compiler.options import VARIABLES

test_pieces.__test__ = False  # type: ignore[attr-defined]  # no test: pieces of tests
ROOT = Path(__file__).resolve().parent.parent
INSIDE = {
    "kernels/": "zerofx.AdamW alone calls kernels, with what it has checked",
    "zerofx/checkpoint/dcp.py": "told by the error around it: refused, or cannot be read as an index",
    "zerofx/checkpoint/deepspeed.py: its vectors have": "told by the error around it",
    "zerofx/inspect/doctor/trials.py": "a line of the doctor's report",
    "zerofx/integrations/states.py: …: …": "what an option says, with where it was given in front",
    "zerofx/checkpoint/sources.py": "told by the error around it: cannot be read as safetensors",
}
"""Files, and beginnings of their messages, whose errors of no row are caught, and told by another."""
UNNAMED = 16
"""Refusals that no test names by a piece of their text: of damaged files, mostly, provoked by class. Not to grow."""


def user_facing() -> list[Refusal]:
    found = {r.place: r for r in refusals() if r.error not in INTERNAL and r.message not in ("", GAP)}
    return [r for r in found.values() if not r.place.startswith("kernels/") and r.error != "saved_in"]


def rows() -> list[str]:
    """The messages of the tables, without the rows that stand for a class of errors."""
    found = re.findall(r"^\| `(.+?)` \|", (ROOT / "docs" / "errors.md").read_text(), re.M)
    assert len(found) > 100
    return found


def matches(row: str, refusal: Refusal) -> bool:
    """Whether the row is the message, or a beginning of it."""
    pattern = ".*".join(map(re.escape, row.split(GAP)))
    return re.match(pattern, refusal.message, re.S) is not None


def test_every_refusal_has_a_row() -> None:
    known = rows()
    missing = [
        r for r in user_facing() if not any(matches(row, r) for row in known) and not str(r).startswith(tuple(INSIDE))
    ]
    assert not missing, "\n".join(f"{r.place}: {r.message}" for r in missing)


def test_every_row_is_of_a_refusal() -> None:
    all_of_them = user_facing()
    stale = [row for row in rows() if not any(matches(row, r) for r in all_of_them)]
    assert not stale


def test_refusals_are_named_by_tests() -> None:
    pieces = test_pieces()
    unnamed = [r for r in user_facing() if not named(r, pieces) and not str(r).startswith(tuple(INSIDE))]
    assert len(unnamed) <= UNNAMED, "\n".join(f"{r.place}: {r.message}" for r in unnamed)


def test_a_refusal_is_found_with_its_gaps() -> None:
    found = {r.message for r in refusals()}
    assert "stage=…: expected 0, 1, 2 or 3." in found
    assert "two passes are named …: give one of them another name." in found


@pytest.mark.parametrize(
    ("typed", "meant"), [("stge", "stage"), ("memory_buget", "memory_budget"), ("pases", "passes")]
)
def test_a_mistyped_option_is_told_the_nearest(typed: str, meant: str, fake_world: Any) -> None:
    fake_world(2)
    for call in (zerofx.compile, zerofx.shard):
        with pytest.raises(ValueError, match=f"unknown option '{typed}': did you mean '{meant}'"):
            call(nn.Linear(2, 2), **{typed: 3})
    torch._dynamo.reset()
    with pytest.raises(Exception, match=f"unknown option '{typed}': did you mean '{meant}'"):
        torch.compile(nn.Linear(2, 2), backend="zerofx", options={typed: 3})(torch.ones(1, 2))


def test_an_option_that_is_like_no_other_is_told_all(fake_world: Any) -> None:
    fake_world(2)
    with pytest.raises(ValueError, match=r"unknown option 'xyzzy'\. zerofx knows stage, executor"):
        zerofx.compile(nn.Linear(2, 2), xyzzy=3)


@pytest.mark.parametrize(
    ("typed", "meant"), [("ZEROFX_PROGESS", "ZEROFX_PROGRESS"), ("ZEROFX_SAMEHOST", "ZEROFX_SAME_HOST")]
)
def test_a_mistyped_variable_is_told_the_nearest(typed: str, meant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(typed, "1")
    with pytest.raises(ValueError, match=f"{typed} in the environment.*did you mean {meant}"):
        zerofx.compile(nn.Linear(2, 2))


def test_a_variable_of_somebody_else_is_left_alone(fake_world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_world(2)
    monkeypatch.setenv("ZEROFX_HOSTS", "1")
    zerofx.shard(nn.Linear(2, 2))


def test_every_variable_that_zerofx_reads_is_known() -> None:
    files = [p for top in ("zerofx", "passes", "kernels") for p in (ROOT / top).rglob("*.py")]
    found = {name for path in files for name in re.findall(r"\bZEROFX_[A-Z_]+\b", path.read_text())}
    assert found - {"ZEROFX_"} == set(VARIABLES)


def test_what_is_no_module_is_refused(fake_world: Any) -> None:
    fake_world(2)
    with pytest.raises(ValueError, match=r"expected an nn.Module, got int"):
        zerofx.compile(3)  # type: ignore[arg-type]


def test_a_dry_run_takes_no_mesh(fake_world: Any) -> None:
    fake_world(2)
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    with pytest.raises(ValueError, match="mesh= in a dry run: there are no processes that could form one"):
        zerofx.dry_run(nn.Linear(2, 2), torch.ones(1, 2), world_size=2, mesh=mesh)
