"""A pairwise exchange: every rank sends straight to every other, and asks for what it receives first.

::

    rank 0     receive from 1, receive from 2     send to 1, send to 2
    rank 1     receive from 2, receive from 0     send to 2, send to 0
    rank 2     receive from 0, receive from 1     send to 0, send to 1

The order is the point. Gloo has one connection for a pair of ranks. A request to receive that stands behind megabytes
of one's own holds the other side up, and only one direction of the link is in use at a time (docs/gloo.md has
figures).

A message carries a tag: the collective's kind, and a number for its size and for what a watcher says it is about, a
gather of which group. Messages of one tag match in order, so all ranks start these exchanges in the same order, as they
do any collective. Where they do not, no rank is given what was meant for another collective: both wait, and a watcher
says why.

Two tables let packages above take part. `SHORTCUTS` are other ways to a rank than the process group's. `WATCHERS` hear
of each exchange.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from zerofx._torch import register_work, resolve_process_group


class Neighbour(Protocol):
    """A rank to which there is a shorter way than the process group's."""

    @property
    def pid(self) -> int:
        """Its process, as this one sees it."""

    def exchange(self, received: torch.Tensor, sent: torch.Tensor, tag: int) -> dist.Work:
        """Start to fill ``received`` with what it sends under ``tag``, and to give it ``sent``."""


class Shortcut(Protocol):
    """Another way between ranks than the process group's. Process groups go by name."""

    def connect(self, name: str) -> None:
        """Find out who can be reached. A collective; the second time it does nothing."""

    def neighbours(self, name: str) -> Mapping[int, Neighbour]:
        """By rank, who can be reached."""

    def give_up(self, name: str) -> None:
        """End what this rank waits for; the waits raise."""


class Watcher(Protocol):
    """Somebody who sees every exchange."""

    def starting(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """The next collective of the process group ``name`` is started inside."""

    def subject(self, name: str) -> str:
        """What the next collective of the process group ``name`` is about: the same on all ranks that are in step."""

    def under_watch(self, works: list[dist.Work], name: str) -> list[dist.Work]:
        """What to wait for in the place of ``works``."""


SHORTCUTS: list[Shortcut] = []
"""The ways there are, the first that knows a rank is taken. Features have them."""

WATCHERS: list[Watcher] = []
"""`zerofx.runtime.ranks.watch` puts itself here."""

ALL_GATHER_TAG, ALL_TO_ALL_TAG, MEETING_TAG, USED_TAG, COMPARISON_TAG, OFFER_TAG = 0x66, 0x67, 0x68, 0x69, 0x6A, 0x6B
"""The lower 8 bits of a tag. The upper 23 go by size and by subject."""


def connect(process_group: str) -> None:
    """Find out to which ranks there is a shortcut. A collective, before the first exchange."""
    for shortcut in SHORTCUTS:
        shortcut.connect(process_group)


def neighbours(process_group: str) -> dict[int, Neighbour]:
    """By rank, to whom there is a shortcut."""
    found: dict[int, Neighbour] = {}
    for shortcut in SHORTCUTS:
        found = {**shortcut.neighbours(process_group), **found}
    return found


def give_up(process_group: str) -> None:
    """End what this rank waits for through shortcuts; the waits raise."""
    for shortcut in SHORTCUTS:
        shortcut.give_up(process_group)


def all_gather_pairwise_(out: torch.Tensor, shard: torch.Tensor, process_group: str) -> list[dist.Work]:
    """Start to fill ``out`` with every rank's ``shard`` (of any dtype); returns what to wait for, or `under_way`.

    ``shard`` may be this rank's part of ``out``.
    """
    parts = out.chunk(out.numel() // shard.numel())
    mine = parts[resolve_process_group(process_group).rank()]
    mine.copy_(shard)
    return exchange(parts, [mine] * len(parts), process_group, ALL_GATHER_TAG)


def all_to_all_pairwise_(out: torch.Tensor, pack: torch.Tensor, world_size: int, process_group: str) -> list[dist.Work]:
    """Start to fill ``out`` with the other ranks' parts for this one, in rank order; returns what to wait for."""
    sent, rank = pack.chunk(world_size), resolve_process_group(process_group).rank()
    received = list(out.chunk(world_size - 1))
    received.insert(rank, sent[rank])
    return exchange(received, sent, process_group, ALL_TO_ALL_TAG)


def meet_(process_group: str) -> list[dist.Work]:
    """Start a barrier: send all ranks a message that this one is here, and receive theirs; returns what to wait for."""
    nothing = [torch.empty(0, dtype=torch.uint8)] * resolve_process_group(process_group).size()
    return exchange(nothing, nothing, process_group, MEETING_TAG)


def all_gather_small(mine: torch.Tensor, process_group: str, kind: int) -> tuple[list[torch.Tensor], list[dist.Work]]:
    """Start to send ``mine`` to every other rank; returns what each rank sends, by rank, and what to wait for.

    For a few bytes by which ranks compare: no watcher sees them, and they take no shortcut.
    """
    group = resolve_process_group(process_group)
    rank, world_size = group.rank(), group.size()
    others = [(rank + i) % world_size for i in range(1, world_size)]
    received = [mine if other == rank else torch.empty_like(mine) for other in range(world_size)]
    tag = _tag(kind, mine.nbytes)
    works = [group.recv([received[other]], other, tag) for other in reversed(others)]
    works += [group.send([mine], other, tag) for other in others]
    return received, works


def under_way(out: torch.Tensor, works: list[dist.Work]) -> torch.Tensor:
    """``wait_tensor(out)`` waits for ``works``; returns ``out``."""
    for work in works:
        register_work(out, work)
    return out


def _tag(kind: int, nbytes: int, subjects: Sequence[str] = ()) -> int:
    """Of messages of ``nbytes`` about ``subjects``."""
    return kind | zlib.crc32(repr((nbytes, subjects)).encode()) >> 9 << 8


def exchange(
    received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], process_group: str, kind: int
) -> list[dist.Work]:
    """Start to exchange messages, both given by rank; this rank's own are not looked at. Returns what to wait for."""
    group = resolve_process_group(process_group)
    rank, world_size = group.rank(), group.size()
    # If ranks run different collectives, more may come than was asked for. Gloo would end the process then, from a
    # thread of its own. And what has the size of another group's would be taken for that. Messages that are not about
    # the same have two tags and never meet: both sides wait, and a watcher says why.
    of_a_group = kind in (ALL_GATHER_TAG, ALL_TO_ALL_TAG)
    subjects = [watcher.subject(process_group) for watcher in WATCHERS if of_a_group]
    tag = _tag(kind, sent[0].nbytes, subjects)
    others = [(rank + i) % world_size for i in range(1, world_size)]
    with contextlib.ExitStack() as starting:
        for watcher in WATCHERS:
            starting.enter_context(watcher.starting(process_group))
        near = neighbours(process_group) if sent[0].device.type == "cpu" else {}
        far = [other for other in others if other not in near]
        works = [group.recv([received[other]], other, tag) for other in reversed(far)]
        works += [group.send([sent[other]], other, tag) for other in far]
        works += [near[other].exchange(received[other], sent[other], tag) for other in others if other in near]
    for watcher in WATCHERS:
        works = watcher.under_watch(works, process_group)
    return works
