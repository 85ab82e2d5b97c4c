"""zerofx.memory_summary counts live tensors, to the byte, and says what it is for."""

from __future__ import annotations

import gc
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.distributed.device_mesh import init_device_mesh

import zerofx
from zerofx.runtime.state.account import Account
from zerofx.runtime.state.group import groups_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))
        self.register_buffer("scale", torch.ones(100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x * self.scale[0]).square().mean()


def build(stage: int, **options: Any) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    zerofx.compile(model, stage=stage, executor="eager", groups=zerofx.Grouping(min_bytes=0), **options)
    return model, zerofx.AdamW(model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).backward()
    optimizer.step()


def live() -> dict[int, torch.UntypedStorage]:
    """By address every storage of 400 bytes or more that a tensor in this process refers to; smaller are scalars."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor)]
    with torch._C.DisableTorchFunctionSubclass():
        storages = [x.untyped_storage() for x in tensors if x.device.type == "cpu"]
    return {s.data_ptr(): s for s in storages if s.nbytes() >= 400}


def counted(stage: int, low: bool) -> list[tuple[int, int, dict[str, int], str]]:
    """Bytes of live tensors that were not there before, and the summary; after a step, and while accumulating."""
    x = torch.randn(8, 64)
    options = {"mixed_precision": zerofx.MixedPrecision(torch.bfloat16)} if low else {}
    before, found = live(), []
    model, optimizer = build(stage, **options)
    for accumulate in (False, True):
        step(model, optimizer, x)
        if accumulate:
            optimizer.zero_grad()
            with zerofx.no_sync(model):
                model(x).backward()
        gradients = [p.grad for p in model.parameters()]  # seen from Python
        now = sum(s.nbytes() for address, s in live().items() if address not in before)
        del gradients
        summary = zerofx.memory_summary(model, optimizer)
        found.append((now, summary.total, summary.nbytes, str(summary)))
    return found


@pytest.mark.parametrize(("stage", "low"), [(0, False), (1, False), (1, True), (3, False)])
def test_the_total_is_what_live_tensors_hold(workers2, stage: int, low: bool) -> None:
    n, itemsize = 4 * 64 * 64, 4
    for stepped, accumulating in workers2.run(counted, stage, low, timeout=120):
        for alive, total, nbytes, text in (stepped, accumulating):
            assert alive <= total < alive + 100, text  # the optimizer's counters
            assert nbytes["buffers"] == 400
            assert sum(nbytes.values()) == total
        owned = n * itemsize // (1 if stage == 0 else 2)
        assert stepped[2]["gradients"] == pytest.approx(owned, rel=0.01)
        assert stepped[2]["optimizer state"] == pytest.approx(2 * owned, rel=0.01)
        assert accumulating[2]["gradients"] == 0 and stepped[2]["kept gradients"] == 0
        assert accumulating[2]["kept gradients"] == n * (2 if low else 4)
        weights = stepped[2]["shards"] + stepped[2]["replicas"]
        replicas = n * (2 if low else 4) if stage == 1 else 0
        assert stepped[2]["replicas"] == pytest.approx(replicas, rel=0.01)
        assert weights == pytest.approx(replicas + (owned if low or not replicas else 0), rel=0.01)


MIXED = zerofx.MixedPrecision(torch.bfloat16)
CODES = zerofx.Wire(weights="int8", gradients="int8", error_feedback=True)
BETWEEN = zerofx.Wire(weights="int8", gradients="int8", error_feedback=True, between="nodes")
SHARED = zerofx.Sharding(gradients="all", optimizer="all")
ACCOUNTS: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 0": (2, {"stage": 0}),
    "stage 1": (2, {"stage": 1}),
    "stage 1, mixed": (2, {"stage": 1, "mixed_precision": MIXED}),
    "stage 2, codes": (2, {"stage": 2, "wire": CODES}),
    "stage 2, bfloat16, codes": (2, {"stage": 2, "wire": CODES, "dtype": torch.bfloat16}),
    "stage 3": (3, {"stage": 3}),
    "stage 3, mixed": (2, {"stage": 3, "mixed_precision": MIXED}),
    "stage 3, codes": (2, {"stage": 3, "wire": CODES}),
    "one copy": (2, {"stage": 3, "one_copy": True}),
    "one copy, mixed": (2, {"stage": 3, "one_copy": True, "mixed_precision": MIXED}),
    "HSDP": (4, {"stage": 3, "wire": replace(BETWEEN, weights=None)}),
    "row copy": (4, {"stage": 3, "sharding": SHARED}),
    "row copy, codes": (4, {"stage": 3, "sharding": SHARED, "wire": BETWEEN}),
    "two hops": (4, {"stage": 3, "sharding": zerofx.Sharding("all", "all", "all", "all"), "wire": BETWEEN}),
}
QUICK = ("stage 1, mixed", "stage 3")


def accounted(ranks: int, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[dict[str, int], dict[str, int]]:
    """By class, what tensors hold when gradients are there, and what the account says."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard")) if ranks == 4 else None
    model = Net().to(dtype)
    model.layers[0].requires_grad_(False)
    zerofx.compile(model, executor="eager", groups=zerofx.Grouping(min_bytes=0), mesh=mesh, **options)
    optimizer = zerofx.AdamW(model.parameters())
    step(model, optimizer, torch.randn(8, 64, dtype=dtype))
    optimizer.zero_grad()
    model(torch.randn(8, 64, dtype=dtype)).backward()
    account = sum((group.at_rest() for group in groups_of(model)), Account())
    said = {"replicas": account.replicas, "shards": account.shards, "gradients": account.gradients}
    said |= {"cut off": account.cut_off, "optimizer state": account.masters + account.moments}
    held = {name: n for name, n in zerofx.memory_summary(model, optimizer).nbytes.items() if name in said}
    assert zerofx.predict(model).held_bytes == held["replicas"] + held["shards"] + held["cut off"]
    return held, said


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in ACCOUNTS]
)
def test_the_account_says_what_is_there(make_workers: Any, case: str) -> None:
    ranks, options = ACCOUNTS[case]
    for held, said in make_workers(ranks).run(accounted, ranks, timeout=120, **options):
        assert held.pop("optimizer state") > said.pop("optimizer state") == 0  # it is the optimizer's to say
        assert held == said


