"""A way to travel: buffers go through files, and come back from them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerofx._torch import PythonWork, resolve_process_group
from zerofx.passes.travel import Call, Travel

_library = torch.library.Library("zerofx_toy", "FRAGMENT")
_library.define("gather_by_file(Tensor shard, int world_size, str process_group) -> Tensor")
_library.define("reduce_by_file(Tensor pack, int world_size, str process_group) -> Tensor")

read = 0
"""Files that this rank has read."""
_sent = 0


def _everyones(sent: torch.Tensor, process_group: str) -> list[torch.Tensor]:
    """What every rank has sent, by rank."""
    global read, _sent
    group = resolve_process_group(process_group)
    _sent += 1
    folder = Path(tempfile.gettempdir()) / f"zerofx-toy-{dist.get_process_group_ranks(group)[0]}-{group.group_name}"
    folder.mkdir(exist_ok=True)
    torch.save(sent.detach().clone(), folder / f"{_sent}-{group.rank()}")
    dist.barrier(group)
    found = [torch.load(folder / f"{_sent}-{rank}") for rank in range(group.size())]
    dist.barrier(group)
    (folder / f"{_sent}-{group.rank()}").unlink()
    read += group.size()
    return found


def _gather(shard: torch.Tensor, world_size: int, process_group: str) -> torch.Tensor:
    return torch.cat(_everyones(shard, process_group))


def _reduce(pack: torch.Tensor, world_size: int, process_group: str) -> torch.Tensor:
    rank = resolve_process_group(process_group).rank()
    return torch.stack([theirs.chunk(world_size)[rank] for theirs in _everyones(pack, process_group)]).sum(0)


def _gathered(shard: torch.Tensor, world_size: int, process_group: str) -> torch.Tensor:
    return shard.new_empty(world_size * shard.numel())


def _reduced(pack: torch.Tensor, world_size: int, process_group: str) -> torch.Tensor:
    return pack.new_empty(pack.numel() // world_size)


for _name, _run, _shape in (("gather_by_file", _gather, _gathered), ("reduce_by_file", _reduce, _reduced)):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    _library.impl(_name, _shape, "Meta")


class _Done(PythonWork):
    def wait(self, timeout: Any = None) -> bool:
        with self.ending():
            return True


class ThroughFile(Travel):
    gather_target = torch.ops.zerofx_toy.gather_by_file.default
    scatter_target = torch.ops.zerofx_toy.reduce_by_file.default

    def takes(self, backend: str) -> bool:
        return True

    def scatter(self, call: Call, pack: Any, world_size: int, process_group: str) -> Any:
        return call(self.scatter_target, pack, world_size, process_group)

    def gather_into(self, out: torch.Tensor, shard: torch.Tensor, process_group: str) -> list[dist.Work]:
        out.copy_(_gather(shard, 0, process_group))
        return [_Done()]
