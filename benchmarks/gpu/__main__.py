"""The command; see the folder's first lines. Exit status 1 if a line is not as expected, once all is written.

python -m benchmarks.gpu --kinds memory step_time
python -m benchmarks.gpu --seconds 1800
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import datetime
import importlib
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks.gpu import FAST, KINDS, RIGHT, report
from benchmarks.gpu.lines import NO_TIME, Line, Setting, failed, not_run

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    args = arguments()
    setting = Setting(args.device, args.ranks, str(args.folder))
    if args.only:
        run_here(args.only, setting, args.lines)
        return 0
    found: report.Found = {kind: [] for kind in args.kinds}
    began = time.monotonic()

    def left() -> float:
        return args.seconds - (time.monotonic() - began)

    together = [kind for kind in args.kinds if kind in RIGHT]
    for kind, line in itertools.chain(
        _at_once(together, setting, left, args.patience, len(together) if setting.device == "cuda" else 1),
        _at_once([kind for kind in args.kinds if kind in FAST], setting, left, args.patience, 1),
    ):
        found[kind].append(line)
        print(f"{kind:14} {line.verdict:12} {line.name}: {line.found}", flush=True)
        written = report.write(args.out, found, facts(setting))  # after each: what was found is not lost
    print(f"{report.counts(found)} in {time.monotonic() - began:.0f} s; written to {written[0]} and {written[1]}")
    return int(any(line.verdict in ("otherwise", "failed") for several in found.values() for line in several))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="What GPUs show of zerofx.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ranks", type=int, default=1, help="devices; 0: all there are")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seconds", type=float, default=420, help="for all kinds together")
    parser.add_argument("--patience", type=float, default=1.0, help="times each kind's own limit, on a slow machine")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "gpu", help="for what kinds leave behind")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/gpu-<device>-<ranks>")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # a kind's own process
    parser.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.ranks:
        args.ranks = max(1, torch.cuda.device_count())
    args.out = args.out or ROOT / "benchmarks" / "results" / f"gpu-{args.device}-{args.ranks}"
    return args


def _at_once(
    kinds: list[str], setting: Setting, left: Callable[[], float], patience: float, most: int
) -> Iterator[tuple[str, Line]]:
    """The lines of ``kinds`` as they come, ``most`` of them at once."""
    lines: queue.SimpleQueue[tuple[str, Line | None]] = queue.SimpleQueue()

    def run(kind: str) -> None:
        try:
            for line in run_apart(kind, setting, left(), patience):
                lines.put((kind, line))
        except Exception as error:
            lines.put((kind, failed(kind, "", error)))
        finally:
            lines.put((kind, None))

    with concurrent.futures.ThreadPoolExecutor(max(1, most)) as pool:
        for kind in kinds:
            pool.submit(run, kind)
        running = len(kinds)
        while running:
            kind, line = lines.get()
            if line is None:
                running -= 1
            else:
                yield kind, line


def module_of(kind: str) -> ModuleType:
    """A kind of this folder's, or any module that has what a kind has."""
    return importlib.import_module(kind if "." in kind else f"benchmarks.gpu.kinds.{kind}")


def run_here(kind: str, setting: Setting, path: Path) -> None:
    """In a process of its own: each line is written as soon as it is known."""
    module = module_of(kind)
    with path.open("w", buffering=1) as file:
        try:
            for line in module.lines(setting):
                file.write(json.dumps(asdict(line)) + "\n")
        except Exception as error:
            file.write(json.dumps(asdict(failed(kind, "", error))) + "\n")


def run_apart(kind: str, setting: Setting, left: float, patience: float = 1.0) -> Iterator[Line]:
    """The lines of a kind as they come, whatever becomes of its process; all that it started ends at its limit."""
    limit = min(left, patience * module_of(kind).LIMIT)
    if limit <= 0:
        yield not_run(kind, why=NO_TIME)
        return
    Path(setting.folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder) / "lines", Path(folder) / "log"
        command = [sys.executable, "-m", "benchmarks.gpu", "--only", kind, "--lines", str(path)]
        command += ["--device", setting.device, "--ranks", str(setting.ranks), "--folder", setting.folder]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            count, end, code = 0, time.monotonic() + limit, None
            while code is None and time.monotonic() < end:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(0.2)
                new = _read(path)[count:]
                count += len(new)
                yield from new
            with contextlib.suppress(ProcessLookupError):  # ranks that it left behind, too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if code != 0:
            how = f"ended at its limit of {limit:.0f} s" if code is None else f"died: {_how(code)}"
            detail = log.read_text(errors="replace")[-4000:]
            yield Line(kind, "all of its lines", f"{how}, behind {count} lines", "failed", detail=detail)


def _read(path: Path) -> list[Line]:
    """The lines that are whole."""
    text = path.read_text() if path.exists() else ""
    return [Line(**json.loads(line)) for line in text.split("\n")[:-1]]


def _how(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def facts(setting: Setting) -> dict[str, Any]:
    device = "no GPU"
    if setting.device == "cuda":
        device = f"{setting.ranks} × {torch.cuda.get_device_name()}"
    return {
        "command": " ".join(["python -m benchmarks.gpu", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "device": device,
        "ranks": setting.ranks,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


if __name__ == "__main__":
    sys.exit(main())
