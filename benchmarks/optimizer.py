"""Time of the optimizer's step alone, zerofx.AdamW beside its peers: one run, interleaved.

    python benchmarks/optimizer.py                             # 2 gloo ranks, one core each, 50 million parameters
    python benchmarks/optimizer.py --device cuda --world 1 --layers 48 --dim 1600

Each rank holds its shard of the same transformer, as every contender shards it, with gradients as a backward pass
leaves them; they are filled anew before every step, and nothing else runs. A step is gradient clipping (over all
ranks) and AdamW, unless the contender's name says otherwise. Its time is that of the slowest rank.

The yardsticks are a copy, which reads and writes 8 bytes per float32 element, and PyTorch's fused kernel on one flat
tensor of the shard's size, without clipping. GB/s count the bytes that the step must move: see ``BYTES``.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib
import json
import os
import statistics
import sys
import tempfile
from operator import truediv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the ranks
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.utils import clip_grad_norm_  # noqa: E402

from benchmarks.step import join, now, over_ranks, processor  # noqa: E402
from tests.models import GPT  # noqa: E402

BYTES = {"copy": 8, "fp32": 28, "fp32 clip": 32, "bf16 clip": 30, "split clip": 28, "8-bit clip": 20}
"""Per parameter of a shard, read and written: weight, gradient, moments and master; clipping reads gradients again."""


class Contender:
    """A sharded model with gradients, and what its step does."""

    kind = "fp32 clip"

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(0)
        self.args, self.device = args, device
        with device:
            model = GPT(args.layers, args.dim, args.heads, args.vocab, 64)
        self.setup(model)

    def setup(self, model: nn.Module) -> None:
        raise NotImplementedError

    def gradients(self) -> list[torch.Tensor]:
        """This rank's, as plain tensors that the step reads."""
        raise NotImplementedError

    def step(self) -> None:
        raise NotImplementedError

    def fill(self) -> None:
        for gradient in self.gradients():
            gradient.fill_(0.01)


class Copy(Contender):
    kind = "copy"

    def setup(self, model: nn.Module) -> None:
        n = sum(p.numel() for p in model.parameters()) // dist.get_world_size()
        self.source, self.target = torch.ones(n, device=self.device), torch.ones(n, device=self.device)

    def gradients(self) -> list[torch.Tensor]:
        return [self.source]

    def step(self) -> None:
        self.target.copy_(self.source)


class FusedKernel(Contender):
    """torch._fused_adamw_ on one flat tensor: what is to be reached."""

    kind = "fp32"

    def setup(self, model: nn.Module) -> None:
        n = sum(p.numel() for p in model.parameters()) // dist.get_world_size()
        p = nn.Parameter(torch.ones(n, device=self.device))
        p.grad = torch.ones_like(p)
        self.optimizer, self.parameter = torch.optim.AdamW([p], fused=True), p

    def gradients(self) -> list[torch.Tensor]:
        return [self.parameter.grad]  # type: ignore[list-item]

    def step(self) -> None:
        self.optimizer.step()


class Zerofx(Contender):
    clip: float | None = 1.0
    options: dict[str, Any] = {}
    dtype = torch.float32

    def setup(self, model: nn.Module) -> None:
        zerofx = importlib.import_module("zerofx")
        self.model = zerofx.shard(model.to(self.dtype))
        self.flat = []
        for group in importlib.import_module("zerofx.runtime.state.group").groups_of(model):
            self.flat.append(torch.ones_like(group.shard))
            group.accumulate(group.layout.slots, self.flat[-1], checked=True)  # as the end of a backward graph does
        self.optimizer = zerofx.AdamW(model.parameters(), max_grad_norm=self.clip, **self.options)

    def gradients(self) -> list[torch.Tensor]:
        return self.flat

    def step(self) -> None:
        self.optimizer.step()


class ZerofxUnclipped(Zerofx):
    kind, clip = "fp32", None


class ZerofxBf16(Zerofx):
    kind, dtype = "bf16 clip", torch.bfloat16


