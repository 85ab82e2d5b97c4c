"""Train, be killed, go on: a run that survives the death of its ranks.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/resume.py
    torchrun --nproc-per-node 2 --max-restarts 3 examples/resume.py --kill-at 25     # a rank dies at step 25
    torchrun --nproc-per-node 3 examples/resume.py --steps 80                        # later, on more ranks

Whenever it starts it goes on from the latest whole checkpoint, with the same losses as if it had never stopped; on
another number of ranks the same to rounding. `torchrun` starts it anew when a rank has died. The folder is
``checkpoints/``, or what ``--folder`` says; the last checkpoint is also written there as safetensors, for others.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx

BATCH = 24  # of all ranks together


class Model(nn.Module):
    """Learns the sum of two digits, as a character model would: from their embeddings."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, dim)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(2 * dim), nn.Linear(2 * dim, 2 * dim)) for _ in range(3))
        self.head = nn.Linear(2 * dim, 19)

    def forward(self, pairs: Tensor, sums: Tensor) -> Tensor:
        hidden = self.embedding(pairs).flatten(1)
        for block in self.blocks:
            hidden = hidden + F.gelu(block(hidden))
        return F.cross_entropy(self.head(hidden), sums)


def batch(step: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """This rank's part of the step's batch: a function of the step alone, so there is no place in the data to save."""
    pairs = torch.randint(10, (BATCH, 2), generator=torch.Generator().manual_seed(step))
    mine = pairs[rank * BATCH // ranks : (rank + 1) * BATCH // ranks]
    return mine, mine.sum(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--executor", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--kill-at", type=int, default=-1, help="the step at which the last rank kills itself, once")
    args = parser.parse_args()

    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    model = zerofx.compile(Model().to(device), stage=args.stage, executor=args.executor)
    optimizer = zerofx.AdamW(model.parameters(), lr=3e-3, max_grad_norm=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)

    start = 0
    if zerofx.latest(args.folder):  # of any number of ranks, in any stage
        start = zerofx.load(args.folder, model, optimizer, rng=False, scheduler=scheduler)["step"]
        if rank == 0:
            print(f"resumed from step {start}", flush=True)

    for step in range(start, args.steps):
        pairs, sums = batch(step, rank, ranks)
        loss = model(pairs.to(device), sums.to(device))
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

        dist.all_reduce(mean := loss.detach())
        if rank == 0 and (step + 1) % 5 == 0:
            print(f"step {step + 1:4}  loss {mean.item() / ranks:.6f}", flush=True)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            zerofx.save(args.folder, model, optimizer, step=step + 1, keep=2, background=True, scheduler=scheduler)
        if step + 1 == args.kill_at and rank == ranks - 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
            os.kill(os.getpid(), signal.SIGKILL)

    zerofx.export_safetensors(model, args.folder / "safetensors")  # waits for the save in the background
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
