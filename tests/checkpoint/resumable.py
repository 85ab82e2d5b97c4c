"""A training program as `torchrun` starts it, which kills one of its own ranks if told to: see test_faults.py.

`train` is all of it but the process group.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import zerofx
from tests.checkpoint.nets import Net, batch


def train(folder: Path, steps: int, kill_at: int = -1, fail_at: int = -1) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = zerofx.compile(Net(), stage=3, executor="eager")
    optimizer = zerofx.AdamW(model.parameters(), lr=0.01)
    folder.mkdir(parents=True, exist_ok=True)
    start = zerofx.load(folder, model, optimizer)["step"] if zerofx.latest(folder) else 0
    first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    for step in range(start, steps):
        if rank == 1 and first_life and step == fail_at:
            raise ValueError("this rank's data is broken")
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        if rank == 0:
            with open(folder.parent / "losses", "a") as file:
                file.write(json.dumps([step, mean.item() / size]) + "\n")
        if rank == size - 1 and first_life and step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if step % 2 == 1:
            zerofx.save(folder, model, optimizer, step=step + 1, keep=2)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
    dist.destroy_process_group()
