"""The weights of one group, as this rank has them.

============  ====================================  =================================  ================
class         shard: flat, 1/M                      replica: flat, whole               graphs are given
============  ====================================  =================================  ================
`Whole`       --                                    -- (the parameters are whole)      the parameters
`Replicated`  a part of the replica; with mixed     what the model computes with       the replica
              precision, or codes on the wire, a
              tensor of its own, the master
`Sharded`     the weights                           --                                 the shard
============  ====================================  =================================  ================

Stage 0 is `Whole`, stages 1 and 2 are `Replicated`, stage 3 is `Sharded`. Another case is a class in a file of its own,
and a line in `WEIGHTS` (`zerofx.features.one_copy.one_copy`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from zerofx.kernels.code import Code
from zerofx.kernels.device import is_captured
from zerofx.model.layout import GroupLayout
from zerofx.passes.pairwise import under_way
from zerofx.passes.travel import Travel, travel_of
from zerofx.runtime.ranks.quantized import Quantized, quantized
from zerofx.runtime.ranks.sharing import RankGroup, Sharing
from zerofx.runtime.ranks.watch import alone
from zerofx.runtime.state.home import Home, all_resident


class Weights:
    """What all cases have in common.

    Attributes:
        shard: 1-D, ``layout.shard_numel`` elements of ``layout.dtype``; parameters' local parts are views of it. There
            is none in stage 0.
        replica: 1-D, ``layout.numel`` elements of ``dtype``; or None.
        dtype: what the model computes in.
        code: what they travel in; None: as they are; and
        quantized: how that is done.
        gathers: whether graphs gather them.
        replayed: whether a CUDA graph writes the shard. Its replays do not show in the version counter.
        in_common: whether the ranks of the host have the replica once, in memory that they share.
        steps_inside: whether a backward may update them (`zerofx.step_in_backward`).
    """

    gathers: bool = False
    replayed: bool = False
    in_common: bool = False
    steps_inside: bool = True
    shard: torch.Tensor
    replica: torch.Tensor | None = None

    def __init__(
        self,
        layout: GroupLayout,
        sharing: Sharing,
        device: torch.device,
        dtype: torch.dtype,
        home: Home,
        memory: torch.Tensor | None = None,
        code: Code | None = None,
    ) -> None:
        """``memory``: what `allocate` has for this group."""
        self.layout = layout
        self.device = device
        self.dtype = dtype
        self.home = home
        self.ranks: RankGroup = sharing.weights
        self.travel: Travel = travel_of(self.ranks.backend(device))
        self.code: Code | None = code if code is not None and self.shortened_by(code) else None
        self.quantized: Quantized | None = None if self.code is None else quantized(layout, self.code)
        self.ahead: list[dist.Work] = []
        """Of a refresh: what is still to be waited for."""
        self._refreshed = -1
        self._stepped = -1
        self._make(memory)

    def shortened_by(self, code: Code) -> bool:
        """Whether weights travel, and ``code`` makes what travels shorter."""
        return self.ranks.size > 1 and code.shortens(self.dtype)

    def _make(self, memory: torch.Tensor | None) -> None:
        """Make the shard and the replica, as far as a case has them."""

    @classmethod
    def takes(cls, stage: int, one_copy: bool, sharing: Sharing | None = None) -> bool:
        """Whether weights are so in this stage. ``sharing``: who shares them; None: the ranks of one process group."""
        raise NotImplementedError

    @classmethod
    def check(cls, device: torch.device) -> None:
        """Refuse a device on which they cannot be so (ValueError)."""

    @classmethod
    def allocate(cls, layouts: Sequence[GroupLayout], sharing: Sharing) -> Sequence[torch.Tensor | None]:
        """Memory that all groups get at once; None where each makes its own. A collective."""
        return [None] * len(layouts)

    @property
    def buffer(self) -> torch.Tensor:
        """What graphs are given."""
        return self.shard if self.replica is None else self.replica

    @property
    def own_replica(self) -> torch.Tensor | None:
        """The replica, where this rank alone writes to it: code outside of graphs may read it."""
        return self.replica

    @property
    def exact(self) -> bool:
        """Whether a replica that is up to date holds what the shards hold, bit for bit."""
        return self.code is None and self.dtype == self.layout.dtype

    @property
    def sends(self) -> bool:
        """Whether to have a weight whole takes a collective now: the same on every rank."""
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of the whole flat buffer, in what the model computes in."""
        return self.layout.numel * self.dtype.itemsize

    @property
    def streams(self) -> bool:
        """Whether graphs fetch the shard from where it lives."""
        return False

    def holders(self, tensor: torch.Tensor) -> int:
        """How many ranks have the memory of ``tensor``, a shard or replica: each counts 1/M of it as its own."""
        return 1

    def holds(self, local: torch.Tensor) -> bool:
        """Whether ``local`` is a slice of the shard: a parameter's, not a gradient's or a moment's."""
        return share_memory(local, self.shard)

    def mark_fresh(self) -> None:
        """The replica holds what the shards hold."""

    def take(self, other: Weights) -> None:
        """Hold what ``other`` holds, which is of the same case: shard and replica, and whether that is up to date."""
        version, replayed = other.shard._version, other.replayed  # replays write, and count nothing
        was_fresh, had_stepped = (not replayed and version == seen for seen in (other._refreshed, other._stepped))
        other.land()
        with torch.no_grad(), self.home.resident(), other.home.resident():
            for mine, theirs in zip(self._held(), other._held(), strict=True):
                mine.copy_(torch.ops._c10d_functional.wait_tensor(theirs))
        if was_fresh:
            self.mark_fresh()
        elif had_stepped:
            self._stepped = self.shard._version

    def _held(self) -> list[torch.Tensor]:
        """What is this rank's own of these weights, the shard last."""
        return [self.shard] if self.own_replica is None else [self.own_replica, self.shard]

    def before_step(self) -> None:
        """An optimizer is about to write the shard."""

    def note_write(self) -> None:
        """An optimizer has written the shard."""
        self.replayed = self.replayed or is_captured(self.device)

    def refresh(self, *, inside: bool = False) -> None:
        """Start to bring the replica up to date. ``inside``: of a graph that runs."""

    def land(self) -> None:
        """Wait for the refresh that is on its way, if there is one."""
        for work in self.ahead:
            work.wait()
        self.ahead = []

    @classmethod
    def reading(
        cls, weights: Sequence[Weights], phase: str, *, written: bool
    ) -> contextlib.AbstractContextManager[Any]:
        """A graph reads all of ``weights`` inside. ``written``: since a graph read them last, they may have been."""
        return all_resident(each.home for each in weights if not each.streams and each.home.moves("weights"))

    def start_gather(self) -> torch.Tensor:
        """Start to bring the whole flat buffer; ``wait_tensor`` of it waits. A collective, outside of any graph.

        The replica, where this rank has one: to be read, not written.
        """
        if self.own_replica is not None:
            self.refresh()
            return self.own_replica
        buffer = torch.empty(self.layout.numel, dtype=self.dtype, device=self.device)
        with record_function(f"zerofx: gather {self.layout.name}"):
            return under_way(buffer, self._gather_into(buffer, "leaf module"))

    def _gather_into(self, out: torch.Tensor, where: str) -> list[dist.Work]:
        """Returns what to wait for. ``where``: in whose name the watchdog is told; "" where it expects it."""
        with self.home.only(self.shard):
            if self.ranks.size == 1:
                if self.shard.data_ptr() != out.data_ptr():
                    out.copy_(self.shard)
                return []
            told: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
            if where:
                told = alone(self.ranks.name, where, "all-gather", self.layout.name, self.nbytes, out.dtype)
            with told:
                return self._send(out)

    def _send(self, out: torch.Tensor) -> list[dist.Work]:
        """Start to fill ``out`` from all shards; returns what to wait for."""
        shard = self.shard.to(out.dtype)
        if self.quantized is None:
            return self.travel.gather_into(out, shard, self.ranks.name)
        return self.quantized.gather_into(self.travel, out, shard, self.ranks.name)


