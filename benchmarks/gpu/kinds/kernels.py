"""The optimizer's kernels against float64, and their own tests."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import zerofx
from benchmarks.gpu.lines import Line, Setting, at_most, attempt, not_run
from zerofx.kernels.split import join

LIMIT = 150
STEPS = 5
TESTS = "tests/kernels -m gpu"

CASES: dict[str, tuple[dict[str, Any], torch.dtype, float]] = {
    "float32": ({}, torch.float32, 5e-5),
    "bfloat16, float32 masters": ({}, torch.bfloat16, 5e-5),
    "bfloat16, split masters": ({"master": "split"}, torch.bfloat16, 5e-5),
    "float32, bfloat16 moments": ({"moments": torch.bfloat16}, torch.float32, 0.02),
    "float32, 8-bit moments": ({"moments": "8bit"}, torch.float32, 0.1),
}
"""Options, the weights' dtype, and how far the weights may be from float64's, as a part of what those have moved."""


def lines(setting: Setting) -> Iterator[Line]:
    for name in CASES:
        expected = f"at most {CASES[name][2]:g}"
        yield from attempt(f"AdamW, {name}", expected, lambda name=name: _case(setting, name))  # type: ignore[misc]
    if setting.device == "cpu":
        yield not_run(TESTS, "all pass")
    else:
        yield from attempt(TESTS, "all pass", _tests)


def _case(setting: Setting, name: str) -> Line:
    options, dtype, bound = CASES[name]
    numel = (1 << 12) + 7 if setting.small else (1 << 22) + 7
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(numel, generator=generator).to(dtype).double().to(setting.device)
    gradients = [torch.randn(numel, generator=generator).to(dtype).double().to(setting.device) for _ in range(STEPS)]
    exact, mine = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.to(dtype))
    theirs = torch.optim.AdamW([exact], lr=1e-2, weight_decay=0.1)
    ours = zerofx.AdamW([mine], lr=1e-2, weight_decay=0.1, max_grad_norm=100.0, **options)
    for gradient in gradients:
        mine.grad, exact.grad = gradient.to(dtype), gradient.clone()
        torch.nn.utils.clip_grad_norm_([exact], 100.0)
        ours.step()
        theirs.step()
    found = _masters(ours, mine).double()
    error = (found - exact).abs().max() / (exact - start).abs().max()
    return at_most(f"AdamW, {name}: off float64's way", error.item(), bound)


def _masters(optimizer: zerofx.AdamW, parameter: torch.nn.Parameter) -> torch.Tensor:
    state = optimizer.state[parameter]
    if "remainder" in state:
        return join(parameter.detach(), state["remainder"])
    return state.get("master", parameter.detach())


def _tests() -> Line:
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/kernels", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("xdist"):
        command += ["-n", "4"]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    last = (ended.stdout.strip().splitlines() or ["nothing was said"])[-1]
    fine = ended.returncode == 0 and re.search(r"\d+ passed", last)
    return Line(TESTS, "all pass", last, "as expected" if fine else "otherwise", detail=ended.stdout[-4000:])
