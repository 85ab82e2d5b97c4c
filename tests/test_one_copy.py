"""One copy of the weights for all ranks of a host: same numbers, no gathers, nobody reads what is being written."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.counting import count_collectives
from tests.slow import quick_if, slow_if
from tests.workers import Workers
from zerofx.features.one_copy import one_copy
from zerofx.runtime.ranks import watch
from zerofx.runtime.ranks.agree import OutOfStepError
from zerofx.runtime.state.group import groups_of

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory without a name, of Linux")
EACH_LAYER = zerofx.Grouping(blocks=(nn.Linear,), min_bytes=0)


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 13), nn.Tanh(), nn.Linear(13, 3))


def batches(steps: int = 3) -> torch.Tensor:
    return torch.randn(steps, 2, 4, 7, generator=torch.Generator().manual_seed(dist.get_rank()))


def whole(model: nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor() for p in model.parameters()]  # type: ignore[operator]


def train(model: nn.Module, in_backward: bool = False) -> list[torch.Tensor]:
    """Losses, and whole weights, of three steps of two micro-batches, with a look at the loss between two steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for first, second in batches():
        with zerofx.no_sync(model):
            model(first).square().mean().backward()
        loss = model(second).square().mean()
        if in_backward:
            with zerofx.step_in_backward(optimizer):
                loss.backward()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            losses += [loss.detach(), model(second).square().mean()]
    return [*losses, *whole(model)]


def train_both_ways(executor: str, precision: zerofx.MixedPrecision | None, in_backward: bool) -> set[str]:
    """What reached the process group while ranks trained on one copy, once the numbers were seen to be the same."""
    options: dict[str, Any] = {"executor": executor, "mixed_precision": precision, "groups": EACH_LAYER}
    wanted = train(zerofx.compile(net(), **options), in_backward)
    model = zerofx.compile(net(seed=dist.get_rank()), one_copy=True, **options)
    with count_collectives() as log:
        got = train(model, in_backward)
    for a, b in zip(got, wanted, strict=True):
        assert a.equal(b)
    assert "all_gather" not in str(zerofx.graphs(model)[0])
    return {event.name.rpartition("_")[0] for event in log.events} - {""}  # `full_tensor` broadcasts


@slow_if(lambda world_size: world_size == 3)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_numbers_are_those_of_gathered_weights_and_nothing_is_gathered(make_workers, world_size: int) -> None:
    for kinds in make_workers(world_size).run(train_both_ways, "eager", None, False):
        assert kinds == ({"all_to_all", "meeting"} if world_size > 1 else set())


LOW = zerofx.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@quick_if(lambda in_backward: in_backward)
@pytest.mark.parametrize(
    ("executor", "precision", "in_backward"),
    [("inductor", None, False), ("eager", LOW, False), ("inductor", LOW, False), ("eager", None, True)],
)
def test_so_they_are_in_generated_code_in_low_precision_and_where_backward_does_the_step(
    workers2: Workers, executor: str, precision: zerofx.MixedPrecision | None, in_backward: bool
) -> None:
    workers2.run(train_both_ways, executor, precision, in_backward)


def what_others_write() -> list[float]:
    """Each rank writes its number into its shard; after a forward all see all of it."""
    model = zerofx.compile(nn.Linear(64, 64, bias=False), one_copy=True, executor="eager")
    with torch.no_grad():
        model.weight._local.fill_(1.0 + dist.get_rank())
        model(torch.ones(1, 64))
    (group,) = groups_of(model)
    assert group.replica is not None
    assert group.shard.data_ptr() == group.replica.data_ptr() + group.rank * group.shard.nbytes
    return group.layout.view(group.replica, group.layout.slots[0]).unique().tolist()


def test_a_shard_is_a_part_of_what_all_ranks_map(workers3: Workers) -> None:
    assert workers3.run(what_others_write) == [[1.0, 2.0, 3.0]] * 3


def bytes_of_a_rank(precision: zerofx.MixedPrecision | None) -> tuple[dict[str, int], int, int]:
    model = zerofx.compile(nn.Linear(64, 64, bias=False), one_copy=True, executor="eager", mixed_precision=precision)
    model(torch.ones(1, 64)).sum().backward()
    model.zero_grad()
    rates = zerofx.Rates(1e9, 1e9, 1e9, 0.0)
    prediction = zerofx.predict(model, rates)
    return zerofx.memory_summary(model).nbytes, prediction.held_bytes, prediction.wire_bytes


@pytest.mark.parametrize(("precision", "replica", "shard"), [(None, 4, 0), (LOW, 2, 4)])
def test_a_rank_is_told_its_part_of_the_memory_alone(
    workers2: Workers, precision: zerofx.MixedPrecision | None, replica: int, shard: int
) -> None:
    for nbytes, held, wire in workers2.run(bytes_of_a_rank, precision):
        assert (nbytes["replicas"], nbytes["shards"]) == (replica * 64 * 64 // 2, shard * 64 * 64 // 2)
        assert held == nbytes["replicas"] + nbytes["shards"]
        assert wire == 4 * 64 * 64 // 2  # a gradient's reduction


@torch.library.custom_op("zerofx_test::nap", mutates_args=())
def nap(x: torch.Tensor) -> torch.Tensor:
    """Rank 1 is slower than others."""
    time.sleep(0.2 * (dist.get_rank() == 1))
    return x.clone()


@nap.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


class Napping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.ops.zerofx_test.nap(self.first(x)))


