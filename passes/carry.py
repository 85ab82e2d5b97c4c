"""State that lives elsewhere than on the device: how a graph has it brought, and has it taken away.

`fetch`, `put` and `stow` insert these operators, a start and a wait of each:

==========================================================  ========================================================
``zerofx.fetch(shard, group)``                              starts to bring the group's weights to the device; an empty
                                                            ticket
``zerofx.wait_fetch(ticket, shard, group)``                 the weights, ``[shard_numel]``, in memory of their own
``zerofx.put(gradient, group, place)``                      starts to take a gradient away: that of the graph's
                                                            reduction number ``place``; an empty ticket
``zerofx.wait_put(ticket, gradient, group, place)``         waits until it has left; empty
``zerofx.stow(saved, order, place)``                        starts to take away what forward saves: number ``place`` of
                                                            these, its dimensions in ``order`` in memory; an empty
                                                            ticket
``zerofx.wait_stow(ticket, saved, order, place)``           waits until it has left: a *handle*, of the shape of
                                                            ``saved``, all of it one element
``zerofx.unstow(handle, order, place)``                     starts to bring it, in backward; an empty ticket
``zerofx.wait_unstow(ticket, handle, order, place)``        what was saved, in memory of its own
==========================================================  ========================================================

Nobody can read what is still being brought: there is no node for it before the wait. And nobody can be given the memory
of what is still being taken away: the wait reads it.

A start that brings something makes the memory for it.

Who runs the graph says what brings and takes, a `Carrier` (`carrying`). The passes do not know where state lives.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

ROOM = 2
"""How many shards may be on their way to the device at a time, and how many gradients away from it; and of what forward
saves, how many either way."""

_library = torch.library.Library("zerofx", "FRAGMENT")
_library.define("fetch(Tensor shard, str group) -> Tensor")
_library.define("wait_fetch(Tensor ticket, Tensor shard, str group) -> Tensor")
_library.define("put(Tensor gradient, str group, int place) -> Tensor")
_library.define("wait_put(Tensor ticket, Tensor gradient, str group, int place) -> Tensor")
_library.define("stow(Tensor saved, int[] order, int place) -> Tensor")
_library.define("wait_stow(Tensor ticket, Tensor saved, int[] order, int place) -> Tensor")
_library.define("unstow(Tensor handle, int[] order, int place) -> Tensor")
_library.define("wait_unstow(Tensor ticket, Tensor handle, int[] order, int place) -> Tensor")


class Carrier(Protocol):
    """Who knows where the state of a graph's groups lives."""

    def fetch(self, group: str, here: torch.Tensor) -> None:
        """Start to bring the weights of ``group`` to ``here``, which is empty."""

    def fetched(self, group: str) -> torch.Tensor:
        """Wait until they have come."""

    def put(self, group: str, place: int, gradient: torch.Tensor) -> None:
        """Start to take ``gradient`` away. It is not written to until `left`."""

    def left(self, group: str, place: int) -> None:
        """Wait until it is gone."""

    def stow(self, place: int, saved: torch.Tensor, order: list[int]) -> None:
        """Start to take ``saved`` away. It is not written to until `stowed`."""

    def stowed(self, place: int) -> torch.Tensor:
        """Wait until it is gone; the handle by which it is found."""

    def unstow(self, place: int, handle: torch.Tensor, here: torch.Tensor) -> None:
        """Start to bring to ``here``, which is empty, what ``handle`` stands for."""

    def unstowed(self, place: int) -> torch.Tensor:
        """Wait until it has come."""


_here = threading.local()


@contextlib.contextmanager
def carrying(carrier: Carrier | None) -> Iterator[None]:
    """A graph runs inside, in this thread, and ``carrier`` brings and takes state."""
    before, _here.carrier = getattr(_here, "carrier", None), carrier
    try:
        yield
    finally:
        _here.carrier = before


