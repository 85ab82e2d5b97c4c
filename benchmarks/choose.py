"""What `zerofx.choose` chooses, beside every alternative: stages, what is saved, what stays gathered, run one by one.

    python benchmarks/choose.py                                      # two gloo ranks of one host, a core each
    sudo python benchmarks/choose.py --rates 1gbit                   # on two hosts (benchmarks/hosts.py)
    python benchmarks/choose.py --models gpt --memories tight --rounds 5

For each model the alternatives are compiled with the options by hand (`GRID`), and what each holds at the worst moment
is measured: the allocator's peak over forward and backward, on top of what is held at rest. From these come three
sizes of memory: for all of them, for half of them, for few. At each size `zerofx.compile(memory=..., batch=...)`
chooses, by the rates that `zerofx.calibrate` has measured at the start. Then all take turns, step by step: forward,
backward, and the step of `zerofx.AdamW`. The best is the fastest of the alternatives that hold no more than the size.
Seconds are the slower rank's, bytes those of the rank that holds more.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["OMP_NUM_THREADS"] = "1"

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import zerofx  # noqa: E402
from benchmarks.choose_models import MODELS  # noqa: E402
from benchmarks.hosts import Hosts  # noqa: E402
from benchmarks.step import join, processor  # noqa: E402
from tests.memory import allocated_peak  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
KEEP = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=4294967296"


GRID: dict[str, dict[str, Any]] = {
    f"stage {stage}, saves {saved:g}{gathered}": {
        "stage": stage,
        "activation_budget": saved,
        **({"memory_budget": math.inf} if gathered else {}),
    }
    for stage in (0, 2, 3)
    for saved in (1, 0.5, 0)
    for gathered in (("", ", gathered") if stage == 3 else ("",))
}
MEMORIES = {"ample": 1.0, "half": 0.5, "tight": 0.1}
"""Of the range of what alternatives hold, from the least to the most."""


class Point:
    """One model, compiled one way, with its optimizer."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        build, data = MODELS[model]
        self.batch, self.seconds = data(), list[float]()
        start = time.perf_counter()
        if "memory" in options:
            options = {"batch": self.batch, **options}
        self.model = zerofx.compile(build(), executor="eager", groups=zerofx.Grouping(min_bytes=64 << 10), **options)
        self.took_s = time.perf_counter() - start
        self.optimizer = zerofx.AdamW(self.model.parameters(), lr=1e-3)
        peaks = []
        for i in range(4):
            gc.collect()
            peaks.append(allocated_peak(self.forward_and_backward) if i else self.forward_and_backward() or 0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        held = zerofx.memory_summary(self.model, self.optimizer)
        at_rest = held.total - held.nbytes["activations"] + sum(x.nbytes for x in self.batch)
        self.peak = int(_most(min(peaks[1:]) + at_rest))

    def forward_and_backward(self) -> None:
        self.model(*self.batch).backward()

    def time(self) -> None:
        dist.barrier()
        start = time.perf_counter()
        self.forward_and_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - start)


def _most(value: float) -> float:
    """On any rank."""
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def measure(model: str, memories: list[str], rounds: int, rates: zerofx.Rates) -> dict[str, Any]:
    """All alternatives of one model, and what is chosen of them at each size of memory."""
    points = {name: Point(model, options) for name, options in GRID.items()}
    least, most = (of(point.peak for point in points.values()) for of in (min, max))
    budgets = {name: math.ceil((least + MEMORIES[name] * (most - least)) * 1.01) for name in memories}
    for name, nbytes in budgets.items():
        points[name] = Point(model, {"memory": zerofx.Memory(nbytes, rates=rates)})
    for _ in range(rounds):
        for point in points.values():
            point.time()
    found: dict[str, Any] = {}
    for name, point in points.items():
        slower = [_most(seconds) for seconds in point.seconds]
        found[name] = {"median_s": statistics.median(slower), "peak": point.peak}
    chosen = {}
    for name, nbytes in budgets.items():
        choice = zerofx.explain(points[name].model)
        fitting = {other: found[other] for other in GRID if found[other]["peak"] <= nbytes}
        best = min(fitting, key=lambda other: fitting[other]["median_s"])
        chosen[name] = {
            "memory": nbytes,
            "chosen": choice.chosen.name,
            "says": str(choice),
            "predicted_s": choice.chosen.step_s,
            "predicted": choice.division.peak_bytes,
            "compile_s": points[name].took_s,
            **found[name],
            "best": best,
            "best_s": fitting[best]["median_s"],
            "slower": found[name]["median_s"] / fitting[best]["median_s"] - 1,
        }
    return {"alternatives": {name: found[name] for name in GRID}, "chosen": chosen}