def write_at_once() -> None:
    """Rank 0 writes as soon as its forward is over, while rank 1 naps in its own; and rank 1 naps before it writes."""
    torch.manual_seed(0)
    plain = Napping()
    model = Napping()
    model.load_state_dict(plain.state_dict())
    zerofx.compile(model, one_copy=True, executor="eager", groups=EACH_LAYER)
    x = torch.randn(2, 4)
    for _ in range(3):
        with torch.no_grad():
            assert model(x).equal(plain(x))
            time.sleep(0.2 * (dist.get_rank() == 1))
            for module in (model, plain):
                for p in module.parameters():
                    p.mul_(1.5)


def test_nobody_writes_while_another_rank_reads_and_nobody_reads_before_all_have_written(workers2: Workers) -> None:
    workers2.run(write_at_once)


def go_on_in_other_ways(folder: str) -> None:
    """A checkpoint of gathered weights, whole weights to edit, a module from the meta device."""
    gathered, model = zerofx.compile(net(), executor="eager"), zerofx.compile(net(1), executor="eager", one_copy=True)
    (x, _), *_ = batches()
    zerofx.save(folder, gathered)
    zerofx.load(folder, model)
    assert model(x).equal(gathered(x))
    for each in (gathered, model):
        with zerofx.unsharded(each), torch.no_grad():
            each[0].weight += 1.0
    assert model(x).equal(gathered(x))
    zerofx.save(f"{folder}/edited", model)
    with torch.device("meta"):
        made = net()
    zerofx.compile(made, executor="eager", one_copy=True, init=f"{folder}/edited")
    assert made(x).equal(gathered(x))


def test_checkpoints_whole_weights_and_modules_from_the_meta_device_work(workers2: Workers, tmp_path: Path) -> None:
    workers2.run(go_on_in_other_ways, str(tmp_path))


def stay_away() -> str:
    watch.TICK, watch.SILENT = 0.25, 2.0
    model = zerofx.compile(net(), executor="eager", one_copy=True, timeout=4)
    model(torch.ones(2, 7)).mean().backward()
    if dist.get_rank():
        time.sleep(9)
    try:
        model(torch.ones(2, 7))
    except OutOfStepError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_rank_that_does_not_come_to_a_meeting_is_named(workers2: Workers) -> None:
    message, _ = workers2.run(stay_away, timeout=60)
    assert re.search(r"rank 0 has waited 4 s for forward, before it reads: meeting.*; missing: rank 1", message)


def refusals(off: bool) -> str:
    """On rank 1 something is amiss: it reads nobody's memory (``off``), or cannot map any."""
    from torch.distributed.device_mesh import DeviceMesh

    model, mesh = net(), DeviceMesh.from_group(dist.new_group(), "cpu")
    last = dist.get_rank() == 1
    alone = mock.patch.dict(os.environ, {"ZEROFX_SAME_HOST": "0"} if last and off else {})
    full = mock.patch.object(one_copy.mmap, "mmap", no_memory) if last and not off else contextlib.nullcontext()
    with alone, full, pytest.raises((ValueError, RuntimeError)) as error:
        zerofx.compile(model, one_copy=True, mesh=mesh)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    return str(error.value)


def no_memory(*_: Any) -> None:
    raise OSError(12, "Cannot allocate memory")


def test_ranks_that_share_no_memory_are_refused_on_all_of_them(make_workers) -> None:
    for message in make_workers(3).run(refusals, True):
        assert re.match(r"one_copy=True: rank 0 shares no memory with rank 1\. Expected ranks of one Linux", message)


def test_memory_that_one_rank_cannot_map_is_an_error_on_all_of_them(make_workers) -> None:
    for message in make_workers(2).run(refusals, False):
        assert re.search(r"rank 1 cannot map [\d,]+ bytes of common memory: .*Cannot allocate memory", message)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_other_stages_than_3_are_refused(stage: int) -> None:
    with pytest.raises(ValueError, match=f"one_copy=True with stage={stage}: expected stage=3"):
        zerofx.dry_run(net(), torch.ones(2, 7), world_size=2, stage=stage, one_copy=True)


def test_weights_that_are_not_in_the_hosts_memory_are_refused() -> None:
    with pytest.raises(ValueError, match="one_copy=True with parameters on cuda: expected the CPU"):
        zerofx.dry_run(net(), torch.ones(2, 7), world_size=2, device="cuda", one_copy=True)


def test_a_dry_run_has_the_graphs_of_one_copy() -> None:
    record = zerofx.dry_run(net(), torch.ones(2, 7), world_size=8, one_copy=True, executor="eager")
    assert "all_gather" not in str(record) and "replica" in str(record)
    assert "ranks have it in common" in record.explain("refresh 0")
    assert zerofx.predict(record, zerofx.Rates(1e9, 1e9, 1e9, 0.0)).held_bytes < 1024
