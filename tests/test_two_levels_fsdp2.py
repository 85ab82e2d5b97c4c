"""FSDP2's own cases of hybrid sharding (docs/fsdp2-parity.md), beside FSDP2 itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zerofx
from tests.models import MLP

BETWEEN = zerofx.Sharding(gradients="all", optimizer="all")


def build() -> MLP:
    torch.manual_seed(0)
    return MLP()


def train(model: nn.Module, accumulate: Any) -> list[float]:
    """Losses of this rank and norms, two micro-batches a step; the first is not reduced."""
    optimizer, history = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        for last in (False, True):
            x, y = torch.randn(4, 13, generator=generator), torch.randn(4, 7, generator=generator)
            with accumulate(last):
                loss = model(x, y)
                loss.backward()
            history.append(loss.item())
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        history.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        optimizer.step()
        optimizer.zero_grad()
    return history


class Unreduced:
    """FSDP2's way of saying that a backward does not reduce."""

    def __init__(self, model: Any, last: bool) -> None:
        self.model, self.last = model, last

    def __enter__(self) -> None:
        self.model.set_requires_gradient_sync(self.last)

    def __exit__(self, *_: Any) -> None:
        self.model.set_requires_gradient_sync(True)


def train_parity_hsdp(shape: tuple[int, int]) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    theirs: Any = build()
    for layer in (theirs.first, theirs.second, theirs.third):
        fully_shard(layer, mesh=mesh)
    fully_shard(theirs, mesh=mesh)
    wanted = train(theirs, lambda last: Unreduced(theirs, last))
    for options in ({}, {"stage": 2}, {"sharding": BETWEEN}):
        unnamed = init_device_mesh("cpu", shape)
        ours = zerofx.compile(build(), mesh=unnamed, executor="eager", groups=zerofx.Grouping(min_bytes=0), **options)

        def accumulate(last: bool, ours: Any = ours) -> Any:
            return torch.enable_grad() if last else zerofx.no_sync(ours)

        assert train(ours, accumulate) == pytest.approx(wanted, rel=1e-5), options


@pytest.mark.parametrize("shape", [(2, 2)])
def test_train_parity_hsdp_and_clip_grad_norm_2d(make_workers: Any, shape: tuple[int, int]) -> None:
    make_workers(4).run(train_parity_hsdp, shape)


def broadcast_and_meta() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    wanted = build().state_dict()
    for sharding in (None, BETWEEN):
        torch.manual_seed(dist.get_rank())
        drawn = zerofx.shard(MLP() if dist.get_rank() else build(), mesh=mesh, sharding=sharding)
        with torch.device("meta"):
            model = MLP()
        torch.manual_seed(dist.get_rank())
        meta = zerofx.shard(model, mesh=mesh, sharding=sharding)
        for model in (drawn, meta):
            found = zerofx.full_state_dict(model, rank0_only=False)
            everyones: list[Any] = [None] * 4
            dist.all_gather_object(everyones, {name: value.sum().item() for name, value in found.items()})
            assert everyones == [everyones[0]] * 4
        for name, value in zerofx.full_state_dict(drawn, rank0_only=False).items():
            assert value.equal(wanted[name])
        groups = {p._group.sharing.weights.name for p in drawn.parameters()}
        assert groups == {mesh.get_group("shard").group_name}


def test_hsdp_broadcast_across_replicas_meta_device_2d_init_and_2d_process_group_init(make_workers: Any) -> None:
    make_workers(4).run(broadcast_and_meta)
