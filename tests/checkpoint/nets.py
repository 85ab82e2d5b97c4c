"""The model that checkpoint tests train, and what they compare."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zerofx
from zerofx import ShardedTensor

EACH_GROUP = zerofx.Grouping(min_bytes=0)


class Net(nn.Module):
    """Every shape that is hard to cut: a scalar, one element, none, 1 to 4 dimensions, primes; tied, frozen, unused."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(23, 7)
            self.scale = nn.Parameter(torch.rand(()) + 1)
            self.none = nn.Parameter(torch.empty(0, 4))
            self.layers = nn.ModuleList([nn.Linear(7, 11), nn.Linear(11, 13)])
            self.conv = nn.Conv2d(1, 3, 2)
            self.norm = nn.BatchNorm1d(36)
            self.back = nn.Linear(36, 7)
            self.head = nn.Linear(7, 23, bias=False)
            self.head.weight = self.embedding.weight
            self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
            self.unused = nn.Parameter(torch.randn(5))
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))
            self.register_buffer("passing", torch.randn(3), persistent=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x) * self.scale + self.frozen
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        image = self.conv(hidden[:, None, None, :].expand(-1, -1, 2, -1)).flatten(1)
        logits = self.head(self.back(image))
        return F.cross_entropy(logits.float(), y)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of a batch of 24."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randint(23, (2, 24), generator=generator)
    size = 24 // dist.get_world_size()
    mine = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
    return x[mine], y[mine]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """This rank's losses."""
    losses = []
    for step in steps:
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(value: Any) -> Any:
    """A value of a state dict, unsharded. A collective."""
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """All that a checkpoint must bring back, unsharded, by name: gathered with nothing of zerofx.checkpoint."""
    names = {p: name for name, p in model.named_parameters()}
    found = {name: whole(value) for name, value in model.state_dict().items()}
    if optimizer is not None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                for what, value in sorted(optimizer.state.get(p, {}).items()):
                    found[f"{what} of {names[p]}"] = whole(value)
        for i, group in enumerate(optimizer.param_groups):
            options = {k: v for k, v in group.items() if k not in ("params", "foreach", "fused")}
            found[f"options {i}"] = sorted(options.items())
    return found


def digests(state: dict[str, Any]) -> dict[str, str]:
    """Short forms of the values, equal where they are bitwise equal."""

    def digest(x: Any) -> str:
        if not isinstance(x, torch.Tensor):
            return repr(x)
        raw = x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{x.dtype} {list(x.shape)} {hashlib.sha256(raw).hexdigest()[:16]}"

    return {name: digest(value) for name, value in state.items()}


def differing(mine: dict[str, str], theirs: dict[str, str]) -> dict[str, tuple[Any, Any]]:
    return {k: (mine.get(k), theirs.get(k)) for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k)}


def disturb(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Other numbers everywhere, so that nothing is right after a load because it was before."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.add_(1)
    for group in optimizer.param_groups:
        group["lr"] = 7.0


def sharded_bytes(model: nn.Module) -> int:
    return sum(p._local.nbytes for p in model.parameters() if isinstance(p, ShardedTensor))
