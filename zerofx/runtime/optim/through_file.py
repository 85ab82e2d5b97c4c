"""The optimizer's state passes through memory: read ahead, updated, written behind.

::

    disk, reading    c0 c1 c2 c3 ...
    arithmetic          c0 c1 c2 c3 ...
    disk, writing          c0 c1 c2 c3 ...
    memory           `BUFFERS` buffers, whatever the model's size

A *batch* is what one buffer holds: a chunk of a large span, or the whole of many small ones. In the file the state of
neighbours lies side by side, so it comes in a few long reads. Weights and gradients that live in the file pass through
the buffer with it. Where they lie there otherwise than the state does, they are brought whole, group by group.

The numbers are those of a step in memory, bit for bit. PyTorch's fused kernel computes what is left after the last
full vector of a run by other instructions. So where a chunk's end cuts `UNIT` elements that a run in memory would have
computed together, each side computes the whole unit aside, and takes its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from zerofx.runtime.optim.spans import Part, Run, Span
from zerofx.runtime.state.raw_file import padded
from zerofx.runtime.state.state_file import BUFFER, CHUNK, Extent, Piece, StateFile

BUFFERS = 4
"""One is updated, one is written, two are read."""

UNIT = 64
"""Elements; a multiple of what vector instructions compute at once."""

WEIGHTS, GRADIENT = "its weights", "its gradient"

Beside = dict[str, tuple[Extent, int]]
"""The weights and the gradient of a span, as far as they live in the file: their extents, and which chunk of each lies
beside the first chunk of the span's state."""

Keyed = Sequence[tuple[Any, Run]]
Update = Callable[[Sequence[tuple[Any, Part]]], None]


@dataclass
class Batch:
    """What is in a buffer at one time.

    Attributes:
        pieces: its transfers, in the order of the file.
        spans: of each span the number of a chunk, and where in the buffer its state lies, by name.
        nbytes: of the buffer that it takes.
    """

    pieces: list[Piece] = field(default_factory=list)
    spans: list[tuple[Span, int, dict[str, int]]] = field(default_factory=list)
    nbytes: int = 0

    def add(self, span: Span, i: int, beside: Beside) -> None:
        """Chunk ``i`` of ``span``, with what lies ``beside`` its state."""
        places: dict[str, int] = {}
        file = span.file
        assert file is not None
        for name, flat in span.state.items():
            extent = file.extent_of(flat)
            assert extent is not None, name
            self._add(extent, i, name, places)
        for name, (extent, first) in beside.items():
            self._add(extent, first + i, name, places)
        self.spans.append((span, i, places))

    def _add(self, extent: Extent, i: int, name: str, places: dict[str, int]) -> None:
        self.pieces.append((extent, i, self.nbytes))
        places[name] = self.nbytes
        self.nbytes += padded(extent.chunk(i)[1])

    def parts(self, runs: dict[int, list[tuple[Any, Run]]], buffer: memoryview) -> Iterator[tuple[Any, Run, int, Part]]:
        """The runs' parts in this batch: key, run, end in the span, and what a kernel is given."""
        for span, i, places in self.spans:
            start, end = i * CHUNK, min(i * CHUNK + CHUNK, span.numel)
            state = {
                name: torch.frombuffer(buffer, dtype=span.state[name].dtype, count=end - start, offset=at)
                for name, at in places.items()
                if name in span.state
            }
            for key, run in runs[id(span)]:
                dtypes = {WEIGHTS: span.whole.dtype, GRADIENT: run.gradient.dtype}
                beside = {
                    name: torch.frombuffer(buffer, dtype=dtype, count=end - start, offset=places[name])
                    for name, dtype in dtypes.items()
                    if name in places
                }
                first, last = max(start, run.start), min(end, run.end)
                if first < last:
                    mine = {name: flat[first - start : last - start] for name, flat in state.items()}
                    its = {name: flat[first - start : last - start] for name, flat in beside.items()}
                    yield key, run, last, run.part(first, last, mine, its.get(WEIGHTS), its.get(GRADIENT))


def through_file(file: StateFile, keyed: Keyed, update: Update) -> None:
    """``update`` all runs, whose state is in ``file``, as if it were in memory.

    ``keyed``: runs with what ``update`` is to know of each. What goes wrong is noted in ``file``: outside of a step it
    is raised.
    """
    with file.noting():
        file.settle()
        file.check()
        runs: dict[int, list[tuple[Any, Run]]] = {}
        for key, run in keyed:
            runs.setdefault(id(run.span), []).append((key, run))
        walked: list[tuple[Span, Beside]] = []
        alone: dict[int, list[Span]] = {}
        for span in {id(run.span): run.span for _, run in keyed}.values():
            beside = _beside(file, span, [run for _, run in runs[id(span)]])
            if beside is not None:
                walked.append((span, beside))
            else:
                alone.setdefault(id(span.group), []).append(span)

        def through(spans: Sequence[tuple[Span, Beside]]) -> None:
            if batches := list(_batches(spans)):
                walk(file, batches, lambda batch, buffer: _update(list(batch.parts(runs, buffer)), update))

        through(walked)
        for together in alone.values():
            file.settle()
            with contextlib.ExitStack() as stack:
                for span in together:
                    stack.enter_context(span.gradients_resident())
                    stack.enter_context(span.weights_resident())
                kept = [span for span in together if any(_is_here(file, flat) for flat in span.state.values())]
                for span in kept:
                    with span.state_resident():
                        update([(key, run.all()) for key, run in runs[id(span)]])
                through([(span, {}) for span in together if span not in kept])


