"""Time to hand whole weights to another program, zerofx beside FSDP2: one run, interleaved.

    python benchmarks/full_parameters.py                       # 2 gloo ranks, one core each, 12 layers of width 512
    sudo python benchmarks/full_parameters.py --rate 1gbit     # each on a host of its own, over a link of that rate
    python benchmarks/full_parameters.py --device cuda --world 8 --layers 32 --dim 4096 --heads 32

All hold the same model, sharded over the same ranks, in float32. On each rank that gets weights there is an engine with
tensors of its own, and each weight is copied into its tensor there, as trainers of reinforcement learning do after a
step. In every round each contender does it once, in an order that rotates. The time is that of the slowest rank. What
the engines have got is compared with the weights at the end.

With ``--rate`` the same run measures what the link carries through plain sockets, and a contender's bytes over that.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the ranks
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

import zerofx  # noqa: E402
from benchmarks import two_hosts  # noqa: E402
from benchmarks.contenders import RESULTS, show, spawned, summary, write  # noqa: E402
from benchmarks.hosts import Hosts  # noqa: E402
from benchmarks.step import join, now, over_ranks  # noqa: E402
from tests.models import GPT  # noqa: E402

Weights = Iterator[tuple[str, torch.Tensor]]


def of_full_tensor(model: nn.Module, dtype: torch.dtype | None = None) -> Weights:
    """FSDP2, one weight after the other; cast first, where that is asked for."""
    for name, p in model.state_dict().items():
        yield name, (p if dtype is None else p.to(dtype)).full_tensor()


def of_state_dict(model: nn.Module) -> Weights:
    """FSDP2's whole state dict, on every rank."""
    yield from get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)).items()


def of_full_state_dict(model: nn.Module) -> Weights:
    """zerofx's."""
    yield from zerofx.full_state_dict(model, rank0_only=False).items()


def of_full_tensor_in_bf16(model: nn.Module) -> Weights:
    return of_full_tensor(model, torch.bfloat16)


def of_full_parameters(**options: Any) -> Callable[[nn.Module], Weights]:
    return lambda model: zerofx.full_parameters(model, **options)


CONTENDERS: dict[str, Callable[[nn.Module], Weights]] = {
    "zerofx": of_full_parameters(),
    "zerofx bf16": of_full_parameters(dtype=torch.bfloat16),
    "zerofx rank 0": of_full_parameters(ranks=0),
    "zerofx full_state_dict": of_full_state_dict,
    "fsdp2 full_tensor": of_full_tensor,
    "fsdp2 full_tensor bf16": of_full_tensor_in_bf16,
    "fsdp2 state dict": of_state_dict,
}


def build(args: argparse.Namespace, device: torch.device) -> GPT:
    torch.manual_seed(0)
    with device:
        return GPT(args.layers, args.dim, args.heads, args.vocab, 64)


def run(rank: int, args: argparse.Namespace, rendezvous: str, answer: str) -> None:
    """One rank: lets the contenders take turns, and rank 0 writes what came of it."""
    args.hosts.enter(rank)
    os.environ["GLOO_SOCKET_IFNAME"] = args.hosts.interface
    device = join(rank, args, rendezvous)
    plain, ours, theirs = (build(args, device) for _ in range(3))
    ours = zerofx.shard(ours)  # type: ignore[assignment]
    for block in theirs.blocks:
        fully_shard(block)  # type: ignore[arg-type]
    fully_shard(theirs)
    wanted = {name: p.detach() for name, p in plain.named_parameters()}
    in_bf16 = {name: p.bfloat16() for name, p in wanted.items()}
    engines = {True: {n: torch.empty_like(p) for n, p in in_bf16.items()}}
    engines[False] = {n: torch.empty_like(p) for n, p in wanted.items()}
    times: dict[str, list[float]] = {name: [] for name in args.contenders}
    gc.collect()
    gc.freeze()
    for round_ in range(-args.warmup, args.rounds):
        for i in range(len(args.contenders)):
            name = args.contenders[(i + round_) % len(args.contenders)]
            engine = engines["bf16" in name]
            dist.barrier()
            start = now(device)
            for weight, value in CONTENDERS[name](ours if name.startswith("zerofx") else theirs):
                engine[weight].copy_(value)
            if round_ >= 0:
                times[name].append(now(device) - start)
            if round_ < 0 and (rank == 0 or "rank 0" not in name):
                for weight, value in (in_bf16 if "bf16" in name else wanted).items():
                    assert torch.equal(engine[weight], value), (name, weight)
                    engine[weight].zero_()
    result = {
        name: over_ranks(torch.tensor(values, device=device), dist.ReduceOp.MAX) for name, values in times.items()
    }
    carries = None if args.rate is None else link_rate(rank, args)
    if rank == 0:
        found = {"nbytes": sum(p.nbytes for p in wanted.values()), "parameters": len(wanted), "bytes_per_s": carries}
        Path(answer).write_text(json.dumps({"times": result, "found": found}))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # torch sometimes aborts as the interpreter ends, with threads of gloo still there


def link_rate(rank: int, args: argparse.Namespace) -> float:
    """Bytes per second of the fastest link, each way."""
    os.environ["ZEROFX_HOSTS"], args.ranks_per_host = args.hosts.address(rank), 1
    found = torch.tensor([two_hosts.link_rate(rank, args, two_hosts.RATES[args.rate])])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time to hand whole weights to another program, beside FSDP2.")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), type=lambda text: text.split(","))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    defaults = {"world": 2, "rounds": 15, "warmup": 2, "layers": 12, "dim": 512, "heads": 8, "vocab": 4096}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument(
        "--rate", choices=list(two_hosts.RATES)[1:], help="of the link between hosts; default: one host"
    )
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/full_parameters-<rate or device>.json")
    args = parser.parse_args()
    if not set(args.contenders) <= set(CONTENDERS):
        parser.error(f"the contenders are {', '.join(CONTENDERS)}")
    args.warmup = max(1, args.warmup)  # what is brought is compared then
    return args


def main() -> int:
    args = parsed()
    out = args.out or RESULTS / f"full_parameters-{args.rate or args.device}.json"
    with Hosts(args.world, args.rate) as args.hosts:
        answer = spawned(run, args)
    del args.hosts
    found, base = answer["found"], args.contenders[0]
    rows = summary(answer["times"], base)
    show(rows, base)
    if args.rate is not None:
        for name, row in rows.items():  # a rank receives what it lacks
            nbytes = found["nbytes"] * (args.world - 1) // args.world // (2 if "bf16" in name else 1)
            row["wire_s"] = nbytes / found["bytes_per_s"]
            row["times_as_long_as_the_wire"] = row["median_s"] / row["wire_s"]
            print(f"{name:24} {row['times_as_long_as_the_wire']:.3f} x of its bytes on the wire")
    write(out, "full_parameters.py", args, rows, **found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
