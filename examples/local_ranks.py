"""What train_gpt.py has around its training: ranks on this machine, and what they print."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx

try:
    from rich.progress import Progress
except ImportError:
    Progress = None


def launch(ranks: int) -> None:
    """Run this program once per rank on this machine. The first rank to fail, or Ctrl-C, ends them all."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # a free one
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the ranks inherit this: Ctrl-C is for the launcher alone
    workers = [
        subprocess.Popen([sys.executable, *sys.argv], env=environment | {"RANK": rank, "LOCAL_RANK": rank})
        for rank in map(str, range(ranks))
    ]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while None in (codes := [worker.poll() for worker in workers]) and not any(codes):
            time.sleep(0.1)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.wait()
        if sys.stdout.isatty():
            print("\033[?25h", end="")  # show the cursor, which a progress bar hides
    if any(codes):
        sys.exit(", ".join(f"rank {rank} failed with exit status {code}" for rank, code in enumerate(codes) if code))


def join() -> torch.device:
    """Make this process a rank; returns its GPU where there are enough of them, and the CPU otherwise."""
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def mean_over_ranks(value: Tensor) -> float:
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


@contextmanager
def progress(steps: int) -> Iterator[Callable[[int, float, float], None]]:
    """Gives ``show(step, loss, tokens_per_second)``: a bar on a terminal where rich is installed, else lines."""
    if dist.get_rank() == 0 and Progress is not None and sys.stdout.isatty():
        with Progress() as bar:
            task = bar.add_task("compiling", total=steps)
            yield lambda step, loss, rate: bar.update(
                task, completed=step, description=f"loss {loss:.3f}  {rate:,.0f} tokens/s"
            )
    else:
        yield lambda step, loss, rate: say(f"step {step:5}  loss {loss:.3f}  {rate:,.0f} tokens/s")


def describe(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What this rank keeps from one step to the next, read off the live tensors after a backward pass."""
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    moments = [t for state in optimizer.state.values() for t in state.values()]
    kept = sum(storages([*parameters, *gradients, *moments]).values())
    plain = 16 * sum(p.numel() for p in parameters)  # fp32 parameter, gradient and two moments
    if any(isinstance(p, zerofx.ShardedTensor) for p in parameters):
        say(f"groups    {len(storages(parameters))}, each gathered and reduced as one")
    say(f"memory    {kept / 1e6:.1f} MB of parameters, gradients and optimizer state per rank:")
    say(f"          {kept / plain:.2f} of the {plain / 1e6:.1f} MB of plain data parallelism")


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address and bytes of each distinct storage that holds this rank's part of the tensors."""
    local = [t.to_local() if isinstance(t, zerofx.ShardedTensor) else t for t in tensors]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}
