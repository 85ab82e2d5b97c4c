"""`zerofx.Muon` on several ranks is the one of one process: each matrix is orthogonalized once, by its owner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.counting import count_collectives
from tests.slow import quick_if, slow
from tests.workers import Workers

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "float32, clipped": {"iteration_dtype": torch.float32, "max_grad_norm": 0.5, "ns_coefficients": "polar_express"},
    "split": {"splits": {"blocks.*.qkv.weight": 3}, "adjust_lr_fn": "match_rms_adamw", "nesterov": False},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.qkv = nn.Linear(10, 30)
        self.out = nn.Linear(10, 10)
        self.experts = nn.Parameter(torch.randn(3, 10, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(torch.tanh(q) * torch.sigmoid(k) * v)
        return x + torch.einsum("bsd,edh,egh->bsg", x, self.experts, self.experts) / 100


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(23, 10)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.lm_head = nn.Linear(10, 23, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.lm_head(x).flatten(0, 1), labels.flatten())


def batches(part: slice) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    found = [torch.randint(23, (2, 6, 5), generator=generator) for _ in range(4)]
    return [(tokens[part], labels[part]) for tokens, labels in found]


def close(module: nn.Module, plain: nn.Module, start: nn.Module, tolerance: float) -> None:
    """Weights agree to ``tolerance`` of how far they moved, or to their last place, and bit for bit among ranks."""
    for (name, p), q, s in zip(module.named_parameters(), plain.parameters(), start.parameters(), strict=True):
        whole = p.full_tensor() if isinstance(p, zerofx.ShardedTensor) else p.detach()
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, whole)
        assert all(torch.equal(x, whole) for x in told), f"{name} differs between ranks"
        moved = float((q - s).abs().max())
        assert moved > 0, name
        last_place = torch.finfo(q.dtype).eps * float(q.abs().max())
        assert float((whole - q).abs().max()) <= tolerance * moved + 2 * last_place, name


def train(stage: int, options: dict[str, Any], where: dict[str, Any]) -> float:
    """The state that this rank has, as a share of one process's."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if "mesh" in where:
        where = {"mesh": dist.device_mesh.init_device_mesh("cpu", where["mesh"], mesh_dim_names=("replicas", "shards"))}
    plain = Net()
    theirs = zerofx.Muon(plain, lr=0.02, adamw_lr=1e-3, **options)
    module = zerofx.compile(Net(), stage=stage, executor="eager", **where)
    mine = zerofx.Muon(module, lr=0.02, adamw_lr=1e-3, **options)
    each = 6 // ranks if 6 % ranks == 0 else 0
    part = slice(rank * each, rank * each + each) if each else slice(None)
    for (x, y), (whole_x, whole_y) in zip(batches(part), batches(slice(None)), strict=True):
        module(x, y).backward()
        mine.step()
        mine.zero_grad()
        plain(whole_x, whole_y).backward()
        theirs.step()
        theirs.zero_grad()
    # Newton-Schulz amplifies what gradients differ by, the more in bfloat16.
    close(module, plain, Net(), 1e-4 if options.get("iteration_dtype") else 0.05)
    return elements(mine) / elements(theirs)


def elements(optimizer: torch.optim.Optimizer) -> int:
    leaves = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    return sum(x._local.numel() if isinstance(x, zerofx.ShardedTensor) else x.numel() for x in leaves)


@quick_if(lambda stage, options: stage == 3 or stage == {"default": 1, "float32, clipped": 2, "split": 0}[options])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_muon_trains_sharded_as_in_one_process(workers2: Workers, workers3: Workers, stage: int, options: str) -> None:
    for workers in (workers2, workers3) if options == "float32, clipped" else (workers2,):
        shares = workers.run(train, stage, OPTIONS[options], {})
        assert max(shares) <= (1.1 / workers.world_size + 0.1 if stage else 1.0)


def test_muon_trains_on_a_mesh(make_workers: Callable[[int], Workers]) -> None:
    make_workers(4).run(train, 3, OPTIONS["float32, clipped"], {"mesh": (2, 2)})


def count(dtype: torch.dtype) -> float:
    """Bytes that a step sends between slices and owners, in those of the matrices as float32 times (M-1)/M."""
    module = zerofx.shard(Net(), stage=3)
    optimizer = zerofx.Muon(module, iteration_dtype=dtype)
    for p in module.parameters():
        p.grad = torch.randn(p.shape)
    with count_collectives() as log:
        optimizer.step()
    assert log.calls["all_to_all"] == 2
    matrices = sum(p.numel() * 4 for group in optimizer.param_groups if group["use_muon"] for p in group["params"])
    return log.bytes["all_to_all"] / (matrices * (dist.get_world_size() - 1) / dist.get_world_size())


@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, 2.0), (torch.bfloat16, 1.0)])
def test_a_step_sends_each_matrix_to_its_owner_and_back(workers2: Workers, dtype: torch.dtype, least: float) -> None:
    assert sum(workers2.run(count, dtype)) / 2 <= least


def save(path: str) -> None:
    module = zerofx.compile(Net(), stage=3, executor="eager")
    optimizer = zerofx.Muon(module, lr=0.02, iteration_dtype=torch.float32)
    for x, y in batches(slice(None))[:1]:
        module(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    zerofx.save(path, module, optimizer)


def load(path: str, stage: int) -> None:
    plain = Net()
    theirs = zerofx.Muon(plain, lr=0.02, iteration_dtype=torch.float32)
    module = zerofx.compile(Net(), stage=stage, executor="eager")
    mine = zerofx.Muon(module, lr=0.02, iteration_dtype=torch.float32)
    zerofx.load(path, module, mine)
    for i, (x, y) in enumerate(batches(slice(None))[:2]):
        for net, optimizer in ((plain, theirs), (module, mine))[: 1 if i == 0 else 2]:
            net(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    close(module, plain, Net(), 1e-4)


@pytest.mark.parametrize("stage", [0, slow(2), 3])
def test_its_state_is_loaded_by_any_number_of_ranks(
    workers2: Workers, workers3: Workers, tmp_path: Path, stage: int
) -> None:
    workers2.run(save, str(tmp_path / "it"))
    workers3.run(load, str(tmp_path / "it"), stage)


def in_backward() -> None:
    module, plain = zerofx.compile(Net(), stage=3, executor="eager"), Net()
    mine = zerofx.Muon(module, lr=0.02, iteration_dtype=torch.float32)
    theirs = zerofx.Muon(plain, lr=0.02, iteration_dtype=torch.float32)
    for x, y in batches(slice(None))[:2]:
        with zerofx.step_in_backward(mine):
            module(x, y).backward()
        plain(x, y).backward()
        theirs.step()
        theirs.zero_grad()
    close(module, plain, Net(), 1e-4)


def test_a_step_in_backward_waits_for_its_end(workers2: Workers) -> None:
    workers2.run(in_backward)
