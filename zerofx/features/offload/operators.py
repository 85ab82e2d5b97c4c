"""State that is offloaded: the operators by which a graph moves it to the device and away from it.

Passes insert a start and a wait of each:

==================================================  ===================================================================
``reload(shard, group)``                            starts to copy the group's weights to the device; an empty ticket
``wait_reload(ticket, shard, group)``               the weights, ``[shard_numel]``, in memory of their own
``offload(gradient, group, place)``                 starts to copy a gradient away: that of the graph's reduction number
                                                    ``place``; an empty ticket
``wait_offload(ticket, gradient, group, place)``    waits until it has left; empty
``offload_activation(saved, order, place)``         starts to copy away what forward saves: number ``place`` of these,
                                                    its dimensions in ``order`` in memory; an empty ticket
``wait_offload_activation(ticket, saved, …)``       waits until it has left: a *handle*, of the shape of ``saved``, all
                                                    of it one element
``reload_activation(handle, order, place)``         starts to copy it back, in backward; an empty ticket
``wait_reload_activation(ticket, handle, …)``       what was saved, in memory of its own
==================================================  ===================================================================

Nobody can read what is still on its way to the device: there is no node for it before the wait. And nobody can be given
the memory of what is still leaving: the wait reads it.

A start that reloads makes the memory for it.

Who runs the graph says what copies, a `Carrier` (`carrying`). The passes do not know where state lives.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

MAX_IN_FLIGHT = 2
"""How many shards may be on their way to the device at a time, and how many gradients away from it; and of what forward
saves, how many either way."""

_library = torch.library.Library("zerofx", "FRAGMENT")
_library.define("reload(Tensor shard, str group) -> Tensor")
_library.define("wait_reload(Tensor ticket, Tensor shard, str group) -> Tensor")
_library.define("offload(Tensor gradient, str group, int place) -> Tensor")
_library.define("wait_offload(Tensor ticket, Tensor gradient, str group, int place) -> Tensor")
_library.define("offload_activation(Tensor saved, int[] order, int place) -> Tensor")
_library.define("wait_offload_activation(Tensor ticket, Tensor saved, int[] order, int place) -> Tensor")
_library.define("reload_activation(Tensor handle, int[] order, int place) -> Tensor")
_library.define("wait_reload_activation(Tensor ticket, Tensor handle, int[] order, int place) -> Tensor")


class Carrier(Protocol):
    """Who knows where the state of a graph's groups lives."""

    def reload(self, group: str, here: torch.Tensor) -> None:
        """Start to bring the weights of ``group`` to ``here``, which is empty."""

    def reloaded(self, group: str) -> torch.Tensor:
        """Wait until they have come."""

    def offload(self, group: str, place: int, gradient: torch.Tensor) -> None:
        """Start to take ``gradient`` away. It is not written to until `offloaded`."""

    def offloaded(self, group: str, place: int) -> None:
        """Wait until it is gone."""

    def offload_activation(self, place: int, saved: torch.Tensor, order: list[int]) -> None:
        """Start to take ``saved`` away. It is not written to until `activation_offloaded`."""

    def activation_offloaded(self, place: int) -> torch.Tensor:
        """Wait until it is gone; the handle by which it is found."""

    def reload_activation(self, place: int, handle: torch.Tensor, here: torch.Tensor) -> None:
        """Start to bring to ``here``, which is empty, what ``handle`` stands for."""

    def activation_reloaded(self, place: int) -> torch.Tensor:
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
            "Run the graph inside of zerofx.features.offload.operators.carrying(carrier)."
        )
    return carrier


def _reload(shard: torch.Tensor, group: str) -> torch.Tensor:
    _carrier("reload", group).reload(group, torch.empty_like(shard))
    return shard.new_empty(0)


def _wait_reload(ticket: torch.Tensor, shard: torch.Tensor, group: str) -> torch.Tensor:
    return _carrier("wait_reload", group).reloaded(group)


def _offload(gradient: torch.Tensor, group: str, place: int) -> torch.Tensor:
    _carrier("offload", group).offload(group, place, gradient)
    return gradient.new_empty(0)


def _wait_offload(ticket: torch.Tensor, gradient: torch.Tensor, group: str, place: int) -> torch.Tensor:
    _carrier("wait_offload", group).offloaded(group, place)
    return gradient.new_empty(0)


def _offload_activation(saved: torch.Tensor, order: list[int], place: int) -> torch.Tensor:
    _carrier("offload_activation", place).offload_activation(place, saved, order)
    return saved.new_empty(0)


def _wait_offload_activation(ticket: torch.Tensor, saved: torch.Tensor, order: list[int], place: int) -> torch.Tensor:
    return _carrier("wait_offload_activation", place).activation_offloaded(place)


def _reload_activation(handle: torch.Tensor, order: list[int], place: int) -> torch.Tensor:
    _carrier("reload_activation", place).reload_activation(place, handle, laid_out(handle, order))
    return handle.new_empty(0)


def _wait_reload_activation(ticket: torch.Tensor, handle: torch.Tensor, order: list[int], place: int) -> torch.Tensor:
    return _carrier("wait_reload_activation", place).activation_reloaded(place)


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


def _activation_ticket(tensor: torch.Tensor, order: list[int], place: int) -> torch.Tensor:
    return tensor.new_empty(0)


def _handle(ticket: torch.Tensor, saved: torch.Tensor, order: list[int], place: int) -> torch.Tensor:
    return new_handle(saved)


def _arrived(ticket: torch.Tensor, handle: torch.Tensor, order: list[int], place: int) -> torch.Tensor:
    return laid_out(handle, order)


for _name, _run, _shape in (
    ("reload", _reload, _ticket),
    ("wait_reload", _wait_reload, _like),
    ("offload", _offload, _ticket),
    ("wait_offload", _wait_offload, _nothing),
    ("offload_activation", _offload_activation, _activation_ticket),
    ("wait_offload_activation", _wait_offload_activation, _handle),
    ("reload_activation", _reload_activation, _activation_ticket),
    ("wait_reload_activation", _wait_reload_activation, _arrived),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    _library.impl(_name, _shape, "Meta")

_zerofx = torch.ops.zerofx
RELOAD, WAIT_RELOAD, OFFLOAD, WAIT_OFFLOAD = (
    _zerofx.reload.default,
    _zerofx.wait_reload.default,
    _zerofx.offload.default,
    _zerofx.wait_offload.default,
)
OFFLOAD_ACTIVATION, WAIT_OFFLOAD_ACTIVATION, RELOAD_ACTIVATION, WAIT_RELOAD_ACTIVATION = (
    _zerofx.offload_activation.default,
    _zerofx.wait_offload_activation.default,
    _zerofx.reload_activation.default,
    _zerofx.wait_reload_activation.default,
)
