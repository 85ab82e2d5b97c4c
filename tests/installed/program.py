"""What a user's program does, in small: every stage on two ranks, against one process.

    torchrun --nproc-per-node 2 program.py REPOSITORY eager inductor

It knows torch and zerofx alone, and refuses a zerofx that lies inside of the repository.
"""

import importlib
import pkgutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zerofx


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()) for _ in range(3)])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor]) -> list[float]:
    losses = []
    for batch in batches:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(repository: str, *executors: str) -> None:
    place = Path(zerofx.__file__).resolve()
    assert not place.is_relative_to(repository), f"{place} is the repository's zerofx, not the one installed"
    for module in pkgutil.walk_packages(zerofx.__path__, "zerofx."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)

    assert len(zerofx.plan(build(), world_size=16).stages) == 4
    batches = list(torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(1)))
    alone = build()
    expected = train(alone, torch.optim.AdamW(alone.parameters(), lr=1e-2), batches)

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mine = [batch.chunk(dist.get_world_size())[rank] for batch in batches]
    for executor in executors:
        for stage in range(4):
            model = zerofx.compile(build(), stage=stage, executor=executor)
            losses = torch.tensor(train(model, zerofx.AdamW(model.parameters(), lr=1e-2), mine))
            dist.all_reduce(losses)
            losses /= dist.get_world_size()
            torch.testing.assert_close(losses, torch.tensor(expected), rtol=1e-5, atol=1e-6)
            zerofx.save(f"checkpoint-{executor}-{stage}", model, step=3)
            for name, whole in zerofx.full_state_dict(model).items():
                torch.testing.assert_close(whole, alone.state_dict()[name], rtol=1e-4, atol=1e-5, msg=name)
            if rank == 0:
                print(f"{executor}, stage {stage}: {' '.join(f'{loss:.6f}' for loss in losses)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