def _beside(file: StateFile, span: Span, runs: Sequence[Run]) -> Beside | None:
    """What of weights and gradient passes through the buffer with the state; None: the span cannot go chunk by chunk.

    Chunks of all three begin with the same elements, and nobody holds a view of any of them (``to_local()``): what is
    in memory is the state then, and not what the file has.
    """
    if any(_is_here(file, flat) for flat in span.state.values()):
        return None
    found: Beside = {}
    first, rest = divmod(span.origin, CHUNK)
    if (weights := file.extent_of(span.whole)) is not None:
        if rest or weights.here:
            return None
        found[WEIGHTS] = (weights, first)
    gradients = {id(extent): extent for run in runs if (extent := file.extent_of(run.gradient)) is not None}
    if gradients:
        [gradient, *others] = gradients.values()
        lies_alike = all(
            file.extent_of(run.gradient) is gradient and run.gradient.storage_offset() == span.origin + run.start
            for run in runs
        )
        if rest or others or gradient.here or not lies_alike or gradient.itemsize != runs[0].gradient.itemsize:
            return None
        found[GRADIENT] = (gradient, first)
    return found


def _is_here(file: StateFile, flat: torch.Tensor) -> bool:
    """Whether somebody holds a view of it (``to_local()``): then that is the state, and not what the file has."""
    extent = file.extent_of(flat)
    return extent is None or extent.here


def _batches(spans: Sequence[tuple[Span, Beside]]) -> Iterator[Batch]:
    """Chunks in the order in which the file has them."""
    batch = Batch()
    for span, beside in spans:
        if not span.state:
            continue
        sizes = [flat.itemsize for flat in span.state.values()] + [extent.itemsize for extent, _ in beside.values()]
        for i in range(-(-span.numel // CHUNK)):
            nbytes = min(CHUNK, span.numel - i * CHUNK) * sum(sizes)
            if batch.nbytes and batch.nbytes + nbytes + len(sizes) * padded(1) > BUFFER:
                yield batch
                batch = Batch()
            batch.add(span, i, beside)
    if batch.nbytes:
        yield batch


def walk(file: StateFile, batches: Sequence[Batch], compute: Callable[[Batch, memoryview], None]) -> None:
    """Each batch through a buffer. Two threads move bytes; the arithmetic is this one's."""
    buffers = file.buffers(BUFFERS, max(batch.nbytes for batch in batches))
    written: list[Future[None]] = []

    def read(i: int) -> None:
        if i >= BUFFERS:
            written[i - BUFFERS].result()  # the buffer is free
        file.read(batches[i].pieces, buffers[i % BUFFERS])

    with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as writer:
        ahead = BUFFERS - 1
        reads = [reader.submit(read, i) for i in range(min(ahead, len(batches)))]
        for i, batch in enumerate(batches):
            reads[i].result()
            buffer = buffers[i % BUFFERS]
            compute(batch, buffer)
            written.append(writer.submit(file.write, batch.pieces, buffer))
            if i + ahead < len(batches):
                reads.append(reader.submit(read, i + ahead))
        for write in written:
            write.result()


def _update(parts: list[tuple[Any, Run, int, Part]], update: Update) -> None:
    """All parts in one call; what a chunk's ends have cut is computed aside."""
    whole: list[tuple[Any, Part]] = []
    aside: list[tuple[Any, Part, Part, int]] = []
    for key, run, end, part in parts:
        start, length = part.start, end - part.start
        before = (start - run.start) % UNIT  # elements of the first unit that the chunk before this one has
        head = min(-before % UNIT, length)
        tail = 0 if end == run.end else (length - head) % UNIT
        for at, n in ((0, head), (length - tail, tail)):
            if n:
                offset = (start + at - run.start) % UNIT
                numel = min(UNIT, run.end - (start + at - offset))
                aside.append((key, _narrow(part, at, n), _alone(part, at, n, offset, numel), offset))
        if length - head - tail:
            whole.append((key, _narrow(part, head, length - head - tail)))
    whole += [(key, unit) for key, _, unit, _ in aside]
    whole.sort(key=lambda pair: pair[0])
    update(whole)
    for _, mine, unit, offset in aside:
        n = mine.weights.numel()
        mine.weights.copy_(unit.weights[offset : offset + n])
        mine.gradient.copy_(unit.gradient[offset : offset + n])  # kernels scale it in place
        for name, flat in mine.state.items():
            flat.copy_(unit.state[name][offset : offset + n])


def _narrow(part: Part, at: int, n: int) -> Part:
    state = {name: flat[at : at + n] for name, flat in part.state.items()}
    return Part(part.span, part.start + at, part.weights[at : at + n], part.gradient[at : at + n], state)


def _alone(part: Part, at: int, n: int, offset: int, numel: int) -> Part:
    """``n`` elements of ``part`` where they are in their unit; zeros around them."""

    def alone(flat: torch.Tensor) -> torch.Tensor:
        made = flat.new_zeros(numel)
        made[offset : offset + n] = flat[at : at + n]
        return made

    state = {name: alone(flat) for name, flat in part.state.items()}
    return Part(part.span, part.start + at - offset, alone(part.weights), alone(part.gradient), state)
