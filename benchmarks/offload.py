"""The optimizer's step with its state in a file, beside what bounds it, and training where memory would not do.

    python benchmarks/offload.py --path /tmp --out benchmarks/results/offload-cpu.json
    python benchmarks/offload.py --limit --out benchmarks/results/offload-limit.json

One rank. These need no disk, and are measured first:

==========  ========================================================================================
arithmetic  `zerofx.AdamW` with its state in memory
cpu         DeepSpeed's ZeRO-Offload: stage 3, ``offload_optimizer`` to the CPU (where it is installed)
==========  ========================================================================================

In each round and size these take turns:

==========  ========================================================================================
disk        the file's bytes read and written by the same threads and buffers, without arithmetic
zerofx      `zerofx.AdamW` with its moments in the file
mapped      a plain optimizer: moments mapped from a file, PyTorch's fused kernel layer by layer
weights     `zerofx.AdamW` with moments and weights in the file
all         the same, and gradients
infinity    DeepSpeed's ZeRO-Infinity: stage 3, ``offload_optimizer`` to NVMe by its aio, pipelined both ways
==========  ========================================================================================

*infinity* has moments and float32 weights in files. Its backward comes before what is timed. ``moved`` has the bytes
that a step of each reads from the disk and writes to it, as the kernel counts them for this process. (What *mapped*
finds in the kernel's cache is not read.)

``ratio`` is zerofx's time over the longer of disk and arithmetic, round by round: disks vary from minute to minute.

With ``--limit`` two processes train the same model under one limit of their data (``RLIMIT_DATA``): one with its state
in a file, one without.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import zerofx  # noqa: E402
from zerofx.inspect.predict.disk import touch  # noqa: E402
from zerofx.runtime.optim.through_file import _batches, walk  # noqa: E402
from zerofx.runtime.state.group import groups_of  # noqa: E402


def net(millions: int, dim: int) -> nn.Sequential:
    """Linear layers of ``dim`` x ``dim``, so many that there are about as many parameters."""
    layers = max(1, round(millions * 1e6 / dim**2))
    return nn.Sequential(*(nn.Linear(dim, dim, bias=False) for _ in range(layers)))


class Sharded:
    """A sharded model with gradients, whose state is in a file or in memory."""

    def __init__(self, args: argparse.Namespace, millions: int, offload: str | zerofx.Offload | None) -> None:
        self.model = zerofx.shard(net(millions, args.dim), stage=3, offload=offload)
        self.optimizer = zerofx.AdamW(self.model.parameters(), lr=1e-4)
        for group in groups_of(self.model):
            group.accumulate(group.layout.slots, torch.full((group.layout.shard_numel,), 1e-3), checked=True)

    def step(self) -> None:
        self.optimizer.step()

    def pass_alone(self) -> None:
        """The same transfers, and no arithmetic: a byte of each chunk changes, else it would not be written."""
        spans = [span for span in self.optimizer._spans or () if span.file is not None]
        file = spans[0].file
        assert file is not None
        walk(file, list(_batches([(span, {}) for span in spans])), touch)


class Mapped:
    """Moments in mapped files; no thread of its own, and no checksum."""

    def __init__(self, args: argparse.Namespace, millions: int, path: str) -> None:
        self.weights = [p.detach() for p in net(millions, args.dim).parameters()]
        self.gradients = [torch.full_like(p, 1e-3) for p in self.weights]
        nbytes = sum(p.nbytes for p in self.weights)
        self.step_count = 0
        self.moments = []
        for name in ("exp_avg", "exp_avg_sq"):
            file = Path(path, name)
            with file.open("wb") as opened:
                os.posix_fallocate(opened.fileno(), 0, nbytes)
            storage = torch.UntypedStorage.from_file(str(file), True, nbytes)
            whole = torch.empty(0, dtype=torch.float32).set_(storage)
            self.moments.append(whole.split([p.numel() for p in self.weights]))

    def step(self) -> None:
        self.step_count += 1
        for p, g, m, v in zip(self.weights, self.gradients, *self.moments, strict=True):
            torch._fused_adamw_(
                [p.view(-1)],
                [g.view(-1)],
                [m],
                [v],
                [],
                [torch.tensor(float(self.step_count))],
                lr=1e-4,
                beta1=0.9,
                beta2=0.999,
                weight_decay=1e-2,
                eps=1e-8,
                amsgrad=False,
                maximize=False,
            )
        os.sync()  # else the next step, or the next contender, pays for what this one wrote


class DeepSpeed:
    """Its engine at stage 3, the optimizer's state on the CPU or in files; of its step, not of its backward."""

    def __init__(self, args: argparse.Namespace, millions: int, path: str | None) -> None:
        os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        offload: dict[str, Any] = {"device": "cpu", "pin_memory": False}
        if path is not None:
            offload = {"device": "nvme", "nvme_path": path, "pin_memory": args.pinned, "buffer_count": args.buffers}
            offload |= {"pipeline_read": True, "pipeline_write": True}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": args.sub_group or args.dim**2,
                "offload_optimizer": offload,
            },
            "aio": {"block_size": 1 << 20, "queue_depth": args.queue, "overlap_events": True},
        }
        linear = F.linear
        self.engine = importlib.import_module("deepspeed").initialize(model=net(millions, args.dim), config=config)[0]
        self.linear, F.linear = F.linear, linear  # of ZeRO-3 it takes the place of PyTorch's, for every model
        self.x = torch.ones(1, args.dim)

    def ready(self) -> None:
        """Have gradients."""
        with mock.patch.object(F, "linear", self.linear):
            self.engine.backward(self.engine(self.x).square().mean())
        os.sync()

    def step(self) -> None:
        self.engine.step()


