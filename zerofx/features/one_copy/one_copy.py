"""One copy of the weights for all ranks of a host: each writes its shard, all read the whole, and nobody gathers.

Ranks of one host can map the same memory. A group's flat buffer is its shards end to end (`zerofx.model.layout`). So
every rank's shard can be a part of one such buffer, and what a gather would bring is there already::

    memory of the host      |######## shard 0 ########|######## shard 1 ########|
                                  ▲                          ▲
    written by              rank 0's optimizer         rank 1's optimizer
    read by                 ◀────────── graphs of both, the whole buffer ──────▶

A rank still owns 1/M of the weights, and that is what it takes of the host's memory: the sum over ranks is one copy.
No gathered buffers come on top. Graphs are those of stages 1 and 2, which read whole replicas. With mixed precision the
shard is a tensor of its own, the master, and the buffer holds what the model computes in.

**The law**: nobody writes while anybody reads. A gather keeps it by copying. Here ranks *meet*, twice a graph::

    rank 0   step ─▶ meet  forward  meet ─▶ backward  meet ─▶ step          a meeting is over when all are there
    rank 1   step ──▶ meet  forward meet ─▶ backward   meet ─▶ step

* before a forward reads: then every rank has written what it wants to write (its optimizer has stepped);
* after every graph that has read, before its caller may write.

A backward reads what its forward has read. Who writes between the two gets autograd's error on that very rank, so
nobody has to be waited for. Code outside of graphs gathers a copy, as ever (`zerofx.runtime.eager.ondemand`,
`zerofx.runtime.eager.leaf`). No group is updated inside of a backward: other ranks may still read it.

The memory is a file without a name (``memfd_create``). Rank 0 makes it. The others open it through ``/proc``. The
kernel allows that to those who may read that process (`zerofx.passes.pairwise.neighbours`). It is gone with the last of
them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from zerofx.model.layout import GroupLayout
from zerofx.passes.pairwise import meet_, neighbours
from zerofx.runtime.ranks.sharing import RankGroup, Sharing
from zerofx.runtime.ranks.watch import alone
from zerofx.runtime.state.home import all_resident
from zerofx.runtime.state.weights import Replicated, Weights, share_memory


class InCommon(Replicated):
    """Stage 3 with ``one_copy``: a replica that the ranks of the host have in common."""

    in_common = True
    steps_inside = False
    others: bool = False
    """Whether there are other ranks that write to the replica. Not so for one rank, and in a dry run."""

    def _make(self, memory: torch.Tensor | None) -> None:
        super()._make(memory)
        self.others = memory is not None

    @classmethod
    def takes(cls, stage: int, one_copy: bool, sharing: Sharing | None = None) -> bool:
        return stage == 3 and one_copy

    @classmethod
    def check(cls, device: torch.device) -> None:
        if device.type != "cpu":
            raise ValueError(
                f"one_copy=True with parameters on {device.type}: expected the CPU, whose memory ranks share."
            )

    @classmethod
    def allocate(cls, layouts: Sequence[GroupLayout], sharing: Sharing) -> Sequence[torch.Tensor | None]:
        if sharing.weights.size == 1:
            return [None] * len(layouts)
        return common_memory([layout.numel * layout.weight_dtype.itemsize for layout in layouts], sharing.weights)

    @property
    def own_replica(self) -> torch.Tensor | None:
        return None

    def holders(self, tensor: torch.Tensor) -> int:
        assert self.replica is not None
        return self.ranks.size if share_memory(tensor, self.replica) else 1

    def refresh(self, *, inside: bool = False) -> None:
        """Write what this rank has to say of the replica, where the shard is not a part of it."""
        assert self.replica is not None
        if self.shard._version != self._refreshed and not share_memory(self.shard, self.replica):
            with self.home.resident():
                self.own_part(self.replica).copy_(self.shard)
        self.mark_fresh()

    @classmethod
    @contextlib.contextmanager
    def reading(cls, weights: Sequence[Weights], phase: str, *, written: bool) -> Iterator[None]:
        """Ranks meet before a graph reads what may have been written, and when it has read.

        Nobody is met after an error: the others wait until they are told of it, as in any collective that one rank does
        not come to.
        """
        first = weights[0]
        others = isinstance(first, InCommon) and first.others
        if written and others:
            connect(first.ranks.name, f"{phase}, before it reads")
        with all_resident(each.home for each in weights):
            yield
        if others:
            connect(first.ranks.name, f"{phase}, when it has read")


def common_memory(sizes: Sequence[int], ranks: RankGroup) -> list[torch.Tensor]:
    """Buffers of so many bytes, zeros, that all ranks have in common. A collective, for ranks that have met.

    Raises:
        ValueError: on every rank, if they are not all on one host.
        RuntimeError: on every rank, if one could not make the memory, or map it.
    """
    rank, near = ranks.rank, neighbours(ranks.name)
    for one, others in enumerate(ranks.all_gathered(sorted({*range(ranks.size)} - {rank, *near}))):
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
    memory = _mapped(end, ranks, None if rank == 0 else near[0].pid)
    parts = zip(starts, sizes, strict=True)
    # Each a storage of its own, for graphs count from a storage's beginning. The memory is mapped while one is alive.
    return [torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start) for start, size in parts]


def _mapped(nbytes: int, ranks: RankGroup, maker: int | None) -> Any:
    """Memory that rank 0 makes and all map; ``maker`` is its process, None for itself."""
    memory: Any = b""
    with contextlib.ExitStack() as until_mapped:
        made: int | None = None
        error = ""
        try:
            if maker is None:
                made = os.memfd_create("zerofx")
                until_mapped.callback(os.close, made)
                os.truncate(made, nbytes)
        except OSError as e:
            error = str(e)
        (file, error), *_ = ranks.all_gathered((made, error))
        try:
            if not error:
                with open(f"/proc/{maker or 'self'}/fd/{file}", "r+b") as opened:
                    memory = mmap.mmap(opened.fileno(), nbytes)
        except (OSError, ValueError) as e:
            error = str(e)
        for one, why in enumerate(ranks.all_gathered(error)):
            if why:
                raise RuntimeError(
                    f"one_copy=True: rank {one} cannot map {nbytes:,} bytes of common memory: {why}. Leave it out: "
                    "weights are gathered then."
                )
    return memory


def connect(group_name: str, where: str) -> None:
    """Wait until every rank is here."""
    with alone(group_name, where, "meeting", "one copy of the weights", 0, torch.uint8):
        for work in meet_(group_name):
            work.wait()
