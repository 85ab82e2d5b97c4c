"""`zerofx.send_parameters` gives ranks that do not train what `zerofx.full_parameters` gives those that do."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zerofx
from tests import models
from tests.counting import count_collectives
from tests.slow import slow
from tests.workers import Workers
from zerofx.checkpoint import broadcast
from zerofx.runtime.state.group import groups_of

EACH_GROUP = zerofx.Grouping(min_bytes=0)
TRAINERS, ENGINE = [0, 1], [0, 2, 3]


def trained(name: str, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Of a step, on two ranks."""
    model = zerofx.compile(models.build(name), executor="eager", groups=EACH_GROUP, mesh=mesh, **options)
    models.loss_of(model, models.make_batch(name, 2, seed=dist.get_rank())).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    return model


def arguments() -> list[dict[str, Any]]:
    """What is sent, in turn."""
    return [{}, {"dtype": torch.bfloat16, "buffer": 1}, {"dtype": torch.float64}, {"names": some}, {"names": []}]


def some(name: str) -> bool:
    return name.endswith("bias") or "embed" in name


def check_sent(name: str, options: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    """On a rank of the trainer what `full_parameters` gives; on one of the engine what has come."""
    mesh, group = DeviceMesh("cpu", TRAINERS), dist.new_group(ENGINE)
    if dist.get_rank() not in TRAINERS:
        return [dict(zerofx.receive_parameters(group)) for _ in arguments()]
    model = trained(name, mesh, **options)
    wanted = []
    for given in arguments():
        zerofx.send_parameters(zerofx.full_parameters(model, ranks=0, **given), group)
        wanted.append(dict(zerofx.full_parameters(model, **given)))
    models.loss_of(model, models.make_batch(name, 2)).backward()  # and it trains on
    return wanted


@pytest.mark.parametrize("stage", [slow(0), slow(1), slow(2), 3])
def test_an_engine_gets_what_full_parameters_gives(make_workers: Callable[[int], Workers], stage: int) -> None:
    workers = make_workers(4)
    mixed = {"mixed_precision": zerofx.MixedPrecision(torch.bfloat16)}
    for name, options in (("tied", {}), ("gpt", mixed)):
        wanted, _, *engine = workers.run(check_sent, name, {"stage": stage, **options})
        for found in engine:
            for one, other in zip(found, wanted, strict=True):
                assert list(one) == list(other)
                for key, value in one.items():
                    assert value.dtype == other[key].dtype and torch.equal(value, other[key]), key


def check_counts() -> Any:
    mesh, group = DeviceMesh("cpu", TRAINERS), dist.new_group(ENGINE)
    if dist.get_rank() not in TRAINERS:
        with count_collectives() as log:
            storages = {w.untyped_storage().data_ptr() for _, w in list(zerofx.receive_parameters(group))}
        return log.calls["broadcast"], len(storages)
    model = trained("gpt", mesh)
    with mock.patch.object(broadcast, "_SMALL", 0), mock.patch.object(torch.Tensor, "copy_", no_copy):
        zerofx.send_parameters(zerofx.full_parameters(model, ranks=0), group)
    return len(groups_of(model))


def no_copy(*_: Any) -> None:
    raise AssertionError("what is gathered is sent as it lies")


def test_a_group_is_one_broadcast_and_its_weights_are_views_of_it(make_workers: Callable[[int], Workers]) -> None:
    groups, _, *engine = make_workers(4).run(check_counts)
    assert engine == [(2 * groups + 1, groups)] * 2  # with a header each, and one that says that it is the end


def check_stops() -> int:
    mesh, group = DeviceMesh("cpu", TRAINERS), dist.new_group(ENGINE)
    if dist.get_rank() in TRAINERS:
        model = trained("gpt", mesh)
        for _ in range(2):
            zerofx.send_parameters(zerofx.full_parameters(model, ranks=0), group)
        return len(list(model.parameters()))
    for i, _ in enumerate(zerofx.receive_parameters(group)):
        if i == dist.get_rank():  # each at another place
            break
    gc.collect()
    return len(dict(zerofx.receive_parameters(group)))


def test_an_engine_that_stops_early_receives_the_next_ones(make_workers: Callable[[int], Workers]) -> None:
    trainer, _, *engine = make_workers(4).run(check_stops)
    assert engine == [trainer, trainer]


def of_ones_own() -> list[tuple[str, torch.Tensor]]:
    """What a trainer may send: of any layout, tied, empty, and more names than a header holds."""
    torch.manual_seed(0)
    flat = torch.randn(64)
    views = [(f"view.{i}", flat[8 * i : 8 * i + 8].view(2, 4)) for i in range(8)]
    tied = torch.randn(3, 5).bfloat16()
    other = torch.arange(24).view(2, 3, 4)
    many = [(f"{i}" + "long" * 20, torch.tensor(float(i))) for i in range(300)]
    return [
        *views,
        ("tied.a", tied),
        ("tied.b", tied),
        ("turned", other.transpose(0, 2)),
        ("every.second", flat[::2]),
        ("none", torch.empty(0, 4)),
        ("bytes", torch.arange(5, dtype=torch.uint8)),
        ("flags", torch.tensor([True, False])),
        *many,
        ("large", torch.randn(700, 1000)),
        ("last", torch.randn(3)),
    ]


def check_any_tensors() -> bool:
    if dist.get_rank() == 0:
        zerofx.send_parameters(iter(of_ones_own()))
        return True
    found = list(zerofx.receive_parameters())
    assert [name for name, _ in found] == [name for name, _ in of_ones_own()]
    for (name, one), (_, other) in zip(found, of_ones_own(), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other), name
    tied = dict(found)
    return tied["tied.a"].data_ptr() == tied["tied.b"].data_ptr()


def test_any_tensors_are_sent_and_tied_ones_once(workers3: Workers) -> None:
    assert workers3.run(check_any_tensors) == [True] * 3


def check_refused() -> None:
    if dist.get_rank():
        with pytest.raises(ValueError, match=r"on rank 1 of group=: expected its rank 0, or a rank of the trainer"):
            zerofx.send_parameters([])


def test_a_second_rank_of_the_trainer_in_the_group_is_refused(workers2: Workers) -> None:
    workers2.run(check_refused)