def seconds(contender: Any, run: Callable[[], None] | None = None, beside: Callable[[], Any] | None = None) -> float:
    """Of a step, or of what else it does; what comes before is not counted. ``beside``: in front of it and behind."""
    if isinstance(contender, DeepSpeed):
        contender.ready()
    if beside is not None:
        beside()
    start = time.perf_counter()
    (run or contender.step)()
    took = time.perf_counter() - start
    if beside is not None:
        beside()
    return took


def on_disk() -> list[int]:
    """Bytes that this process has read from disks and written to them."""
    counted = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return [int(counted["read_bytes"]), int(counted["write_bytes"])]


def measure(args: argparse.Namespace, millions: int) -> dict[str, Any]:
    """All contenders at one size."""
    times: dict[str, list[float]] = {}
    has_deepspeed = millions <= args.beside and bool(importlib.util.find_spec("deepspeed"))
    for name, kind in {"arithmetic": Sharded, "cpu": DeepSpeed}.items():
        if (kind is DeepSpeed and not has_deepspeed) or millions > args.in_memory:
            continue
        contender: Any = kind(args, millions, None)
        seconds(contender)  # state is made, pages are touched
        times[name] = [seconds(contender) for _ in range(args.rounds)]
        print(millions, name, [round(each, 3) for each in times[name]], flush=True)
        del contender
        gc.collect()
    with tempfile.TemporaryDirectory(dir=args.path) as folder:
        filed = Sharded(args, millions, folder)
        seconds(filed)
        parameters = sum(p.numel() for p in filed.model.parameters())
        runs: dict[str, tuple[Any, Callable[[], None] | None]] = {"disk": (filed, filed.pass_alone)}
        runs["zerofx"] = filed, None
        if millions <= args.beside:
            runs["mapped"] = Mapped(args, millions, folder), None
            for name, gradients in (("weights", None), ("all", folder)):
                offload = zerofx.Offload(optimizer=folder, weights=folder, gradients=gradients)
                runs[name] = Sharded(args, millions, offload), None
        if has_deepspeed:
            runs["infinity"] = DeepSpeed(args, millions, folder), None
        moved = {}
        for name, run in runs.items():
            seconds(*run)
            counted: list[list[int]] = []
            seconds(*run, beside=lambda counted=counted: counted.append(on_disk()))
            moved[name] = [after - before for before, after in zip(*counted, strict=True)]
            times[name] = []
        for i in range(args.rounds):
            order = list(runs)[i % len(runs) :] + list(runs)[: i % len(runs)]
            for name in order:
                times[name].append(seconds(*runs[name]))
            print(millions, {name: round(times[name][-1], 3) for name in runs}, flush=True)
    computed = times.get("arithmetic", [0.0] * args.rounds)
    bound = [max(disk, computes) for disk, computes in zip(times["disk"], computed, strict=True)]
    times = {name: [round(each, 4) for each in values] for name, values in times.items()}
    found: dict[str, Any] = {"parameters": parameters, "file_bytes_per_step": 16 * parameters, "seconds": times}
    found["moved"] = moved
    found["ratio"] = [round(took / least, 3) for took, least in zip(times["zerofx"], bound, strict=True)]
    found["ratio_median"] = statistics.median(found["ratio"])
    for name in ("cpu", "mapped", "weights", "all", "infinity"):
        base = "arithmetic" if name == "cpu" else "zerofx"
        if name in times:
            over = [a / b for a, b in zip(times[name], times[base], strict=True)]
            found[f"{name}_over_{base}"] = round(statistics.median(over), 2)
    if has_deepspeed:
        over = [a / b for a, b in zip(times["infinity"], times["weights"], strict=True)]
        found["infinity_over_weights"] = round(statistics.median(over), 2)
    else:
        print(f"{millions}: without DeepSpeed: it is not installed, or the size is above --beside={args.beside}")
    return found


