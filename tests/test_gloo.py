"""What `lower` hands to gloo holds up: thousands of steps with several collectives in flight.

PyTorch's coalesced all-gather on gloo corrupts the heap under this load within seconds (docs/architecture.md).
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.passes.graphs import Sketch, apply, aten, up_to
from zerofx.passes import lower

STEPS = 10_000


def hammer(steps: int) -> float:
    """Runs a lowered forward of six layers, all gathers in flight at once; every result is checked."""
    group = dist.group.WORLD
    s = Sketch(prefetch_bytes=1 << 20, process_group=group.group_name, world_size=group.size())
    x = s.input("x", 1, 8)
    for name in "abcdef":
        x = s.call(aten.mm.default, x, s.parameters(name, **{name: (8, 8)})[0])
    gm, ctx = s.done(x)
    apply(gm, ctx, *up_to(lower))
    shards = [torch.ones(layout.shard_numel) for layout in ctx.shards]
    for step in range(steps):
        (y,) = gm(torch.full((1, 8), 1.0 + step % 7), *shards)
        assert y.eq((1.0 + step % 7) * 8**6).all(), (step, y)
    return y.sum().item()


@pytest.mark.parametrize("world_size", [2])
def test_many_steps_with_all_gathers_in_flight_leave_the_heap_whole(make_workers, world_size: int) -> None:
    results = make_workers(world_size).run(hammer, STEPS, timeout=240)
    assert len(set(results)) == 1
