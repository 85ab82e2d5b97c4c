"""A plain run says nothing on stderr: no warning that its user can do nothing about."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slow import slow

ROOT = Path(__file__).resolve().parent.parent
BEFORE = """
import sys, torch, torch.distributed as dist, torch.nn.functional as F, zerofx
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(64, 16), nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 64))

    def forward(self, x, y):
        return F.cross_entropy(self.layers(x).flatten(0, 1), y.flatten())

dist.init_process_group("gloo")
torch.manual_seed(0)
model, loader = Model(), [(torch.randint(64, (4, 8)), torch.randint(64, (4, 8))) for _ in range(3)]
"""
AFTER = """
loss = model(x, y).item()
if dist.get_rank() == 0:
    print("loss", loss)
dist.destroy_process_group()
"""


def loop_of_the_readme() -> str:
    """The block of README.md that compiles a model and trains it."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    return next(b for b in blocks if "zerofx.compile(" in b and "in loader:" in b and ".backward()" in b)


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The program on two ranks; torchrun says something of its own about threads where nobody has chosen."""
    ours = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONWARNINGS", "ZEROFX_PROGRESS")
    environment = {k: v for k, v in os.environ.items() if k not in ours}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=840
    )


@pytest.mark.parametrize("executor", [slow("eager"), slow("inductor")])
def test_the_loop_of_the_readme_writes_nothing_to_stderr(tmp_path: Path, executor: str) -> None:
    program = tmp_path / "program.py"
    loop = loop_of_the_readme().replace("zerofx.compile(model,", f"zerofx.compile(model, executor={executor!r},")
    assert executor in loop
    program.write_text(BEFORE + loop + AFTER)
    done = run(program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("loss ") and done.stdout.count("\n") == 1
    assert done.stderr == ""


@pytest.mark.slow
def test_the_example_of_a_gpt_writes_nothing_to_stderr() -> None:
    small = "--steps 12 --layers 2 --dim 32 --heads 2 --batch 2 --context 32".split()
    done = run(ROOT / "examples" / "train_gpt.py", *small)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.slow
def test_a_warning_that_all_ranks_have_reason_for_is_printed_once(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    use = "for _ in range(3):\n    model.layers[2].weight @ torch.ones(16)\nx, y = loader[0]\n"
    program.write_text(BEFORE + "zerofx.compile(model, executor='eager')\n" + use + AFTER)
    done = run(program)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("needs the whole of 'layers.2.weight'") == 1
