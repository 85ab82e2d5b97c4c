"""Who shares what: two halves of all ranks, which share nothing with each other."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zerofx.runtime.ranks.sharing import RankGroup, Sharing

_groups: dict[int, list[dist.ProcessGroup]] = {}


class Halves(Sharing):
    def __init__(self) -> None:
        world = dist.get_world_size()
        if world not in _groups:
            _groups[world] = [
                dist.new_group(list(range(world)[half])) for half in (slice(world // 2), slice(world // 2, None))
            ]
        mine = RankGroup(_groups[world][dist.get_rank() >= world // 2])
        self.weights = self.gradients = self.optimizer = self.everyone = mine

    @staticmethod
    def of(mesh: DeviceMesh | None, reductions: str | None) -> Halves | None:
        return Halves() if mesh is None and reductions is None else None
