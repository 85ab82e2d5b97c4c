"""The counter sees every way a collective reaches a process group, and knows its bytes."""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from tests import models
from tests.counting import CollectiveLog, count_collectives
from tests.workers import Workers

Counts = tuple[dict[str, int], dict[str, int]]


def counts(log: CollectiveLog) -> Counts:
    assert log.total_bytes == sum(log.bytes.values())
    return dict(log.calls), log.bytes


def eager_calls() -> Counts:
    world = dist.get_world_size()
    part, whole = torch.ones(6), torch.ones(6 * world)
    with count_collectives() as log:
        dist.all_gather_into_tensor(whole, part)
        dist.all_gather([torch.empty(6) for _ in range(world)], part)
        dist.reduce_scatter_tensor(part, whole)
        dist.all_to_all_single(torch.empty_like(whole), whole)
        dist.all_reduce(part.bfloat16(), async_op=True).wait()
        dist.broadcast(part, 0)
        dist.barrier()
        thread = threading.Thread(target=dist.all_reduce, args=(part,))
        thread.start()
        thread.join()
    dist.all_reduce(part)  # after the context: not counted
    assert [event.dtypes for event in log.events if event.name == "all_reduce"] == [
        (torch.bfloat16,),
        (torch.float32,),
    ]
    return counts(log)


def nested() -> tuple[Counts, Counts, Counts]:
    with count_collectives() as outer:
        dist.barrier()
        with count_collectives() as inner:
            dist.barrier()
        dist.barrier()
    with count_collectives() as later:
        dist.barrier()
    return counts(outer), counts(inner), counts(later)


def functional(shard: torch.Tensor, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    weight = funcol.all_gather_tensor_autograd(shard, 0, group)  # reduce-scatters in backward
    return (torch.relu(x @ weight) ** 2).sum()


def compiled_functional() -> tuple[Counts, Counts, bool]:
    """Code that Inductor generated, forward and backward apart; and whether the result equals eager's."""
    group = dist.group.WORLD
    assert group is not None
    shard = torch.randn(4, 5, requires_grad=True)
    x = torch.randn(3, 4 * dist.get_world_size())
    functional(shard, x, group).backward()
    assert shard.grad is not None
    expected, shard.grad = shard.grad, None
    step = torch.compile(functional, fullgraph=True)
    with count_collectives() as log:  # compiling inside: tracers must not be counted
        step(shard, x, group).backward()
    assert log.calls == {"all_gather": 1, "reduce_scatter": 1}
    shard.grad = None
    with count_collectives() as forward:
        loss = step(shard, x, group)
    with count_collectives() as backward:
        loss.backward()
    return counts(forward), counts(backward), torch.allclose(shard.grad, expected)


def data_parallel() -> tuple[Counts, int]:
    """DDP's reducer calls the group from C++ hooks of the autograd engine."""
    model = torch.nn.parallel.DistributedDataParallel(models.build("mlp"))
    with count_collectives() as log:
        models.loss_of(model, models.make_batch("mlp", 4)).backward()
    return counts(log), sum(p.numel() * 4 for p in model.parameters())


def fully_sharded() -> dict[str, int]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = models.build("gpt")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with count_collectives() as log:
        models.loss_of(model, models.make_batch("gpt", 4)).backward()
    return dict(log.calls)


def test_eager_calls(workers2: Workers) -> None:
    calls = {
        "all_gather": 2,
        "reduce_scatter": 1,
        "all_to_all": 1,
        "all_reduce": 2,
        "broadcast": 1,
        "barrier": 1,
    }
    sizes = {
        "all_gather": 2 * 24,  # one shard of 6 floats from the other rank, twice
        "reduce_scatter": 24,
        "all_to_all": 24,
        "all_reduce": 12 + 24,  # there and back, of half: bfloat16 and float32
        "broadcast": 24,
        "barrier": 0,
    }
    assert workers2.run(eager_calls) == [(calls, sizes | {"broadcast": 0}), (calls, sizes)]


def test_bytes_on_three_ranks(workers3: Workers) -> None:
    *_, (_, sizes) = workers3.run(eager_calls)
    assert sizes == {
        "all_gather": 2 * 48,
        "reduce_scatter": 48,
        "all_to_all": 48,
        "all_reduce": 4 * 12 // 3 + 4 * 24 // 3,
        "broadcast": 24,
        "barrier": 0,
    }


def test_contexts_nest_and_end(workers2: Workers) -> None:
    expected = [({"barrier": n}, {"barrier": 0}) for n in (3, 1, 1)]
    assert workers2.run(nested) == [tuple(expected)] * 2


def test_compiled_forward_and_backward(workers2: Workers) -> None:
    for forward, backward, close in workers2.run(compiled_functional):
        assert forward == ({"all_gather": 1}, {"all_gather": 4 * 5 * 4})
        assert backward == ({"reduce_scatter": 1}, {"reduce_scatter": 4 * 5 * 4})
        assert close


def test_ddp(workers2: Workers) -> None:
    for (calls, sizes), weights in workers2.run(data_parallel):
        assert calls == {"all_reduce": 1} and sizes == {"all_reduce": weights}


def test_fsdp2(workers2: Workers) -> None:
    # root and 3 blocks; the root keeps its weights between forward and backward, and so does the last block
    for calls in workers2.run(fully_sharded):
        assert calls["reduce_scatter"] == 4 and calls["all_gather"] in (6, 7)


def test_fake_world(fake_world) -> None:
    fake_world(8)
    with count_collectives() as log:
        dist.all_reduce(torch.ones(16))
    assert counts(log) == ({"all_reduce": 1}, {"all_reduce": 2 * 64 * 7 // 8})
