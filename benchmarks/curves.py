"""What codes on the wire do to a loss: a byte-level GPT on two gloo ranks, the same data and weights for all of them.

    python benchmarks/curves.py                                    # all contenders, three seeds, 1,000 steps each
    python benchmarks/curves.py --contenders none "int4, feedback" --seeds 0

The model and its text are those of examples/train_gpt.py, smaller. A contender starts from the seed's weights and sees
the seed's batches. Every hundred steps its loss on text that was held out is taken, on windows spaced evenly over it.
The stages of a code compute the same bits (tests/test_wire.py), so one is run. A run adds to what the file has, and
draws a plot of all of it.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from gpt import GPT, load_text, windows  # noqa: E402

import zerofx  # noqa: E402
from benchmarks import themed  # noqa: E402

WIRES: dict[str, zerofx.Wire | None] = {
    "none": None,
    "int8": zerofx.Wire("int8", "int8"),
    "int4": zerofx.Wire("int8", "int4"),
    "int4, nearest": zerofx.Wire("int8", "int4", stochastic=False),
    "int4, feedback": zerofx.Wire("int8", "int4", error_feedback=True),
    "changes": zerofx.Wire("int4", "int8"),
}
"""Contenders. "int4": of gradients, rounded stochastically; weights are in int8. "changes": of weights, in int4."""
EVERY = 100
SETTINGS = {"layers": 3, "dim": 64, "heads": 4, "context": 64, "batch": 8, "steps": 1000, "lr": 4e-3}


def main() -> int:
    parser = argparse.ArgumentParser(description="Held-out loss with and without codes on the wire.")
    parser.add_argument("--contenders", default=list(WIRES), nargs="+", choices=list(WIRES), metavar="NAME")
    parser.add_argument("--seeds", default=[0, 1, 2], nargs="+", type=int)
    parser.add_argument("--steps", type=int, default=SETTINGS["steps"])
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "curves.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(be_a_rank, (args, f"file://{folder}/store"), nprocs=args.world)
    found = json.loads(args.out.read_text())
    print(table(found))
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed")
    else:
        plot(found, args.out.with_suffix(".svg"))
    return 0


def be_a_rank(rank: int, args: argparse.Namespace, rendezvous: str) -> None:
    """Runs all contenders, seed by seed; rank 0 writes each one's curve when it is there."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=args.world)
    text, held_out = load_text(None)
    for seed in args.seeds:
        for name in args.contenders:
            start = time.perf_counter()
            curve = train(WIRES[name], seed, args.steps, text, held_out)
            if rank == 0:
                note(args, name, seed, curve)
                print(f"seed {seed}, {name}: {curve[-1][1]:.4f} in {time.perf_counter() - start:.0f} s", flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # as in benchmarks/step.py


def train(
    wire: zerofx.Wire | None, seed: int, steps: int, text: torch.Tensor, held_out: torch.Tensor
) -> list[list[float]]:
    """Steps, and the held-out loss behind them."""
    s, rank = SETTINGS, dist.get_rank()
    torch.manual_seed(seed)
    model: Any = GPT(s["layers"], s["dim"], s["heads"], s["context"])
    model = zerofx.compile(model, stage=2, executor="eager", wire=wire)
    optimizer = zerofx.AdamW(model.parameters(), lr=s["lr"], betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(10 * (step + 1) / steps, (1 + math.cos(math.pi * step / steps)) / 2)
    )
    draw = torch.Generator().manual_seed(1000 * seed + rank)
    curve = []
    for step in range(1, steps + 1):
        starts = torch.randint(len(text) - int(s["context"]), (int(s["batch"]),), generator=draw)
        inputs, targets = windows(text, starts, int(s["context"]))
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % EVERY == 0 or step == steps:
            curve.append([step, evaluate(model, held_out)])
    return curve


@torch.no_grad()
def evaluate(model: Any, text: torch.Tensor, batches: int = 32) -> float:
    """Mean loss on windows spaced evenly over ``text``; each rank takes its part of them."""
    context, batch, rank, ranks = (
        int(SETTINGS["context"]),
        int(SETTINGS["batch"]),
        dist.get_rank(),
        dist.get_world_size(),
    )
    count = batches * batch * ranks
    starts, total = torch.arange(count) * (len(text) - context) // count, torch.zeros(())
    for mine in starts[rank::ranks].split(batch):
        inputs, targets = windows(text, mine, context)
        total += F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    dist.all_reduce(total)
    return float(total) / batches / ranks


def note(args: argparse.Namespace, name: str, seed: int, curve: list[list[float]]) -> None:
    """Add a curve to the file."""
    found: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {"curves": {}}
    found["curves"].setdefault(name, {})[str(seed)] = curve
    found |= {
        "command": "python benchmarks/curves.py",
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "settings": {**SETTINGS, "steps": args.steps, "world": args.world, "stage": 2},
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")


def last_losses(found: dict[str, Any]) -> dict[str, list[float]]:
    """Each contender's last losses, in the order of the seeds."""
    return {name: [curves[seed][-1][1] for seed in sorted(curves)] for name, curves in found["curves"].items()}


def table(found: dict[str, Any]) -> str:
    """A line for each contender: its last losses, and how far their mean is from that without codes."""
    last = last_losses(found)
    base = statistics.mean(last["none"]) if "none" in last else math.nan
    lines = [f"{'contender':16} {'mean':>8} {'against none':>13}   seeds"]
    for name, losses in last.items():
        mean = statistics.mean(losses)
        seeds = " ".join(f"{loss:.4f}" for loss in losses)
        lines.append(f"{name:16} {mean:8.4f} {100 * (mean / base - 1):+12.2f}%   {seeds}")
    return "\n".join(lines)


def plot(found: dict[str, Any], path: Path) -> None:
    """The mean over seeds of every contender's held-out loss, and between its best and its worst seed a shade."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "zerofx"
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 3.4), layout="constrained")
    for name, curves in found["curves"].items():
        steps = [step for step, _ in next(iter(curves.values()))]
        losses = [[curve[i][1] for curve in curves.values()] for i in range(len(steps))]
        (line,) = axis.plot(steps, list(map(statistics.mean, losses)), label=name, linewidth=1.2)
        axis.fill_between(steps, list(map(min, losses)), list(map(max, losses)), color=line.get_color(), alpha=0.12)
    axis.set_xlabel("steps")
    axis.set_ylabel("held-out loss, nats per byte")
    axis.legend()
    themed.save(figure, path)


if __name__ == "__main__":
    sys.exit(main())
