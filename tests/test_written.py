"""Models that write to their weights in forward: as in eager PyTorch, and all ranks have the same weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.slow import quick_if
from tests.test_parameters import full, twins
from tests.workers import Workers


class Net(nn.Module):
    """Two layers of one group, one of another; what `write` does to the first is done in forward."""

    def __init__(self, write: Callable[[nn.Linear], Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 3)
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self.a)
        return self.b(torch.tanh(self.a(x))).square().mean()


class Between(Net):
    """It reads the weight before the write as well, which only ``.data`` allows in eager PyTorch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.a(x))
        self.write(self.a)
        return self.b(torch.tanh(self.a(x))).square().mean()


class Broken(Net):
    """The graph ends behind the write."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self.a)
        torch._dynamo.graph_break()
        return self.b(torch.tanh(self.a(x))).square().mean()


class Table(nn.Module):
    """An embedding that shortens the rows that it looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(40, 5, max_norm=0.7), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x)).square().mean()


def in_place(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.mul_(0.9)
        layer.bias[1:3] += 0.5


def of_rows(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight[torch.tensor([0, 3])] = 0.25


WRITES: dict[str, Callable[[], nn.Module]] = {
    "data": lambda: Net(lambda layer: layer.weight.data.mul_(0.9)),
    "detach": lambda: Net(lambda layer: layer.weight.detach().clamp_(-0.1, 0.1)),
    "no_grad": lambda: Net(in_place),
    "rows": lambda: Net(of_rows),
    "between reads": lambda: Between(lambda layer: layer.weight.data.mul_(0.9)),
    "before a break": lambda: Broken(lambda layer: layer.weight.data.mul_(0.9)),
    "max_norm": Table,
}


def check_writes(case: str, stages: tuple[int, ...], executor: str) -> None:
    rows = torch.arange(24) % 7
    x = rows if case == "max_norm" else torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    for stage in stages:
        torch._dynamo.reset()
        module, plain = twins(WRITES[case], stage=stage, executor=executor)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, plain)]
        for _ in range(3):
            losses = [module(x), plain(x)]
            torch.testing.assert_close(losses[0], losses[1])
            for loss, optimizer in zip(losses, optimizers, strict=True):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            for (name, p), q in zip(module.named_parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(full(p), q, msg=lambda m, n=f"{name}, stage {stage}": f"{n}: {m}")
        with torch.no_grad():
            torch.testing.assert_close(module(x), plain(x))


@quick_if(lambda case, stages: 3 in stages or case == "between reads")
@pytest.mark.parametrize("stages", [(0, 3), (1, 2)], ids=str)
@pytest.mark.parametrize("case", WRITES)
def test_a_write_in_forward_is_a_write(workers2: Workers, case: str, stages: tuple[int, ...]) -> None:
    workers2.run(check_writes, case, stages, "eager")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["max_norm", "between reads"])
def test_a_write_in_forward_is_a_write_with_inductor(workers2: Workers, case: str) -> None:
    workers2.run(check_writes, case, (2, 3), "inductor")


def check_ranks_that_write_differently(stage: int) -> None:
    module, plain = twins(Table, stage=stage)
    batches = [torch.tensor([0, 1, 2, 20, 39]), torch.tensor([2, 3, 19, 20, 38])]
    module(batches[dist.get_rank()])
    theirs = []
    for batch in batches:
        copied = copy.deepcopy(plain)
        copied(batch)
        theirs.append(copied.table.weight.detach().reshape(-1))
    table = module.table.weight
    held = [None, None]
    dist.all_gather_object(held, table.to_local().numel())
    assert all(held), "both ranks have a part, or this shows nothing"
    pieces = torch.cat([theirs[0][: held[0]], theirs[1][held[0] :]])
    assert not torch.equal(theirs[0], theirs[1])
    torch.testing.assert_close(full(table).reshape(-1), pieces)


@pytest.mark.parametrize("stage", [1, 3])
def test_where_ranks_write_different_values_each_element_is_of_the_rank_that_has_it(
    workers2: Workers, stage: int
) -> None:
    workers2.run(check_ranks_that_write_differently, stage)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("case", ["data", "detach", "rows", "max_norm"])
def test_a_write_to_a_weight_that_was_cast_is_refused(fake_world: Callable[..., None], stage: int, case: str) -> None:
    fake_world(2)
    torch._dynamo.reset()
    module = WRITES[case]()
    precision = zerofx.MixedPrecision(torch.bfloat16)
    zerofx.compile(module, stage=stage, executor="eager", mixed_precision=precision)
    x = torch.arange(6) if case == "max_norm" else torch.ones(6, 5)
    with pytest.raises(
        Exception, match=r"writes to the parameter '.*weight', which it computes with in torch.bfloat16"
    ):
        module(x)