def join() -> None:
    store = tempfile.mktemp()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)


# ---- under a limit --------------------------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    """A process under ``--bytes`` of data: trains, and says its losses and what it held at most."""
    if args.bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (args.bytes, args.bytes))
    join()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=args.path) as folder:
        offload = folder if args.child == "offload" else None
        model = zerofx.compile(net(args.limit_millions, args.dim), stage=3, executor="eager", offload=offload)
        optimizer = zerofx.AdamW(model.parameters(), lr=1e-4)
        losses = []
        for step in range(3):
            x = torch.randn(8, args.dim, generator=torch.Generator().manual_seed(step))
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"losses": losses, "peak_resident_bytes": peak, "data_bytes": _data()}), flush=True)


def _data() -> int:
    """What ``RLIMIT_DATA`` counts, now."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmData"].split()[0]) * 1024


def limited(args: argparse.Namespace) -> dict[str, Any]:
    def run(kind: str, nbytes: int) -> dict[str, Any]:
        command = [sys.executable, __file__, "--child", kind, "--bytes", str(nbytes), "--path", str(args.path)]
        command += ["--dim", str(args.dim), "--limit-millions", str(args.limit_millions)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        last = (ended.stdout.strip().splitlines() or ["{}"])[-1]
        found: dict[str, Any] = {"exit": ended.returncode, **(json.loads(last) if ended.returncode == 0 else {})}
        if ended.returncode:
            said = [line for line in ended.stderr.splitlines() if "memory" in line.lower()]
            found["error"] = said[-1][:200] if said else ended.stderr[-200:]
        print(kind, nbytes, found, flush=True)
        return found

    free = {kind: run(kind, 0) for kind in ("offload", "memory")}
    # Between what both take: the state in memory is 8 bytes per parameter more.
    nbytes = free["offload"]["data_bytes"] + 2 * args.limit_millions * 1_000_000
    under = {kind: run(kind, nbytes) for kind in ("offload", "memory")}
    return {"parameters": args.limit_millions * 10**6, "without_limit": free, "limit_bytes": nbytes, "under": under}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--millions", default="25,100,400")
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", type=int, default=100, help="the largest size of mapped, all and DeepSpeed's")
    parser.add_argument(
        "--in-memory", type=int, default=400, help="the largest size of arithmetic; beyond, disk bounds"
    )
    parser.add_argument("--sub-group", type=int, help="DeepSpeed's sub_group_size; default: a layer")
    for name, value in {"buffers": 12, "queue": 8, "pinned": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=value, help="of DeepSpeed's offload_optimizer and aio")
    parser.add_argument("--limit", action="store_true")
    parser.add_argument("--limit-millions", type=int, default=100)
    parser.add_argument("--child", choices=["offload", "memory"])
    parser.add_argument("--bytes", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.child:
        train(args)
        return
    if args.limit:
        found: dict[str, Any] = limited(args)
    else:
        join()
        found = {"sizes": [measure(args, int(millions)) for millions in args.millions.split(",")]}
    result = {"command": " ".join(["python", *sys.argv]), "torch": torch.__version__, **found}
    print(json.dumps(result, indent=2))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
