"""One copy of the weights for all ranks of a host: each writes its shard, all read the whole, and nobody gathers.

Ranks of one host can map the same memory. A group's flat buffer is its shards end to end (`zerofx.model.layout`), so
where every rank's shard is a part of one such buffer, what a gather would bring is there already::

    memory of the host      |######## shard 0 ########|######## shard 1 ########|
                                  ▲                          ▲
    written by              rank 0's optimizer         rank 1's optimizer
    read by                 ◀────────── graphs of both, the whole buffer ──────▶

A rank still owns 1/M of the weights, and that is what it takes of the host's memory: the sum over ranks is one copy.
No gathered buffers come on top. Graphs are those of stages 1 and 2, which read whole replicas; with mixed precision the
shard is a tensor of its own, the master, and the buffer holds what the model computes in.

**The law**: nobody writes while anybody reads. A gather keeps it by copying. Here ranks *meet*, twice a graph::

    rank 0   step ─▶ meet  forward  meet ─▶ backward  meet ─▶ step          a meeting is over when all are there
    rank 1   step ──▶ meet  forward meet ─▶ backward   meet ─▶ step

* before a forward reads: then every rank has written what it wants to write (its optimizer has stepped);
* behind every graph that has read, before its caller may write.

A backward reads what its forward has read: who writes between the two gets autograd's error on that very rank, so
nobody has to be waited for. Code outside of graphs gathers a copy, as ever (`zerofx.runtime.eager.ondemand`,
`zerofx.runtime.eager.leaf`).

The memory is a file without a name (``memfd_create``): rank 0 makes it, the others open it through ``/proc``, which the
kernel allows to those who may read that process (`zerofx.runtime.ranks.same_host`). It is gone when the last of them is.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerofx.passes.ops import meet_
from zerofx.runtime.ranks import same_host
from zerofx.runtime.ranks.watch import alone


def check(device: torch.device) -> None:
    """Refuse weights that are not in the host's memory (ValueError)."""
    if device.type != "cpu":
        raise ValueError(f"one_copy=True with parameters on {device.type}: expected the CPU, whose memory ranks share.")


def common_memory(sizes: Sequence[int], process_group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Buffers of so many bytes, zeros, that all ranks have in common. A collective, for ranks that have met.

    Raises:
        ValueError: on every rank, if they are not all on one host.
        RuntimeError: on every rank, if one could not make the memory, or map it.
    """
    rank, ranks, near = process_group.rank(), process_group.size(), same_host.neighbours(process_group.group_name)
    apart = _told([sorted({*range(ranks)} - {rank, *near})], process_group)
    for one, (others,) in enumerate(apart):
        if others:
            raise ValueError(
                f"one_copy=True: rank {one} shares no memory with rank {', '.join(map(str, others))}. Expected ranks "
                "of one Linux host, with gloo, that may read each other's memory (ZEROFX_SAME_HOST is not 0). Leave it "
                "out: weights are gathered then."
            )
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    with contextlib.ExitStack() as until_mapped:
        made: int | None = None
        error, memory = "", b""
        try:
            if rank == 0:
                made = os.memfd_create("zerofx")
                until_mapped.callback(os.close, made)
                os.truncate(made, end)
        except OSError as e:
            error = str(e)
        (file, error), *_ = _told((made, error), process_group)
        try:
            if not error:
                with open(f"/proc/{'self' if rank == 0 else near[0].pid}/fd/{file}", "r+b") as opened:
                    memory = mmap.mmap(opened.fileno(), end)  # type: ignore[assignment]
        except (OSError, ValueError) as e:
            error = str(e)
        for one, why in enumerate(_told(error, process_group)):
            if why:
                raise RuntimeError(
                    f"one_copy=True: rank {one} cannot map {end:,} bytes of common memory: {why}. Leave it out: "
                    "weights are gathered then."
                )
    parts = zip(starts, sizes, strict=True)
    # Each a storage of its own, for graphs count from a storage's beginning. The memory is mapped while one is alive.
    return [torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start) for start, size in parts]


def _told(what: Any, process_group: dist.ProcessGroup) -> list[Any]:
    """By rank, what each has to say."""
    everyone: list[Any] = [None] * process_group.size()
    dist.all_gather_object(everyone, what, group=process_group)
    return everyone


@contextlib.contextmanager
def reading(group_name: str, phase: str, *, written: bool) -> Iterator[None]:
    """A graph reads the common weights of a process group inside.

    ``written``: they may have been written since a graph read them last. Nobody is met after an error: the others wait
    until they are told of it, as in any collective that one rank does not come to.
    """
    if written:
        meet(group_name, f"{phase}, before it reads")
    yield
    meet(group_name, f"{phase}, when it has read")


def meet(group_name: str, where: str) -> None:
    """Wait until every rank is here."""
    with alone(group_name, where, "meeting", "one copy of the weights", 0, torch.uint8):
        for work in meet_(group_name):
            work.wait()
