"""Which parameters have a gradient on any rank: what ranks tell each other beside a backward's reductions.

::

    rank 0's graph has a gradient of     a                 every rank adds to .grad of    a, b
    rank 1's                                b                                             (not of c)
    nobody's                                   c

Ranks whose data choose different branches run different graphs with the same collectives. A rank reduces zeros for
what its own graph does not use, so the average is right on all of them. What a rank cannot see in it is whether anybody
has used a parameter: a gradient of zeros makes an optimizer decay the weight, and None leaves it alone.

So each rank sends one byte for each parameter of the module. It is sent as backward begins and read after the last
reduction, when it has arrived. On gloo these are messages like those of a reduction. Other backends run one small
all-reduce, and the host waits for its result only where the rank's own graph lacks a parameter, and after
`zerofx.no_sync`: ranks may have kept gradients of different parameters.

DistributedDataParallel's ``find_unused_parameters=True`` does the same by an all-reduce of a bitmap (Li et al., PyTorch
Distributed, VLDB 2020, section 3.2.3).
"""

from __future__ import annotations

import contextlib
import functools

import torch
import torch.distributed as dist

from zerofx.kernels.device import there
from zerofx.passes import pairwise
from zerofx.runtime.ranks.agree import Collective, Schedule
from zerofx.runtime.ranks.sharing import RankGroup
from zerofx.runtime.ranks.watch import watch_of


class UsedMap:
    """Which of a module's parameters some rank has a gradient of, in one backward; on its way as soon as it is made.

    Every rank makes one in the same backward. `wait` ends it on every rank.
    """

    def __init__(self, mine: torch.Tensor, ranks: RankGroup, device: torch.device) -> None:
        """``mine``: one byte (``uint8``, on the CPU) for each parameter, 1 where this rank has a gradient."""
        self._ranks = ranks
        self._maps: list[torch.Tensor] = [mine]
        self._arrived: torch.Tensor | None = None
        with self._watched():
            if ranks.backend(device) == "gloo":
                self._maps, self._works = pairwise.all_gather_small(mine, ranks.name, pairwise.USED_TAG)
            else:
                self._arrived = there(mine, device)
                work = dist.all_reduce(self._arrived, dist.ReduceOp.MAX, group=ranks.process_group, async_op=True)
                assert work is not None
                self._works = [work]

    def wait(self) -> None:
        """What was sent has arrived; on an accelerator: is ahead of what its stream does next."""
        works, self._works = self._works, []
        if works:
            with self._watched():
                for work in works:
                    work.wait()

    def _watched(self) -> contextlib.AbstractContextManager[None]:
        """Errors inside are explained: most likely a rank is gone, or runs something else."""
        what = Collective("message", "all parameters", self._maps[0].nbytes, "uint8: which are used")
        watch = watch_of(self._ranks.name)
        return contextlib.nullcontext() if watch is None else watch.waiting(Schedule("backward", (what,)), 0)

    @functools.cached_property
    def anywhere(self) -> list[bool]:
        """By parameter: whether any rank has a gradient of it. The host waits for it."""
        self.wait()
        maps = self._maps if self._arrived is None else [self._arrived.cpu()]
        return [any(row) for row in zip(*(each.tolist() for each in maps), strict=True)]