class ZerofxSplit(Zerofx):
    kind, dtype, options = "split clip", torch.bfloat16, {"master": "split"}


class Zerofx8bit(Zerofx):
    kind, options = "8-bit clip", {"moments": "8bit"}


class TorchOnShards(Contender):
    """torch.optim.AdamW and clip_grad_norm_ on plain tensors of the sizes that a rank has of each parameter."""

    options: dict[str, Any] = {}
    clip = True

    def setup(self, model: nn.Module) -> None:
        world = dist.get_world_size()
        self.parameters = [
            nn.Parameter(torch.ones(-(-p.numel() // world), device=self.device)) for p in model.parameters()
        ]
        for p in self.parameters:
            p.grad = torch.ones_like(p)
        self.optimizer = torch.optim.AdamW(self.parameters, **self.options)

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.parameters]  # type: ignore[misc]

    def step(self) -> None:
        if self.clip:
            clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()


class TorchForeach(TorchOnShards):
    options = {"foreach": True}


class TorchForeachUnclipped(TorchForeach):
    kind, clip = "fp32", False


class TorchFused(TorchOnShards):
    options = {"fused": True}


class TorchFusedUnclipped(TorchFused):
    kind, clip = "fp32", False


class TorchFusedMixed(TorchFused):
    """With what mixed precision needs: bfloat16 gradients unscaled into float32, and the weights cast for forward."""

    kind = "bf16 clip"

    def setup(self, model: nn.Module) -> None:
        super().setup(model)
        self.scale = torch.full((), 1024.0, device=self.device)
        self.low = [p.detach().bfloat16() for p in self.parameters]
        self.scaled = [torch.ones_like(weight) for weight in self.low]

    def gradients(self) -> list[torch.Tensor]:
        return self.scaled

    def step(self) -> None:
        for p, gradient in zip(self.parameters, self.scaled, strict=True):
            assert p.grad is not None
            p.grad.copy_(gradient)
        torch._foreach_div_([p.grad for p in self.parameters], self.scale)
        super().step()
        torch._foreach_copy_(self.low, [p.detach() for p in self.parameters])


class Fsdp2(Contender):
    """The step that FSDP2's users run: clip_grad_norm_ and AdamW on DTensors."""

    options: dict[str, Any] = {}

    def setup(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block)
        self.model = fully_shard(model)
        for p in self.model.parameters():
            p.grad = torch.ones_like(p)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **self.options)

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad._local_tensor for p in self.model.parameters()]

    def step(self) -> None:
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


class Fsdp2Fused(Fsdp2):
    options = {"fused": True}


class DeepSpeedCpu(TorchOnShards):
    """DeepSpeed's AdamW for CPUs (where it is installed), clipping with torch's function."""

    def setup(self, model: nn.Module) -> None:
        super().setup(model)
        adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        self.optimizer = adam(self.parameters, adamw_mode=True)


class BitsAndBytes(TorchOnShards):
    """bitsandbytes' AdamW with 8-bit moments (where it is installed)."""

    kind = "8-bit clip"

    def setup(self, model: nn.Module) -> None:
        super().setup(model)
        self.optimizer = importlib.import_module("bitsandbytes").optim.AdamW8bit(self.parameters)


CONTENDERS: dict[str, type[Contender]] = {
    "copy": Copy,
    "fused kernel": FusedKernel,
    "zerofx": Zerofx,
    "zerofx unclipped": ZerofxUnclipped,
    "zerofx bf16": ZerofxBf16,
    "zerofx bf16 split": ZerofxSplit,
    "zerofx 8-bit": Zerofx8bit,
    "torch foreach": TorchForeach,
    "torch foreach unclipped": TorchForeachUnclipped,
    "torch fused": TorchFused,
    "torch fused unclipped": TorchFusedUnclipped,
    "torch fused mixed": TorchFusedMixed,
    "fsdp2": Fsdp2,
    "fsdp2 fused": Fsdp2Fused,
    "deepspeed cpu": DeepSpeedCpu,
    "bitsandbytes 8-bit": BitsAndBytes,
}


