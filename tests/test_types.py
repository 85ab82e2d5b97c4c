"""Type checkers of users know what zerofx gives them (`make types` lists what is missing)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import zerofx

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def completeness() -> dict[str, Any]:
    """What pyright finds out about every name that does not begin with an underscore."""
    pytest.importorskip("pyright")
    # pyright asks the first python of PATH where packages are, and knows nothing of editable ones.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pyright", "--verifytypes", "zerofx", "--ignoreexternal", "--outputjson"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=720)
    return json.loads(done.stdout)["typeCompleteness"]


@pytest.mark.slow
def test_ninety_five_percent_of_names_are_typed(completeness: dict[str, Any]) -> None:
    assert completeness["packageName"] == "zerofx" and completeness["pyTypedPath"]
    assert completeness["completenessScore"] >= 0.95


@pytest.mark.parametrize("name", zerofx.__all__)
def test_what_a_user_imports_is_typed_whole(completeness: dict[str, Any], name: str) -> None:
    known = {symbol["name"]: symbol["isTypeKnown"] for symbol in completeness["symbols"]}
    home = getattr(getattr(zerofx, name), "__module__", "zerofx")
    found = {symbol: fine for symbol, fine in known.items() if symbol in (f"zerofx.{name}", f"{home}.{name}")}
    assert found and all(found.values())
