"""Time of a step of Muon alone, zerofx.Muon beside its peers: one run, interleaved.

    pip install muon-fsdp2
    python benchmarks/muon.py                      # 2 gloo ranks, one core each, a GPT of 8 layers of width 512

As `benchmarks/optimizer.py`, whose contenders these join: a step begins with gradients as backward leaves them, and
lasts until the slowest rank has its weights. All of them orthogonalize the same matrices, by five steps of the quintic
in bfloat16, and have AdamW for the rest. "one process" is PyTorch's, on one core, for all that ranks share elsewhere.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import optimizer as base  # noqa: E402  (it sets what has to be set ahead of torch)

import torch  # noqa: E402  isort: skip
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402


def is_matrix(name: str, p: torch.Tensor) -> bool:
    return p.dim() == 2 and name.startswith("blocks.")


def parted(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """Matrices, and the rest."""
    named = list(model.named_parameters())
    return [p for n, p in named if is_matrix(n, p)], [p for n, p in named if not is_matrix(n, p)]


class OneProcess(base.Contender):
    """torch.optim.Muon and torch.optim.AdamW, of the whole model, on rank 0; the others wait."""

    def setup(self, model: nn.Module) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        self.parameters: list[Any] = []
        if dist.get_rank() == 0:
            matrices, rest = parted(model)
            self.parameters = [*matrices, *rest]
            for p in self.parameters:
                p.grad = torch.ones_like(p)
            self.optimizers = [torch.optim.Muon(matrices), torch.optim.AdamW(rest)]

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.parameters]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


class Zerofx(base.Zerofx):
    def setup(self, model: nn.Module) -> None:
        zerofx = importlib.import_module("zerofx")
        super().setup(model)
        others = [name for name, p in model.named_parameters() if not is_matrix(name, p)]
        self.optimizer = zerofx.Muon(model, others=others)


class ZerofxByOwner(base.Zerofx):
    """PyTorch's own Muon and AdamW on sharded parameters."""

    def setup(self, model: nn.Module) -> None:
        super().setup(model)
        matrices, rest = parted(model)
        self.optimizers = [torch.optim.Muon(matrices), torch.optim.AdamW(rest)]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


class MuonFsdp2(base.Fsdp2):
    def setup(self, model: nn.Module) -> None:
        super().setup(model)
        matrices, rest = parted(model)
        kind = importlib.import_module("muon_fsdp2").Muon
        self.optimizer = kind([{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}])

    def step(self) -> None:
        for p in self.model.parameters():  # it writes to them
            p.grad = p.grad if p.grad is not None else torch.ones_like(p)
        self.optimizer.step()


CONTENDERS: dict[str, type[base.Contender]] = {
    "one process": OneProcess,
    "zerofx.Muon": Zerofx,
    "torch.optim.Muon by owners": ZerofxByOwner,
    "muon-fsdp2": MuonFsdp2,
}


def run(rank: int, args: argparse.Namespace, rendezvous: str, answer: str) -> None:
    base.CONTENDERS.update(CONTENDERS)
    base.run(rank, args, rendezvous, answer)


def main() -> int:
    parser = argparse.ArgumentParser(description="Time of a step of Muon, zerofx.Muon beside its peers.")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), type=lambda text: text.split(","))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    defaults = {"world": 2, "rounds": 5, "warmup": 1, "layers": 8, "dim": 512, "heads": 8, "vocab": 4096}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/muon-<device>-<world>.json")
    args = parser.parse_args()
    out = args.out or ROOT / "benchmarks" / "results" / f"muon-{args.device}-{args.world}.json"
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        torch.multiprocessing.spawn(run, (args, f"file://{folder}/store", str(answer)), nprocs=args.world)
        found = json.loads(answer.read_text())
    rows = {}
    for name, times in found["times"].items():
        rows[name] = {"median_s": statistics.median(times), "min_s": min(times), "max_s": max(times), "n": len(times)}
        rows[name]["times_as_long_as_zerofx"] = base.paired(times, found["times"]["zerofx.Muon"])
        print(f"{name:28} {1e3 * rows[name]['median_s']:9.1f} ms {rows[name]['times_as_long_as_zerofx']:6.2f}")
    result = {
        "contenders": rows,
        "parameters": found["parameters"],
        "command": " ".join(["python benchmarks/muon.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "processor": base.processor(args.device),
        "load_average": os.getloadavg()[0],
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