def be_a_rank(args: argparse.Namespace) -> None:
    """What torchrun starts on each host. Does not return."""
    rank = int(os.environ["RANK"])
    join(rank, argparse.Namespace(device="cpu", world=2), "env://")
    rates = zerofx.calibrate()
    result = {"rates": asdict(rates)}
    for model in args.models:
        result[model] = measure(model, args.memories, args.rounds, rates)
    if rank == 0:
        Path(args.answer).write_text(json.dumps(result))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def run(args: argparse.Namespace, rate: str, model: str) -> dict[str, Any]:
    """Two ranks, on two hosts where there is a ``rate``."""
    with Hosts(2, None if rate == "loopback" else rate) as hosts, tempfile.TemporaryDirectory() as folder:
        answer, ranks = Path(folder) / "answer.json", []
        for host in range(2):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={host}"]
            torchrun += ["--nproc-per-node=1", f"--master-addr={hosts.address(0)}", "--master-port=29513"]
            command = [__file__, f"--models={model}", f"--memories={','.join(args.memories)}"]
            command += [f"--rounds={args.rounds}", f"--answer={answer}"]
            env = {"GLIBC_TUNABLES": KEEP} | os.environ | {"GLOO_SOCKET_IFNAME": hosts.interface}
            ranks.append(subprocess.Popen([*hosts.inside(host), *torchrun, *command], env=env))
        try:
            codes = [rank.wait(timeout=1200) for rank in ranks]
        finally:
            for each in ranks:
                each.kill()
        if any(codes):
            raise RuntimeError(f"{model} at {rate}: the ranks ended with {codes}")
        return dict(json.loads(answer.read_text()))


def table(rate: str, model: str, found: dict[str, Any]) -> str:
    """In Markdown."""
    lines = []
    for name, at in found["chosen"].items():
        held = f"{at['peak'] / 1e6:.2f} of {at['memory'] / 1e6:.2f} MB"
        chosen = f"{at['chosen']}, {1e3 * at['median_s']:.1f} ms ({1e3 * at['predicted_s']:.1f} predicted)"
        best = f"{at['best']}, {1e3 * at['best_s']:.1f} ms"
        lines.append(f"| {model} | {rate} | {name} | {held} | {chosen} | {best} | {100 * at['slower']:+.0f} % |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="What is chosen, beside every alternative.")
    names = functools.partial(str.split, sep=",")
    parser.add_argument("--models", type=names, default=list(MODELS))
    parser.add_argument("--memories", type=names, default=list(MEMORIES))
    parser.add_argument("--rates", type=names, default=["loopback"], help="loopback, or as tc knows them: 1gbit")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS / "choose-cpu-2.json")
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.answer is not None:
        be_a_rank(args)
    kept: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    for rate in args.rates:
        for model in args.models:
            found = run(args, rate, model)
            facts = {"date": datetime.date.today().isoformat(), "torch": torch.__version__}
            facts |= {"processor": processor("cpu"), "rates": found["rates"], "rounds": args.rounds}
            kept[f"{model}, {rate}"] = {**found[model], **facts}
            args.out.write_text(json.dumps(kept, indent=1) + "\n")
            print(table(rate, model, found[model]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
