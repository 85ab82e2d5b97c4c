"""The optimizer's state on a disk: a model trains that would not fit with it in memory.

    torchrun --nproc-per-node 2 examples/offload.py --scratch /tmp

Each rank has a file in the scratch folder. `zerofx.AdamW` reads, updates and writes it chunk by chunk. The files end
with the run. What a run goes on from is its checkpoint, as ever.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zerofx


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="a folder on a local disk")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--executor", default="inductor", choices=["inductor", "eager"])
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(args.dim, args.dim), nn.Tanh()) for _ in range(4)))
    model = zerofx.compile(model, stage=3, executor=args.executor, offload=args.scratch)
    optimizer = zerofx.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)

    x = torch.randn(32, args.dim, generator=torch.Generator().manual_seed(dist.get_rank()))
    for step in range(args.steps):
        loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
    if dist.get_rank() == 0:
        print(zerofx.memory_summary(model, optimizer))

    del model, optimizer
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
