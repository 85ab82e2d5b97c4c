"""Ranks whose data choose other branches of one group: as DistributedDataParallel with ``find_unused_parameters=True``.

A parameter that any rank has used gets the averaged gradient on all ranks; one that no rank has used gets None on all.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import zerofx
from tests.counting import count_collectives
from tests.slow import quick_if, slow
from tests.workers import Workers

STAGES = [0, 1, 2, 3]
HEADS = 4
TASKS = [[0, 0], [0, 1], [1, 0], [2, 1], [2, 2], [1, 2], [0, 1]]
"""By step: the heads that even and odd ranks take. In some steps they agree; nobody takes the last one."""


class Tasks(nn.Module):
    """A head for each task, and what all of them share."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.heads = nn.ModuleList(nn.Linear(8, 3 if i % 2 else 5) for i in range(HEADS))

    def forward(self, x: torch.Tensor, task: int) -> torch.Tensor:
        x = x * self.scale if task % 2 else x
        return self.heads[task](x)


class Net(nn.Module):
    """A trunk, and a head by task. With ``breaks`` they are two graphs, and the trunk's group is in both."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.trunk, self.tasks, self.breaks = nn.Linear(6, 8), Tasks(), breaks

    def forward(self, x: torch.Tensor, task: int) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.tasks(hidden, task).square().mean()


GROUPS = {
    "one group": zerofx.Grouping(),
    "two groups": zerofx.Grouping(blocks=(Tasks,), min_bytes=0),
}


def compare(way: str, mesh: tuple[int, int] | None = None, breaks: bool = False, **options: Any) -> None:
    """Train both and compare weights and gradients after each step, on every rank."""
    torch.manual_seed(0)
    plain, net = Net(breaks), Net(breaks)
    net.load_state_dict(plain.state_dict())
    ddp = DistributedDataParallel(plain, find_unused_parameters=True)
    options["mesh"] = None if mesh is None else init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    zerofx.compile(net, **options)
    wanted = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.5)
    found = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.5)
    rank, hooked = dist.get_rank(), []
    if way == "hooks":
        for name, p in net.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name: hooked.append(name))
    for step, tasks in enumerate(TASKS):
        micro = [tasks, TASKS[step - 1]] if way == "no_sync" else [tasks]
        for i, chosen in enumerate(micro):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + 10 * i + rank))
            last = i == len(micro) - 1
            with contextlib.nullcontext() if last else ddp.no_sync():
                ddp(x, chosen[rank % 2]).backward()
            with contextlib.nullcontext() if last else zerofx.no_sync(net):
                inside = zerofx.step_in_backward(found) if way == "step_in_backward" else contextlib.nullcontext()
                with inside:
                    net(x, chosen[rank % 2]).backward()
        for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
            if way == "step_in_backward":
                break
            assert (p.grad is None) == (q.grad is None), (step, name)
            if q.grad is not None:
                grad = p.grad.full_tensor() if isinstance(p.grad, zerofx.ShardedTensor) else p.grad
                torch.testing.assert_close(grad, q.grad, msg=lambda m, name=name, step=step: f"{step}: {name}: {m}")
        if way == "hooks":
            assert sorted(hooked) == sorted(name for name, q in plain.named_parameters() if q.grad is not None), step
            hooked.clear()
        wanted.step()
        if way != "step_in_backward":
            found.step()
        wanted.zero_grad()
        found.zero_grad()
        whole = zerofx.full_state_dict(net, rank0_only=False)
        for name, q in plain.state_dict().items():
            torch.testing.assert_close(whole[name], q, msg=lambda m, name=name, step=step: f"{step}: {name}: {m}")


@quick_if(lambda stage, groups: (groups == "one group") == (stage in (0, 2)))
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("stage", STAGES)
def test_branches_by_rank_train_as_data_parallelism(workers2: Workers, stage: int, groups: str) -> None:
    workers2.run(compare, "plain", stage=stage, groups=GROUPS[groups], executor="eager")


@quick_if(lambda stage, way: stage == (0 if way == "hooks" else 1))
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("way", ["no_sync", "hooks", "step_in_backward"])
def test_in_every_way_of_treating_gradients(workers2: Workers, stage: int, way: str) -> None:
    workers2.run(compare, way, stage=3 - stage, groups=GROUPS["two groups"], executor="eager")


@quick_if(lambda stage, way: (stage == 3) == (way == "no_sync"))
@pytest.mark.parametrize("way", ["plain", "no_sync"])
@pytest.mark.parametrize("stage", [0, 3])
def test_where_a_graph_breaks_between(workers2: Workers, stage: int, way: str) -> None:
    workers2.run(compare, way, breaks=True, stage=stage, executor="eager")


def test_in_one_bucket_of_all_gradients(workers2: Workers) -> None:
    workers2.run(compare, "no_sync", stage=0, buckets="all", executor="eager")


@pytest.mark.parametrize(
    "options", [{}, slow({"leaf_modules": ["trunk"]}), {"sharding": zerofx.Sharding(gradients="all", optimizer="all")}]
)
def test_on_a_mesh(make_workers: Any, options: dict[str, Any]) -> None:
    make_workers(4).run(compare, "no_sync", mesh=(2, 2), groups=GROUPS["two groups"], executor="eager", **options)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["plain", "no_sync", "step_in_backward"])
@pytest.mark.parametrize("stage", STAGES)
def test_branches_by_rank_train_with_inductor(workers2: Workers, stage: int, way: str) -> None:
    workers2.run(compare, way, stage=stage, timeout=280)


def messages() -> tuple[int, int, list[int]]:
    """Of one backward: how many parameters there are, how many collectives start, and the sizes of what is told."""
    torch.manual_seed(0)
    net = zerofx.compile(Net(), executor="eager", groups=GROUPS["two groups"])
    for _ in range(2):
        loss = net(torch.randn(4, 6), 0)
        with count_collectives() as log:
            loss.backward()
    reductions = sum(event.name == "all_to_all_send" for event in log.events)
    return len(list(net.parameters())), reductions, [m.payload for m in log.used if m.name == "used_send"]


def test_a_backward_sends_one_byte_for_each_parameter_to_each_other_rank(workers3: Workers) -> None:
    for parameters, reductions, sizes in workers3.run(messages):
        assert reductions == 2 * 2, "two groups, two other ranks"
        assert sizes == [parameters, parameters]
