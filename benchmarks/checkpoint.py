"""Time to save and to load, zerofx beside FSDP2 with torch.distributed.checkpoint: one run, interleaved.

    python benchmarks/checkpoint.py                            # 2 gloo ranks, 1 GB of weights and AdamW's moments
    python benchmarks/checkpoint.py --folder /mnt/disk --rounds 9

Both hold the same model, sharded over the same ranks, in float32. In every round each saves to a new folder and loads
it again, in an order that rotates. All files are forced to the disk; zerofx writes and checks checksums besides. The
time is that of the slowest rank. ``stops`` is how long training stands still while a save goes on in the background.

What is loaded is compared with what was saved, bit for bit, at the end.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the ranks
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: E402

import zerofx  # noqa: E402
from benchmarks.step import fsdp2, join, now, over_ranks, processor  # noqa: E402
from tests.models import GPT  # noqa: E402


class Contender:
    """A model with its optimizer's state. ``save`` in the background returns what waits for its end."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model, self.optimizer = self.build(GPT(args.layers, args.dim, args.heads, args.vocab, 64).to(device))
        for p in self.model.parameters():
            p.grad = torch.ones_like(p)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.nbytes = 3 * sum(p.numel() * p.element_size() for p in self.model.parameters())

    def build(self, model: GPT) -> tuple[Any, Any]:
        raise NotImplementedError

    def save(self, folder: Path) -> Any:
        raise NotImplementedError

    def save_in_background(self, folder: Path) -> Callable[[], Any]:
        raise NotImplementedError

    def load(self, folder: Path) -> None:
        raise NotImplementedError

    def tensors(self) -> list[torch.Tensor]:
        """All that this rank holds."""
        states = [state[name] for state in self.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        return [x.detach().to_local() for x in (*self.model.parameters(), *states)]


class Zerofx(Contender):
    def build(self, model: GPT) -> tuple[Any, Any]:
        zerofx.shard(model)
        return model, zerofx.AdamW(model.parameters())

    def save(self, folder: Path) -> Any:
        zerofx.save(folder, self.model, self.optimizer)

    def save_in_background(self, folder: Path) -> Callable[[], Any]:
        return zerofx.save(folder, self.model, self.optimizer, background=True).result

    def load(self, folder: Path) -> None:
        zerofx.load(folder, self.model, self.optimizer)


class Fsdp2(Contender):
    def build(self, model: GPT) -> tuple[Any, Any]:
        # a thread saves, and says so to the other ranks: not in the midst of what this one says
        self.of_the_thread = dist.new_group(backend="gloo")
        sharded = fsdp2(compiled=False)(model)
        return sharded, torch.optim.AdamW(sharded.parameters())

    def state(self) -> dict[str, Any]:
        weights, states = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optim": states}

    def save(self, folder: Path) -> Any:
        dcp.save(self.state(), checkpoint_id=folder)

    def save_in_background(self, folder: Path) -> Callable[[], Any]:
        future: Any = dcp.async_save(self.state(), checkpoint_id=folder, process_group=self.of_the_thread)
        return getattr(future, "upload_completion", future).result

    def load(self, folder: Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


CONTENDERS: dict[str, type[Contender]] = {"zerofx": Zerofx, "fsdp2": Fsdp2}


def run(rank: int, args: argparse.Namespace, rendezvous: str, answer: str) -> None:
    """One rank: the contenders take turns, and rank 0 writes what came of it."""
    warnings.simplefilter("ignore")
    device = join(rank, args, rendezvous)
    contenders = {name: cls(args, device) for name, cls in CONTENDERS.items()}
    before = {name: [x.clone() for x in c.tensors()] for name, c in contenders.items()}
    times: dict[str, dict[str, list[float]]] = {name: {} for name in contenders}

    def timed(name: str, what: str, work: Callable[[], Any], round_: int) -> Any:
        dist.barrier()
        start = now(device)
        result = work()
        elapsed = over_ranks(torch.tensor([now(device) - start], device=device), dist.ReduceOp.MAX)[0]
        if round_ > 0:  # the first one warms up
            times[name].setdefault(what, []).append(elapsed)
        return result

    def turn(name: str, round_: int) -> None:
        contender, folder = contenders[name], Path(args.folder) / f"{name}-{round_}"
        timed(name, "save", lambda: contender.save(folder), round_)
        if round_ == args.rounds:
            for x in contender.tensors():
                x.zero_()
        timed(name, "load", lambda: contender.load(folder), round_)
        wait = timed(name, "stops", lambda: contender.save_in_background(folder.with_suffix(".2")), round_)
        wait()
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder)
            shutil.rmtree(folder.with_suffix(".2"))

    names = list(contenders)
    for round_ in range(args.rounds + 1):
        for i in range(len(names)):
            turn(names[(i + round_) % len(names)], round_)
        if rank == 0 and round_:
            print(f"round {round_}/{args.rounds}: " + "; ".join(
                f"{name} " + ", ".join(f"{what} {seconds[-1]:.2f}" for what, seconds in times[name].items())
                for name in names
            ), flush=True)  # fmt: skip
    for name, contender in contenders.items():
        assert all(map(torch.equal, before[name], contender.tensors())), f"{name} loaded other numbers"
    if rank == 0:
        facts = {
            name: {
                what: {"median_s": statistics.median(s), "min_s": min(s), "max_s": max(s), "n": len(s)}
                for what, s in times[name].items()
            }
            for name in names
        }
        Path(answer).write_text(json.dumps({"contenders": facts, "bytes": contenders[names[0]].nbytes}))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # torch sometimes aborts as the interpreter ends, with threads of gloo still there


def main() -> int:
    parser = argparse.ArgumentParser(description="Time to save and to load, zerofx beside FSDP2.")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--folder", type=Path, help="where to write checkpoints; default: a temporary folder")
    defaults = {"world": 2, "rounds": 5, "layers": 6, "dim": 1024, "heads": 16, "vocab": 4096}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/checkpoint-<device>-<world>.json")
    args = parser.parse_args()
    out = args.out or ROOT / "benchmarks" / "results" / f"checkpoint-{args.device}-{args.world}.json"
    with tempfile.TemporaryDirectory(prefix="zerofx-benchmark-", dir=args.folder) as folder:
        args.folder = folder
        answer = Path(folder) / "answer.json"
        spawn: Any = torch.multiprocessing.spawn
        start = time.perf_counter()
        spawn(run, (args, f"file://{folder}/rendezvous", str(answer)), nprocs=args.world)
        result = json.loads(answer.read_text())
    result |= {
        "command": " ".join(["python benchmarks/checkpoint.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "processor": processor(args.device),
        "load_average": os.getloadavg()[0],  # about one per rank where nothing else ran
        "settings": {name: getattr(args, name) for name in (*defaults, "device")},
        "seconds": time.perf_counter() - start,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['bytes'] / 1e9:.2f} GB; median seconds of {args.rounds}")
    for name, facts in result["contenders"].items():
        print(f"{name:8}" + "".join(f" {what} {facts[what]['median_s']:7.3f}" for what in facts))
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
