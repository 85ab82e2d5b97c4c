"""The optimizer's path on a GPU, under whole training suites: Triton's interpreter takes the place of the device."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.workers import ROOT

SUITES = ["test_step_in_backward", "test_mixed_precision"]


@pytest.mark.slow
@pytest.mark.timeout(4500)
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_passes_on_kernels(suite: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", f"tests/{suite}.py", "-p", "no:cacheprovider"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=4200)
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert " passed" in ended.stdout
