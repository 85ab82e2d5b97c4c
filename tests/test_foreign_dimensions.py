"""Dimensions of a mesh that are not zerofx's: layers split by hand over a tensor-parallel group train along with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerofx

WIDTH, HIDDEN = 6, 10


class Copy(torch.autograd.Function):
    """A whole activation that each tensor-parallel rank uses: its gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return functional.all_reduce(dy, "sum", ctx.group), None


class Sum(torch.autograd.Function):
    """Parts of an activation that tensor-parallel ranks have: their sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        return functional.all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dy, None


class Split(nn.Module):
    """Two layers split over ``parts``, and a head that every part has whole. ``group``: None in one process."""

    def __init__(self, parts: int, group: str | None) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN // parts)
        self.down = nn.Linear(HIDDEN // parts, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 3)
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return self.head(x + self.down(torch.tanh(self.up(x)))).square().mean()
        h = self.down(torch.tanh(self.up(Copy.apply(x, self.group))))
        return self.head(x + Sum.apply(h, self.group)).square().mean()


def part(i: int, group: str | None, dp: int = 0) -> Split:
    """The part ``i`` of two, as the dp rank ``dp`` happens to draw it."""
    torch.manual_seed(100 * dp + i)
    model = Split(2, group)
    torch.manual_seed(100 * dp + 50)  # the head is one and the same
    model.head.reset_parameters()
    return model


def whole() -> Split:
    first, second = (part(i, None) for i in (0, 1))
    model = Split(1, None)
    with torch.no_grad():
        model.up.weight.copy_(torch.cat([first.up.weight, second.up.weight]))
        model.up.bias.copy_(torch.cat([first.up.bias, second.up.bias]))
        model.down.weight.copy_(torch.cat([first.down.weight, second.down.weight], dim=1))
        model.head.load_state_dict(first.head.state_dict())
    return model


def batches(step: int) -> torch.Tensor:
    return torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(step))


def split_layers(stage: int, executor: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"], mesh["tp"]
    i, j = dp.get_local_rank(), tp.get_local_rank()
    model = part(j, tp.get_group().group_name, dp=i)
    zerofx.compile(model, stage=stage, executor=executor, mesh=dp, groups=zerofx.Grouping(min_bytes=0))
    reference = whole()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3, momentum=0.9) for m in (model, reference)]
    for step in range(3):
        loss, wanted = model(batches(step)[i]), reference(batches(step).flatten(0, 1))
        loss.backward(), wanted.backward()
        both = loss.detach().clone()
        dist.all_reduce(both, group=dp.get_group())
        assert both.item() / 2 == pytest.approx(wanted.item(), rel=1e-5)
        mine = torch.nn.utils.get_total_norm([p.grad for p in model.up.parameters()]) ** 2
        dist.all_reduce(mine, group=tp.get_group())
        norm = torch.nn.utils.get_total_norm([p.grad for p in reference.up.parameters()])
        assert mine.sqrt().item() == pytest.approx(norm.item(), rel=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    rows = reference.up.weight.chunk(2)[j]
    found = zerofx.full_state_dict(model, rank0_only=False)["up.weight"]
    torch.testing.assert_close(found, rows.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("stage", "executor"), [(3, "eager"), (2, "eager")])
def test_layers_split_by_hand_train_on_one_dimension_of_a_mesh(make_workers: Any, stage: int, executor: str) -> None:
    make_workers(4).run(split_layers, stage, executor)