def run(rank: int, args: argparse.Namespace, rendezvous: str, answer: str) -> None:
    """One rank: builds the contenders, lets them take turns, and rank 0 writes what came of it."""
    device = join(rank, args, rendezvous)
    contenders: dict[str, Contender] = {}
    times: dict[str, list[float]] = {}
    for name in args.contenders:
        try:
            contender = CONTENDERS[name](args, device)
        except ImportError as error:
            if rank == 0:
                print(f"{name:24} skipped: {error}")
            continue
        contenders[name], times[name] = contender, []
    gc.collect()
    gc.freeze()
    names = list(contenders)
    for round_ in range(-args.warmup, args.rounds):
        for i in range(len(names)):
            name = names[(i + round_) % len(names)]
            contenders[name].fill()
            dist.barrier()
            start = now(device)
            contenders[name].step()
            if round_ >= 0:
                times[name].append(now(device) - start)
    result = {
        name: over_ranks(torch.tensor(values, device=device), dist.ReduceOp.MAX) for name, values in times.items()
    }
    if rank == 0:
        parameters = sum(p.numel() for p in GPT(args.layers, args.dim, args.heads, args.vocab, 64).parameters())
        kinds = {name: contender.kind for name, contender in contenders.items()}
        Path(answer).write_text(json.dumps({"times": result, "kinds": kinds, "parameters": parameters}))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # torch sometimes aborts as the interpreter ends, with threads of gloo still there


def paired(times: list[float], base: list[float]) -> float:
    """How many times as long as ``base``: the median over rounds, within which a noisy machine changes least."""
    return statistics.median(map(truediv, times, base))


def main() -> int:
    parser = argparse.ArgumentParser(description="Time of the optimizer's step, zerofx.AdamW beside its peers.")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), type=lambda text: text.split(","))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    defaults = {"world": 2, "rounds": 12, "warmup": 3, "layers": 12, "dim": 576, "heads": 8, "vocab": 4096}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/optimizer-<device>-<world>.json")
    args = parser.parse_args()
    if not set(args.contenders) <= set(CONTENDERS):
        parser.error(f"the contenders are {', '.join(CONTENDERS)}")
    out = args.out or ROOT / "benchmarks" / "results" / f"optimizer-{args.device}-{args.world}.json"
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        torch.multiprocessing.spawn(run, (args, f"file://{folder}/store", str(answer)), nprocs=args.world)
        found = json.loads(answer.read_text())

    shard = found["parameters"] / args.world
    rows = {}
    for name, times in found["times"].items():
        median, moved = statistics.median(times), BYTES[found["kinds"][name]]
        rows[name] = {
            **{"median_s": median, "min_s": min(times), "max_s": max(times), "n": len(times)},
            **{"bytes_per_parameter": moved, "gb_per_s_and_rank": moved * shard / median / 1e9},
        }
    yardsticks = [name for name in ("zerofx", "zerofx unclipped") if name in rows]
    for name, row in rows.items():
        row["times_as_long_as"] = {base: paired(found["times"][name], found["times"][base]) for base in yardsticks}
    heads = "".join(f" {'/ ' + base:>18}" for base in yardsticks)
    print(f"{'contender':24} {'median ms':>9} {'min':>8} {'max':>8} {'B/param':>8} {'GB/s':>6}{heads}")
    for name, row in sorted(rows.items(), key=lambda item: item[1]["median_s"]):
        line = f"{name:24} {1e3 * row['median_s']:9.2f} {1e3 * row['min_s']:8.2f} {1e3 * row['max_s']:8.2f}"
        moved, speed = row["bytes_per_parameter"], row["gb_per_s_and_rank"]
        ratios = "".join(f" {ratio:18.2f}" for ratio in row["times_as_long_as"].values())
        print(f"{line} {moved:8} {speed:6.1f}{ratios}")
    result = {
        "contenders": rows,
        "parameters": found["parameters"],
        "command": " ".join(["python benchmarks/optimizer.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "processor": processor(args.device),
        "load_average": os.getloadavg()[0],
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
