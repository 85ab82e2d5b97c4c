"""Training steps over a slow link: zerofx and its peers on hosts of their own, at several rates, for several models.

    sudo python benchmarks/two_hosts.py                                                     # everything: hours
    sudo python benchmarks/two_hosts.py --rates 1gbit --models gpt --contenders zerofx,alone,fsdp2+prefetch
    sudo python benchmarks/two_hosts.py --world 4 --ranks-per-host 2 --contenders zerofx-rows,zerofx-between,fsdp2-hsdp

Hosts are network namespaces (benchmarks/hosts.py) with one rank and one core each, started by torchrun; with
``--ranks-per-host`` several ranks of a host share its link. In every run
the contenders take turns, as in benchmarks/step.py. Beside them the same run measures what no schedule can beat:

* the arithmetic: the same model, compiled, on all ranks, without any communication (contender ``alone``);
* the wire: what the link carries in both directions at once, through plain sockets, times the bytes of a step.

glibc is told to keep what is freed (`KEEP`). By itself it gives buffers of more than 32 MiB back and asks Linux for new
pages for the next; all contenders have such buffers, and what they take differs with who shares the process.

The larger of the two is the *bound*; a contender's time over its bound says how much of the other is exposed. Where
both want one core, no schedule reaches it: contenders ``alone+bytes-2`` and ``-3`` say what one could (`step.Beside`).

A run replaces what the file has of the same model and rate, and leaves the rest; beside it a plot is drawn of all.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["OMP_NUM_THREADS"] = "1"

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks import step, themed  # noqa: E402
from benchmarks.hosts import Hosts  # noqa: E402

MODELS = {
    "gpt": {"layers": 8, "dim": 512, "heads": 8, "vocab": 4096, "length": 256, "batch": 2},
    "deep": {"layers": 24, "dim": 256, "heads": 4, "vocab": 2048, "length": 256, "batch": 2},
    "wide": {"layers": 2, "dim": 1024, "heads": 16, "vocab": 2048, "length": 256, "batch": 2},
    "few-tokens": {"layers": 8, "dim": 512, "heads": 8, "vocab": 4096, "length": 16, "batch": 1},
    "embedding": {"layers": 4, "dim": 256, "heads": 4, "vocab": 32768, "length": 128, "batch": 2},
}
RATES = {"loopback": 2e9, "10gbit": 1.25e9, "1gbit": 1.25e8, "250mbit": 3.125e7}
"""Names, as tc knows them, and bytes per second to expect."""
KEEP = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=4294967296"
"""What ranks start with, unless the environment says otherwise."""


def main() -> int:
    args = parse()
    if dist.is_torchelastic_launched():
        be_a_rank(args)
    runs = json.loads(args.out.read_text())["runs"] if args.out.exists() else {}
    wrong = False
    for model in args.models:
        for rate in args.rates:
            found = race(args, model, rate)
            print(f"{model} at {rate}: {report(found)}", flush=True)
            runs[f"{model} at {rate}"] = facts(model) | found
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
            wrong |= bool(found["failed"]) or not found["largest_relative_difference_of_losses"] <= 1e-4
    plot(runs, args.out.with_suffix(".svg"))
    return int(wrong)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Training steps over a slow link, zerofx beside its peers.")
    parser.add_argument("--contenders", default=",".join(step.CONTENDERS), type=lambda text: text.split(","))
    parser.add_argument("--models", default=list(MODELS), type=lambda text: text.split(","))
    parser.add_argument("--rates", default=list(RATES), type=lambda text: text.split(","))
    for name, value in {"world": 2, "ranks-per-host": 1, "rounds": 4, "steps": 3, "warmup": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "two_hosts.json")
    parser.add_argument("--answer", help=argparse.SUPPRESS)  # of a rank: where its results go
    parser.add_argument("--device", default="cpu", choices=("cpu",))
    args = parser.parse_args()
    contenders = step.CONTENDERS | step.BUDGETS | step.CODED
    for name, known in (("contenders", contenders), ("models", MODELS), ("rates", RATES)):
        if not set(getattr(args, name)) <= set(known):
            parser.error(f"--{name}: expected some of {', '.join(known)}")
    return args


def race(args: argparse.Namespace, model: str, rate: str) -> dict[str, Any]:
    """One run: the ranks of ``args.world`` hosts, and what they found."""
    count = args.world // args.ranks_per_host
    with Hosts(count, None if rate == "loopback" else rate) as hosts, tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        ranks = []
        for host in range(count):
            torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={count}", f"--node-rank={host}"]
            torchrun += [f"--nproc-per-node={args.ranks_per_host}"]
            torchrun += [f"--master-addr={hosts.address(0)}", "--master-port=29511"]
            # Of ranks on several hosts there is no common memory.
            here = [name for name in args.contenders if rate == "loopback" or "one-copy" not in name]
            command = [__file__, f"--contenders={','.join(here)}", f"--models={model}", f"--rates={rate}"]
            command += [f"--{name}={getattr(args, name)}" for name in ("world", "rounds", "steps", "warmup")]
            command += [f"--ranks-per-host={args.ranks_per_host}"]
            env = {"GLIBC_TUNABLES": KEEP} | os.environ
            env |= {"GLOO_SOCKET_IFNAME": hosts.interface, "ZEROFX_HOSTS": hosts.address(host)}
            command = [*hosts.inside(host), *torchrun, *command, f"--answer={answer}"]
            ranks.append(subprocess.Popen(command, env=env))
        try:
            codes = [rank.wait(timeout=3600) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            raise RuntimeError(f"{model} at {rate}: the hosts ended with {codes}")
        return json.loads(answer.read_text())


def be_a_rank(args: argparse.Namespace) -> None:
    """What torchrun starts on each host. Does not return."""
    rank = int(os.environ["RANK"])
    for name, value in MODELS[args.models[0]].items():
        setattr(args, name, value)
    device = step.join(rank, args, "env://")
    link = [link_rate(rank, args, RATES[args.rates[0]])]
    result = step.take_turns(rank, args, device)
    link.append(link_rate(rank, args, RATES[args.rates[0]]))
    if rank == 0:
        result["ranks_per_host"] = args.ranks_per_host
        result["link_bytes_per_s"] = max(link)
        result["glibc_tunables"] = os.environ["GLIBC_TUNABLES"]
        result["largest_relative_difference_of_losses"] = step.spread_of_losses(result["contenders"])
        Path(args.answer).write_text(json.dumps(result))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def link_rate(rank: int, args: argparse.Namespace, expected: float) -> float:
    """Bytes per second that this host sends while it receives as many: plain TCP sockets, the hosts in a ring.

    The first rank of each host takes part; the others learn nothing.
    """
    first, world = args.ranks_per_host, args.world
    nbytes, chunk = int(expected / 2), bytearray(1 << 20)
    server = socket.create_server((os.environ["ZEROFX_HOSTS"], 0))
    addresses: list[Any] = [None] * world
    dist.all_gather_object(addresses, server.getsockname())
    if rank % first:
        for _ in range(3):
            dist.barrier()
        return 0.0
    out = socket.create_connection(addresses[(rank + first) % world])
    into, _ = server.accept()

    def send() -> None:
        for start in range(0, nbytes, len(chunk)):
            out.sendall(memoryview(chunk)[: nbytes - start])

    best, inbox = 0.0, bytearray(1 << 20)
    for _ in range(3):
        dist.barrier()
        sender, got, start = threading.Thread(target=send), 0, time.perf_counter()
        sender.start()
        while got < nbytes:
            got += into.recv_into(inbox, min(len(inbox), nbytes - got))
        sender.join()
        best = max(best, nbytes / (time.perf_counter() - start))
    for end in (out, into, server):
        end.close()
    return best


def report(result: dict[str, Any]) -> str:
    """The table of one run."""
    contenders, link = result["contenders"], result["link_bytes_per_s"]
    arithmetic = contenders["alone"]["median_s"] if "alone" in contenders else 0.0
    lines = [f"the link carries {link / 1e6:.1f} MB/s each way"]
    head = (
        f"{'contender':24} {'median s':>9} {'min':>7} {'max':>7} {'wire s':>7} {'cpu s':>6} {'bound':>7} {'/ bound':>7}"
    )
    lines += [f"{head}   {step.PREDICTED}"]
    for name, c in sorted(contenders.items(), key=lambda item: item[1]["median_s"]):
        c["wire_s"] = c["bytes_between_hosts"] * result["ranks_per_host"] / link
        c["bound_s"] = max(c["wire_s"], arithmetic)
        line = f"{name:24} {c['median_s']:9.3f} {c['min_s']:7.3f} {c['max_s']:7.3f}"
        line += f" {c['wire_s']:7.3f} {c['processor_s']:6.3f} {c['bound_s']:7.3f} {c['median_s'] / c['bound_s']:7.2f}"
        lines.append(f"{line}   {step.predicted(c)}".rstrip())
    return "\n".join([*lines, f"losses differ by at most {result['largest_relative_difference_of_losses']:.1e}", ""])


def facts(model: str) -> dict[str, Any]:
    return {
        "command": " ".join(["python benchmarks/two_hosts.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "processor": step.processor("cpu"),
        "settings": MODELS[model],
    }


def plot(runs: dict[str, Any], path: Path) -> None:
    """A panel for each run: a bar for each contender's median step, its spread, and a tick where its bound is."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "zerofx"
    import matplotlib.pyplot as plt

    heights = [len(run["contenders"]) for run in runs.values()]
    size = (7, 0.8 + 0.24 * sum(heights) + 0.5 * len(runs))
    ratios: dict[str, Any] = {"height_ratios": heights}
    figure, axes = plt.subplots(len(runs), 1, figsize=size, layout="constrained", squeeze=False, gridspec_kw=ratios)
    for (name, run), axis in zip(runs.items(), axes[:, 0], strict=True):
        rows = sorted(run["contenders"].items(), key=lambda item: -item[1]["median_s"])
        for y, (contender, c) in enumerate(rows):
            color = "tab:blue" if contender.startswith("zerofx") else "lightgray"
            spread = [[c["median_s"] - c["min_s"]], [c["max_s"] - c["median_s"]]]
            axis.barh(y, c["median_s"], xerr=spread, color=color, error_kw={"linewidth": 0.8})
            axis.vlines(c["bound_s"], y - 0.4, y + 0.4, color="black", linewidth=1.5)
        axis.set_yticks(range(len(rows)), [contender for contender, _ in rows])
        axis.set_title(name, loc="left", fontsize=10)
    axes[-1, 0].set_xlabel("seconds a step; black: no schedule can be faster")
    themed.save(figure, path)


if __name__ == "__main__":
    sys.exit(main())
