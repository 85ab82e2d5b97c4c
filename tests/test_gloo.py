"""What `lower` hands to gloo is right, and holds up: thousands of steps with several collectives in flight.

With ranks that know they share a host, and with ranks that do not. PyTorch's coalesced all-gather on gloo corrupts the
heap under this load within seconds (docs/gloo.md).
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.passes.graphs import Sketch, apply, aten, up_to
from zerofx.features.gloo_threads.gloo_threads import gloo_threads
from zerofx.features.same_host import same_host as memory
from zerofx.passes import lower

STEPS = 5_000
same_host = pytest.mark.parametrize("same_host", [False, True])
batch = pytest.mark.skipif(
    not hasattr(os, "SCHED_BATCH") or torch.__version__ < (2, 13),
    reason="a scheduling policy of Linux, for threads that gloo gave a name",
)


def process_group(same_host: bool) -> str:
    """The name of a new one of all ranks, which read each other's memory or do not."""
    name = dist.new_group().group_name
    if same_host:
        memory.connect(name)
    assert len(memory.neighbours(name)) == (dist.get_world_size() - 1 if same_host else 0)
    return name


def exchange(dtype: torch.dtype, same_host: bool) -> None:
    """Pairwise collectives in flight together, beside what PyTorch has for the same, and messages of a user's own."""
    rank, world, group = dist.get_rank(), dist.get_world_size(), process_group(same_host)
    shards = [torch.full((5,), 10.0 * rank + i).to(dtype) for i in range(4)]
    packs = [torch.arange(3.0 * world).add(100 * rank + i).to(dtype) for i in range(4)]
    mine = torch.tensor([rank])
    sent = dist.isend(mine, (rank + 1) % world)
    gathered = [torch.ops.zerofx.all_gather_pairwise(shard, world, group) for shard in shards]
    exchanged = [torch.ops.zerofx.all_to_all_pairwise(pack, world, group) for pack in packs]
    theirs = torch.empty_like(mine)
    dist.recv(theirs, (rank - 1) % world)
    sent.wait()
    assert theirs.item() == (rank - 1) % world
    for got in [*exchanged, *gathered]:
        torch.ops._c10d_functional.wait_tensor(got)
    for shard, got in zip(shards, gathered, strict=True):
        wanted = torch.empty_like(got)
        dist.all_gather_into_tensor(wanted, shard)
        assert got.equal(wanted)
    for pack, got in zip(packs, exchanged, strict=True):
        wanted = torch.empty_like(pack)
        dist.all_to_all_single(wanted, pack)
        parts = list(wanted.chunk(world))
        own = torch.ops.zerofx.own_part(pack, world, group)
        assert own.equal(parts.pop(rank)) and own.untyped_storage().data_ptr() == pack.untyped_storage().data_ptr()
        assert got.equal(torch.cat(parts))


@same_host
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 3])
def test_pairwise_collectives_give_what_pytorchs_own_give(
    make_workers, world: int, dtype: torch.dtype, same_host: bool
) -> None:
    make_workers(world).run(exchange, dtype, same_host)


def hammer(steps: int, same_host: bool) -> float:
    """Runs a lowered forward of six layers, all gathers in flight at once; every result is checked."""
    s = Sketch(memory_budget=1 << 20, process_group=process_group(same_host), world_size=dist.get_world_size())
    x = s.input("x", 1, 8)
    for name in "abcdef":
        x = s.call(aten.mm.default, x, s.parameters(name, **{name: (8, 8)})[0])
    gm, ctx = s.done(x)
    apply(gm, ctx, *up_to(lower))
    shards = [torch.ones(layout.shard_numel) for layout in ctx.found.shards]
    for step in range(steps):
        (y,) = gm(torch.full((1, 8), 1.0 + step % 7), *shards)
        assert y.eq((1.0 + step % 7) * 8**6).all(), (step, y)
    return y.sum().item()


@pytest.mark.slow
@same_host
@pytest.mark.parametrize("world_size", [2])
def test_many_steps_with_all_gathers_in_flight_leave_the_heap_whole(
    make_workers, world_size: int, same_host: bool
) -> None:
    results = make_workers(world_size).run(hammer, STEPS, same_host, timeout=240)
    assert len(set(results)) == 1


def policies_on(cores: int) -> tuple[set[int], int]:
    """The scheduling policies of gloo's threads, and that of this one, once something is sharded on so many cores."""
    gloos = gloo_threads()
    assert gloos
    had = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(had)[:cores])
    try:
        zerofx.shard(nn.Linear(4, 4))
        return {os.sched_getscheduler(thread) for thread in gloos}, os.sched_getscheduler(0)
    finally:
        os.sched_setaffinity(0, had)
        for thread in gloos:
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


@batch
def test_on_one_core_gloos_threads_wait_for_their_turn_and_the_one_that_computes_does_not(workers2) -> None:
    assert workers2.run(policies_on, 1) == [({os.SCHED_BATCH}, os.SCHED_OTHER)] * 2


@batch
@pytest.mark.skipif(len(getattr(os, "sched_getaffinity", lambda _: "1")(0)) < 2, reason="needs two cores")
def test_on_more_cores_gloos_threads_are_left_alone(workers2) -> None:
    assert workers2.run(policies_on, 2) == [({os.SCHED_OTHER}, os.SCHED_OTHER)] * 2
