"""What a code cuts off of a gradient is added to the next one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.slow import slow
from tests.workers import Workers


class Slope(nn.Module):
    """Its gradient is what it is called with, whatever the weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(80, 80)), nn.Parameter(torch.zeros(80))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum() + (self.bias * x[0]).sum()


def slope(rank: int) -> torch.Tensor:
    return torch.randn(80, 80, generator=torch.Generator().manual_seed(rank))


def added_up(wire: zerofx.Wire, stage: int, backwards: int) -> list[tuple[float, float, float, int]]:
    """Of the sum of so many gradients, for each: how far it is off, of the weight and of the bias; bytes kept."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = zerofx.compile(Slope(), stage=stage, executor="eager", wire=wire)
    exact = sum(slope(r).double() for r in range(ranks)) / ranks
    found = []
    for n in range(1, backwards + 1):
        model(slope(rank)).backward()
        off = [(p.grad.full_tensor() - n * x).abs() for p, x in zip(model.parameters(), (exact, exact[0]))]
        kept = zerofx.memory_summary(model).nbytes["cut off"]
        found.append((float(off[0].max()), float(off[0].mean()), float(off[1].max()), kept))
    return found


@pytest.mark.parametrize("stage", [slow(2), 3])
def test_what_is_cut_off_of_a_gradient_is_in_the_next(workers2: Workers, stage: int) -> None:
    nearest = zerofx.Wire(gradients="int4", stochastic=False)
    fed = zerofx.Wire(gradients="int4", error_feedback=True)
    largest = max(float(slope(rank).abs().max()) for rank in range(2))
    without, with_it = (workers2.run(added_up, wire, stage, 12)[0] for wire in (nearest, fed))
    assert without[0][:3] == with_it[0][:3]  # nothing was cut off before
    assert without[11][0] == pytest.approx(12 * without[0][0], rel=1e-4)
    for most, _, of_bias, kept in with_it:
        assert most < 1.2 * largest / 14 / 2  # what the last code cut off, in the mean of two ranks
        assert of_bias < 1e-5
        assert kept == 4 * (80 * 81 + 176) // 2  # the other rank's half of the flat buffer
    assert with_it[11][1] < without[11][1] / 8


def skips_a_block() -> tuple[bool, bool]:
    model = zerofx.compile(Slope(), stage=3, executor="eager", wire=zerofx.Wire(gradients="int4", error_feedback=True))
    x = slope(dist.get_rank())
    for value in (x, x.clone().fill_(torch.nan), x):
        model.zero_grad()
        model(value).backward()
    rests = [p._group.gradients.rest for p in model.parameters()]
    return all(p.grad.to_local().isfinite().all() for p in model.parameters()), all(r.isfinite().all() for r in rests)


def test_nothing_is_left_of_a_gradient_that_is_not_finite(workers2: Workers) -> None:
    assert workers2.run(skips_a_block) == [(True, True)] * 2
