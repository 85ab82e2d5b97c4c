"""A small diffusion model, sharded, with an average of its weights: samples are drawn from the averages.

    torchrun --nproc-per-node 2 examples/ema.py

Points on a circle are learnt from their noisy copies. Each step moves the averages by 1 percent towards the weights.
In the end both draw samples, and the program prints how far these are from the circle. Model and averages are saved
together; on its next start, on any number of ranks, it goes on from there.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx

LEVELS = 30
"""Steps of noise, from none to all."""


class Denoiser(nn.Module):
    """The noise in points of the plane, at a level from 0 to 1."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.enter = nn.Linear(3, dim)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.SiLU()) for _ in range(4))
        self.leave = nn.Linear(dim, 2)

    def forward(self, points: Tensor, level: Tensor) -> Tensor:
        hidden = self.enter(torch.cat([points, level], dim=-1))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.leave(hidden)


def kept(level: Tensor) -> Tensor:
    """How much of a point's square is left of it at ``level``: the cosine schedule."""
    return torch.cos(level * 0.95 * torch.pi / 2) ** 2


def circle(count: int) -> Tensor:
    angle = 2 * torch.pi * torch.rand(count)
    return torch.stack([angle.cos(), angle.sin()], dim=-1)


@torch.no_grad()
def distance(model: nn.Module, device: torch.device) -> float:
    """The mean distance of samples from the circle; all ranks draw the same."""
    draw = torch.Generator().manual_seed(1)
    points = torch.randn(512, 2, generator=draw).to(device)
    for step in range(LEVELS, 0, -1):
        level, next_level = (torch.full((512, 1), i / LEVELS, device=device) for i in (step, step - 1))
        noise = model(points, level)
        clean = (points - (1 - kept(level)).sqrt() * noise) / kept(level).sqrt()
        points = kept(next_level).sqrt() * clean + (1 - kept(next_level)).sqrt() * noise
    return (points.norm(dim=-1) - 1).abs().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/ema"))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--stage", type=int, default=3, choices=range(4))
    parser.add_argument("--executor", default="inductor", choices=("inductor", "eager"))
    args = parser.parse_args()

    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)

    model = zerofx.compile(Denoiser(args.dim).to(device), stage=args.stage, executor=args.executor)
    optimizer = zerofx.AdamW(model.parameters(), lr=3e-3, max_grad_norm=1.0)
    ema = zerofx.EMA(model, decay=0.99)
    both = nn.ModuleDict({"model": model, "ema": ema})
    start = zerofx.load(args.folder, both, optimizer, rng=False)["step"] if zerofx.latest(args.folder) else 0

    for step in range(start, start + args.steps):
        torch.manual_seed(step * dist.get_world_size() + dist.get_rank())
        points, noise, level = circle(256).to(device), torch.randn(256, 2).to(device), torch.rand(256, 1).to(device)
        noisy = kept(level).sqrt() * points + (1 - kept(level)).sqrt() * noise
        F.mse_loss(model(noisy, level), noise).backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update()

    zerofx.save(args.folder, both, optimizer, step=start + args.steps)
    of_weights = distance(model, device)
    with ema.swapped():  # the averages are in the model's place
        of_averages = distance(model, device)
    if dist.get_rank() == 0:
        print(f"step {start + args.steps}: samples are {of_weights:.4f} from the circle, of averages {of_averages:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
