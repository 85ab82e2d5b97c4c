"""The optimizer's state is in the host's memory: gradients come to it, and new weights go back, chunk by chunk.

::

    to the host      c0 c1 c2 c3 ...
    arithmetic          c0 c1 c2 c3 ...      `zerofx.kernels.cpu`, where the moments are
    to the device          c0 c1 c2 ...
    pinned memory    `BUFFERS` buffers, whatever the model's size

A *batch* is what one buffer holds: a chunk of a long run, or many short runs. Of each it has the gradient and the
weights. Where a float32 master is kept with the moments, the device's weights are not read, and nothing of them comes.

Gradients and weights that live in the host's memory (`Run.on_host`) are used there. They are in place when the first
batch is: what comes out comes after all copies that were started before. A run of which both live there passes through
no buffer: the host waits for its gradient alone, while the device may be at others.

The numbers are those of the same kernel on whole runs, bit for bit. A chunk ends a multiple of `UNIT` elements after
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
    """Elements of a run's span from ``start`` up to ``end``, and where in a buffer they lie, in bytes.

    ``gradient``, ``weights``: the same elements, if they are in the host's memory; else they are on the device.
    """

    key: Any
    run: Run
    start: int
    end: int
    gradient_at: int = 0
    weights_at: int = 0

    def __post_init__(self) -> None:
        self.gradient, self.weights = self.run.on_host(self.start, self.end)

    def part(self, buffer: torch.Tensor) -> Part:
        """What a kernel is given."""
        gradient, weights = self.gradient, self.weights
        if gradient is None:
            gradient = self._in(buffer, self.gradient_at, self.run.gradient.dtype)
        if weights is None:
            weights = self._in(buffer, self.weights_at, self.run.span.whole.dtype)
        return self.run.part(self.start, self.end, self.run.state(self.start, self.end), weights, gradient)

    def bring(self, staging: Staging, buffer: torch.Tensor) -> None:
        """Start to copy what the kernel reads, and is on the device. It reads no weights that have a float32 master."""
        here = self.part(buffer)
        if self.gradient is None:
            at = self.run.gradient.storage_offset() + self.start - self.run.start
            staging.out(here.gradient, self.run.gradient.as_strided(here.gradient.shape, (1,), at))
        if self.weights is None and "master" not in self.run.span.state:
            staging.out(here.weights, self._weights_there())

    def take(self, staging: Staging, buffer: torch.Tensor) -> None:
        """Start to copy new weights to the device, if they live there."""
        if self.weights is None:
            staging.back(self._weights_there(), self.part(buffer).weights)

    def _weights_there(self) -> torch.Tensor:
        return self.run.span.weights().narrow(0, self.start, self.end - self.start)

    def _in(self, buffer: torch.Tensor, at: int, dtype: torch.dtype) -> torch.Tensor:
        return buffer[at : at + (self.end - self.start) * dtype.itemsize].view(dtype)


@dataclass
class Batch:
    """What is in a buffer at one time. ``nbytes``: of the buffer that it takes."""

    pieces: list[Piece] = field(default_factory=list)
    nbytes: int = 0

    def add(self, key: Any, run: Run, start: int, end: int, sizes: tuple[int, int]) -> None:
        """Elements of ``run``, which fit; ``sizes``: see `_sizes`."""
        gradient_at = self.nbytes
        weights_at = gradient_at + _aligned((end - start) * sizes[0])
        self.nbytes = weights_at + _aligned((end - start) * sizes[1])
        self.pieces.append(Piece(key, run, start, end, gradient_at, weights_at))


def through_host(staging: Staging, keyed: Keyed, update: Update) -> None:
    """``update`` all runs, whose state is in the host's memory, in the order that they are given in.

    ``keyed``: runs with what ``update`` is to know of each. As it returns, new weights may still be on their way, and
    what the computing stream is given next is after them.
    """
    passing = [(key, run) for key, run in keyed if any(_sizes(run))]
    batches = list(_batches(passing, staging.buffers[0].nbytes))
    if batches:
        _walk(staging, batches, update)
    for key, run in reversed(keyed):  # backward comes to the last layers first: their gradients are there
        if not any(_sizes(run)):
            run.settle()
            gradient, weights = run.on_host(run.start, run.end)
            update([(key, run.part(run.start, run.end, run.state(), weights, gradient))])


def _walk(staging: Staging, batches: Sequence[Batch], update: Update) -> None:
    copies, buffers = staging.copies, staging.buffers
    ahead = len(buffers) - 1
    came: list[Mark] = []
    went: list[Mark] = []

    def bring(i: int) -> None:
        if i >= len(buffers):
            copies.out_behind(went[i - len(buffers)])  # the buffer is free
        for piece in batches[i].pieces:
            piece.bring(staging, buffers[i % len(buffers)])
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
                piece.take(staging, buffer)
            went.append(copies.mark_back())
            if i + ahead < len(batches):
                bring(i + ahead)
    finally:
        copies.end()  # after an error, too: a gradient's memory may be given to others then


def _batches(keyed: Keyed, nbytes: int) -> Iterator[Batch]:
    """What ``nbytes`` have room for, one after the other."""
    batch = Batch()
    for key, run in keyed:
        at, sizes = run.start, _sizes(run)
        most = nbytes // sum(sizes) // UNIT * UNIT
        while at < run.end:
            end = min(at + most, run.end)
            needs = sum(_aligned((end - at) * size) for size in sizes)
            if batch.nbytes + needs > nbytes and batch.pieces:
                yield batch
                batch = Batch()
            batch.add(key, run, at, end, sizes)
            at = end
    if batch.pieces:
        yield batch


def _sizes(run: Run) -> tuple[int, int]:
    """Bytes that an element's gradient and its weight take in a buffer: 0 of what is in the host's memory already."""
    gradient, weights = run.on_host(run.start, run.end)
    return 0 if gradient is not None else run.gradient.itemsize, 0 if weights is not None else run.span.whole.itemsize


def _aligned(nbytes: int) -> int:
    """``nbytes``, and up to a cache line's end."""
    return -(-nbytes // 64) * 64
