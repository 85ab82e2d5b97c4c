"""The optimizer's state is in the host's memory: gradients come to it, and new weights go back, chunk by chunk.

::

    to the host      c0 c1 c2 c3 ...
    arithmetic          c0 c1 c2 c3 ...      `zerofx.kernels.cpu`, where the moments are
    to the device          c0 c1 c2 ...
    pinned memory    `BUFFERS` buffers, whatever the model's size

A *batch* is what one buffer holds: a chunk of a long run, or many short runs. Of each it has the gradient and the
weights. Where a float32 master is kept with the moments, the device's weights are not read, and nothing of them comes.

The numbers are those of the same kernel on whole runs, bit for bit. A chunk ends a multiple of `UNIT` elements behind
its run's beginning, so vectors, blocks of 8-bit moments and what is left at a run's end are computed as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zerofx.runtime.optim.spans import Part, Run
from zerofx.runtime.state.copies import Mark
from zerofx.runtime.state.staging import Staging

UNIT = 256
"""Elements; a multiple of what vector instructions compute at once, and of the blocks of 8-bit moments."""

Keyed = Sequence[tuple[Any, Run]]
Update = Callable[[Sequence[tuple[Any, Part]]], None]


@dataclass
class Piece:
    """Elements of a run's span from ``start`` up to ``end``, and where in a buffer they lie, in bytes."""

    key: Any
    run: Run
    start: int
    end: int
    gradient_at: int
    weights_at: int

    def part(self, buffer: torch.Tensor) -> Part:
        """What a kernel is given."""
        gradient = self._in(buffer, self.gradient_at, self.run.gradient.dtype)
        weights = self._in(buffer, self.weights_at, self.run.span.whole.dtype)
        return self.run.part(self.start, self.end, self.run.state(self.start, self.end), weights, gradient)

    def there(self) -> Part:
        """The same elements where they live: weights and gradient on the device."""
        return self.run.part(self.start, self.end, {})

    @property
    def reads_weights(self) -> bool:
        """Whether the kernel reads the weights that are there: a float32 master is all that it needs."""
        return "master" not in self.run.span.state

    def _in(self, buffer: torch.Tensor, at: int, dtype: torch.dtype) -> torch.Tensor:
        return buffer[at : at + (self.end - self.start) * dtype.itemsize].view(dtype)


@dataclass
class Batch:
    """What is in a buffer at one time. ``nbytes``: of the buffer that it takes."""

    pieces: list[Piece] = field(default_factory=list)
    nbytes: int = 0

    def add(self, key: Any, run: Run, start: int, end: int) -> None:
        """Elements of ``run``, which fit."""
        gradient_at = self.nbytes
        weights_at = gradient_at + _aligned((end - start) * run.gradient.itemsize)
        self.nbytes = weights_at + _aligned((end - start) * run.span.whole.itemsize)
        self.pieces.append(Piece(key, run, start, end, gradient_at, weights_at))


def through_host(staging: Staging, keyed: Keyed, update: Update) -> None:
    """``update`` all runs, whose state is in the host's memory, in the order that they are given in.

    ``keyed``: runs with what ``update`` is to know of each. As it returns, new weights may still be on their way, and
    what the computing stream is given next is behind them.
    """
    batches = list(_batches(keyed, staging.buffers[0].nbytes))
    if batches:
        _walk(staging, batches, update)


def _walk(staging: Staging, batches: Sequence[Batch], update: Update) -> None:
    copies, buffers = staging.copies, staging.buffers
    ahead = len(buffers) - 1
    came: list[Mark] = []
    went: list[Mark] = []

    def bring(i: int) -> None:
        if i >= len(buffers):
            copies.out_behind(went[i - len(buffers)])  # the buffer is free
        for piece in batches[i].pieces:
            here, there = piece.part(buffers[i % len(buffers)]), piece.there()
            staging.out(here.gradient, there.gradient)
            if piece.reads_weights:
                staging.out(here.weights, there.weights)
        came.append(copies.mark_out())

    copies.begin()
    try:
        for i in range(min(ahead, len(batches))):
            bring(i)
        for i, batch in enumerate(batches):
            came[i].synchronize()
            buffer = buffers[i % len(buffers)]
            update([(piece.key, piece.part(buffer)) for piece in batch.pieces])
            for piece in batch.pieces:
                staging.back(piece.there().weights, piece.part(buffer).weights)
            went.append(copies.mark_back())
            if i + ahead < len(batches):
                bring(i + ahead)
    finally:
        copies.end()  # behind an error, too: a gradient's memory may be given to others then


def _batches(keyed: Keyed, nbytes: int) -> Iterator[Batch]:
    """What ``nbytes`` have room for, one after the other."""
    batch = Batch()
    for key, run in keyed:
        at = run.start
        element = run.gradient.itemsize + run.span.whole.itemsize
        most = nbytes // element // UNIT * UNIT
        while at < run.end:
            end = min(at + most, run.end)
            needs = _aligned((end - at) * run.gradient.itemsize) + _aligned((end - at) * run.span.whole.itemsize)
            if batch.nbytes + needs > nbytes and batch.pieces:
                yield batch
                batch = Batch()
            batch.add(key, run, at, end)
            at = end
    if batch.pieces:
        yield batch


def _aligned(nbytes: int) -> int:
    """``nbytes``, and up to a cache line's end."""
    return -(-nbytes // 64) * 64
