"""Time of a step with `pool=True`, under glibc's malloc as it is, and told to keep what is freed.

    python benchmarks/pool.py
    python benchmarks/pool.py --model large --runs 4

What glibc does is settled when a process starts. So each run is a pair of `benchmarks/step.py`, one as it is and one
told to keep; the pairs take turns in their order. In each process zerofx without a pool, with one, and
DistributedDataParallel take turns. The models are mostly embedding, a table and a head, whose buffers malloc gives back
to the kernel: the *embedding* model of docs/benchmarks.md, and one of larger buffers.

What a contender took is the median over its runs of each run's median; ``spread`` is the largest of these by the least.
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
KEEPS = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=4294967296"
MALLOCS = {"as it is": "", "told to keep": KEEPS}
CONTENDERS = ("zerofx", "zerofx-3-pool", "ddp")
MODELS = {
    "embedding": {"vocab": 32_768, "dim": 256, "layers": 4, "batch": 2, "length": 128},
    "large": {"vocab": 50_000, "dim": 512, "layers": 2, "batch": 1, "length": 128},
}
SECONDS = 900  # for one run, compiling included


def run(malloc: str, args: argparse.Namespace) -> dict[str, float]:
    """Seconds of a step, by contender."""
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    if MALLOCS[malloc]:
        environment["GLIBC_TUNABLES"] = MALLOCS[malloc]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "step.json"
        sizes = MODELS[args.model] | {"rounds": args.rounds}
        options = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
        command = [sys.executable, str(ROOT / "benchmarks" / "step.py"), "--contenders", ",".join(CONTENDERS), *options]
        subprocess.run([*command, "--out", str(out)], check=True, env=environment, timeout=SECONDS)
        found = json.loads(out.read_text())["contenders"]
    return {name: contender["median_s"] for name, contender in found.items()}


def summed_up(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Median and spread, by contender and by malloc."""
    result: dict[str, Any] = {}
    for name in CONTENDERS:
        for malloc, each in runs.items():
            seconds = [run[name] for run in each]
            result[f"{name}, glibc {malloc}"] = {
                "median_s": statistics.median(seconds),
                "spread": max(seconds) / min(seconds),
                "of_runs": seconds,
            }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="A step with pool=True, under two settings of glibc's malloc.")
    parser.add_argument("--runs", type=int, default=3, help="of each setting")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--model", choices=MODELS, default="embedding")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/pool-<model>.json")
    args = parser.parse_args()
    out = args.out or ROOT / "benchmarks" / "results" / f"pool-{args.model}.json"
    runs: dict[str, list[dict[str, float]]] = {malloc: [] for malloc in MALLOCS}
    for i in range(args.runs):
        for malloc in list(MALLOCS)[:: 1 if i % 2 == 0 else -1]:
            runs[malloc].append(run(malloc, args))
    found = summed_up(runs)
    best = found["zerofx, glibc told to keep"]["median_s"]
    result = {
        "command": " ".join(["python benchmarks/pool.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "libc": " ".join(platform.libc_ver()),
        "contenders": found,
        "pool_by_told_to_keep": found["zerofx-3-pool, glibc as it is"]["median_s"] / best,
        "without_by_told_to_keep": found["zerofx, glibc as it is"]["median_s"] / best,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    for name, of in found.items():
        print(f"{name:36} {of['median_s']:.4f} s, spread {of['spread']:.3f}, {of['median_s'] / best:.3f}")


if __name__ == "__main__":
    main()
