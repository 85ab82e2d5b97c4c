"""Time of a step and resident memory, under glibc's malloc as it is, and with freed memory kept.

    python benchmarks/malloc.py
    python benchmarks/malloc.py --model large --runs 4

glibc reads its settings when a process starts. So each run starts `benchmarks/step.py` once for each contender and
setting; the starts take turns in their order. The models are mostly embedding, a table and a head, whose buffers malloc
returns to the kernel: the *embedding* model of docs/benchmarks.md, and one of larger buffers. *gpt* is the model of
`benchmarks/step.py`, whose buffers are small.

What a contender took is the median over its runs of each run's median; ``spread`` is the largest of these by the least.
Resident memory is that of the fuller rank at its peak, in the timed steps alone; compiling is over by then.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KEEPS = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
"""No buffer is mapped by itself, and none is returned: mallopt(3)."""
MALLOCS: dict[str, dict[str, str]] = {"as it is": {}, "keeps what is freed": KEEPS}
CONTENDERS = ("zerofx", "ddp")
MODELS = {
    "embedding": {"vocab": 32_768, "dim": 256, "layers": 4, "batch": 2, "length": 128},
    "large": {"vocab": 50_000, "dim": 512, "layers": 2, "batch": 1, "length": 128},
    "gpt": {},
}
SECONDS = 900  # for one run, compiling included


def run(contender: str, malloc: str, args: argparse.Namespace) -> dict[str, Any]:
    """What `benchmarks/step.py` found of one contender."""
    environment = {name: value for name, value in os.environ.items() if name not in {"GLIBC_TUNABLES", *KEEPS}}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "step.json"
        sizes = MODELS[args.model] | {"rounds": args.rounds}
        sizes |= {name: value for name in SIZES if (value := getattr(args, name)) is not None}
        options = [f"--{name}={value}" for name, value in sizes.items()]
        command = [sys.executable, str(ROOT / "benchmarks" / "step.py"), f"--contenders={contender}", *options]
        subprocess.run([*command, f"--out={out}"], check=True, env=environment | MALLOCS[malloc], timeout=SECONDS)
        found: dict[str, Any] = json.loads(out.read_text())
    return found["contenders"][contender] | {"resident_bytes": found["resident_bytes"]}


def summed_up(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and spread of one contender under one malloc."""
    seconds = [run["median_s"] for run in runs]
    return {
        "median_s": statistics.median(seconds),
        "spread": max(seconds) / min(seconds),
        "of_runs": seconds,
        "resident_bytes": statistics.median(run["resident_bytes"] for run in runs),
        "resident_of_runs": [run["resident_bytes"] for run in runs],
    }


SIZES = ("vocab", "dim", "layers", "heads", "batch", "length")


def main() -> None:
    parser = argparse.ArgumentParser(description="A step and its memory, under two settings of glibc's malloc.")
    parser.add_argument("--runs", type=int, default=3, help="of each setting")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--model", choices=MODELS, default="embedding")
    for name in SIZES:
        parser.add_argument(f"--{name}", type=int, help="in the place of the model's own")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/malloc-<model>.json")
    args = parser.parse_args()
    out = args.out or ROOT / "benchmarks" / "results" / f"malloc-{args.model}.json"
    pairs = [(contender, malloc) for contender in CONTENDERS for malloc in MALLOCS]
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {pair: [] for pair in pairs}
    for i in range(args.runs):
        for pair in pairs[:: 1 if i % 2 == 0 else -1]:
            runs[pair].append(run(*pair, args))
    found = {f"{contender}, glibc {malloc}": summed_up(runs[contender, malloc]) for contender, malloc in pairs}
    result = {
        "command": " ".join(["python benchmarks/malloc.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "libc": " ".join(platform.libc_ver()),
        "contenders": found,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    for name, of in found.items():
        print(f"{name:32} {of['median_s']:.4f} s, spread {of['spread']:.3f}, {of['resident_bytes'] / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
