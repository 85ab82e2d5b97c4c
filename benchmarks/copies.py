"""A step with state in the host's memory beside what computes and what is copied, on the simulated accelerator's clock.

    python benchmarks/copies.py                 all ways, 24 blocks, two ranks: two minutes
    python benchmarks/copies.py --paced         jobs really last as long: seconds that have passed, of one way

Seconds are those of tests/accelerator/timed.py: compute alone is 1, copies alone are a ratio of it. *least* is what no
order of a step could be under whose phases (forward, backward, the optimizer's step) come one after the other.
benchmarks/results/copies-sim.json has what is in docs/offload.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from tests.accelerator.ranks import VARIABLES, on_accelerator  # noqa: E402
from tests.workers import Processes, Workers  # noqa: E402
from zerofx import Offload  # noqa: E402

RATIOS = (0.05, 0.5, 1.0, 2.0)
WAYS = {
    "optimizer": (3, Offload("cpu")),
    "activations": (3, Offload(activations="cpu")),
    "optimizer, gradients": (3, Offload("cpu", gradients="cpu")),
    "optimizer, weights": (3, Offload("cpu", weights="cpu")),
    "optimizer, gradients, weights": (3, Offload("cpu", gradients="cpu", weights="cpu")),
    "all four": (3, Offload("cpu", gradients="cpu", weights="cpu", activations="cpu")),
    "stage 2: optimizer, gradients, activations": (2, Offload("cpu", gradients="cpu", activations="cpu")),
}


def table(found: dict[str, Any]) -> str:
    lines = [f"| `Offload(...)` of | {' | '.join(f'copies {r:g}' for r in RATIOS)} |", "|---" * (1 + len(RATIOS)) + "|"]
    for way, points in found.items():
        cells = [f"{p['over']:.2f} ({p['step'] / p['least']:.2f})" for p in points]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=None)
    parser.add_argument("--paced", action="store_true")
    args = parser.parse_args()
    path = ROOT / "benchmarks" / "results" / "copies-sim.json"
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    processes = Processes(VARIABLES)
    try:
        workers, found = Workers(args.ranks, processes), {}
        for way in args.ways or (["all four"] if args.paced else WAYS):
            stage, offload = WAYS[way]
            given = args.layers, RATIOS, {"stage": stage, "offload": offload}, args.paced
            ranks = on_accelerator(workers, "tests.accelerator.timed:measured", *given, timeout=500)
            found[way] = [max(points, key=lambda p: p["step"]) for points in zip(*ranks, strict=True)]
            print(table({way: found[way]}), flush=True)
    finally:
        processes.stop()
    name = f"{args.ranks} ranks, {args.layers} blocks{', paced' * args.paced}"
    kept |= {"torch": torch.__version__, name: found}
    path.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"\n{name}\n{table(found)}")


if __name__ == "__main__":
    main()
