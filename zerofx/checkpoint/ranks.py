"""The ranks that save or load together, and how an error of one becomes an error of all.

::

    rank 0    work ── fine ──────────┐             ┌── CheckpointError: rank 1: no space left on device
    rank 1    work ── no space left ─┤ all-gather  ├── CheckpointError: rank 1: no space left on device
    rank 2    work ── fine ──────────┘             └── CheckpointError: rank 1: no space left on device

Work that may fail holds no collective of its own, so that no rank waits for one that has given up.

The ranks talk through a gloo group of their own: a save in the background must not come between the collectives of
training, and objects on their way need no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from zerofx._torch import resolve_process_group
from zerofx.shard import groups_of

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint that could not be saved or loaded: the same on every rank."""


class Ranks:
    """The ranks that share a module, or this process alone.

    Attributes:
        rank: this one's place among them.
        size: how many they are.
    """

    def __init__(self, group_name: str | None) -> None:
        self._name = group_name
        self.rank = 0 if group_name is None else self._group.rank()
        self.size = 1 if group_name is None else self._group.size()

    @staticmethod
    def of(module: nn.Module) -> Ranks:
        """The ranks that ``module`` is sharded over; for a plain one, all there are. A collective the first time."""
        if not (dist.is_available() and dist.is_initialized()):
            return Ranks(None)
        groups = groups_of(module)
        shared = groups[0].process_group if groups else dist.group.WORLD
        assert shared is not None
        return Ranks(None if shared.size() == 1 else _companion(shared))

    @property
    def _group(self) -> dist.ProcessGroup:
        assert self._name is not None
        return resolve_process_group(self._name)

    @property
    def key(self) -> str:
        """What tells these ranks from others of this process."""
        return self._name or ""

    def all_gather(self, value: T) -> list[T]:
        """Every rank's ``value``, on every rank."""
        values = [value] * self.size
        if self._name is not None:
            dist.all_gather_object(values, value, group=self._group)
        return values

    def gather(self, value: T) -> list[T]:
        """Every rank's ``value`` on rank 0; nothing elsewhere."""
        if self._name is None:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, group=self._group, group_dst=0)
        return values or []

    def scatter(self, values: list[T]) -> T:
        """The one of rank 0's ``values`` that is this rank's."""
        if self._name is None:
            return values[0]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, values if self.rank == 0 else None, group=self._group, group_src=0)
        return mine[0]

    def together(self, what: str, work: Callable[[], T], *, only: int | None = None) -> list[T]:
        """Do ``work`` on every rank (or on rank ``only``) and return every rank's result.

        Raises:
            CheckpointError: on all ranks, where one of them failed: ``what`` was done, and why it failed.
        """
        result: Any = None
        error: Exception | None = None
        if only is None or only == self.rank:
            try:
                result = work()
            except Exception as e:
                error = e
        answers = self.all_gather((result, _describe(error)))
        failed = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(answers) if text]
        if failed:
            same = all(text == answers[0][1] for _, text in answers)
            raise CheckpointError(f"{what} failed: {answers[0][1] if same else '; '.join(failed)}") from error
        return [answer for answer, _ in answers]


def _describe(error: Exception | None) -> str:
    if error is None:
        return ""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


_companions: dict[str, str] = {}


def _companion(group: dist.ProcessGroup) -> str:
    """The name of the gloo group beside ``group``: by name, see `zerofx.group.ShardGroup.group_name`."""
    mark = f"zerofx checkpoints of {group.group_name}"
    known = _companions.get(group.group_name)
    if known is not None:
        try:
            found = resolve_process_group(known)
        except RuntimeError:  # destroyed together with all others
            found = None
        if found is not None and found.group_desc == mark:
            return known
    ranks = dist.get_process_group_ranks(group)
    made = dist.new_group(ranks, backend="gloo", use_local_synchronization=True, group_desc=mark)
    _companions[group.group_name] = made.group_name
    return made.group_name
