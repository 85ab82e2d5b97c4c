"""`zerofx.EMA`: averages in slices, in the model's place to evaluate, saved and loaded with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zerofx
from tests.counting import count_collectives
from tests.slow import slow
from tests.workers import Workers


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(6, 10, bias=False), nn.BatchNorm1d(10), nn.Linear(10, 3)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.codes = nn.Parameter(torch.arange(3, dtype=torch.int8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.norm(self.first(x)))) * self.frozen + self.codes
        return out


def batch(step: int) -> torch.Tensor:
    """One for all ranks: statistics of batches are each rank's own."""
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    model(batch(number)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)


def whole(module: nn.Module) -> dict[str, torch.Tensor]:
    return zerofx.full_state_dict(module, rank0_only=False)


def same(module: nn.Module, plain: nn.Module) -> None:
    found = whole(module)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def check(stage: int, executor: str, use_buffers: bool, folder: str, options: dict[str, Any]) -> None:
    model, plain = zerofx.compile(Net(), stage=stage, executor=executor, **options), Net()
    ema = zerofx.EMA(model, decay=0.8, use_buffers=use_buffers)
    reference = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    with ema.swapped():  # there is no average yet
        same(model, plain)
    first, second = optimizer_of(model), optimizer_of(plain)
    for number in range(3):
        step(model, first, number)
        step(plain, second, number)
        with count_collectives() as log:
            ema.update()
        assert not log.calls  # slice by slice
        reference.update_parameters(plain)
    if not use_buffers:
        same(ema.module, reference.module)
    graphs = len(zerofx.graphs(model))
    model.eval(), plain.eval(), reference.eval()
    with torch.no_grad():
        plain(batch(9)), model(batch(9))
        with count_collectives() as log, ema.swapped() as inside:
            assert not log.calls and inside is model
            found = model(batch(9))
            if not use_buffers:
                torch.testing.assert_close(found, reference(batch(9)), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model(batch(9)), plain(batch(9)), rtol=1e-4, atol=1e-5)
    same(model, plain)
    assert len(zerofx.graphs(model)) <= graphs + 2 and not zerofx.graphs(ema)  # the model's own graphs
    zerofx.save(folder, nn.ModuleDict({"model": model, "ema": ema}), first)
    again = zerofx.compile(Net(), stage=3 - stage, executor="eager")
    other, optimizer = zerofx.EMA(again, decay=0.8), optimizer_of(again)
    zerofx.load(folder, nn.ModuleDict({"model": again, "ema": other}), optimizer)
    assert other.n_averaged == 3
    for number in range(3, 5):
        for each, its, average in ((model, first, ema), (again, optimizer, other)):
            each.train()
            step(each, its, number)
            average.update()
    for name, value in whole(ema.module).items():
        if not use_buffers or name in dict(model.named_parameters()):
            torch.testing.assert_close(whole(other.module)[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", [0, slow(1), slow(2), 3])
def test_averages_are_those_of_one_process(workers2: Workers, stage: int, tmp_path: Path) -> None:
    workers2.run(check, stage, "eager", False, str(tmp_path / "saved"), {}, timeout=100)


@pytest.mark.parametrize(
    ("stage", "executor", "use_buffers", "options"),
    [
        (3, "eager", True, {}),
        (2, "eager", False, {"ignored": ["second.bias"]}),
        (1, "eager", False, {"wire": zerofx.Wire(weights="int4")}),
        slow(3, "inductor", False, {}),
        slow(0, "inductor", True, {}),
    ],
)
def test_and_with_buffers_plain_parameters_and_codes_of_changes(
    workers2: Workers, stage: int, executor: str, use_buffers: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    workers2.run(check, stage, executor, use_buffers, str(tmp_path / "saved"), options, timeout=200)


def check_other_world(folder: str, write: bool) -> None:
    model = zerofx.compile(Net(), executor="eager")
    ema, optimizer = zerofx.EMA(model, decay=0.5), optimizer_of(model)
    both = nn.ModuleDict({"model": model, "ema": ema})
    if write:
        for number in range(2):
            step(model, optimizer, number)
            ema.update()
        zerofx.save(folder, both, optimizer)
        state = whole(ema.module)
        if dist.get_rank() == 0:
            torch.save(state, f"{folder}.whole")
    else:
        zerofx.load(folder, both, optimizer)
        for name, value in torch.load(f"{folder}.whole").items():
            torch.testing.assert_close(whole(ema.module)[name], value)


def test_averages_are_loaded_by_another_number_of_ranks(workers2: Workers, workers3: Workers, tmp_path: Path) -> None:
    workers2.run(check_other_world, str(tmp_path / "saved"), True)
    workers3.run(check_other_world, str(tmp_path / "saved"), False)


def check_stale() -> None:
    model = zerofx.compile(Net(), executor="eager")
    ema = zerofx.EMA(model)
    ema.update()
    loss = model(batch(0)).mean()
    with ema.swapped():
        pass
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()
    with pytest.raises(ValueError, match=r"EMA\(decay=2\): expected a number from 0 to 1"):
        zerofx.EMA(model, decay=2)
    with pytest.raises(ValueError, match=r"EMA of a Net that is not sharded: call zerofx\.compile on it first"):
        zerofx.EMA(Net())


def test_a_backward_that_would_read_swapped_weights_raises(workers2: Workers) -> None:
    workers2.run(check_stale)
