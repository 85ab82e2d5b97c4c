"""Process groups, their backends, and what waits in them."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn


def resolve_process_group(name: str) -> dist.ProcessGroup:
    """The live process group of that name (2.11, 2.13, 2.15).

    Raises:
        RuntimeError: there is none (any more).
    """
    return torch.distributed.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def is_on_its_way(x: object) -> bool:
    """Whether ``x`` is what a collective of eager code has started and nobody has waited for (2.11, 2.13, 2.15)."""
    return isinstance(x, torch.distributed._functional_collectives.AsyncCollectiveTensor)


def default_store() -> dist.Store:
    """The store by which all ranks found each other (2.11, 2.13, 2.15)."""
    return torch.distributed.distributed_c10d._get_default_store()


FSDP_MARKS = {"_fsdp_flattened": "FullyShardedDataParallel", "_fsdp_orig_uid": "fully_shard"}
"""What FSDP asks a parameter for before it takes it, and which kind does (2.13; in 2.11 the first alone)."""


def around_forward() -> nn.Module | None:
    """The ``DistributedDataParallel`` whose forward runs now (2.11, 2.13, 2.15)."""
    return nn.parallel.DistributedDataParallel._get_active_ddp_module()


def register_work(tensor: torch.Tensor, work: dist.Work) -> None:
    """``_c10d_functional.wait_tensor`` of ``tensor``, or of a view of it, waits for ``work`` too (2.11, 2.13, 2.15)."""
    torch._C._distributed_c10d._register_work(tensor, work)


class PythonWork(dist.Work):
    """A work made in Python, alive until it was waited for: PyTorch holds the C++ half alone (2.11, 2.13, 2.15)."""

    def __init__(self) -> None:
        super().__init__()
        _alive[id(self)] = self

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """It is waited for inside."""
        try:
            yield
        finally:
            _alive.pop(id(self), None)


_alive: dict[int, PythonWork] = {}


class PretendedGroup:
    """What looks like rank 0 of a process group to those who only ask for names; it cannot send anything."""

    def __init__(self, group_name: str, world_size: int, backend: str) -> None:
        self.group_name = group_name
        self._size, self._backend = world_size, backend

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._size

    def _get_backend(self, device: torch.device) -> PretendedGroup:  # see backend_name
        return self

    def name(self) -> str:
        return self._backend


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """The communication backend that ``group`` uses for tensors on ``device`` (2.11, 2.13, 2.15)."""
    return group._get_backend(device).name()


def timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds after which a collective on the CPU is an error (2.11, 2.13, 2.15)."""
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def has_backend(group: dist.ProcessGroup, names: Sequence[str]) -> bool:
    """Whether a backend of ``group`` is one of ``names`` (2.11, 2.13, 2.15)."""
    return any(name in dist.get_backend_config(group) for name in names)


def gather_into(out: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start to fill ``out`` with every rank's ``shard``, as the backend does it.

    2.13 and 2.15 have the function under a new name, and warn of the old one; 2.11 has the old one.
    """
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work = gather(out, shard, group=group, async_op=True)
    assert work is not None
    return work


def abort_collectives(name: str) -> None:
    """End all that this rank waits for in a process group; the waits raise (2.11, 2.13, 2.15).

    ``ProcessGroup.abort`` does nothing on gloo. There, a receive that times out closes all connections of the group.
    A group may have both: ``init_process_group()`` makes gloo for the CPU and NCCL for GPUs.
    """
    group = resolve_process_group(name)
    backends = {pair.rpartition(":")[2] for pair in dist.get_backend_config(group).split(",")}
    if backends != {"gloo"}:
        group.abort()
    if "gloo" not in backends:
        return
    with contextlib.suppress(RuntimeError):  # the time-out, which is what this is for
        other = (group.rank() + 1) % group.size()
        group.recv([torch.empty(1)], other, _NOBODY_SENDS).wait(datetime.timedelta(milliseconds=10))


def is_communication_error(error: RuntimeError) -> bool:
    """Whether the backend raised it, to judge by its text: it has no class of its own (2.11, 2.13, 2.15)."""
    text = str(error)
    return isinstance(error, dist.DistError) or any(
        part in text for part in ("gloo/transport", "pair closure", SAME_HOST_ERROR)
    )


SAME_HOST_ERROR = "zerofx.features.same_host.same_host: an exchange"
"""How what `zerofx.features.same_host.same_host` raises begins."""


_NOBODY_SENDS = 0x7A68
"""A message tag."""
