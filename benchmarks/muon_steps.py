"""Whole steps with Muon: forward, backward and optimizer, zerofx beside its peers: one run, interleaved.

    pip install muon-fsdp2
    make deepspeed                                              # puts DeepSpeed into build/deepspeed
    PYTHONPATH=build/deepspeed python benchmarks/muon_steps.py  # 2 gloo ranks, one core each, a GPT of 8 x 512

Every contender orthogonalizes the matrices of the blocks by five steps of the quintic in bfloat16. The rest has
AdamW. A rank has 1,024 tokens: Newton-Schulz is less than half of the arithmetic then. The time of a step is that of
the slowest rank. Losses of the last step are compared, to 2 percent: iterations in 16 bits add up in other orders.
`benchmarks/muon.py` times the optimizer alone.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import sys
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import step as steps  # noqa: E402  (it sets what has to be set ahead of torch)
from benchmarks.contenders import RESULTS, show, spawned, summary, write  # noqa: E402
from benchmarks.muon import is_matrix, parted  # noqa: E402

import torch  # noqa: E402  isort: skip
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

LR, ADAMW_LR, BETAS = 0.02, 1e-3, (0.9, 0.95)
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def by(model: Any, *optimizers: torch.optim.Optimizer) -> Step:
    """The loop that everybody writes."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x, y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


def of_zerofx(stage: int) -> Callable[[nn.Module], Step]:
    def make(model: Any) -> Step:
        zerofx = importlib.import_module("zerofx")
        others = [name for name, p in model.named_parameters() if not is_matrix(name, p)]
        model = steps.zerofx(stage, progress=False)(model)
        decay = {"weight_decay": 0.0, "adamw_weight_decay": 0.0}
        return by(model, zerofx.Muon(model, LR, others=others, adamw_lr=ADAMW_LR, adamw_betas=BETAS, **decay))

    return make


def of_fsdp2(model: Any) -> Step:
    model = steps.fsdp2(compiled=True)(model)
    matrices, rest = parted(model)
    groups = [
        {"params": matrices, "use_muon": True, "lr": LR, "weight_decay": 0.0},
        {"params": rest, "use_muon": False, "lr": ADAMW_LR, "betas": BETAS, "weight_decay": 0.0},
    ]
    return by(model, importlib.import_module("muon_fsdp2").Muon(groups))


def of_deepspeed(stage: int) -> Callable[[nn.Module], Step]:
    def make(model: Any) -> Step:
        os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank())}
        os.environ["WORLD_SIZE"] = str(dist.get_world_size())
        params = {"muon_lr": LR, "adam_lr": ADAMW_LR, "betas": BETAS, "weight_decay": 0.0, "ns_method": "standard"}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage, "overlap_comm": True, "reduce_scatter": False},
            "gradient_clipping": 0.0,
            "optimizer": {"type": "Muon", "params": {**params, "torch_adam": True}},
        }
        linear = F.linear
        engine = importlib.import_module("deepspeed").initialize(model=model, config=config)[0]
        theirs, F.linear = F.linear, linear  # of ZeRO-3 it takes the place of PyTorch's, for every model

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with unittest.mock.patch.object(F, "linear", theirs):
                loss: torch.Tensor = engine(x, y)
                engine.backward(loss)
                engine.step()
            return loss.detach()

        return step

    return make


CONTENDERS: dict[str, Callable[[nn.Module], Step]] = {
    "zerofx 2": of_zerofx(2),
    "zerofx 3": of_zerofx(3),
    "fsdp2 + compile, muon-fsdp2": of_fsdp2,
    "deepspeed 2": of_deepspeed(2),
    "deepspeed 3": of_deepspeed(3),
}


def run(rank: int, args: argparse.Namespace, rendezvous: str, answer: str) -> None:
    """One rank: lets the contenders take turns, and rank 0 writes what came of it."""
    device = steps.join(rank, argparse.Namespace(**{**vars(args), "device": "cpu"}), rendezvous)
    made: dict[str, Step] = {}
    for name in args.contenders:
        torch.manual_seed(0)
        made[name] = CONTENDERS[name](steps.GPT(args.layers, args.dim, args.heads, args.vocab, args.length))
    times: dict[str, list[float]] = {name: [] for name in made}
    losses: dict[str, list[float]] = {name: [] for name in made}
    gc.collect()
    gc.freeze()
    for round_ in range(-args.warmup, args.rounds):
        generator = torch.Generator().manual_seed(1000 * rank + round_ + 100)
        x, y = torch.randint(args.vocab, (2, args.batch, args.length), generator=generator)
        for i in range(len(made)):
            name = args.contenders[(i + round_) % len(made)]
            dist.barrier()
            start = steps.now(device)
            loss = made[name](x, y)
            if round_ >= 0:
                times[name].append(steps.now(device) - start)
            losses[name].append(loss.item())
    last = {name: own[-1] for name, own in losses.items()}
    first = last[args.contenders[0]]
    assert all(abs(other - first) < 0.02 * first for other in last.values()), last
    result: Any = {name: steps.over_ranks(torch.tensor(own), dist.ReduceOp.MAX) for name, own in times.items()}
    if rank == 0:
        Path(answer).write_text(json.dumps({"times": result, "losses": losses}))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # torch sometimes aborts as the interpreter ends, with threads of gloo still there


def main() -> int:
    parser = argparse.ArgumentParser(description="Whole steps with Muon, zerofx beside its peers.")
    parser.add_argument("--contenders", default=";".join(CONTENDERS), type=lambda text: text.split(";"))
    sizes = {"layers": 8, "dim": 512, "heads": 8, "vocab": 4096, "length": 256, "batch": 4}
    for name, value in {"world": 2, "rounds": 5, "warmup": 2, **sizes}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path, default=RESULTS / "muon-steps-cpu.json")
    args = parser.parse_args()
    found = spawned(run, args)
    rows = summary(found["times"], args.contenders[0])
    show(rows, args.contenders[0])
    write(args.out, "muon_steps.py", args, rows, losses=found["losses"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
