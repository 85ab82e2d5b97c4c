"""Step time against a budget for all that a rank holds (`memory=`), beside torch.utils.checkpoint of every block.

    python benchmarks/memory.py                                        # all models, eager, ten budgets each
    python benchmarks/memory.py --models gpt-8 --budgets 5 --steps 7
    python benchmarks/memory.py --plot                                 # draws docs/pictures/memory.svg

Two gloo ranks, one core each, stage 3, Adam. The budgets are even steps from all (everything is saved, and stays
gathered) to the least possible, which is the number that a refusal names. At each: the peak that was predicted and the
one that is measured (the allocator's over forward and backward, on top of what is held at rest), both on the rank where
they are most; the losses of four steps beside those without a budget; the median time of forward and backward on the
slower rank. All points of one model take turns, step by step, so whatever else the machine does hits all alike. Two
points have no budget: "none", and "checkpoint", with every block in torch.utils.checkpoint. The last budget is what
that one takes.

A division that was tried at one budget is not predicted again at the next, since it is the same; and rank 0 alone
predicts. With ``--known`` predictions also outlive a run: one run can make them on a busy machine, and another one time
the steps on an idle one.

    python benchmarks/memory.py --models gpt-8 --known /tmp/known            # predictions, peaks, losses
    python benchmarks/memory.py --models gpt-8 --known /tmp/known --steps 7  # and times
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import pickle
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import zerofx  # noqa: E402
from benchmarks import themed  # noqa: E402
from benchmarks.activations import CHECKPOINT, MODELS, batch_of, checkpoint_blocks  # noqa: E402
from tests.memory import allocated_peak  # noqa: E402
from tests.workers import Workers  # noqa: E402
from zerofx.compiler import division  # noqa: E402
from zerofx.runtime.ranks.watch import watch_of  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
NONE, PLENTY, STEPS = "none", 10**12, 4


class Remembered(division.Trials):
    """The trials of one model go on where those for the last budget ended, or the last run. Rank 0 makes them."""

    model = ""
    file: Path | None = None
    known: dict[Any, tuple[division.Tried | None, int]] = {}

    @classmethod
    def begin(cls, folder: Path | None, name: str) -> None:
        """Forget those of another model."""
        cls.model = name
        cls.file = None if folder is None else folder / f"{name}.pickle"
        cls.known = pickle.loads(cls.file.read_bytes()) if cls.file is not None and cls.file.exists() else {}

    def try_(self, rung: int, memory_budget: float | None) -> division.Tried | None:
        key = rung, memory_budget
        if key not in self.known:
            store = watch_of(self.unit.any_group().sharing.optimizer.name).store  # type: ignore[union-attr]
            if dist.get_rank() == 0:
                tried = super().try_(rung, memory_budget)
                self.known[key] = tried, self._needed
                if self.file is not None:
                    self.file.write_bytes(pickle.dumps(self.known))
                store.set(f"tried/{self.model}/{key}", pickle.dumps(self.known[key]))  # type: ignore[arg-type]
            else:
                self.known[key] = pickle.loads(store.get(f"tried/{self.model}/{key}"))
        self.tried[key], needed = self.known[key]
        if self.tried[key] is None:
            self._needed = needed
        return self.tried[key]


class Point:
    """One model, compiled one way, with its optimizer and what was found of it."""

    def __init__(self, name: str, point: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        torch.manual_seed(0)
        self.x, self.y, self.model = x, y, MODELS[name]()
        if point == CHECKPOINT:
            checkpoint_blocks(self.model)
        memory = point if isinstance(point, int) else None
        zerofx.compile(self.model, executor="eager", groups=zerofx.Grouping(min_bytes=64 << 10), memory=memory)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3, foreach=False)
        self.found: dict[str, Any] = {"point": point, "losses": [], "seconds": []}

    def train(self) -> None:
        """Losses, and the peak of all steps but the first, which compiles. gloo's thread can hold on to a buffer longer
        than its wait, so the least of these counts."""
        peaks = []
        for i in range(STEPS):
            gc.collect()
            if i:
                peaks.append(allocated_peak(self.forward_and_backward))
            else:
                self.forward_and_backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        held = zerofx.memory_summary(self.model, self.optimizer)
        at_rest = held.total - held.nbytes["activations"]  # what is saved of the batch is still there
        self.found["peak"] = min(peaks) + at_rest + self.x.nbytes + self.y.nbytes
        forward = zerofx.graphs(self.model)[0].forward
        if (said := forward.division) is not None:  # type: ignore[union-attr]
            self.found |= {
                "predicted": said.peak_bytes,
                "at_rest": said.at_rest,
                "by_class": said.peak,
                "gathered": "all" if said.memory_budget == math.inf else said.memory_budget,
                "predicted_s": said.step_s,
                "saved": forward.activations.saved_bytes,
                "recomputed_flops": forward.activations.flops,
            }

    def forward_and_backward(self) -> None:
        loss = self.model(self.x, self.y)
        loss.backward()
        self.found["losses"].append(loss.item())

    def time(self) -> None:
        """One more step, on the clock."""
        dist.barrier()
        start = time.perf_counter()
        self.model(self.x, self.y).backward()
        self.found["seconds"].append(time.perf_counter() - start)
        self.optimizer.zero_grad()


def run(name: str, budgets: int, steps: int, known: Path | None) -> dict[str, Any]:
    """One rank: every point of the curve of one model, from all to the least; then those without a budget."""
    division.Trials = Remembered  # type: ignore[misc]
    Remembered.begin(known, name)
    dist.barrier()
    x, y = batch_of(name)
    try:
        Point(name, 1, x, y).train()
    except Exception as refused:
        least = int(re.search(r"at least ([\d,]+) bytes", str(refused))[1].replace(",", ""))  # type: ignore[index]
    whole = Point(name, PLENTY, x, y)
    whole.train()
    most = whole.found["predicted"]
    points: list[Any] = [round(most + (least - most) * i / max(1, budgets - 1)) for i in range(budgets)]
    built = []
    for point in [*points, NONE, CHECKPOINT]:
        built.append(Point(name, point, x, y))
        built[-1].train()
    theirs = torch.tensor([built[-1].found["peak"]])
    dist.all_reduce(theirs, dist.ReduceOp.MAX)
    if int(theirs) >= least:  # what we make of the memory that they take
        built.append(Point(name, int(theirs), x, y))
        built[-1].train()
    for _ in range(steps):
        for each in built:
            each.time()
    return {"least": least, "all": most, "points": [each.found for each in built]}


def of_ranks(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each point what is most on any rank, and whether the losses are those without a budget."""
    found = ranks[0]
    plain = [next(p["losses"] for p in rank["points"] if p["point"] == NONE) for rank in ranks]
    for i, point in enumerate(found["points"]):
        on_ranks = [rank["points"][i] for rank in ranks]
        point["peak"] = max(p["peak"] for p in on_ranks)
        off = [abs(a - b) for p, wanted in zip(on_ranks, plain) for a, b in zip(p["losses"], wanted)]
        point["losses_off"] = max(off)
        if seconds := [max(pair) for pair in zip(*(p["seconds"] for p in on_ranks))]:
            point["median_s"] = round(statistics.median(seconds), 4)
        del point["seconds"]
    return found


