"""Three steps of one architecture on ranks, and in one process that never heard of zerofx."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.agreement import assert_ranks_agree
from tests.zoo.architectures import ARCHITECTURES
from tests.zoo.base import make_batch
from zerofx.model import sharding
from zerofx.runtime.eager import unshard

STEPS, ROWS = 3, 2
SCHEMES: dict[str, zerofx.Sharding] = {scheme.name: scheme for scheme in sharding.SCHEMES}
"""How a mesh is divided (docs/meshes.md)."""


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Attributes:
        parameters: how many elements they have.
        graphs: how many graphs Dynamo made.
        places: the places outside of any graph that gather a weight on demand, as warnings named them.
        loss: the largest relative difference of a loss.
        weights: the largest difference of a weight at the end, relative to the largest of its parameter, or to a
            thousandth of the model's largest weight, or of 1.
        still: the share of the one process's parameters that have not moved.
    """

    parameters: int
    graphs: int
    places: tuple[str, ...]
    loss: float
    weights: float
    still: float

    @property
    def verdict(self) -> str:
        """What the table says of it: "equal", or what is not."""
        if not (self.loss < 1e-5 and self.weights < 1e-4):  # nan is not equal either
            return f"other numbers: losses off by {self.loss:.0e}, weights by {self.weights:.0e}"
        if self.still > 0.4:  # most have gradients, or equal numbers would mean nothing
            return f"{self.still:.0%} of the parameters did not move"
        return "equal"


def loss_of(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    out = model(**batch)
    return out if isinstance(out, torch.Tensor) else out.loss


def train(name: str, stage: int, executor: str = "eager", scheme: str = "") -> Outcome:
    """On each rank: both runs. One process takes the ranks' rows one after another and the mean of their losses.

    ``scheme``: of `SCHEMES`, on a mesh of two replicas; "": all ranks are one dimension.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    architecture = ARCHITECTURES[name]
    dtype = torch.float64 if architecture.chaotic else torch.float32
    plain = architecture.build(0).to(dtype)
    model = architecture.build(rank).to(dtype)  # rank 0's weights must win
    options: dict[str, Any] = {"stage": stage, "executor": executor, "groups": zerofx.Grouping(min_bytes=0)}
    if scheme:
        mesh = dist.init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        options |= {"mesh": mesh, "sharding": SCHEMES[scheme]}
    zerofx.compile(model, **options)
    start = [q.detach().clone() for q in plain.parameters()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model, plain)]
    places, worst = [], 0.0
    unshard._warned.clear()  # each place warns once per process
    for step in range(STEPS):
        batches = [make_batch(architecture.batch, ROWS, 10 * step + r, dtype) for r in range(world)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = loss_of(model, batches[rank])
            got.backward()
        places += [
            f"{w.filename.rpartition('site-packages/')[2]}:{w.lineno}"
            for w in caught
            if "gathered here" in str(w.message)
        ]
        wanted = torch.stack([loss_of(plain, batch) for batch in batches]).mean()
        wanted.backward()
        dist.all_reduce(mean := got.detach().clone())
        worst = max(worst, abs(mean.item() / world / wanted.item() - 1))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_ranks_agree(model)
    # A bias in front of a batch norm has a gradient of zero but for rounding, which is as large as what it adds up.
    weights, least = 0.0, 1e-3 * max(1.0, *(q.abs().max().item() for q in plain.parameters() if q.numel()))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        whole = p.full_tensor() if isinstance(p, zerofx.ShardedTensor) else p
        if q.numel():
            weights = max(weights, ((whole - q).abs().max() / q.abs().max().clamp(min=least)).item())
    still: float = sum(q.numel() > 0 and torch.equal(q, old) for q, old in zip(plain.parameters(), start, strict=True))
    still /= len(start)
    graphs = 0
    with contextlib.suppress(ValueError):
        graphs = len(zerofx.graphs(model))
    numel = sum(p.numel() for p in plain.parameters())
    return Outcome(numel, graphs, tuple(dict.fromkeys(places)), worst, weights, still)
