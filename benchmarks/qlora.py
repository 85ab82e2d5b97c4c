"""A step of adapters on a frozen base in 8 bits (QLoRA), zerofx beside FSDP2: one run, interleaved.

    python benchmarks/qlora.py                                  # 2 gloo ranks, one core each, 8 layers of 512 x 2048

Blocks of two layers whose codes (int8) and scales are frozen parameters, with adapters of rank 8 beside them. Every
contender holds the same model in stage 3, each block by itself, and takes the same steps of AdamW. The time of a step
is that of the slowest rank. Losses are compared at the end.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the ranks
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

import zerofx  # noqa: E402
from benchmarks.contenders import RESULTS, show, spawned, summary, write  # noqa: E402
from benchmarks.step import join, now, over_ranks  # noqa: E402
from tests.quantized import Adapted, Int8  # noqa: E402


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = (
            Adapted(Int8(torch.randn(rows, columns) / columns**0.5), rows, columns)
            for rows, columns in ((4 * width, width), (width, 4 * width))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


def build(args: argparse.Namespace) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(args.dim) for _ in range(args.layers)))
    for block in model:
        block.norm.requires_grad_(False)  # type: ignore[union-attr]
    return model


def of_zerofx(executor: str) -> Callable[[nn.Sequential], nn.Module]:
    return lambda model: zerofx.compile(model, stage=3, executor=executor, progress=False)


def of_fsdp2(compiled: bool) -> Callable[[nn.Sequential], nn.Module]:
    def sharded(model: nn.Sequential) -> nn.Module:
        for block in model:
            if compiled:
                block.compile()
            fully_shard(block)  # type: ignore[arg-type]
        fully_shard(model)  # type: ignore[arg-type]
        return model

    return sharded


CONTENDERS: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "zerofx": of_zerofx("inductor"),
    "zerofx eager": of_zerofx("eager"),
    "fsdp2": of_fsdp2(False),
    "fsdp2 + compile": of_fsdp2(True),
}


def held(model: nn.Module) -> int:
    """Bytes of weights that this rank holds at rest."""
    return sum((p._local if hasattr(p, "_local") else p.to_local()).nbytes for p in model.parameters())  # type: ignore


def run(rank: int, args: argparse.Namespace, rendezvous: str, answer: str) -> None:
    """One rank: lets the contenders take turns, and rank 0 writes what came of it."""
    device = join(rank, argparse.Namespace(**{**vars(args), "device": "cpu"}), rendezvous)
    models = {name: CONTENDERS[name](build(args)) for name in args.contenders}
    optimizers = {
        name: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        for name, model in models.items()
    }
    times: dict[str, list[float]] = {name: [] for name in models}
    losses: dict[str, float] = {}
    gc.collect()
    gc.freeze()
    for round_ in range(-args.warmup, args.rounds):
        x = torch.randn(args.batch, args.dim, generator=torch.Generator().manual_seed(1000 * rank + round_ + 100))
        for i in range(len(models)):
            name = args.contenders[(i + round_) % len(models)]
            dist.barrier()
            start = now(device)
            loss = models[name](x).square().mean()
            loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            if round_ >= 0:
                times[name].append(now(device) - start)
            losses[name] = loss.item()
    first = losses[args.contenders[0]]
    assert all(abs(other - first) < 1e-3 * abs(first) for other in losses.values()), losses
    result: Any = {name: over_ranks(torch.tensor(own), dist.ReduceOp.MAX) for name, own in times.items()}
    if rank == 0:
        at_rest = {name: held(model) for name, model in models.items()}
        Path(answer).write_text(json.dumps({"times": result, "held": at_rest, "losses": losses}))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # torch sometimes aborts as the interpreter ends, with threads of gloo still there


def main() -> int:
    parser = argparse.ArgumentParser(description="A step of adapters on a base in 8 bits, beside FSDP2.")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), type=lambda text: text.split(","))
    for name, value in {"world": 2, "rounds": 25, "warmup": 3, "layers": 8, "dim": 512, "batch": 256}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path, default=RESULTS / "qlora-cpu.json")
    args = parser.parse_args()
    if not set(args.contenders) <= set(CONTENDERS):
        parser.error(f"the contenders are {', '.join(CONTENDERS)}")
    found = spawned(run, args)
    rows = summary(found["times"], args.contenders[0])
    show(rows, args.contenders[0])
    print("bytes at rest:", found["held"])
    write(args.out, "qlora.py", args, rows, held=found["held"], losses=found["losses"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
