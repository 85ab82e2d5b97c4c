"""docs/from-deepspeed.md, its rows held against DeepSpeed itself, which `make deepspeed` installs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.parity.deepspeed_programs import CASES

ROOT = Path(__file__).resolve().parent.parent.parent
DEEPSPEED = ROOT / "build" / "deepspeed"  # beside the environment: Trainer and accelerate look for it where they are
ROUNDED = ("bf16", "Muon")  # sums of 16 bits, in another order

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DEEPSPEED.exists(), reason="DeepSpeed is not in build/deepspeed: make deepspeed"),
]


def results(package: str, folder: Path) -> dict[str, Any]:
    file, program = folder / f"{package}.json", Path(__file__).with_name("deepspeed_programs.py")
    path = os.pathsep.join([str(ROOT), *([str(DEEPSPEED)] if package == "deepspeed" else [])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, str(program), package, str(file)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=840,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("deepspeed")
    return results("zerofx", folder), results("deepspeed", folder)


@pytest.mark.parametrize("case", CASES)
def test_losses_norms_and_weights_are_those_of_deepspeed(
    both: tuple[dict[str, Any], dict[str, Any]], case: str
) -> None:
    ours, theirs = (found[case] for found in both)
    tolerance = 5e-3 if case.startswith(ROUNDED) else 2e-6
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=tolerance)
    assert ours["losses"][-1] < 0.98 * ours["losses"][0]
    if any(theirs["norms"]):  # DeepSpeed tells none in stage 0
        assert ours["norms"] == pytest.approx(theirs["norms"], rel=tolerance)
    assert CASES[case].stage == 0 or ours["weights"].keys() == theirs["weights"].keys()
    if not case.startswith(ROUNDED):
        for name, weight in theirs["weights"].items():
            assert ours["weights"][name] == pytest.approx(weight, rel=1e-4, abs=1e-6), name
