"""Training on ranks with a device each, over NCCL, against plain PyTorch; and NCCL's operators by themselves."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from benchmarks.gpu.lines import Line, Setting, at_most
from benchmarks.gpu.ranks import on_ranks
from benchmarks.gpu.training import difference, train, train_plainly
from zerofx.passes.travel import Collective, run

LIMIT = 140
BOUND = {"cpu": 1e-5, "cuda": 1e-4}
"""Of a loss, relative. On a GPU products are summed in another order for every shape."""


def lines(setting: Setting) -> Iterator[Line]:
    yield from on_ranks(setting, _travel, {f"{setting.backend}'s operators bring what was sent": ()}, _all_fine)
    cases = [(stage, "eager") for stage in (3, 2, 1, 0)] + [(stage, "inductor") for stage in (3, 2, 0)]
    yield from trains(setting, cases[:2] if setting.small else cases)


def trains(setting: Setting, cases: list[tuple[int, str]], shared: int = 0) -> Iterator[Line]:
    """Stages and executors, and how far the losses of each are from plain PyTorch's on the rows of all ranks."""
    world = shared or setting.ranks
    where = f"{world} ranks on one device" if shared else f"{world} rank{'s' * (world > 1)}"
    named = {
        f"{where}, stage {stage}, {executor}: losses off plain PyTorch's": (setting.small, stage, executor)
        for stage, executor in cases
    }
    wanted = train_plainly(torch.device(setting.device), setting.small, world)

    def read(name: str, found: list[list[float]]) -> Line:
        return at_most(name, max(difference(losses, wanted) for losses in found), BOUND[setting.device])

    yield from on_ranks(setting, train, named, read, shared=shared)


def _all_fine(name: str, fine: list[bool]) -> Line:
    return Line(name, "on every rank", f"on {sum(fine)} of {len(fine)}", "as expected" if all(fine) else "otherwise")


def _travel(device: torch.device) -> bool:
    """The spelling of `zerofx.passes.travel.Collective`, on as many ranks as there are; of one, too."""
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    wait, travel = torch.ops._c10d_functional.wait_tensor, Collective()
    mine = torch.full((64,), float(rank), device=device)
    pack = torch.arange(64.0 * world, device=device)
    out = torch.empty(64 * world, device=device)
    ranks = torch.arange(world, device=device, dtype=mine.dtype).repeat_interleave(64)
    if device.type == "cpu":  # gloo's own gather of this name is not sound (docs/gloo.md)
        dist.all_gather_into_tensor(out, mine)
        gathered = out
    else:
        gathered = wait(travel.gather(run, mine, world, group.group_name))
        for work in travel.gather_into(out, mine, group.group_name):
            work.wait()
    summed = wait(travel.scatter(run, pack, world, group.group_name))
    return bool(
        gathered.equal(ranks)
        and out.equal(ranks)
        and summed.equal(pack.chunk(world)[rank] * world)  # all sent the same
    )
