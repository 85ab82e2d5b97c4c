"""Small questions to a GPU, each in a process of its own, several at once: see `benchmarks.gpu.probes`."""

from __future__ import annotations

import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.lines import Line, Setting
from benchmarks.gpu.probes import PROBES

LIMIT = 155
EACH = 110
"""Seconds of one probe. What hangs is ended, and costs no other its line."""
AT_ONCE = 4
ROOT = Path(__file__).resolve().parents[3]


def lines(setting: Setting) -> Iterator[Line]:
    at_once = 1 if setting.small else AT_ONCE
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        asked = [pool.submit(_asked, setting, name, Path(folder)) for name in PROBES]
        for answer in concurrent.futures.as_completed(asked):
            yield from answer.result()


def _asked(setting: Setting, name: str, folder: Path) -> list[Line]:
    path = folder / name
    environment = dict(os.environ)
    if setting.device == "cpu":
        environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu.probes", name, setting.device, str(path)]
    try:
        ended = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=EACH
        )
    except subprocess.TimeoutExpired:
        return [Line(name, "", f"hung: ended after {EACH} s", "failed")]
    if path.exists():
        return [Line(**line) for line in json.loads(path.read_text())]
    last = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
    return [Line(name, "", last[:300], "failed", detail=ended.stderr[-4000:])]
