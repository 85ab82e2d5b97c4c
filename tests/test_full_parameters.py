"""`zerofx.full_parameters` gives what one weight after the other is, one collective for a group, within its buffer."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerofx
from tests import models
from tests.counting import CollectiveLog, count_collectives
from tests.slow import slow
from tests.tensor_parallel.models import MLP, skip_old
from tests.workers import Workers
from zerofx.checkpoint import parameters
from zerofx.checkpoint.export import gathered_value
from zerofx.checkpoint.state import plain
from zerofx.runtime.state.group import groups_of

EACH_GROUP = zerofx.Grouping(min_bytes=0)
BF16 = zerofx.MixedPrecision(torch.bfloat16)


def trained(name: str, **options: Any) -> nn.Module:
    """Of a step: so replicas are behind their shards."""
    model = zerofx.compile(models.build(name), executor="eager", groups=EACH_GROUP, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    models.loss_of(model, models.make_batch(name, 2, seed=dist.get_rank())).backward()
    optimizer.step()
    return model


def brought(model: nn.Module, **options: Any) -> tuple[dict[str, torch.Tensor], CollectiveLog]:
    with count_collectives() as log:
        found = dict(zerofx.full_parameters(model, **options))
    return found, log


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], dtype: torch.dtype | None = None) -> None:
    assert sorted(found) == sorted(wanted)
    for name, tensor in found.items():
        value = wanted[name].to(dtype) if dtype is not None and wanted[name].is_floating_point() else wanted[name]
        assert type(tensor) is torch.Tensor and tensor.dtype == value.dtype, (name, type(tensor), tensor.dtype)
        assert torch.equal(tensor, value), name


def one_by_one(model: nn.Module, rank0_only: bool = False) -> dict[str, torch.Tensor]:
    """Each weight brought by itself, on all ranks or on rank 0."""
    state = {name: plain(p) for name, p in model.state_dict(keep_vars=True).items() if isinstance(p, nn.Parameter)}
    whole = {name: gathered_value(value, everywhere=not rank0_only) for name, value in state.items()}
    here = not rank0_only or dist.get_rank() == 0
    return {name: value for name, value in whole.items() if value is not None and here}


def check_same(stage: int) -> None:
    options: dict[str, Any]
    for name, options in (("tied", {}), ("gpt", {"mixed_precision": BF16})):
        model = trained(name, stage=stage, **options)
        for dtype in (torch.bfloat16, None, torch.float64):  # first of replicas that are behind, then of fresh ones
            for ranks in (0, "all"):
                found, _ = brought(model, dtype=dtype, ranks=ranks, buffer=1)
                wanted = one_by_one(model, ranks == 0)
                same(found, wanted, dtype)
                same(zerofx.full_state_dict(model, rank0_only=ranks == 0), wanted)
        before = dict(model.named_parameters())
        models.loss_of(model, models.make_batch(name, 2)).backward()  # and it trains on
        assert dict(model.named_parameters()) == before


@pytest.mark.parametrize("stage", [slow(0), slow(1), slow(2), 3])
def test_weights_are_those_of_each_parameter(workers2: Workers, workers3: Workers, stage: int) -> None:
    for workers in (workers2, workers3):
        workers.run(check_same, stage)


def check_counts() -> None:
    model, world = trained("gpt"), dist.get_world_size()
    groups = groups_of(model)
    nbytes = sum(group.layout.nbytes for group in groups) * (world - 1) // world
    assert len(list(model.parameters())) > 2 * len(groups)
    opening = brought(model, names=[])[1]

    def of_weights(**options: Any) -> tuple[dict[str, int], int]:
        _, log = brought(model, **options)
        counts = log.calls - opening.calls
        return dict(counts), log.total_bytes - opening.total_bytes

    for dtype, part in ((None, 1), (torch.bfloat16, 2), (torch.float64, 1)):
        counts, sent = of_weights(dtype=dtype)
        messages = len(groups) * (world - 1)
        assert counts == {"all_gather_recv": messages, "all_gather_send": messages} and sent == nbytes // part
        counts, sent = of_weights(dtype=dtype, ranks=0)
        assert counts == {"gather": len(groups)} and sent == nbytes // part
    name = next(iter(dict(model.named_parameters())))
    counts, _ = of_weights(names=[name])
    assert counts["all_gather_recv"] == world - 1  # the other groups stay where they are

    model = trained("gpt", stage=2)  # once: the replicas are fresh then
    counts, sent = of_weights()
    assert counts["all_gather_recv"] == messages and sent == nbytes
    assert of_weights() == of_weights(dtype=torch.bfloat16) == ({}, 0)
    with count_collectives() as log, torch.no_grad():
        models.loss_of(model, models.make_batch("gpt", 2))
    assert not log.calls
    model = trained("gpt", stage=0)
    assert not brought(model)[1].calls


@pytest.mark.slow
def test_a_group_is_one_collective_and_half_of_the_bytes_in_bf16(workers2: Workers, workers3: Workers) -> None:
    workers2.run(check_counts)
    workers3.run(check_counts)


def check_buffer() -> None:
    model = trained("gpt")
    largest, all_of_them = (f(group.layout.nbytes for group in groups_of(model)) for f in (max, sum))
    start, held = parameters._Arriving._start, []

    def counted(self: Any, group: Any, sent: Any) -> None:
        start(self, group, sent)
        held.append(self.flat.untyped_storage()._weak_ref())
        alive = [ref for ref in held if not torch.UntypedStorage._expired(ref)]
        most.append(sum(torch.UntypedStorage._new_with_weak_ptr(ref).nbytes() for ref in alive))

    def run(buffer: int) -> tuple[int, int]:
        """The most bytes of buffers that were there, and the most groups that were on their way ahead."""
        held.clear(), most.clear()
        ahead = []
        done: set[int] = set()
        for name, weight in zerofx.full_parameters(model, buffer=buffer):
            done.add(id(model.get_parameter(name)._group))
            ahead.append(len(most) - len(done))
            del weight
        return max(most), max(ahead)

    most: list[int] = []
    parameters._Arriving._start = counted  # type: ignore[method-assign]
    try:
        assert run(1) == (largest, 0)
        bytes_there, ahead = run(2 * largest)
        assert largest < bytes_there <= 2 * largest and ahead >= 1
        bytes_there, ahead = run(10**9)
        assert bytes_there < all_of_them and ahead == 2
    finally:
        parameters._Arriving._start = start  # type: ignore[method-assign]


def test_the_next_groups_are_on_their_way_within_the_buffer(workers2: Workers) -> None:
    workers2.run(check_buffer)


def check_stops() -> None:
    model = trained("gpt")
    wanted = zerofx.full_state_dict(model, rank0_only=False)
    for ranks in ("all", 0):
        for at in (1, 7):
            kept = []
            for i, (name, weight) in enumerate(zerofx.full_parameters(model, ranks=ranks), start=1):
                kept.append((name, weight))
                if i == at:
                    break
            gc.collect()
            assert len(kept) == (at if ranks == "all" or dist.get_rank() == 0 else 0)
            for name, weight in kept:  # they are the program's
                assert torch.equal(weight, wanted[name])
                weight.zero_()
            same(brought(model)[0], wanted)
    never = zerofx.full_parameters(model)
    del never
    models.loss_of(model, models.make_batch("gpt", 2)).backward()

    def failing() -> None:
        for _ in zerofx.full_parameters(model):
            raise KeyError("of the user's own")

    with pytest.raises(KeyError, match="of the user's own"):
        failing()
    gc.collect()
    same(brought(model)[0], wanted)


def test_a_program_that_stops_early_leaves_all_well(workers2: Workers) -> None:
    workers2.run(check_stops)


def check_chosen() -> None:
    model = trained("tied")
    wanted = zerofx.full_state_dict(model, rank0_only=False)
    found = dict(zerofx.full_parameters(model, names=lambda name: "body" not in name))
    assert list(found) == ["embedding.weight", "head.weight"] and found["head.weight"] is found["embedding.weight"]
    assert list(dict(zerofx.full_parameters(model, names=["head.weight"]))) == ["head.weight"]
    assert list(dict(zerofx.full_parameters(model.body))) == ["weight", "bias"]
    for given, said in (
        ({"names": ["haed.weight"]}, r"'haed.weight' is no parameter of this Tied: did you mean 'head.weight'"),
        ({"names": "head"}, r"'head' is no parameter of this Tied"),
        ({"buffer": "1 elephant"}, r"buffer='1 elephant'\): expected a number of bytes above 0, or one with its unit"),
        ({"buffer": 0}, r"buffer=0\): expected a number of bytes above 0"),
        ({"dtype": torch.int8}, r"dtype=torch.int8\): expected a floating-point torch.dtype, or None"),
        ({"ranks": 1}, r'ranks=1\): expected "all", or 0 for rank 0 alone'),
    ):
        with pytest.raises(ValueError, match=said):  # as it is called, not as it is iterated
            zerofx.full_parameters(model, **given)
    assert parameters._bytes_of("1.5 kB") == 1500 and parameters._bytes_of("2MiB") == 2 << 20
    with zerofx.unsharded(model, writeback=False), count_collectives() as log:
        same(dict(zerofx.full_parameters(model)), wanted)
    assert not log.calls

    class WithBuffers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.arange(3))
            self.register_buffer("scale", torch.ones(2))
            self.linear = nn.Linear(3, 5)

    module = zerofx.shard(WithBuffers())
    same(dict(zerofx.full_parameters(module)), {f"linear.{n}": p for n, p in whole(module.linear).items()})
    found = dict(zerofx.full_parameters(module, buffers=True, dtype=torch.bfloat16))
    assert list(found) == ["linear.weight", "linear.bias", "steps", "scale"]
    same(found, zerofx.full_state_dict(module, rank0_only=False), torch.bfloat16)


def whole(module: Any) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor() for name, p in module.named_parameters()}


def test_names_choose_and_what_is_no_choice_is_refused(workers2: Workers) -> None:
    workers2.run(check_chosen)


def check_out_of_step() -> str:
    model = trained("tied")
    if dist.get_rank() == 1:
        groups_of(model)[0].steps += 1
    with pytest.raises(zerofx.OutOfStepError) as caught:
        next(zerofx.full_parameters(model))
    return str(caught.value)


def test_weights_of_two_steps_are_refused(make_workers: Callable[[int], Workers]) -> None:
    for said in make_workers(2).run(check_out_of_step):
        assert said.startswith("zerofx.full_parameters would mix two steps")


def check_mesh(shape: tuple[int, int], how: str) -> None:
    ways = {
        "plain": None,
        "between": zerofx.Sharding(gradients="all", optimizer="all"),
        "near": zerofx.Sharding(weights="all", gradients="all", optimizer="all"),
        "all": zerofx.Sharding(weights="all", backward="all", gradients="all", optimizer="all"),
    }
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    for stage in (2, 3) if how == "plain" else (3,):
        model = trained("tied", mesh=mesh, sharding=ways[how], stage=stage)
        for ranks in (0, "all"):
            for dtype in (torch.bfloat16, None):
                found, _ = brought(model, ranks=ranks, dtype=dtype)
                same(found, one_by_one(model, ranks == 0), dtype)


@pytest.mark.parametrize("how", [slow("plain"), slow("between"), "near", slow("all")])
def test_replicas_and_rows_of_a_mesh_give_the_same(make_workers: Callable[[int], Workers], how: str) -> None:
    make_workers(4).run(check_mesh, (2, 2), how)


def check_tensor_parallel(stage: int) -> None:
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    net = parallelize_module(MLP(), mesh["tp"], dict(MLP.plan))
    model = zerofx.shard(net, mesh=mesh["dp"], stage=stage, groups=EACH_GROUP)
    for ranks in (0, "all"):
        for dtype in (torch.bfloat16, None):
            found, _ = brought(model, ranks=ranks, dtype=dtype)
            same(found, one_by_one(model, ranks == 0), dtype)
    for i, _ in enumerate(zerofx.full_parameters(model, ranks=0)):
        if i == 1:
            break
    same(brought(model)[0], one_by_one(model))


@skip_old
@pytest.mark.parametrize("stage", [slow(0), slow(2), 3])
def test_tensor_parallel_weights_are_whole(make_workers: Callable[[int], Workers], stage: int) -> None:
    make_workers(4).run(check_tensor_parallel, stage)


def check_kept_elsewhere(folder: str) -> None:
    where = zerofx.Offload(folder, folder, folder)
    for options in ({"offload": where}, {"one_copy": True}, {"uneven": True}, {"wire": zerofx.Wire(weights="int8")}):
        model = trained("gpt", **options)
        for dtype in (torch.bfloat16, None):
            for ranks in (0, "all"):
                found, _ = brought(model, ranks=ranks, dtype=dtype)
                same(found, one_by_one(model, ranks == 0), dtype)
        models.loss_of(model, models.make_batch("gpt", 2)).backward()
        del model
        gc.collect()


@pytest.mark.slow
def test_weights_in_files_in_common_memory_and_by_turns_are_brought(workers2: Workers, tmp_path: Any) -> None:
    workers2.run(check_kept_elsewhere, str(tmp_path))