def _carrier(operator: str, of: str | int) -> Carrier:
    carrier = getattr(_here, "carrier", None)
    if carrier is None:
        what = f"group {of!r}" if isinstance(of, str) else f"saved tensor {of}"
        raise RuntimeError(
            f"zerofx.{operator} of {what} outside of a graph of zerofx: nobody said where its state lives. "
            "Run the graph inside of zerofx.passes.carry.carrying(carrier)."
        )
    return carrier


def _fetch(shard: torch.Tensor, group: str) -> torch.Tensor:
    _carrier("fetch", group).fetch(group, torch.empty_like(shard))
    return shard.new_empty(0)


def _wait_fetch(ticket: torch.Tensor, shard: torch.Tensor, group: str) -> torch.Tensor:
    return _carrier("wait_fetch", group).fetched(group)


def _put(gradient: torch.Tensor, group: str, place: int) -> torch.Tensor:
    _carrier("put", group).put(group, place, gradient)
    return gradient.new_empty(0)


def _wait_put(ticket: torch.Tensor, gradient: torch.Tensor, group: str, place: int) -> torch.Tensor:
    _carrier("wait_put", group).left(group, place)
    return gradient.new_empty(0)


def _stow(saved: torch.Tensor, order: list[int], place: int) -> torch.Tensor:
    _carrier("stow", place).stow(place, saved, order)
    return saved.new_empty(0)


def _wait_stow(ticket: torch.Tensor, saved: torch.Tensor, order: list[int], place: int) -> torch.Tensor:
    return _carrier("wait_stow", place).stowed(place)


def _unstow(handle: torch.Tensor, order: list[int], place: int) -> torch.Tensor:
    _carrier("unstow", place).unstow(place, handle, laid_out(handle, order))
    return handle.new_empty(0)


def _wait_unstow(ticket: torch.Tensor, handle: torch.Tensor, order: list[int], place: int) -> torch.Tensor:
    return _carrier("wait_unstow", place).unstowed(place)


def new_handle(saved: torch.Tensor) -> torch.Tensor:
    """What autograd saves in the place of ``saved``: as large to look at, and one element in memory."""
    return saved.new_empty(()).expand(saved.shape)


def laid_out(like: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """An empty tensor of the shape of ``like`` without gaps, the dimension ``order[0]`` outermost in memory."""
    return torch.empty_permuted(like.shape, tuple(order), dtype=like.dtype, device=like.device)


def _ticket(tensor: torch.Tensor, group: str, place: int = 0) -> torch.Tensor:
    return tensor.new_empty(0)


def _like(ticket: torch.Tensor, tensor: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(tensor)


def _nothing(ticket: torch.Tensor, gradient: torch.Tensor, group: str, place: int) -> torch.Tensor:
    return gradient.new_empty(0)


def _stow_ticket(tensor: torch.Tensor, order: list[int], place: int) -> torch.Tensor:
    return tensor.new_empty(0)


def _handle(ticket: torch.Tensor, saved: torch.Tensor, order: list[int], place: int) -> torch.Tensor:
    return new_handle(saved)


def _arrived(ticket: torch.Tensor, handle: torch.Tensor, order: list[int], place: int) -> torch.Tensor:
    return laid_out(handle, order)


for _name, _run, _shape in (
    ("fetch", _fetch, _ticket),
    ("wait_fetch", _wait_fetch, _like),
    ("put", _put, _ticket),
    ("wait_put", _wait_put, _nothing),
    ("stow", _stow, _stow_ticket),
    ("wait_stow", _wait_stow, _handle),
    ("unstow", _unstow, _stow_ticket),
    ("wait_unstow", _wait_unstow, _arrived),
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
STOW, WAIT_STOW, UNSTOW, WAIT_UNSTOW = (
    _zerofx.stow.default,
    _zerofx.wait_stow.default,
    _zerofx.unstow.default,
    _zerofx.wait_unstow.default,
)
