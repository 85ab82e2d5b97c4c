"""Who shares what: for each purpose the ranks that take part, and the process group by which they are reached.

::

    sharing.weights      the ranks that a group's weights are divided over; its gathers run there
    sharing.gradients    the ranks that gradients are reduced over, and divided over
    sharing.optimizer    the ranks that the optimizer's state is divided over, and parameters and ``.grad`` as an
                         optimizer sees them; norms are summed there
    sharing.everyone     the ranks that train one model; they start from rank 0's weights
    sharing.replicas     the ranks that hold the same shard as this one, each another replica's; gradients that were
                         reduced are summed over them too. None where there is one replica
    sharing.secondary    the ranks that backward gathers among, where forward gathers over more; else None
    sharing.row_size     how many of ``weights`` are in a row of a mesh, where that is known
    sharing.two_hops     whether a rank keeps 1/(R S) of the weights, which cross the rows once on their way to a gather
    sharing.crosses      whether ``weights`` are ranks of several rows of a mesh
    sharing.foreign      the ranks of each dimension that is not ours and on which the module has DTensors: each of them
                         trains another part, or a copy of one
    sharing.whole        ``everyone``, of all these parts: the ranks that have the module together

Layouts, the passes' context, the watchdog, checkpoints, the optimizer and the cost model ask here, and nowhere else,
which ranks they deal with. `OneGroup`: the first four are the ranks of one process group. Reductions may run in a
second process group of the same ranks. `zerofx.features.meshes.two_levels`: a mesh of two dimensions. Another case is a
class in a feature, which is in front in `SHARINGS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zerofx._torch import DTensorLayout, PretendedGroup, backend_name, resolve_process_group
from zerofx.model.sharding import Sharding
from zerofx.passes.travel import travel_of
from zerofx.runtime.ranks.watch import Watch, alone, watch_of, watch_too

_T = TypeVar("_T")


class RankGroup:
    """The ranks of one process group.

    Attributes:
        name: the process group's. A `RankGroup` keeps no process group itself: one that outlives
            ``destroy_process_group`` aborts the interpreter as it exits.
        rank: this rank's place among them.
        size: how many they are.
    """

    def __init__(self, process_group: dist.ProcessGroup | PretendedGroup) -> None:
        self.name: str = process_group.group_name
        self.rank: int = process_group.rank()
        self.size: int = process_group.size()

    def rank_at(self, place: int) -> int:
        """The rank in the process group of the one whose ``rank`` here is ``place``."""
        return place

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The live process group. Do not keep it."""
        return resolve_process_group(self.name)

    def backend(self, device: torch.device) -> str:
        """The communication backend for tensors on ``device``."""
        return backend_name(self.process_group, device)

    def all_gathered(self, what: Any) -> list[Any]:
        """What each rank has to say, by rank. A collective."""
        everyone: list[Any] = [what] * self.size
        if self.size > 1:
            dist.all_gather_object(everyone, what, group=self.process_group)
        return everyone

    def all_or_none(self, option: str, work: Callable[[], _T], error: type[Exception]) -> _T:
        """What ``work`` returns, once it went well on every rank. A collective; ``work`` is none.

        Raises:
            error: on every rank, where it was raised on one of them. It names ``option`` and the rank.
        """
        said, found = "", None
        try:
            found = work()
        except error as e:
            said = str(e)
        for rank, text in enumerate(self.all_gathered(said)):
            if text:
                raise error(f"{option} on rank {rank}: {text}")
        assert found is not None
        return found

    def sum_(self, value: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce ``value`` over the ranks, in place; returns it. A collective."""
        if self.size > 1:
            dist.all_reduce(value, op=op, group=self.process_group)
        return value


class PretendedRanks(RankGroup):
    """Rank 0 of ranks that are not there, for a dry run or a plan."""

    def __init__(self, size: int, backend: str, name: str = "dry run") -> None:
        self._pretended = PretendedGroup(name, size, backend)
        super().__init__(self._pretended)

    def backend(self, device: torch.device) -> str:
        return self._pretended.name()


class Sharing:
    """See the file's first lines. A case sets the first four attributes, and ``replicas`` where there are some."""

    weights: RankGroup
    gradients: RankGroup
    optimizer: RankGroup
    everyone: RankGroup
    replicas: RankGroup | None = None
    secondary: RankGroup | None = None
    row_size: int = 1
    crosses: bool = False
    two_hops: bool = False
    foreign: tuple[RankGroup, ...] = ()
    _whole: RankGroup | None = None
    _named: dict[str, RankGroup]

    @property
    def whole(self) -> RankGroup:
        """See the file's first lines."""
        return self._whole or self.everyone

    def connect_foreign(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """The module has DTensors over ``groups``, named once or several times. A collective of all their ranks."""
        self.note_foreign(groups)
        together = set(dist.get_process_group_ranks(self.everyone.process_group))
        for ranks in self.foreign:
            together = set().union(*ranks.all_gathered(together))
        if together == set(range(dist.get_world_size())):
            self._whole = RankGroup(dist.group.WORLD)  # type: ignore[arg-type]
        elif self.foreign:
            self._whole = RankGroup(dist.new_group(sorted(together), use_local_synchronization=True))

    def note_foreign(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """What `connect_foreign` does where nobody is to be met: in a dry run."""
        self._named = {}
        by_ranks: dict[tuple[int, ...], RankGroup] = {}  # two meshes may have one dimension, by two groups
        for group in groups:
            ranks = by_ranks.setdefault(tuple(dist.get_process_group_ranks(group)), RankGroup(group))
            self._named[group.group_name] = ranks
        self.foreign = tuple(by_ranks.values())  # in the same order everywhere, for models are alike

    def counts(self, layout: DTensorLayout | None) -> bool:
        """Whether this rank counts its part of a DTensor: of several ranks that have a copy of it the first one does.

        None: a tensor that is none, of which each of them has a copy.
        """
        divided = self.divide(layout)
        return all(ranks in divided or ranks.rank == 0 for ranks in self.foreign)

    def divide(self, layout: DTensorLayout | None) -> list[RankGroup]:
        """The ranks of ``foreign`` that a DTensor is divided over."""
        return [] if layout is None else [self._named[group.group_name] for group in layout.groups(sharded=True)]

    @property
    def weights_cross(self) -> bool:
        """Whether weights travel between the rows of a mesh."""
        return self.crosses or self.divides_between

    @property
    def averaged_over(self) -> int:
        """How many ranks a gradient is averaged over."""
        return self.gradients.size * self.copies

    @property
    def copies(self) -> int:
        """How many replicas of the module there are."""
        return 1 if self.replicas is None else self.replicas.size

    @property
    def divides_between(self) -> bool:
        """Whether replicas share the optimizer's state: each rank updates a part of the shard that it holds."""
        return self.replicas is not None and self.optimizer.size > self.weights.size

    @property
    def watched(self) -> set[str]:
        """The names of the process groups that have a watchdog of their own."""
        return {ranks.name for ranks in (self.weights, self.replicas) if ranks is not None}

    def by(self, sharding: Sharding | None, *, two_hops: bool = False) -> Sharing:
        """The same ranks, by the option ``sharding``. On one dimension ``"shard"`` and ``"all"`` are the same.

        ``two_hops``: a gather over all ranks may be one along the column and one in the row.
        """
        return self

    def undivided(self) -> Sharing:
        """Who shares a module of which nothing is divided (stage 0): all ranks alike."""
        return self if self.replicas is None else OneGroup(self.everyone)

    def sum_over_replicas_(self, value: torch.Tensor, where: str, group: str) -> torch.Tensor:
        """Sum what ``value`` is over the replicas, in place; returns it. A collective, where there are several.

        It is the sum over all ranks already where these share the optimizer's state.

        ``where``, ``group``: in whose name the watchdog is told, and whose gradient it is.
        """
        if self.replicas is None or self.divides_between:
            return value
        with alone(self.replicas.name, where, "all-reduce", group, value.nbytes, value.dtype):
            return self.replicas.sum_(value)

    def check(self) -> None:
        """Refuse ranks that do not fit together (ValueError)."""

    def connect(self, device: torch.device) -> None:
        """Ranks get to know each other, before anything travels. A collective."""
        for ranks in {ranks.name: ranks for ranks in (self.gradients, self.weights)}.values():
            travel_of(ranks.backend(device)).connect(ranks.name)

    def watch(self) -> Watch | None:
        """The watchdog of these ranks; None where there is nobody to be out of step with."""
        watch = watch_of(self.weights.name)
        if watch is not None and self.gradients.name != self.weights.name:
            watch_too(watch, self.gradients.name)
        return watch


class OneGroup(Sharing):
    """All is divided over the ranks of one process group; ``reductions`` is the name of a second one of the same."""

    def __init__(self, ranks: RankGroup, reductions: str | None = None) -> None:
        self.weights = self.gradients = self.optimizer = self.everyone = ranks
        self._reductions = reductions
        if reductions:
            try:
                self.gradients = RankGroup(resolve_process_group(reductions))
            except RuntimeError:  # `check` says so, on every rank
                self.gradients = ranks

    @staticmethod
    def of(mesh: DeviceMesh | None, reductions: str | None) -> OneGroup:
        """The ranks of a 1-D mesh; without one, all there are.

        Raises:
            RuntimeError: there is no process group.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "no process group: call torch.distributed.init_process_group() first, and start the program with "
                "torchrun (one process works too: `torchrun --nproc-per-node 1`)."
            )
        group = dist.group.WORLD if mesh is None else mesh.get_group()
        assert group is not None
        return OneGroup(RankGroup(group), reductions)

    @staticmethod
    def pretended(world_size: int, backend: str = "") -> OneGroup:
        """The same of ranks that are not there, for what is told of a run before it is one."""
        return OneGroup(PretendedRanks(world_size, backend))

    def check(self) -> None:
        if self._reductions is None:
            return
        try:
            ranks = dist.get_process_group_ranks(resolve_process_group(self._reductions))
        except RuntimeError as e:
            raise ValueError(
                f"reduce_group={self._reductions!r}: rank {dist.get_rank()} is in no process group of that name."
            ) from e
        if ranks != (expected := dist.get_process_group_ranks(self.weights.process_group)):
            raise ValueError(
                f"reduce_group has the ranks {ranks}: expected {expected}, those that the module is sharded over. Make "
                "one with torch.distributed.new_group(ranks)."
            )


def pretended(
    replicas: int, ranks: int, backend: str = "", sharding: Sharding | None = None, *, two_hops: bool = False
) -> Sharing:
    """Ranks that are not there: ``replicas`` of a module, each divided over ``ranks``, by ``sharding``."""
    if replicas == 1:
        return OneGroup.pretended(ranks, backend)
    everyone = PretendedRanks(replicas * ranks, backend, "dry run, everyone")
    over_all = sharding is not None and (sharding.one_dimension or sharding.has_secondary)
    hops = two_hops and over_all and ranks > 1
    if sharding is not None and over_all and not hops:
        one = OneGroup(everyone)
        one.row_size, one.crosses = ranks, True
        if sharding.has_secondary and ranks > 1:
            one.secondary = PretendedRanks(ranks, backend, "dry run, near")
        return one
    sharing = OneGroup.pretended(ranks, backend)
    sharing.replicas, sharing.everyone = PretendedRanks(replicas, backend, "dry run, replicas"), everyone
    if sharding is not None and (sharding.divides_optimizer or hops):
        sharing.optimizer = everyone
    if sharding is not None and hops:
        sharing.two_hops = True
        if sharding.has_secondary:
            sharing.secondary, sharing.row_size = sharing.weights, ranks
    return sharing


SETTLED: list[Callable[[], None]] = []
"""Called whenever a module was sharded (`zerofx.features.gloo_threads`)."""

SHARINGS: list[Callable[[DeviceMesh | None, str | None], Sharing | None]] = [OneGroup.of]
"""Every case. Each is asked with the options ``mesh`` and ``reduce_group``; the first that has an answer is taken."""


def sharing_of(mesh: DeviceMesh | None, reductions: str | None) -> Sharing:
    """Who shares a module.

    Raises:
        RuntimeError: there is no process group.
    """
    return next(sharing for of in SHARINGS if (sharing := of(mesh, reductions)) is not None)