def kept_between(budget: float) -> tuple[list[int], int]:
    """Bytes kept gathered before and after a forward, after its backward, after another that none follows; promised."""
    model, _ = build(3, memory_budget=budget)
    x = torch.randn(8, 64)
    model(x).backward()  # compiles
    now = [zerofx.memory_summary(model).nbytes["kept gathered"]]
    loss = model(x)
    now.append(zerofx.memory_summary(model).nbytes["kept gathered"])
    loss.backward()
    now.append(zerofx.memory_summary(model).nbytes["kept gathered"])
    loss = model(x)
    del loss
    now.append(zerofx.memory_summary(model).nbytes["kept gathered"])
    (record,) = zerofx.graphs(model)
    return now, sum(left.nbytes for left in record.forward.context.handover.kept_gathered.values())


def test_what_stays_gathered_between_forward_and_backward_is_counted_while_it_does(workers2) -> None:
    for now, promised in workers2.run(kept_between, math.inf, timeout=120):
        assert promised == 3 * 64 * 64 * 4  # the backward does not read the first layer
        assert now == [0, promised, 0, 0]


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        SEEN.append(zerofx.memory_summary(MODELS[0]).nbytes["kept gathered"])
        return super().forward(x)


SEEN: list[int] = []
MODELS: list[nn.Module] = []


def kept_by_a_leaf(budget: float | None) -> list[int]:
    """Bytes kept gathered before, inside and after a leaf module's forward, and after its backward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), Layer(64, 64, bias=False))
    groups = zerofx.Grouping(min_bytes=0)
    zerofx.compile(model, executor="eager", leaf_modules=[Layer], groups=groups, memory_budget=budget)
    MODELS[:], SEEN[:] = [model], []
    before = zerofx.memory_summary(model).nbytes["kept gathered"]
    loss = model[1](torch.randn(8, 64, requires_grad=True)).square().mean()
    after = zerofx.memory_summary(model).nbytes["kept gathered"]
    loss.backward()
    return [before, *SEEN, after, zerofx.memory_summary(model).nbytes["kept gathered"]]


@pytest.mark.parametrize("budget", [None, math.inf])
def test_a_leaf_modules_weights_count_while_they_are_whole(workers2, budget: float | None) -> None:
    whole = 64 * 64 * 4
    for found in workers2.run(kept_by_a_leaf, budget, timeout=60):
        assert found == [0, whole, whole if budget else 0, 0]


def test_it_prints_a_line_per_kind_that_there_is(fake_world) -> None:
    fake_world(4, rank=1)
    model = Net()
    zerofx.compile(model, stage=3, executor="eager", groups=zerofx.Grouping(min_bytes=0))
    title, *lines = str(zerofx.memory_summary(model)).splitlines()
    assert title == "rank 1 of 4 holds 16.8 kB, stage 3"
    assert [re.split(r"  +", line) for line in lines] == [
        ["shards", "16.4 kB", "4 storages"],
        ["buffers", "400 B", "1 storage"],
    ]
    with pytest.raises(ValueError, match="Linear is not sharded"):
        zerofx.memory_summary(nn.Linear(2, 2))
