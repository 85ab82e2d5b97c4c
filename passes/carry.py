"""State that lives elsewhere than on the device: how a graph has it brought, and has it taken away.

`fetch` and `put` insert these operators, a start and a wait of each:

==========================================================  ========================================================
``zerofx.fetch(shard, group)``                              starts to bring the group's weights to the device; an empty
                                                            ticket
``zerofx.wait_fetch(ticket, shard, group)``                 the weights, ``[shard_numel]``, in memory of their own
``zerofx.put(gradient, group, place)``                      starts to take a gradient away: that of the graph's
                                                            reduction number ``place``; an empty ticket
``zerofx.wait_put(ticket, gradient, group, place)``         waits until it has left; empty
==========================================================  ========================================================

Nobody can read what is still being brought: there is no node for it before the wait. And nobody can be given the memory
of what is still being taken away: the wait reads it.

Who runs the graph says what brings and takes, a `Carrier` (`carrying`). The passes do not know where state lives.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Protocol

import torch

ROOM = 2
"""How many shards may be on their way to the device at a time, and how many gradients away from it."""

_library = torch.library.Library("zerofx", "FRAGMENT")
_library.define("fetch(Tensor shard, str group) -> Tensor")
_library.define("wait_fetch(Tensor ticket, Tensor shard, str group) -> Tensor")
_library.define("put(Tensor gradient, str group, int place) -> Tensor")
_library.define("wait_put(Tensor ticket, Tensor gradient, str group, int place) -> Tensor")


class Carrier(Protocol):
    """Who knows where the state of a graph's groups lives."""

    def fetch(self, group: str) -> None:
        """Start to bring the weights of ``group``."""

    def fetched(self, group: str) -> torch.Tensor:
        """Wait for them; they are nobody else's."""

    def put(self, group: str, place: int, gradient: torch.Tensor) -> None:
        """Start to take ``gradient`` away. It is not written to until `left`."""

    def left(self, group: str, place: int) -> None:
        """Wait until it is gone."""


_here = threading.local()


@contextlib.contextmanager
def carrying(carrier: Carrier | None) -> Iterator[None]:
    """A graph runs inside, in this thread, and ``carrier`` brings and takes state."""
    before, _here.carrier = getattr(_here, "carrier", None), carrier
    try:
        yield
    finally:
        _here.carrier = before


def _carrier(operator: str, group: str) -> Carrier:
    carrier = getattr(_here, "carrier", None)
    if carrier is None:
        raise RuntimeError(
            f"zerofx.{operator} of group {group!r} outside of a graph of zerofx: nobody said where its state lives. "
            "Run the graph inside of zerofx.passes.carry.carrying(carrier)."
        )
    return carrier


def _fetch(shard: torch.Tensor, group: str) -> torch.Tensor:
    _carrier("fetch", group).fetch(group)
    return shard.new_empty(0)


def _wait_fetch(ticket: torch.Tensor, shard: torch.Tensor, group: str) -> torch.Tensor:
    return _carrier("wait_fetch", group).fetched(group)


def _put(gradient: torch.Tensor, group: str, place: int) -> torch.Tensor:
    _carrier("put", group).put(group, place, gradient)
    return gradient.new_empty(0)


def _wait_put(ticket: torch.Tensor, gradient: torch.Tensor, group: str, place: int) -> torch.Tensor:
    _carrier("wait_put", group).left(group, place)
    return gradient.new_empty(0)


def _ticket(tensor: torch.Tensor, group: str, place: int = 0) -> torch.Tensor:
    return tensor.new_empty(0)


def _like(ticket: torch.Tensor, tensor: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(tensor)


def _nothing(ticket: torch.Tensor, gradient: torch.Tensor, group: str, place: int) -> torch.Tensor:
    return gradient.new_empty(0)


for _name, _run, _shape in (
    ("fetch", _fetch, _ticket),
    ("wait_fetch", _wait_fetch, _like),
    ("put", _put, _ticket),
    ("wait_put", _wait_put, _nothing),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    _library.impl(_name, _shape, "Meta")

_zerofx = torch.ops.zerofx
FETCH, WAIT_FETCH, PUT, WAIT_PUT = (
    _zerofx.fetch.default,
    _zerofx.wait_fetch.default,
    _zerofx.put.default,
    _zerofx.wait_put.default,
)
