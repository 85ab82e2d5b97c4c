"""A second case of each seam is one file (beside this one) and one line in a table: the same numbers as the first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn

import zerofx
from tests.seams import halves, second_tensor, through_file
from tests.slow import slow_if
from tests.workers import Workers
from zerofx.passes.travel import TRAVELS
from zerofx.runtime.ranks.sharing import SHARINGS
from zerofx.runtime.state.home import HOMES, Home

EACH_LAYER = zerofx.Grouping(blocks=(nn.Linear,), min_bytes=0)


@contextlib.contextmanager
def first_in(table: list[Any], case: Any) -> Iterator[None]:
    """The line in the table."""
    table.insert(0, case)
    try:
        yield
    finally:
        table.remove(case)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.front, self.expert, self.head = nn.Linear(7, 11), nn.Sequential(nn.Linear(11, 11)), nn.Linear(11, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.expert(self.front(x).tanh()).tanh())


def train(options: dict[str, Any], optimizer: str = "zerofx", part: int | None = None) -> list[torch.Tensor]:
    """Losses of four steps of two micro-batches, and the whole weights after them."""
    model = zerofx.compile(Net(), groups=EACH_LAYER, **options)
    step: torch.optim.Optimizer = zerofx.AdamW(model.parameters(), lr=0.1, max_grad_norm=1.0)
    if optimizer == "torch":
        step = torch.optim.AdamW(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank() if part is None else part)
    losses = []
    for first, second in torch.randn(4, 2, 4, 7, generator=generator):
        with zerofx.no_sync(model):
            model(first).square().mean().backward()
        losses.append(model(second).square().mean())
        losses[-1].backward()
        if optimizer == "torch":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        step.step()
        step.zero_grad()
    whole = [p.full_tensor() if isinstance(p, zerofx.ShardedTensor) else p for p in model.parameters()]
    return [x.detach() for x in [*losses, *whole]]


def all_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(a.equal(b) and a.isfinite().all() for a, b in zip(found, wanted, strict=True))


# ---- how a buffer travels -------------------------------------------------------------------------------------------


def travel_both_ways(options: dict[str, Any]) -> bool:
    wanted, before = train(options), through_file.read
    assert through_file.read == before
    with first_in(TRAVELS, through_file.ThroughFile()):
        found = train(options)
    assert through_file.read > before
    return all_equal(found, wanted)


@slow_if(lambda options: options["executor"] == "inductor" or "leaf_modules" in options)
@pytest.mark.parametrize(
    "options",
    [
        {"stage": 3, "executor": "eager"},
        {"stage": 3, "executor": "inductor"},
        {"stage": 2, "executor": "eager"},
        {"stage": 3, "executor": "eager", "leaf_modules": ["expert"]},
    ],
    ids=["3 eager", "3 inductor", "2 eager", "leaf module"],
)
def test_buffers_that_travel_through_files_bring_the_same_numbers(workers2: Workers, options: dict[str, Any]) -> None:
    assert workers2.run(travel_both_ways, options) == [True, True]


# ---- where state lives ----------------------------------------------------------------------------------------------


def live_both_ways(options: dict[str, Any], optimizer: str) -> bool:
    wanted, before = train(options, optimizer), dict(second_tensor.brought)
    try:
        with first_in(HOMES, second_tensor.SecondTensor):
            found = train(options, optimizer)
    finally:
        Home.any_away = False
    for kind, times in second_tensor.brought.items():
        assert times > before[kind], kind
    return all_equal(found, wanted)


@slow_if(lambda options: options["executor"] == "inductor")
@pytest.mark.parametrize(
    ("options", "optimizer"),
    [
        ({"stage": 3, "executor": "eager"}, "zerofx"),
        ({"stage": 3, "executor": "eager"}, "torch"),
        ({"stage": 2, "executor": "inductor"}, "zerofx"),
        ({"stage": 1, "executor": "eager"}, "torch"),
        ({"stage": 3, "executor": "eager", "leaf_modules": ["expert"]}, "zerofx"),
        ({"stage": 3, "executor": "eager", "mixed_precision": zerofx.MixedPrecision(torch.bfloat16)}, "zerofx"),
    ],
    ids=["3", "3 torch", "2 inductor", "1 torch", "leaf module", "bfloat16"],
)
def test_state_in_a_second_tensor_gives_the_same_numbers(
    workers2: Workers, options: dict[str, Any], optimizer: str
) -> None:
    assert workers2.run(live_both_ways, options, optimizer) == [True, True]


def save_from_a_second_tensor(folder: str) -> bool:
    try:
        with first_in(HOMES, second_tensor.SecondTensor):
            model = zerofx.compile(Net(), groups=EACH_LAYER, stage=3, executor="eager")
            optimizer = zerofx.AdamW(model.parameters(), lr=0.1)
            model(torch.ones(2, 7)).sum().backward()
            optimizer.step()
            zerofx.save(folder, model, optimizer)
            wanted = zerofx.full_state_dict(model, rank0_only=False)
            again = zerofx.compile(Net(), groups=EACH_LAYER, stage=3, executor="eager")
            zerofx.load(folder, again, zerofx.AdamW(again.parameters(), lr=0.1))
            found = zerofx.full_state_dict(again, rank0_only=False)
    finally:
        Home.any_away = False
    plain = zerofx.compile(Net(), groups=EACH_LAYER, stage=3, executor="eager")
    zerofx.load(folder, plain, zerofx.AdamW(plain.parameters(), lr=0.1))
    at_home = zerofx.full_state_dict(plain, rank0_only=False)
    return all(all_equal([found[n], at_home[n]], [wanted[n]] * 2) for n in wanted)


def test_a_checkpoint_is_of_the_state_and_not_of_what_is_left_in_the_first_tensor(
    workers2: Workers, tmp_path: Path
) -> None:
    assert workers2.run(save_from_a_second_tensor, str(tmp_path / "saved")) == [True, True]


def lend_from_a_second_tensor(stage: int) -> list[bool]:
    """Reads, writes and keeps ``to_local()``; then the same writes on a model whose state is at home."""

    def change(model: nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for p in model.parameters():
            p.to_local().mul_(2)  # type: ignore[operator]
            p.to_local()[1:].add_(1)  # type: ignore[operator]
        held = [p.to_local()[:3] for p in model.parameters()]  # type: ignore[operator]
        loss = model(torch.ones(2, 7)).square().mean()
        loss.backward()
        optimizer.step()
        return [loss.detach(), *(x.clone() for x in held), *(p.full_tensor() for p in model.parameters())]  # type: ignore[operator]

    results = []
    try:
        with first_in(HOMES, second_tensor.SecondTensor):
            model = zerofx.compile(Net(), groups=EACH_LAYER, stage=stage, executor="eager")
            weight: Any = model.front.weight
            results.append(bool(weight._local.isnan().all()))
            read = weight.to_local()
            results.append(bool(read.isfinite().all()) and bool(weight._local.isfinite().all()))
            view = read[1:]
            del read
            results.append(bool(view.isfinite().all()))
            del view
            results.append(bool(weight._local.isnan().all()))
            found = change(model)
            results.append(bool(weight._local.isnan().all()))
    finally:
        Home.any_away = False
    wanted = change(zerofx.compile(Net(), groups=EACH_LAYER, stage=stage, executor="eager"))
    return [*results, all_equal(found, wanted)]


@pytest.mark.parametrize("stage", [2, 3])
def test_to_local_lends_state_until_the_last_view_of_it_is_gone(workers2: Workers, stage: int) -> None:
    assert workers2.run(lend_from_a_second_tensor, stage) == [[True] * 6] * 2


def pytorchs_checkpoint_from_a_second_tensor(folder: str, stage: int) -> bool:
    """Saved and loaded without `zerofx.save`: torch.distributed.checkpoint asks the tensors themselves."""

    def state(model: nn.Module) -> dict[str, Any]:
        return dict(model.named_parameters())

    def whole(model: nn.Module) -> list[torch.Tensor]:
        x = torch.ones(2, 7)
        return [model(x).detach(), *(p.full_tensor().detach() for p in model.parameters())]  # type: ignore[operator]

    options: dict[str, Any] = {"groups": EACH_LAYER, "stage": stage, "executor": "eager"}
    try:
        with first_in(HOMES, second_tensor.SecondTensor):
            model, again = (zerofx.compile(Net(), **options) for _ in range(2))
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(1)
            checkpoint.save(state(model), checkpoint_id=folder)
            checkpoint.load(state(again), checkpoint_id=folder)
            wanted, found = whole(model), whole(again)
            away = all(bool(p._local.isnan().all()) for p in again.parameters())  # type: ignore[attr-defined]
    finally:
        Home.any_away = False
    plain = zerofx.compile(Net(), **options)
    checkpoint.load(state(plain), checkpoint_id=folder)
    return away and all_equal(found, wanted) and all_equal(whole(plain), wanted)


@pytest.mark.parametrize("stage", [2, 3])
def test_pytorchs_own_checkpoint_saves_and_loads_state_that_is_away(
    workers2: Workers, tmp_path: Path, stage: int
) -> None:
    assert workers2.run(pytorchs_checkpoint_from_a_second_tensor, str(tmp_path / "saved"), stage) == [True, True]


# ---- who shares what ------------------------------------------------------------------------------------------------


def train_in_halves(options: dict[str, Any]) -> bool:
    """Each half has batches of its own: ranks 0 and 1 of it those of parts 0 and 1, the other half's parts 2 and 3."""
    rank = dist.get_rank()
    with first_in(SHARINGS, halves.Halves.of):
        found = train(options, part=rank)
    results = []
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mesh = dist.device_mesh.DeviceMesh.from_group(pairs[rank // 2], "cpu")
    results.append(all_equal(found, train({**options, "mesh": mesh}, part=rank)))
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, found[-1])
    results.append(everyone[0].equal(everyone[1]) and everyone[2].equal(everyone[3]))
    results.append(not everyone[0].equal(everyone[2]))
    return all(results)


@slow_if(lambda stage: stage == 0)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_halves_that_share_nothing_train_two_models(make_workers, stage: int) -> None:
    assert make_workers(4).run(train_in_halves, {"stage": stage, "executor": "eager"}) == [True] * 4
