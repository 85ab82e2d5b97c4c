"""Time to update an average of the weights, zerofx beside FSDP2: one run, interleaved.

    python benchmarks/ema.py                                    # 2 gloo ranks, one core each, 12 layers of width 512

All average the same model, sharded over the same ranks, in float32. FSDP2's users keep a clone of each parameter, a
DTensor, and call ``torch._foreach_lerp_``; or they do it on what is inside of the DTensors. Weights change in between,
and averages are compared at the end. The time is that of the slowest rank.
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
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn  # noqa: E402

import zerofx  # noqa: E402
from benchmarks.contenders import RESULTS, show, spawned, summary, write  # noqa: E402
from benchmarks.step import join, now, over_ranks  # noqa: E402
from tests.models import GPT  # noqa: E402

DECAY = 0.99
Contender = tuple[Callable[[], None], Callable[[], list[torch.Tensor]]]
"""An update, and the averages, whole."""


def of_ema(model: nn.Module) -> Contender:
    ema = zerofx.EMA(model, DECAY)
    return ema.update, lambda: [p.full_tensor() for p in ema.module.parameters()]  # type: ignore[operator]


def of_averaged_model(model: nn.Module) -> Contender:
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    full = lambda: [p.full_tensor() for p in average.module.parameters()]  # type: ignore[operator] # noqa: E731
    return lambda: average.update_parameters(model), full


def of_dtensors(model: nn.Module) -> Contender:
    averages = [p.detach().clone() for p in model.parameters()]
    weights = [p.detach() for p in model.parameters()]
    return (
        lambda: torch._foreach_lerp_(averages, weights, 1 - DECAY),
        lambda: [a.full_tensor() for a in averages],  # type: ignore[attr-defined]
    )


def of_what_is_inside(model: nn.Module) -> Contender:
    averages: list[Any] = [p.detach().clone() for p in model.parameters()]
    inside = [a.to_local() for a in averages]
    weights = [p.detach().to_local() for p in model.parameters()]  # type: ignore[attr-defined]
    return (
        lambda: torch._foreach_lerp_(inside, weights, 1 - DECAY),
        lambda: [a.full_tensor() for a in averages],
    )


CONTENDERS: dict[str, Callable[[nn.Module], Contender]] = {
    "zerofx.EMA": of_ema,
    "zerofx AveragedModel": of_averaged_model,
    "fsdp2 DTensors": of_dtensors,
    "fsdp2 inside DTensors": of_what_is_inside,
}


def run(rank: int, args: argparse.Namespace, rendezvous: str, answer: str) -> None:
    """One rank: lets the contenders take turns, and rank 0 writes what came of it."""
    device = join(rank, argparse.Namespace(**{**vars(args), "device": "cpu"}), rendezvous)

    def build() -> GPT:
        torch.manual_seed(0)
        return GPT(args.layers, args.dim, 8, args.vocab, 64)

    ours, theirs = zerofx.shard(build()), build()
    for block in theirs.blocks:
        fully_shard(block)  # type: ignore[arg-type]
    fully_shard(theirs)
    made = {name: CONTENDERS[name](ours if name.startswith("zerofx") else theirs) for name in args.contenders}
    times: dict[str, list[float]] = {name: [] for name in made}
    gc.collect()
    gc.freeze()
    for round_ in range(-args.warmup, args.rounds):
        with torch.no_grad():  # the first time averages are the weights as they began
            factor = 1.0 if round_ == -args.warmup else 0.99
            for model in (ours, theirs):
                torch._foreach_mul_(list(model.parameters()), factor)
        for i in range(len(made)):
            name = args.contenders[(i + round_) % len(made)]
            dist.barrier()
            start = now(device)
            made[name][0]()
            if round_ >= 0:
                times[name].append(now(device) - start)
    first = made[args.contenders[0]][1]()
    for _, averages in made.values():
        for one, other in zip(first, averages(), strict=True):
            torch.testing.assert_close(one, other)
    result = {name: over_ranks(torch.tensor(own), dist.ReduceOp.MAX) for name, own in times.items()}
    if rank == 0:
        Path(answer).write_text(json.dumps({"times": result, "nbytes": sum(a.nbytes for a in first)}))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # torch sometimes aborts as the interpreter ends, with threads of gloo still there


def main() -> int:
    parser = argparse.ArgumentParser(description="Time to update an average of the weights, beside FSDP2.")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), type=lambda text: text.split(","))
    for name, value in {"world": 2, "rounds": 60, "warmup": 5, "layers": 12, "dim": 512, "vocab": 4096}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path, default=RESULTS / "ema-cpu.json")
    args = parser.parse_args()
    if not set(args.contenders) <= set(CONTENDERS):
        parser.error(f"the contenders are {', '.join(CONTENDERS)}")
    found = spawned(run, args)
    rows = summary(found["times"], args.contenders[0])
    show(rows, args.contenders[0])
    write(args.out, "ema.py", args, rows, nbytes=found["nbytes"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
