"""The ranks that save or load together, and how an error of one becomes an error of all.

::

    rank 0    work ── fine ──────────┐             ┌── CheckpointError: rank 1: no space left on device
    rank 1    work ── no space left ─┤ all-gather  ├── CheckpointError: rank 1: no space left on device
    rank 2    work ── fine ──────────┘             └── CheckpointError: rank 1: no space left on device

Work that may fail holds no collective of its own, so that no rank waits for one that has given up.

What ranks save or gather must be of one step. So they tell each other how often each group was stepped, before
anything is written.

A save in the background must not come between the collectives of training. It talks through the store by which the
ranks once found each other (`Aside`). A process group of its own would do too, but not in a run that `torchrun` has
restarted: the store keeps the addresses of the dead, and a second gloo group tries to connect to them.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from zerofx._torch import default_store, resolve_process_group
from zerofx.runtime.ranks.agree import OutOfStepError
from zerofx.runtime.ranks.sharing import RankGroup
from zerofx.runtime.ranks.steps import times
from zerofx.runtime.ranks.turns import Turns, common
from zerofx.runtime.ranks.watch import call
from zerofx.runtime.state.group import groups_of

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
        self._name = group_name  # see `zerofx.runtime.ranks.sharing.RankGroup`
        self._watched: set[str] = set()
        self._turns: Turns | None = None
        self.rank: int = 0 if group_name is None else self._group.rank()
        self.size: int = 1 if group_name is None else self._group.size()

    @staticmethod
    def of(module: nn.Module) -> Ranks:
        """The ranks that train ``module``, all parts of it; for a plain one, all there are."""
        if not (dist.is_available() and dist.is_initialized()):
            return Ranks(None)
        groups = groups_of(module)
        shared = groups[0].sharing.whole if groups else RankGroup(dist.group.WORLD)  # type: ignore[arg-type]
        ranks = Ranks(None if shared.size == 1 else shared.name)
        if groups:
            ranks._watched, ranks._turns = groups[0].sharing.watched, groups[0].family.turns
        return ranks

    @contextlib.contextmanager
    def call(self, what: str) -> Iterator[None]:
        """The call ``what``, which every rank must make, runs inside: `zerofx.runtime.ranks.watch.call`."""
        with common(self._turns, what), call(self._watched, what):
            yield

    @property
    def _group(self) -> dist.ProcessGroup:
        assert self._name is not None
        return resolve_process_group(self._name)

    @property
    def key(self) -> str:
        """What tells these ranks from others of this process."""
        return self._name or ""

    def aside(self) -> Ranks:
        """The same ranks for a thread in the background. A collective."""
        if self._name is None:
            return self
        return Aside(self._name, self.all_gather(uuid.uuid4().hex)[0])

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


Counts = dict[str, int]
"""How often an optimizer has stepped each group of a module, by name."""


def steps_of(module: nn.Module) -> Counts:
    """How often an optimizer has stepped each group of ``module`` on this rank."""
    return {group.layout.name: group.steps for group in groups_of(module)}


def compare_steps(what: str, module: nn.Module, ranks: Ranks, everyone: list[Counts]) -> None:
    """Refuse what would be of two steps: ``everyone`` are the `steps_of` of all ranks, by rank.

    In stage 0 each rank has the whole weights, and may have got them from a rank that stepped alone. So there the
    weights are compared, where the counts differ. That is a collective.

    Raises:
        OutOfStepError: on every rank.
    """
    mine = everyone[ranks.rank]
    found = next(
        ((r, name) for r, theirs in enumerate(everyone) for name in mine if theirs.get(name) != everyone[0].get(name)),
        None,
    )
    if found is None or (groups_of(module)[0].family.stage == 0 and len(set(ranks.all_gather(_digest(module)))) == 1):
        return
    rank, name = found
    raise OutOfStepError(
        f"{what} would mix two steps: optimizers have stepped group {name!r} {times(everyone[0][name])} on rank 0 and "
        f"{times(everyone[rank].get(name, 0))} on rank {rank}. Nothing has changed. Step on every rank or on none, and "
        "go on from the last checkpoint (docs/debugging.md)."
    )


def _digest(module: nn.Module) -> str:
    """What tells one rank's parameters of stage 0 from another's."""
    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _describe(error: Exception | None) -> str:
    if error is None:
        return ""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


class Aside(Ranks):
    """Ranks that talk through the store, in a thread beside their collectives.

    Each exchange has a number; a rank's value in it is the key ``<number>/<rank>``. Nobody is told when a rank dies:
    whoever waits gives up when its own program has ended, or after ``PATIENCE`` seconds.
    """

    PATIENCE = 30 * 60.0

    def __init__(self, group_name: str, name: str) -> None:
        super().__init__(group_name)
        self._store = dist.PrefixStore(f"zerofx/{name}", default_store())
        self._number = 0

    def all_gather(self, value: T) -> list[T]:
        return self._exchange({self.rank: value}, range(self.size))

    def gather(self, value: T) -> list[T]:
        return self._exchange({self.rank: value}, range(self.size) if self.rank == 0 else [])

    def scatter(self, values: list[T]) -> T:
        given = dict(enumerate(values)) if self.rank == 0 else {}
        return self._exchange(given, [self.rank])[0]

    def _exchange(self, given: dict[int, Any], wanted: Iterable[int]) -> list[Any]:
        self._number += 1
        for rank, value in given.items():
            self._store.set(f"{self._number}/{rank}", pickle.dumps(value))  # type: ignore[arg-type]
        return [pickle.loads(self._get(f"{self._number}/{rank}")) for rank in wanted]

    def _get(self, key: str) -> bytes:
        """Asks again and again: a wait would keep the store from the program's other threads."""
        start, pause = time.monotonic(), 0.001
        while not self._store.check([key]):
            if not threading.main_thread().is_alive():
                raise CheckpointError("the program ended before it was done")
            if time.monotonic() - start > self.PATIENCE:
                raise CheckpointError(f"another rank has not answered for {self.PATIENCE:g} seconds")
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return self._store.get(key)
