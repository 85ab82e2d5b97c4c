"""Seconds from the first call to the end of the first step, cold and warm: zerofx beside its peers.

    python benchmarks/starts.py                                   # a GPT of 4 and 16 layers, 2 gloo ranks, a core each
    python benchmarks/starts.py --layers 8 --contenders zerofx,fsdp2 --warm 2

Every start is a set of new processes. *Cold* has an empty folder for code (``TORCHINDUCTOR_CACHE_DIR``), *warm* has
the one that the cold start left. Imports, the process group and the model are there when the clock starts; what is
measured is the slower rank's first forward, backward and step. ``processors`` is what all ranks worked for it, with the
compilers that they start. ``alone`` is plain ``torch.compile`` in one process.
``-memory`` contenders have a budget (`memory=`) half-way between the least that a step needs and all it could take.
All contenders start from the same weights and see the same data: their losses must agree.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
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

from benchmarks.step import join, over_ranks, processor  # noqa: E402
from tests.models import GPT  # noqa: E402

VOCAB, LENGTH, BATCH = 256, 64, 2

MEMORY = "ZEROFX_BENCHMARK_MEMORY"
"""The variable by which ranks get the budget of ``-memory`` contenders."""


def zerofx(stage: int, **options: Any) -> Callable[[GPT], nn.Module]:
    def wrap(model: GPT) -> nn.Module:
        import zerofx

        return zerofx.compile(model, stage=stage, **options)

    return wrap


def divided(executor: str) -> Callable[[GPT], nn.Module]:
    def wrap(model: GPT) -> nn.Module:
        return zerofx(3, executor=executor, memory=int(os.environ[MEMORY]))(model)

    return wrap


def half(layers: int, dim: int, answer: str) -> None:
    """Bytes half-way between the least budget and one for all, by a dry run."""
    import zerofx

    x = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    record = zerofx.dry_run(
        GPT(layers, dim, 4, VOCAB, LENGTH), x, x, world_size=2, stage=3, executor="eager", memory="1TB"
    )
    most = record.forward.division.peak_bytes
    try:
        zerofx.dry_run(GPT(layers, dim, 4, VOCAB, LENGTH), x, x, world_size=2, stage=3, executor="eager", memory=1024)
    except Exception as e:
        least = e.inner_exception.offers[0].needs  # type: ignore[attr-defined]
        Path(answer).write_text(str((least + most) // 2))


def half_of(layers: int, dim: int) -> int:
    """`half`, in a process of its own, so that nothing of it is warm."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        process = torch.multiprocessing.get_context("spawn").Process(target=half, args=(layers, dim, str(answer)))
        process.start()
        process.join()
        return int(answer.read_text())


def fsdp2(model: GPT) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        block.compile()
        fully_shard(block)
    return fully_shard(model)


def ddp(model: GPT) -> nn.Module:
    model = nn.parallel.DistributedDataParallel(model)  # type: ignore[assignment]
    model.compile()
    return model


def alone(model: GPT) -> nn.Module:
    model.compile()
    return model


def worked_s() -> float:
    """Seconds that processors worked for this rank, and for compilers that it has started."""
    return sum(os.times()[:4])


CONTENDERS: dict[str, Callable[[GPT], nn.Module]] = {
    "zerofx": zerofx(3),
    "zerofx-0": zerofx(0),
    "zerofx-regional": zerofx(3, executor="regional"),
    "zerofx-eager": zerofx(3, executor="eager"),
    "zerofx-memory": divided("inductor"),
    "zerofx-eager-memory": divided("eager"),
    "fsdp2": fsdp2,
    "ddp": ddp,
    "alone": alone,
}


def start(rank: int, args: argparse.Namespace, name: str, layers: int, store: str, answer: str) -> None:
    """One rank of one start."""
    device = join(rank, args, store)
    import torch._inductor.compile_fx
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    model = CONTENDERS[name](GPT(layers, args.dim, 4, VOCAB, LENGTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [
        torch.randint(
            VOCAB, (2, BATCH, LENGTH), generator=torch.Generator().manual_seed(i * dist.get_world_size() + rank)
        )
        for i in range(6)
    ]
    times, worked, losses = [], [], []
    for x, y in batches:
        dist.barrier()
        began, work = time.perf_counter(), worked_s()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
        worked.append(worked_s() - work)
        losses.append(loss.detach())
    times = over_ranks(torch.tensor(times, device=device), dist.ReduceOp.MAX)
    processor_s = over_ranks(torch.tensor(worked[:1]), dist.ReduceOp.SUM)[0]
    losses = over_ranks(torch.stack(losses) / dist.get_world_size(), dist.ReduceOp.SUM)
    if rank == 0:
        cached = {k: v for k, v in counters["inductor"].items() if k.startswith("fxgraph_cache_")}
        cached |= {k: v for k, v in counters["aot_autograd"].items() if k.startswith("autograd_cache_")}
        found = {"first_s": times[0], "step_s": min(times[2:]), "processor_s": processor_s, "losses": losses}
        Path(answer).write_text(json.dumps(found | cached))
    dist.barrier()
    os._exit(0)  # torch sometimes aborts as the interpreter ends, with threads of gloo still there


def measure(args: argparse.Namespace, name: str, layers: int, cache: str) -> dict[str, Any]:
    """One start, in processes of its own."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        args.world = 1 if name == "alone" else 2
        given = (args, name, layers, f"file://{folder}/store", str(answer))
        torch.multiprocessing.spawn(start, given, nprocs=args.world)
        return json.loads(answer.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description="Seconds until the first step has run, cold and warm.")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), type=lambda text: text.split(","))
    parser.add_argument("--layers", default="4,16", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--warm", type=int, default=1, help="warm starts; the fastest counts")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "starts-cpu-2.json")
    args = parser.parse_args()
    args.device = "cpu"
    rows = []
    for layers in args.layers:
        if any(name.endswith("-memory") for name in args.contenders):
            os.environ[MEMORY] = str(half_of(layers, args.dim))
        for name in args.contenders:
            with tempfile.TemporaryDirectory() as cache:
                cold = measure(args, name, layers, cache)
                warm = min((measure(args, name, layers, cache) for _ in range(args.warm)), key=lambda x: x["first_s"])
            rows.append({"contender": name, "layers": layers, "cold": cold, "warm": warm})
            if name.endswith("-memory"):
                rows[-1]["memory"] = int(os.environ[MEMORY])
            print(
                f"{layers:3} layers  {name:19} cold {cold['first_s']:6.1f} s  warm {warm['first_s']:6.1f} s  "
                f"step {1e3 * warm['step_s']:6.1f} ms  "
                f"processors {cold['processor_s']:.1f} and {warm['processor_s']:.1f} s",
                flush=True,
            )
    several = [row for row in rows if row["contender"] != "alone"]  # one rank has half of the data
    table = torch.tensor(
        [[row[kind]["losses"] for kind in ("cold", "warm")] for row in several if row["layers"] == args.layers[0]]
    )
    spread = float((table.amax((0, 1)) / table.amin((0, 1)) - 1).max()) if len(table) else 0.0
    result = {
        "command": " ".join(["python benchmarks/starts.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "processor": processor("cpu"),
        "load_average": os.getloadavg()[0],
        "largest_relative_difference_of_losses": spread,
        "starts": rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"losses differ by at most {spread:.1e} (relative); written to {args.out}")
    return int(not spread <= 1e-4)


if __name__ == "__main__":
    sys.exit(main())