def table(found: dict[str, Any]) -> str:
    """In Markdown, as docs/memory.md has it."""
    lines = ["| `memory` | predicted | measured | saved | gathered | step |", "|---|---|---|---|---|---|"]
    for p in found["points"]:
        budget = f"{p['point'] / 1e6:.2f} MB" if isinstance(p["point"], int) else p["point"]
        predicted, saved = (f"{p[key] / 1e6:.2f} MB" if key in p else "" for key in ("predicted", "saved"))
        gathered = p.get("gathered", "")
        gathered = gathered if isinstance(gathered, str) else f"{gathered / 1e6:.2f} MB"
        step = f"{1e3 * p['median_s']:.0f} ms" if "median_s" in p else ""
        lines.append(f"| {budget} | {predicted} | {p['peak'] / 1e6:.2f} MB | {saved} | {gathered} | {step} |")
    with_budget = [p for p in found["points"] if isinstance(p["point"], int)]
    over = sum(p["peak"] > p["point"] for p in with_budget)
    off = max(abs(p["predicted"] / p["peak"] - 1) for p in with_budget)
    losses = max(p["losses_off"] for p in with_budget)
    lines.append(f"\nover the budget: {over} of {len(with_budget)}; predictions off by {100 * off:.3f} % at most; ")
    return "\n".join(lines) + f"losses by {losses:.1e}"


def measure(args: argparse.Namespace) -> None:
    kept: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    kept["torch"] = torch.__version__
    if args.known is not None:
        args.known.mkdir(parents=True, exist_ok=True)
    for name in args.models:
        ranks = Workers(2).run(
            "benchmarks.memory:run", name, args.budgets, args.steps, args.known, timeout=args.timeout
        )
        command = f"python benchmarks/memory.py --models {name} --budgets {args.budgets} --steps {args.steps}"
        kept[name] = {"command": command, **of_ranks(ranks)}
        args.out.write_text(json.dumps(kept, indent=1) + "\n")
        print(f"\n{name}\n{table(kept[name])}", flush=True)


def plot(args: argparse.Namespace) -> None:
    import matplotlib.pyplot as plt

    kept = json.loads(args.out.read_text())
    curves = {name: found for name, found in kept.items() if name != "torch" and "median_s" in found["points"][0]}
    figure, axes = plt.subplots(-(-len(curves) // 3), 3, figsize=(11, 3.2 * -(-len(curves) // 3)), squeeze=False)
    for axis in axes.flat[len(curves) :]:
        axis.set_axis_off()
    for axis, (name, found) in zip(axes.flat, curves.items()):
        places = {p["point"]: (p["peak"] / 1e6, 1e3 * p["median_s"]) for p in found["points"]}
        ours = sorted(place for point, place in places.items() if isinstance(point, int))
        axis.plot(*zip(*ours), "o-", label="memory=")
        for point, said in ((NONE, "no budget"), (CHECKPOINT, "torch.utils.checkpoint per block")):
            if point in places:
                axis.plot(*places[point], "s", label=said)
        axis.set(title=name, xlabel="peak, with all that is held, MB", ylabel="step, ms")
        axis.set_ylim(0, 1.15 * max(step for _, step in places.values()))
        axis.legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    themed.save(figure, ROOT / "docs" / "pictures" / "memory.svg")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--budgets", type=int, default=10, help="of each model")
    parser.add_argument("--steps", type=int, default=0, help="timed, of each point")
    parser.add_argument("--known", type=Path, help="a folder that keeps predictions from run to run")
    parser.add_argument("--timeout", type=float, default=1800)
    parser.add_argument("--out", type=Path, default=RESULTS / "memory-cpu-2.json")
    parser.add_argument("--plot", action="store_true", help="draw, and measure nothing")
    arguments = parser.parse_args()
    plot(arguments) if arguments.plot else measure(arguments)
