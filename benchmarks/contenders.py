"""What comes of contenders that took turns in one run: a table to read, and a record of it under ``results``."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.optimizer import paired
from benchmarks.step import processor

RESULTS = Path(__file__).resolve().parent / "results"


def spawned(run: Callable[..., None], args: argparse.Namespace) -> Any:
    """What rank 0 of ``run(rank, args, rendezvous, answer)``, on ``args.world`` ranks, wrote as JSON to ``answer``."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        torch.multiprocessing.spawn(run, (args, f"file://{folder}/store", str(answer)), nprocs=args.world)
        return json.loads(answer.read_text())


def summary(times: dict[str, list[float]], base: str) -> dict[str, dict[str, Any]]:
    """Of each contender's seconds the median, least and most, and how often as long as ``base``, paired by round."""
    return {
        name: {
            **{"median_s": statistics.median(own), "min_s": min(own), "max_s": max(own), "n": len(own)},
            f"times_as_long_as_{base}": paired(own, times[base]),
        }
        for name, own in times.items()
    }


def show(rows: dict[str, dict[str, Any]], base: str) -> None:
    """Print the table, the fastest first."""
    print(f"{'contender':24} {'median ms':>9} {'min':>8} {'max':>8} {'/ ' + base:>12}")
    for name, row in sorted(rows.items(), key=lambda item: item[1]["median_s"]):
        line = f"{name:24} {1e3 * row['median_s']:9.1f} {1e3 * row['min_s']:8.1f} {1e3 * row['max_s']:8.1f}"
        print(f"{line} {row[f'times_as_long_as_{base}']:12.2f}")


def write(out: Path, script: str, args: argparse.Namespace, rows: dict[str, dict[str, Any]], **found: Any) -> None:
    """Write ``rows`` to ``out``, with the command, the machine and whatever else was ``found``."""
    result = {
        "contenders": rows,
        **found,
        "command": " ".join([f"python benchmarks/{script}", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "processor": processor(getattr(args, "device", "cpu")),
        "load_average": os.getloadavg()[0],
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {out}")