class Whole(Weights):
    """Stage 0: the parameters have their own memory, and zerofx none."""

    steps_inside = False

    @classmethod
    def takes(cls, stage: int, one_copy: bool, sharing: Sharing | None = None) -> bool:
        return stage == 0


class Sharded(Weights):
    """Stage 3: a rank has its shard, and graphs gather the rest."""

    gathers = True

    def _make(self, memory: torch.Tensor | None) -> None:
        self.shard: torch.Tensor = self.home.new("weights", self.layout.shard_numel, self.layout.dtype, self.device)

    @property
    def streams(self) -> bool:
        return "weights" in self.home.streams

    @classmethod
    def takes(cls, stage: int, one_copy: bool, sharing: Sharing | None = None) -> bool:
        return stage == 3 and not one_copy and (sharing is None or not sharing.divides_between)


class Replicated(Weights):
    """Stages 1 and 2: a rank has the weights whole, and updates its part of them."""

    def _make(self, memory: torch.Tensor | None) -> None:
        layout = self.layout
        if memory is None:
            memory = torch.zeros(layout.numel, dtype=self.dtype, device=self.device)
        self.replica: torch.Tensor | None = memory.view(self.dtype)
        if self.dtype == layout.dtype and not self.home.moves("weights") and self.code is None:
            # .data: with a version counter of its own, which counts the optimizer's writes and not the refresh's.
            self.shard = self.own_part(self.replica.data)
        else:
            self.shard = self.home.new("weights", layout.shard_numel, layout.dtype, self.device)

    @classmethod
    def takes(cls, stage: int, one_copy: bool, sharing: Sharing | None = None) -> bool:
        return stage in (1, 2)

    def own_part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole flat buffer."""
        return whole.narrow(0, self.ranks.rank * self.layout.shard_numel, self.layout.shard_numel)

    @property
    def sends(self) -> bool:
        return not self.exact or self.replayed or self.shard._version != self._refreshed

    def mark_fresh(self) -> None:
        self._refreshed = self._stepped = self.shard._version

    # A code of changes is for what steps write, which is small. `_stepped` is the shard's version, as long as nothing
    # else has written it since the refresh; else -1.

    def before_step(self) -> None:
        if self._stepped != self.shard._version:
            self._stepped = -1

    def note_write(self) -> None:
        super().note_write()
        if self._stepped != -1:
            self._stepped = self.shard._version

    def _send(self, out: torch.Tensor) -> list[dist.Work]:
        if self.quantized is None or self.code is None or self.code.name != "int4":
            return super()._send(out)
        if self._stepped != self.shard._version:
            return self.travel.gather_into(out, self.shard.to(out.dtype), self.ranks.name)
        return self.quantized.gather_changes_into(self.travel, out, self.shard, self.ranks.name)

    def refresh(self, *, inside: bool = False) -> None:
        """Start to bring the replica up to date, if the shard was written since; ``wait_tensor(replica)`` waits for it.

        A collective, and the same decision on every rank: optimizers step on all ranks or on none. ``inside``: it is
        one of those of the graph that runs. It is waited for after the next call of this, if there is any.

        A CUDA graph replays what was decided as it was captured. So it is always captured, and always done where
        replays may have written the shard. One ahead is left out: nothing may be under way where a capture ends.
        """
        assert self.replica is not None
        if captured := is_captured(self.device):
            self.replayed = True
        if captured and inside:
            return
        if self.replayed or self.shard._version != self._refreshed:
            with record_function(f"zerofx: refresh {self.layout.name}"):
                self.ahead += self._gather_into(self.replica, "" if inside else "refresh")
                self.mark_fresh()
        if not inside:
            under_way(self.replica, self.ahead)
            self.ahead = []


WEIGHTS: list[type[Weights]] = [Whole, Replicated, Sharded]
"""Every case. The first that takes a stage is taken."""


def weights_of(stage: int, one_copy: bool, sharing: Sharing | None = None) -> type[Weights]:
    """How weights are kept in a stage. ``sharing``: who shares them; None: the ranks of one process group.

    Raises:
        ValueError: no case takes it.
    """
    for case in WEIGHTS:
        if case.takes(stage, one_copy, sharing):
            return case
    chosen = "sharding=" if sharing is not None and sharing.divides_between else f"one_copy={one_copy!r}"
    raise ValueError(f"{chosen} with stage={stage}: this zerofx has no such weights. Leave it out.")


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are parts of one memory: of one storage, where that is empty now."""
    one, other = a.untyped_storage(), b.untyped_storage()
    return one.data_ptr() == other.data_ptr() and (one.nbytes() > 0 or one._cdata == other._cdata)
