"""Loss curves of zerofx.Muon and zerofx.AdamW: the same model, text, batches, schedule and seeds.

    pip install -e '.[benchmarks]'
    python benchmarks/muon_curves.py               # ten minutes on a core

As `benchmarks/moments.py`. The learning rate of each is the best of three with the first seed; the file has all three.
The other seeds were run with that alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import moments, themed  # noqa: E402

import torch  # noqa: E402  isort: skip

import zerofx  # noqa: E402

RATES: dict[str, list[float]] = {"AdamW": [2e-3, 4e-3, 8e-3], "Muon": [1e-2, 2e-2, 4e-2]}
COLORS = {"AdamW": "black", "Muon": "tab:blue"}


def make(args: argparse.Namespace, name: str, seed: int, model: torch.nn.Module) -> torch.optim.Optimizer:
    """``args.lr`` is of all parameters, or of matrices; the rest has AdamW's in both."""
    if name == "AdamW":
        return zerofx.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=1.0)
    rest: dict[str, Any] = {"adamw_lr": args.adamw_lr, "adamw_betas": (0.9, 0.95), "max_grad_norm": 1.0}
    return zerofx.Muon(model, lr=args.lr, weight_decay=0.1, **rest)


def plot(runs: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "zerofx"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    for key, found in runs.items():
        name, seed = key.split("/")
        label = f"{name}, lr {found['lr']:g}" if seed == "0" else None
        axes.plot(moments.smooth(found["losses"]), color=COLORS[name], linewidth=1, label=label)
    axes.set(xlabel="step", ylabel=f"loss, mean of {moments.SMOOTHED} steps", ylim=(None, 4))
    axes.legend(frameon=False)
    themed.save(figure, path)


def main() -> int:
    parser = argparse.ArgumentParser(description="Loss curves of zerofx.Muon and zerofx.AdamW.")
    defaults = {"steps": 1000, "layers": 2, "dim": 128, "heads": 4, "batch": 8, "context": 64}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "muon_curves-cpu.json")
    args = parser.parse_args()
    args.adamw_lr = 0.0
    tried: dict[str, dict[str, float]] = {}
    runs: dict[str, Any] = {}
    for name, rates in RATES.items():
        first = {}
        for args.lr in rates:
            first[args.lr] = moments.run(args, name, 0, make)
            tried.setdefault(name, {})[f"{args.lr:g}"] = first[args.lr]["held_out"]
            print(f"{name}, lr {args.lr:g}, seed 0: {first[args.lr]['held_out']:.4f}", flush=True)
        args.lr = min(first, key=lambda lr: first[lr]["held_out"])
        if name == "AdamW":
            args.adamw_lr = args.lr
        runs[f"{name}/0"] = {**first[args.lr], "lr": args.lr}
        for seed in (1, 2):
            runs[f"{name}/{seed}"] = {**moments.run(args, name, seed, make), "lr": args.lr}
            print(f"{name}, lr {args.lr:g}, seed {seed}: {runs[f'{name}/{seed}']['held_out']:.4f}", flush=True)
    result = {
        "runs": runs,
        "held_out_by_lr": tried,
        "settings": {name: getattr(args, name) for name in defaults},
        "command": " ".join(["python benchmarks/muon_curves.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
    }
    args.out.write_text(json.dumps(result) + "\n")
    plot(runs, args.out.with_name("muon_curves.svg"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
