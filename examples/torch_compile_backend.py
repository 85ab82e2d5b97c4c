"""zerofx as a backend of torch.compile: one line of a loop that compiles already.

    torchrun --nproc-per-node 2 examples/torch_compile_backend.py

The model is sharded when it is called first. An optimizer made before that holds the same parameter objects, and goes
on with them. What `torch.compile` compiles besides, such as a function around the model, is compiled as always.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx  # it registers the backend, too, where the package is not installed


class Model(nn.Module):
    """Tells of three numbers which is the largest."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, dim), nn.GELU(), nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, 3))

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), x.argmax(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--executor", default="inductor", choices=("inductor", "eager"))
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model(args.dim)
    compiled = torch.compile(model, backend="zerofx", options={"stage": args.stage, "executor": args.executor})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    torch.manual_seed(dist.get_rank() + 1)
    for step in range(1, args.steps + 1):
        loss = compiled(torch.randn(64, 3))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 and dist.get_rank() == 0:
            print(f"step {step:4}  loss {loss:.4f}", flush=True)

    memory = zerofx.memory_summary(model, optimizer)
    whole = zerofx.full_state_dict(model)  # on rank 0, under the names of the plain module
    if dist.get_rank() == 0:
        print(f"\n{memory}\n\nthe whole model has {sum(x.numel() for x in whole.values()):,} parameters")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
