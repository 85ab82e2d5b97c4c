"""The optimizer's step with its state in a file, beside what bounds it, and training where memory would not do.

    python benchmarks/offload.py --path /tmp --out benchmarks/results/offload-cpu.json
    python benchmarks/offload.py --limit --out benchmarks/results/offload-limit.json

One rank. In each round and size these take turns:

==========  ========================================================================================
disk        the file's bytes read and written by the same threads and buffers, without arithmetic
arithmetic  `zerofx.AdamW` with its state in memory
zerofx      `zerofx.AdamW` with its state in the file
mapped      a plain optimizer: moments mapped from a file, PyTorch's fused kernel layer by layer
==========  ========================================================================================

``ratio`` is zerofx's time over the longer of disk and arithmetic, round by round: disks vary from minute to minute.

With ``--limit`` two processes train the same model under one limit of their data (``RLIMIT_DATA``): one with its state
in a file, one without.
"""

from __future__ import annotations

import argparse
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

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import zerofx  # noqa: E402
from zerofx.inspect.predict.disk import touch  # noqa: E402
from zerofx.runtime.optim.through_file import _batches, walk  # noqa: E402


def net(millions: int, dim: int) -> nn.Sequential:
    """Linear layers of ``dim`` x ``dim``, so many that there are about as many parameters."""
    layers = max(1, round(millions * 1e6 / dim**2))
    return nn.Sequential(*(nn.Linear(dim, dim, bias=False) for _ in range(layers)))


class Sharded:
    """A sharded model with gradients, whose state is in a file or in memory."""

    def __init__(self, args: argparse.Namespace, millions: int, path: str | None) -> None:
        self.model = zerofx.shard(net(millions, args.dim), stage=3, offload=path)
        self.optimizer = zerofx.AdamW(self.model.parameters(), lr=1e-4)
        for p in self.model.parameters():
            p.grad = torch.full(p.shape, 1e-3)

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


def seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(args: argparse.Namespace, millions: int) -> dict[str, Any]:
    """All contenders at one size, taking turns."""
    times: dict[str, list[float]] = {"disk": [], "arithmetic": [], "zerofx": [], "mapped": []}
    with tempfile.TemporaryDirectory(dir=args.path) as folder:
        filed, memory = Sharded(args, millions, folder), Sharded(args, millions, None)
        runs: dict[str, Callable[[], None]] = {
            "disk": filed.pass_alone,
            "arithmetic": memory.step,
            "zerofx": filed.step,
        }
        if millions <= args.mapped:
            runs["mapped"] = Mapped(args, millions, folder).step
        for name in ("zerofx", "arithmetic", "disk"):  # state is made, pages are touched
            runs[name]()
        for _ in range(args.rounds):
            for name, run in runs.items():
                times[name].append(seconds(run))
            print(millions, {name: round(each[-1], 3) for name, each in times.items() if each}, flush=True)
        parameters = sum(p.numel() for p in filed.model.parameters())
    bound = [max(disk, computed) for disk, computed in zip(times["disk"], times["arithmetic"], strict=True)]
    found: dict[str, Any] = {"parameters": parameters, "file_bytes_per_step": 16 * parameters, "seconds": times}
    found["ratio"] = [round(took / least, 3) for took, least in zip(times["zerofx"], bound, strict=True)]
    found["ratio_median"] = statistics.median(found["ratio"])
    if times["mapped"]:
        found["mapped_over_zerofx"] = round(statistics.median(times["mapped"]) / statistics.median(times["zerofx"]), 2)
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
    parser.add_argument("--mapped", type=int, default=100, help="the largest size of the mapped optimizer")
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
