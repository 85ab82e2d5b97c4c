"""The order of collectives follows from the module: batches of other shapes, of one row above all, change nothing."""

from __future__ import annotations

import contextlib
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zerofx
from tests.slow import quick_if, slow
from zerofx.runtime.ranks.agree import Schedule
from zerofx.runtime.ranks.watch import watch_of
from zerofx.runtime.state.group import groups_of

DIM = 8


class Scaled(nn.Module):
    """Its output is a product with a weight, so that Inductor can compute it once more from what is inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(torch.randn(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(F.rms_norm(self.inside(x), (DIM,)) * self.scale)


class PostNorm(nn.Module):
    """Its last norm belongs to it, and the next layer's gradients begin with what that returns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(DIM, 3 * DIM), nn.Linear(3 * DIM, DIM), nn.LayerNorm(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(F.gelu(self.up(x))))


class Skips(nn.Module):
    """What leaves the first layers enters the last: their gradients come when those of the first are far."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left = []
        for i, block in enumerate(self.blocks):
            x = block(x + left.pop() if i >= 3 else x)
            left += [x] if i < 3 else []
        return x


NETS = {
    "scaled": lambda: nn.Sequential(*(Scaled() for _ in range(4)), nn.LayerNorm(DIM), nn.Linear(DIM, 5)),
    "post-norm": lambda: nn.Sequential(*(PostNorm() for _ in range(3)), nn.Linear(DIM, 5)),
    "skips": Skips,
}


def schedules(net: str, shape: tuple[int, ...], **options: object) -> list[Schedule]:
    torch._dynamo.reset()
    x = torch.ones(shape)
    record = zerofx.dry_run(
        NETS[net](), x, world_size=2, backend="gloo", groups=zerofx.Grouping(min_bytes=0), **options
    )
    graphs = [trace for trace in (record.forward, record.backward) if trace is not None]
    return [Schedule.of(trace.final, trace.context) for trace in graphs]


@pytest.mark.parametrize(
    "net, options",
    [slow("scaled", {}), ("scaled", {"memory_budget": 1000}), slow("post-norm", {}), slow("skips", {})],
)
def test_collectives_and_their_order_are_the_same_for_every_batch(net: str, options: dict[str, object]) -> None:
    expected = schedules(net, (4, DIM), **options)
    assert all(schedule.collectives for schedule in expected)
    for shape in ((1, DIM), (1, 1, DIM), (4, 3, DIM)):
        assert schedules(net, shape, **options) == expected


def train(net: str, stage: int, executor: str, rows: list[tuple[int, ...]], **options: Any) -> float:
    """The largest error, relative to DistributedDataParallel's, of a parameter's gradient over steps; of this rank."""
    ours, theirs = NETS[net](), NETS[net]()
    theirs.load_state_dict(ours.state_dict())
    ddp = DistributedDataParallel(theirs)
    groups = zerofx.Grouping(min_bytes=0)
    zerofx.compile(ours, stage=stage, executor=executor, groups=groups, timeout=30, **options)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]
    torch.manual_seed(1 + dist.get_rank())
    worst = 0.0
    for batch in rows:
        x = torch.randn(batch[dist.get_rank()], DIM)
        for model in (ours, ddp):
            model(x).square().mean().backward()
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            grad = p.grad.full_tensor() if stage else p.grad
            assert grad is not None and q.grad is not None, name
            worst = max(worst, float((grad - q.grad).norm() / q.grad.norm()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return worst


@quick_if(lambda stage, executor: stage == 3 and executor == "eager")
@pytest.mark.parametrize("executor", ["inductor", "eager"])
@pytest.mark.parametrize("stage", [3, 2, 1, 0])
def test_a_rank_whose_batch_has_one_row_trains_as_with_ddp(workers2, stage: int, executor: str) -> None:
    rows = [(4, 4), (4, 1), (1, 4), (3, 1)]
    assert max(workers2.run(train, "scaled", stage, executor, rows)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("budget", [{"activation_budget": 0.5}, {"memory": 10**9}], ids=["activations", "memory"])
def test_so_does_one_within_a_budget(workers2, budget: dict[str, Any]) -> None:
    assert max(workers2.run(train, "scaled", 3, "inductor", [(4, 4), (4, 1), (1, 4), (3, 1)], **budget)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("net", ["post-norm", "skips"])
def test_so_does_one_whose_layers_reach_over_others(workers2, net: str) -> None:
    assert max(workers2.run(train, net, 3, "inductor", [(4, 1), (1, 4)])) < 1e-5


class Crossed(nn.Module):
    """Two layers of one size, in one order or in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, a_first: bool) -> torch.Tensor:
        return self.b(self.a(x)) if a_first else torch.relu(self.a(self.b(x)))


def cross() -> tuple[float, str]:
    """How far this rank's output is off where the other runs the same layers in another order, and what was found.

    Each rank has started both gathers before it waits for one, so both may end well. The watchdog says so all the same,
    and ends the process group: no other test may come into it before.
    """
    model = Crossed()
    expected = model(torch.ones(1, DIM), dist.get_rank() == 0).detach()
    zerofx.compile(
        model, stage=3, executor="eager", groups=zerofx.Grouping(blocks=[nn.Linear], min_bytes=0), timeout=20
    )
    off = 0.0
    with contextlib.suppress(zerofx.OutOfStepError):
        off = float((model(torch.ones(1, DIM), dist.get_rank() == 0) - expected).abs().max())
    watch = watch_of(groups_of(model)[0].group_name)
    assert watch is not None
    while not watch.failure:  # the test's time limit ends it
        time.sleep(0.1)
    return off, watch.failure


def test_what_is_sent_for_one_group_is_never_taken_for_another_of_its_size(workers2) -> None:
    for off, found in workers2.run(cross):
        assert off < 1e-6
        assert re.search(r"out of step.*rank \d has forward: all-gather of '[ab]'", found)
