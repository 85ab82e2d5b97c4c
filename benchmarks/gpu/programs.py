"""Benchmarks that are programs of their own, run for the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.lines import Setting

ROOT = Path(__file__).resolve().parents[2]


def run_benchmark(name: str, setting: Setting, contenders: list[str], sizes: list[str]) -> dict[str, Any]:
    """What ``benchmarks/<name>.py`` writes.

    Raises:
        RuntimeError: it wrote nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), f"--device={setting.device}"]
        command += [f"--world={setting.ranks}", f"--contenders={','.join(contenders)}", *sizes, f"--out={out}"]
        environment = dict(os.environ)
        if setting.device == "cuda":  # where a CPU is measured, a rank has one core
            environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(os.cpu_count()))
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if not out.exists():
            raise RuntimeError(f"{' '.join(command)} wrote nothing: {(ended.stdout + ended.stderr)[-3000:]}")
        return json.loads(out.read_text())
