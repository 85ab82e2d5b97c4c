"""Time of a training step, zerofx beside its peers: one run, one set of processes, interleaved.

    python benchmarks/step.py                                  # 2 gloo ranks, one core each
    python benchmarks/step.py --contenders zerofx,fsdp2+compile --rounds 10

All contenders live in the same ranks and take turns, in an order that rotates: in every round each makes one
untimed step (the caches belong to whoever ran before) and then `--steps` timed ones, so whatever else the
machine does hits all alike. A step is forward, backward, optimizer step and zero_grad; its time is that of
the slowest rank. All start from the same weights and see the same data, so their losses must agree, step by
step: one that does less than the others is found out. Collectives are counted at the process group, and the
bytes that a step allocates at its peak by the allocator; ``processor_s`` is what all threads of a rank, on its one
core, worked in a step. Beside what is measured of zerofx stands what
`zerofx.predict` says of forward and backward, by rates that are measured before anything else is.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib
import json
import os
import platform
import re
import statistics
import sys
import tempfile
import time
import traceback
import unittest.mock
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
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from tests.counting import CollectiveLog, count_collectives  # noqa: E402
from tests.memory import allocated_peak  # noqa: E402
from tests.models import GPT  # noqa: E402

Wrap = Callable[[GPT], Any]
LEARNING_RATE = 0.1


def zerofx(
    stage: int, max_bytes: int | None = None, apart: bool = False, scheme: dict[str, str] | None = None, **options: Any
) -> Wrap:
    """``max_bytes``: of a group, by default small. ``apart``: reductions in a process group of their own.

    ``scheme``: on a mesh of two dimensions, what `zerofx.Sharding` is given.
    """

    def wrap(model: GPT) -> Any:
        zerofx = importlib.import_module("zerofx")
        if scheme is not None:
            options.update(mesh=rows_and_columns(), sharding=zerofx.Sharding(**scheme))
        groups = None if max_bytes is None else zerofx.Grouping(max_bytes=max_bytes)
        reductions = dist.new_group() if apart else None
        return zerofx.compile(model, stage=stage, groups=groups, reduce_group=reductions, **options)

    return wrap


def deepspeed(stage: int) -> Wrap:
    """In full precision, its communication overlapped as its documentation advises."""

    def wrap(model: GPT) -> Any:
        os.environ.setdefault("DS_ACCELERATOR", next(model.parameters()).device.type)
        os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank())}
        os.environ["WORLD_SIZE"] = str(dist.get_world_size())
        zero = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True, "reduce_scatter": True}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "SGD", "params": {"lr": LEARNING_RATE}},
        }
        linear = F.linear
        engine = importlib.import_module("deepspeed").initialize(model=model, config=config)[0]
        engine.linear, F.linear = F.linear, linear  # of ZeRO-3 it takes the place of PyTorch's, for every model
        return engine

    return wrap


def in_codes(stage: int, weights: str | None, gradients: str | None, between: str = "all", **options: Any) -> Wrap:
    """``zerofx.Wire``, made when zerofx is there."""

    def wrap(model: GPT) -> Any:
        wire = importlib.import_module("zerofx").Wire(weights, gradients, between=between)
        return zerofx(stage, wire=wire, **options)(model)

    return wrap


def ranks_per_host() -> int:
    """How many ranks a host has: as torchrun says; without it all are on one, of which half play another."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", max(1, dist.get_world_size() // 2)))


def rows_and_columns() -> Any:
    """A mesh of hosts and their ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    local = ranks_per_host()
    return init_device_mesh("cpu", (dist.get_world_size() // local, local), mesh_dim_names=("replicate", "shard"))


def fsdp2(compiled: bool, ahead: int = 0, hybrid: bool = False) -> Wrap:
    """One group per block and one for the rest; compiled block by block first, as torchtitan does.

    ``ahead``: how many groups to prefetch explicitly, both ways, as FSDP2's tutorial does; 0: its own choice.
    ``hybrid``: on a mesh of two dimensions.
    """

    def wrap(model: GPT) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
        mesh = rows_and_columns() if hybrid else mesh
        for block in model.blocks:
            if compiled:
                block.compile(fullgraph=True)
            fully_shard(block, mesh=mesh)
        whole = fully_shard(model, mesh=mesh)
        blocks = list(model.blocks)
        for i in range(len(blocks) if ahead else 0):
            blocks[i].set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + ahead])
            blocks[i].set_modules_to_backward_prefetch(blocks[max(0, i - ahead) : i][::-1])
        return whole

    return wrap


def torchtitan(model: GPT) -> Any:
    """SimpleFSDP, what torchtitan's graph trainer shards with: gathers as parametrizations, in torch.compile's graph.

    As it is without the trainer, whose bucketing passes are parts of it: one collective per parameter.
    """
    from torch.distributed.device_mesh import init_device_mesh

    simple_fsdp = importlib.import_module("torchtitan.experiments.graph_trainer.simple_fsdp")
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    return torch.compile(simple_fsdp.data_parallel(model, mesh, "fully_shard"))


def alone(compiled: bool) -> Wrap:
    """What a rank computes, and no communication: ranks drift apart."""

    def wrap(model: GPT) -> Any:
        return torch.compile(model) if compiled else model

    return wrap


class Beside(nn.Module):
    """A model that computes alone while the bytes of a ZeRO step travel beside it, and nothing waits for them.

    What the rank's cores and the link do at once, with no dependence between them: a schedule's limit where arithmetic
    and messages share a core. Messages are as large as those of zerofx's groups, and all are given to the process group
    when forward begins; `arrive` waits for them.
    """

    def __init__(self, model: GPT, exchanges: int, message: int = 4 << 20) -> None:
        super().__init__()
        mine = sum(p.numel() * p.itemsize for p in model.parameters()) // dist.get_world_size()
        self.model, self.exchanges = torch.compile(model), exchanges
        device = next(model.parameters()).device
        self.out, self.into = (torch.zeros(mine, dtype=torch.uint8, device=device).split(message) for _ in range(2))
        self.travelling: list[Any] = []

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        others = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
        for _ in range(self.exchanges):
            for out, into in zip(self.out, self.into, strict=True):
                messages = [dist.P2POp(dist.irecv, into, other) for other in others]
                messages += [dist.P2POp(dist.isend, out, other) for other in others]
                self.travelling += dist.batch_isend_irecv(messages)
        return self.model(*args)

    def arrive(self) -> None:
        for work in self.travelling:
            work.wait()
        self.travelling = []


def alone_beside(stage: int) -> Wrap:
    """Weights are gathered once and gradients reduced; in stage 3 weights are gathered once more."""
    return lambda model: Beside(model, exchanges=3 if stage == 3 else 2)


def ddp(compiled: bool) -> Wrap:
    def wrap(model: GPT) -> Any:
        parallel = nn.parallel.DistributedDataParallel(model)
        return torch.compile(parallel) if compiled else parallel

    return wrap


def ddp_with_hook(hook: str, **settings: Any) -> Wrap:
    """DistributedDataParallel whose gradients travel as PyTorch's ``hook`` says, a module and a function of it."""

    def wrap(model: GPT) -> Any:
        module, _, name = hook.partition(".")
        hooks = importlib.import_module(f"torch.distributed.algorithms.ddp_comm_hooks.{module}")
        state = hooks.PowerSGDState(None, **settings) if settings else None
        parallel = nn.parallel.DistributedDataParallel(model)
        parallel.register_comm_hook(state, getattr(hooks, name))
        return parallel

    return wrap


BETWEEN = {"gradients": "all", "optimizer": "all"}
NEAR = {"weights": "all", **BETWEEN}
"""`zerofx.Sharding`: replicas share the optimizer's work; backward gathers inside of a host."""

CONTENDERS: dict[str, Wrap] = {
    "zerofx": zerofx(3),
    "zerofx-eager": zerofx(3, executor="eager"),
    "zerofx-3-blocks": zerofx(3, max_bytes=256 << 20),
    "zerofx-2-blocks": zerofx(2, max_bytes=256 << 20),
    "zerofx-3-apart": zerofx(3, apart=True),
    "zerofx-3-all": zerofx(3, memory_budget=float("inf")),
    "zerofx-3-one-copy": zerofx(3, one_copy=True),
    "zerofx-3-lookups": zerofx(3, lookups=True),
    "zerofx-3-all-lookups": zerofx(3, memory_budget=float("inf"), lookups=True),
    "zerofx-3-step": zerofx(3),
    "zerofx-2-step": zerofx(2),
    "zerofx-0": zerofx(0),
    "zerofx-1": zerofx(1),
    "zerofx-2": zerofx(2),
    "zerofx-rows": zerofx(3, scheme={}),
    "zerofx-rows-eager": zerofx(3, scheme={}, executor="eager"),
    "zerofx-between": zerofx(3, scheme=BETWEEN),
    "zerofx-between-eager": zerofx(3, scheme=BETWEEN, executor="eager"),
    "zerofx-near": zerofx(3, scheme=NEAR),
    "zerofx-near-eager": zerofx(3, scheme=NEAR, executor="eager"),
    "zerofx-line-eager": zerofx(3, scheme={"backward": "all", **NEAR}, executor="eager"),
    "fsdp2-hsdp": fsdp2(compiled=False, hybrid=True),
    "fsdp2-hsdp+prefetch": fsdp2(compiled=False, ahead=2, hybrid=True),
    "fsdp2-hsdp+compile+prefetch": fsdp2(compiled=True, ahead=2, hybrid=True),
    "fsdp2": fsdp2(compiled=False),
    "fsdp2+prefetch": fsdp2(compiled=False, ahead=2),
    "fsdp2+compile": fsdp2(compiled=True),
    "fsdp2+compile+prefetch": fsdp2(compiled=True, ahead=2),
    "torchtitan": torchtitan,
    "ddp": ddp(compiled=False),
    "ddp+compile": ddp(compiled=True),
    "alone": alone(compiled=True),
    "alone-eager": alone(compiled=False),
    "alone+bytes-2": alone_beside(2),
    "alone+bytes-3": alone_beside(3),
    "deepspeed-1": deepspeed(1),
    "deepspeed-2": deepspeed(2),
    "deepspeed-3": deepspeed(3),
}

BUDGETS: dict[str, Wrap] = {f"zerofx-3-{mb}MB": zerofx(3, memory_budget=1e6 * mb) for mb in range(4, 132, 4)}
"""Stage 3 with a `memory_budget`: contenders to be named, not in every run."""

POWER = {"matrix_approximation_rank": 4, "start_powerSGD_iter": 2}
CODED: dict[str, Wrap] = {
    **{
        f"zerofx-{stage}-{'-'.join(codes)}": in_codes(stage, *codes)
        for stage in (2, 3)
        for codes in (("bf16", "bf16"), ("fp8", "fp8"), ("int8", "int8"), ("int8", "int4"))
    },
    "zerofx-rows-int8-eager": in_codes(3, None, "int8", "nodes", scheme={}, executor="eager"),
    "zerofx-rows-int4-eager": in_codes(3, None, "int4", "nodes", scheme={}, executor="eager"),
    "zerofx-between-int8-eager": in_codes(3, "int8", "int8", "nodes", scheme=BETWEEN, executor="eager"),
    "zerofx-between-int4-eager": in_codes(3, "int8", "int4", "nodes", scheme=BETWEEN, executor="eager"),
    "ddp+fp16": ddp_with_hook("default_hooks.fp16_compress_hook"),
    "ddp+powersgd": ddp_with_hook("powerSGD_hook.powerSGD_hook", **POWER),
}
"""What travels is not what was computed: contenders to be named, whose losses are compared apart."""


class Contender:
    """A model and its optimizer, which remembers what every step cost and gave."""

    def __init__(self, name: str, args: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(0)
        with device:
            model = GPT(args.layers, args.dim, args.heads, args.vocab, args.length)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.model = (CONTENDERS | BUDGETS | CODED)[name](model)
        self.engine = name.startswith("deepspeed")  # brings its own backward and optimizer
        self.steps_in_backward = name.startswith("zerofx") and name.endswith("-step")
        if not self.engine:
            ranks = dist.get_world_size() if name == "torchtitan" else 1  # it sums gradients: its loss is per token
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE / ranks)
        self.name, self.args, self.device = name, args, device
        self.times: list[float] = []
        self.processor_times: list[float] = []
        self.losses: list[torch.Tensor] = []
        self.log = CollectiveLog()
        self.peak_bytes = 0
        self.predicted: dict[str, Any] | None = None

    def count(self, rates: Any) -> None:
        """One step, its collectives and its memory counted; what zerofx predicts for it."""
        with count_collectives() as self.log:
            self.peak_bytes = allocated_peak(self.step, self.device.type)
        if self.name.startswith("zerofx"):
            try:
                self.predicted = importlib.import_module("zerofx").predict(self.model, rates).summary()
            except (RuntimeError, ValueError) as error:  # a step that cannot be predicted can still be timed
                print(f"{self.name}: no prediction: {error}")

    def steps(self, n: int) -> None:
        """``n`` timed steps in a row; the ranks start together, and what one step leaves to the next is in its time."""
        dist.barrier()
        for _ in range(n):
            start, worked = now(self.device), time.process_time()
            self.step()
            self.times.append(now(self.device) - start)
            self.processor_times.append(time.process_time() - worked)

    def step(self) -> None:
        seed = len(self.losses) * dist.get_world_size() + dist.get_rank()
        generator = torch.Generator().manual_seed(seed)
        shape = (2, self.args.batch, self.args.length)
        x, y = torch.randint(self.args.vocab, shape, generator=generator).to(self.device)
        if self.engine:
            with unittest.mock.patch.object(F, "linear", self.model.linear):
                loss = self.model(x, y)
                self.model.backward(loss)
                self.model.step()
            self.losses.append(loss.detach())
            return
        loss = self.model(x, y)
        if self.steps_in_backward:
            with importlib.import_module("zerofx").step_in_backward(self.optimizer):
                loss.backward()
        else:
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if isinstance(self.model, Beside):
                self.model.arrive()
        self.losses.append(loss.detach())


def now(device: torch.device) -> float:
    """Seconds, once all that ``device`` was given to do is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def over_ranks(values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> list[float]:
    dist.all_reduce(values := values.double(), op)
    return values.tolist()


def join(rank: int, args: argparse.Namespace, rendezvous: str) -> torch.device:
    """Become ``rank``, on a device of its own, or on a core; returns its device."""
    if args.device == "cuda":
        device, backend = torch.device("cuda", rank), "nccl"
        torch.cuda.set_device(device)
    else:
        device, backend = torch.device("cpu"), "gloo"
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=rendezvous, rank=rank, world_size=args.world, timeout=datetime.timedelta(minutes=5)
    )
    return device


def run(rank: int, args: argparse.Namespace, rendezvous: str, answer: str) -> None:
    """One rank: builds the contenders, lets them take turns, and rank 0 writes what came of it."""
    device = join(rank, args, rendezvous)
    result = take_turns(rank, args, device)
    if rank == 0:
        Path(answer).write_text(json.dumps(result))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # torch sometimes aborts as the interpreter ends, with threads of gloo still there


def take_turns(rank: int, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Builds the contenders and lets them take turns; what came of it, the same on every rank."""
    say = print if rank == 0 else lambda text: None
    contenders: list[Contender] = []
    failed: dict[str, str] = {}
    rates = calibrated(args.contenders, device)
    for name in args.contenders:
        start = time.perf_counter()
        try:
            contender = Contender(name, args, device)
            for _ in range(args.warmup):
                contender.step()
            contender.count(rates)
        except ImportError as error:
            say(f"{name:14} skipped: {error}")
            continue
        except Exception as error:  # of all ranks alike, or the group's timeout ends the run
            failed[name] = f"{type(error).__name__}: {error}"
            say(f"{name:14} FAILED: {traceback.format_exc()}")
            continue
        contenders.append(contender)
        say(f"{name:14} ready in {time.perf_counter() - start:.1f} s; a step: {contender.log}")
    gc.collect()
    gc.freeze()  # what was compiled stays: no timed step shall walk over it
    forget_resident_peak()
    for round_ in range(args.rounds):
        for i in range(len(contenders)):
            contender = contenders[(i + round_) % len(contenders)]
            contender.step()
            contender.steps(args.steps)
        newest = ", ".join(f"{c.name} {statistics.median(c.times[-args.steps :]):.3f}" for c in contenders)
        say(f"round {round_ + 1}/{args.rounds}: {newest}")

    result: dict[str, Any] = {}
    for contender in contenders:
        times = over_ranks(torch.tensor(contender.times, device=device), dist.ReduceOp.MAX)
        worked = over_ranks(torch.tensor(contender.processor_times, device=device), dist.ReduceOp.MAX)
        losses = over_ranks(torch.stack(contender.losses) / args.world, dist.ReduceOp.SUM)
        result[contender.name] = {
            **{"median_s": statistics.median(times), "min_s": min(times), "max_s": max(times), "n": len(times)},
            "processor_s": statistics.median(worked),
            "calls_per_step": contender.log.calls,
            "wire_bytes_per_step": contender.log.total_bytes,
            "bytes_between_hosts": bytes_between_hosts(contender.log),
            "peak_bytes": contender.peak_bytes,
            "predicted": contender.predicted,
            "parameters": contender.parameters,
            "losses": losses,
        }
    most = over_ranks(torch.tensor([resident_peak()], device=device), dist.ReduceOp.MAX)
    return {"contenders": result, "failed": failed, "resident_bytes": most[0]}


def calibrated(contenders: list[str], device: torch.device) -> Any:
    """The rates of the machine; of both its links where a contender knows them."""
    calibrate = importlib.import_module("zerofx").calibrate
    if not any(name.startswith(("zerofx-rows", "zerofx-between", "zerofx-near", "zerofx-line")) for name in contenders):
        return calibrate(device=device)
    mesh = rows_and_columns()
    return calibrate(mesh.get_group(1), device, replica_group=mesh.get_group(0))


def forget_resident_peak() -> None:
    """From now on `resident_peak` is of what comes (proc_pid_clear_refs(5))."""
    Path("/proc/self/clear_refs").write_text("5")


def resident_peak() -> int:
    """The most bytes of memory that this process had; all its contenders together."""
    (kilobytes,) = re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(kilobytes)


def bytes_between_hosts(log: CollectiveLog) -> int:
    """What a rank receives from ranks of other hosts in a step, if each collective's parts are equal."""
    resolve, host, total = torch.distributed.distributed_c10d._resolve_process_group, ranks_per_host(), 0.0
    here = dist.get_rank() // host
    for event in log.events:
        ranks = dist.get_process_group_ranks(resolve(event.group)) if event.group else []
        others = [rank for rank in ranks if rank != dist.get_rank()]
        if others:
            total += event.bytes * sum(rank // host != here for rank in others) / len(others)
    return int(total)


def processor(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return model[1] if model else platform.processor()


def spread_of_losses(contenders: dict[str, Any]) -> float:
    """The largest relative difference between contenders at any step; not a number where a loss is not."""
    losses = [c["losses"] for name, c in contenders.items() if not name.startswith("alone") and name not in CODED]
    if not losses:
        return 0.0
    table = torch.tensor(losses, dtype=torch.float64)
    return ((table.amax(0) - table.amin(0)) / table.amin(0).abs()).max().item()


PREDICTED = f"{'predicted s':>11} {'exposed':>8} {'peak MB':>8}"


def predicted(contender: dict[str, Any]) -> str:
    """What zerofx said of its own step, under `PREDICTED`; nothing for others."""
    said = contender["predicted"]
    return f"{said['time_s']:11.4f} {said['exposed_s']:8.4f} {said['peak_bytes'] / 1e6:8.1f}" if said else ""


def table(contenders: dict[str, Any]) -> str:
    base = "zerofx" if "zerofx" in contenders else next(iter(contenders))
    head = (
        f"{'contender':14} {'median s':>9} {'min':>8} {'max':>8} {'n':>4} {'/' + base:>9} {'MB/step':>8} {'peak MB':>8}"
    )
    lines = [f"{head}   {PREDICTED}"]
    for name, c in sorted(contenders.items(), key=lambda item: item[1]["median_s"]):
        line = f"{name:14} {c['median_s']:9.4f} {c['min_s']:8.4f} {c['max_s']:8.4f} {c['n']:4}"
        ratio, megabytes = c["median_s"] / contenders[base]["median_s"], c["wire_bytes_per_step"] / 1e6
        lines.append(f"{line} {ratio:9.3f} {megabytes:8.1f} {c['peak_bytes'] / 1e6:8.1f}   {predicted(c)}".rstrip())
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Time of a training step, zerofx beside its peers.")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), type=lambda text: text.split(","))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    defaults = {"world": 2, "rounds": 6, "steps": 4, "warmup": 2}
    defaults |= {"layers": 8, "dim": 512, "heads": 8, "vocab": 4096, "length": 256, "batch": 2}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/step-<device>-<world>.json")
    args = parser.parse_args()
    if not set(args.contenders) <= {*CONTENDERS, *BUDGETS, *CODED}:
        parser.error(f"the contenders are {', '.join([*CONTENDERS, *BUDGETS, *CODED])}")
    out = args.out or ROOT / "benchmarks" / "results" / f"step-{args.device}-{args.world}.json"
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        torch.multiprocessing.spawn(run, (args, f"file://{folder}/store", str(answer)), nprocs=args.world)
        result = json.loads(answer.read_text())

    if not result["contenders"]:
        return 1
    spread = spread_of_losses(result["contenders"])
    result |= {
        "command": " ".join(["python benchmarks/step.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "processor": processor(args.device),
        "load_average": os.getloadavg()[0],  # about one per rank where nothing else ran
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
        "largest_relative_difference_of_losses": spread,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result["contenders"]))
    print(f"losses differ by at most {spread:.1e} (relative); written to {out}")
    return int(bool(result["failed"]) or not spread <= 1e-4)


if __name__ == "__main__":
    sys.exit(main())
