"""Loss curves of zerofx.AdamW with float32, bfloat16 and 8-bit moments: the same model, text, batches and seeds.

    pip install -e '.[benchmarks]'
    python benchmarks/moments.py                   # everything, then the plot
    python benchmarks/moments.py --moments 8bit --seeds 1  # one run, added to what the file has; --plot draws alone

A small byte-level GPT learns Python's standard library, as in examples/train_gpt.py, on one process and plain
parameters. Nothing but the moments differs between the runs of a seed. Seeds differ in weights and batches: how far
apart their losses are says what a difference means. The held-out loss is that of text nobody trained on.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import zerofx  # noqa: E402
from benchmarks import themed  # noqa: E402
from examples.gpt import GPT, load_text, windows  # noqa: E402

MOMENTS: dict[str, Any] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "8bit": "8bit"}
SMOOTHED = 20
"""Steps whose mean loss is drawn: single batches differ more than optimizers do."""


def adamw(args: argparse.Namespace, moments: str, seed: int, model: torch.nn.Module) -> torch.optim.Optimizer:
    return zerofx.AdamW(
        model.parameters(),
        lr=args.lr,
        betas=(0.9, args.beta2),
        weight_decay=0.1,
        max_grad_norm=1.0,
        moments=MOMENTS[moments],
        seed=seed,
    )


def run(args: argparse.Namespace, name: str, seed: int, make: Callable[..., torch.optim.Optimizer]) -> dict[str, Any]:
    """Train; the loss of every step, and the held-out loss at the end."""
    text, held_out = load_text(None)
    torch.manual_seed(seed)
    model = GPT(args.layers, args.dim, args.heads, args.context)
    optimizer = make(args, name, seed, model)
    schedule = torch.optim.lr_scheduler.LambdaLR(  # as in the example
        optimizer, lambda step: min(10 * (step + 1) / args.steps, (1 + math.cos(math.pi * step / args.steps)) / 2)
    )
    draw = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(args.steps):
        starts = torch.randint(len(text) - args.context, (args.batch,), generator=draw)
        loss = loss_of(model, text, starts, args.context)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(round(loss.item(), 5))
    with torch.no_grad():
        starts = torch.arange(256) * (len(held_out) - args.context) // 256
        parts = [loss_of(model, held_out, part, args.context).item() for part in starts.split(32)]
    kept = [t for state in optimizer.state.values() for name, t in state.items() if name != "step"]
    each = sum(t.nbytes for t in kept) / sum(p.numel() for p in model.parameters())
    return {"losses": losses, "held_out": sum(parts) / len(parts), "bytes_of_moments_per_parameter": round(each, 3)}


def loss_of(model: torch.nn.Module, text: torch.Tensor, starts: torch.Tensor, context: int) -> torch.Tensor:
    inputs, targets = windows(text, starts, context)
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def show(runs: dict[str, Any]) -> None:
    print(f"{'moments':10} {'seed':>4} {'held-out loss':>14} {'less float32':>13} {'bytes':>6}")
    for key, found in runs.items():
        moments, seed = key.split("/")
        base = runs.get(f"float32/{seed}", found)["held_out"]
        less, each = found["held_out"] - base, found["bytes_of_moments_per_parameter"]
        print(f"{moments:10} {seed:>4} {found['held_out']:14.4f} {less:+13.4f} {each:6.2f}")


def plot(runs: dict[str, Any], path: Path) -> None:
    """Left the losses, right how far each is from float32's: on the left they cannot be told apart."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "zerofx"
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    colors = {"float32": "black", "bfloat16": "tab:blue", "8bit": "tab:red"}
    for key, found in runs.items():
        moments, seed = key.split("/")
        label = moments if seed == min(k.split("/")[1] for k in runs) else None
        style: dict[str, Any] = {"color": colors[moments], "label": label, "linewidth": 1}
        left.plot(smooth(found["losses"]), linestyle="-" if moments == "float32" else "--", **style)
        base = runs.get(f"float32/{seed}")
        if base is not None and moments != "float32":
            right.plot([a - b for a, b in zip(smooth(found["losses"]), smooth(base["losses"]))], **style)
    right.axhline(0, color="black", linewidth=0.5)
    left.set(xlabel="step", ylabel=f"loss, mean of {SMOOTHED} steps", ylim=(None, 4))
    right.set(xlabel="step", ylabel="less that of float32, same seed")
    left.legend(frameon=False)
    right.legend(frameon=False)
    themed.save(figure, path)


def smooth(losses: list[float]) -> list[float]:
    return [sum(losses[max(0, i - SMOOTHED + 1) : i + 1]) / min(i + 1, SMOOTHED) for i in range(len(losses))]


def main() -> int:
    parser = argparse.ArgumentParser(description="Loss curves with moments in float32, bfloat16 and 8 bits.")
    parser.add_argument("--moments", default=",".join(MOMENTS), type=lambda text: text.split(","))
    parser.add_argument("--seeds", default="0,1,2", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--plot", action="store_true", help="draw what the file has, and train nothing")
    defaults = {"steps": 400, "layers": 2, "dim": 128, "heads": 4, "batch": 8, "context": 64}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--beta2", type=float, default=0.999)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "moments-cpu.json")
    args = parser.parse_args()
    if not set(args.moments) <= set(MOMENTS):
        parser.error(f"the moments are {', '.join(MOMENTS)}")
    settings = {name: getattr(args, name) for name in (*defaults, "lr", "beta2")}
    result = json.loads(args.out.read_text()) if args.out.exists() else {"runs": {}}
    if result.get("settings", settings) != settings:
        parser.error(f"{args.out} has runs with other settings, {result['settings']}: give another --out, or remove it")
    for seed, moments in [] if args.plot else [(seed, moments) for seed in args.seeds for moments in args.moments]:
        result["runs"][f"{moments}/{seed}"] = run(args, moments, seed, adamw)
        result["runs"] = dict(sorted(result["runs"].items(), key=lambda item: item[0].split("/")[::-1]))
        result |= {"settings": settings, "date": datetime.date.today().isoformat(), "torch": torch.__version__}
        result["text"] = f"the standard library of Python {sysconfig.get_python_version()}"
        args.out.write_text(json.dumps(result) + "\n")
        print(f"{moments} with seed {seed}: {result['runs'][f'{moments}/{seed}']['held_out']:.4f}", flush=True)
    show(result["runs"])
    plot(result["runs"], args.out.with_name("moments.svg"))
    print(f"written to {args.out} and {args.out.with_name('moments.svg')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
