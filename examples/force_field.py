"""A force field: energies, and forces as the gradient of the energy by positions, which is inside of the loss.

    python examples/force_field.py                                   # starts two ranks here
    torchrun --nproc-per-node 2 examples/force_field.py --stage 2

`Field.forward` calls `torch.autograd.grad(..., create_graph=True)`. zerofx has it traced, so weights are gathered, and
gradients of gradients reduced, by the graphs that any other model gets. The data are clusters of 6 to 9 atoms of two
species, with the energies and forces of a Lennard-Jones potential. Each batch has another number of atoms, and another
on each rank.
"""

from __future__ import annotations

import argparse
import os

import local_ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx

SIZES = torch.tensor([[1.0, 1.1], [1.1, 1.2]])  # of a pair, by the species of both
CUTOFF = 3.0


class Clusters:
    """Some clusters, end to end: ``species`` [atoms], ``positions`` [atoms, 3], ``pairs`` [2, pairs] of one cluster."""

    def __init__(self, count: int, generator: torch.Generator) -> None:
        sizes = torch.randint(6, 10, (count,), generator=generator).tolist()
        lattice = torch.cartesian_prod(*[torch.arange(3.0)] * 3)
        spots = [1.35 * lattice[torch.randperm(27, generator=generator)[:n]] for n in sizes]
        self.positions = torch.cat(spots)
        self.positions += 0.06 * torch.randn(self.positions.shape, generator=generator)
        self.species = torch.randint(2, (len(self.positions),), generator=generator)
        self.cluster = torch.repeat_interleave(torch.arange(count), torch.tensor(sizes))
        near = (self.positions[:, None] - self.positions).norm(dim=2) < CUTOFF
        same = self.cluster[:, None] == self.cluster
        self.pairs = (near & same & ~torch.eye(len(self.species), dtype=torch.bool)).nonzero().T.contiguous()
        self.count = count
        self.forces = self._forces()

    def _forces(self) -> Tensor:
        """Of the potential 4 e ((s/r)^12 - (s/r)^6) with e = 1/4; each pair is there twice."""
        positions = self.positions.clone().requires_grad_()
        sender, receiver = self.pairs
        distance = (positions[sender] - positions[receiver]).norm(dim=1)
        ratio = SIZES[self.species[sender], self.species[receiver]] / distance
        (gradient,) = torch.autograd.grad((ratio**12 - ratio**6).sum() / 2, positions)
        return -gradient


class Field(nn.Module):
    """Messages between atoms, by their distance; the energy is a sum over atoms, and does not turn with the cluster."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.register_buffer("centers", torch.linspace(0.8, CUTOFF, 24))
        self.species = nn.Embedding(2, dim)
        self.filters = nn.ModuleList(
            nn.Sequential(nn.Linear(24, dim), nn.SiLU(), nn.Linear(dim, dim)) for _ in range(layers)
        )
        self.updates = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim)) for _ in range(layers)
        )
        self.energy = nn.Linear(dim, 1)

    def forward(self, species: Tensor, positions: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
        """Energies of atoms [atoms, 1] and forces on them [atoms, 3]."""
        positions = positions.detach().requires_grad_()
        sender, receiver = pairs
        distance = (positions[sender] - positions[receiver]).square().sum(1, keepdim=True).sqrt()
        waves = torch.exp(-20.0 * (distance - self.centers) ** 2) * torch.cos(distance * torch.pi / (2 * CUTOFF))
        atoms = self.species(species)
        for wave, update in zip(self.filters, self.updates, strict=True):
            messages = atoms[sender] * wave(waves)
            atoms = atoms + update(torch.zeros_like(atoms).index_add(0, receiver, messages))
        energies = self.energy(atoms)
        (gradient,) = torch.autograd.grad(energies.sum(), positions, create_graph=True)
        return energies, -gradient


def error(model: nn.Module, data: Clusters) -> Tensor:
    """The mean squared error of forces. An energy is known but for a constant, so its gradient says all there is."""
    _, forces = model(data.species, data.positions, data.pairs)
    return (forces - data.forces).square().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="clusters of a step and rank")
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--executor", default="inductor", choices=("inductor", "eager"))
    args = parser.parse_args()
    if "RANK" not in os.environ:
        return local_ranks.launch(2)

    device = local_ranks.join()
    if device.type != "cpu":
        torch.set_default_device(device)
    torch.manual_seed(0)
    model = zerofx.compile(Field(args.dim, args.layers), stage=args.stage, executor=args.executor)
    optimizer = zerofx.AdamW(model.parameters(), lr=3e-3, max_grad_norm=10.0)
    held_out = Clusters(32, torch.Generator(device).manual_seed(0))
    local_ranks.say(f"mean square of held-out forces {held_out.forces.square().mean():.4f}")
    data = torch.Generator(device).manual_seed(1 + dist.get_rank())
    for step in range(1, args.steps + 1):
        loss = error(model, Clusters(args.batch, data))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            local_ranks.say(f"step {step:5}  error of forces {local_ranks.mean_over_ranks(loss.detach()):.4f}")
    local_ranks.say(f"held-out error of forces {error(model, held_out).item():.4f}, {len(zerofx.graphs(model))} graphs")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
