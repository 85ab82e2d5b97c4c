"""Large buffers on a CPU come from arenas, and go back to them: no allocation is left in a step after the first.

A graph that runs takes one piece for its whole *frame*: all that it gathers, packs, exchanges and codes has its place
there beforehand (`zerofx.passes.place`)::

    frames   ┌──────────────────────────────┬──────────────────────────────
             │ frame of a backward          │ never touched: no memory yet
             │ gathered h.1 │ pack  │ codes │
             └──────────────┴───────┴───────┴──────────────────────────────

What leaves a graph outlives its frame, and how long nobody knows; what generated code computes in between has no place
beforehand. Each such buffer takes a piece of its own, from `LEAST` bytes on, in an arena beside::

    pieces   ┌──────────────┬────────┬──────────────────────┬──────────────────────────────
             │ saved h.1    │ a sum  │ free                 │ never touched: no memory yet
             └──────────────┴────────┴──────────────────────┴──────────────────────────────
    take     the first free piece that is large enough
    give     when the last tensor on it is gone; free neighbours become one piece

A step takes the same pieces in the same order as the step before. The first fit is then the same, too: what a piece
needs was touched by the last step, and no arena grows. malloc gives such buffers back to the kernel, which zeroes
every page of the next one; or it keeps them, and fits none into the place of the last (docs/tuning.md). On GPUs PyTorch
has an allocator that keeps memory; on CPUs it has none.

An arena is address space, as much as the machine has memory. Linux puts pages under it where something is written.

Every tensor in a frame holds the piece. So what is still on its way when a graph fails, a message say, has memory that
is nobody else's.

Who runs a graph says whether it draws on the pool, and by which frame (`drawing`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import os
import resource
import sys
import threading
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

LEAST = 1 << 20
"""Bytes of the smallest buffer that takes a piece of its own. Smaller ones malloc serves well. In a frame all are."""

_PAGE = mmap.PAGESIZE


@dataclass(frozen=True)
class Room:
    """Where in a frame one buffer lies.

    Attributes:
        number: by which its operator asks for it.
        name, kind, group: of the node that makes it.
        nbytes: of the buffer.
        first, last: the node, or line of code, that makes it, and the last that touches it; as places in that order.
        start: bytes of the frame in front of it.
    """

    number: int
    name: str
    kind: str
    group: str
    nbytes: int
    first: int
    last: int
    start: int = 0


@dataclass(frozen=True)
class Frame:
    """Where all buffers lie that a graph makes for collectives, and that do not leave it.

    Attributes:
        rooms: of these.
        nbytes: of the frame.
        least: the most bytes that are live at once: no frame is smaller.
        order: of what their times are places: the nodes of the graph, or the lines of the code made of it.
        lines: the lines of code that allocate one by themselves, and which.
    """

    rooms: tuple[Room, ...]
    nbytes: int
    least: int
    order: Literal["graph", "code"] = "graph"
    lines: Mapping[int, Room] = field(default_factory=dict)

    @functools.cached_property
    def numbered(self) -> dict[int, Room]:
        return {room.number: room for room in self.rooms}

    @functools.cached_property
    def named(self) -> dict[str, Room]:
        return {room.name: room for room in self.rooms}


class Pool:
    """Pieces of one arena.

    Attributes:
        nbytes: of the arena's addresses.
        live: bytes of pieces that are taken.
        reach: bytes from the arena's beginning that were taken at any time: what has memory under it.
        takes: how many pieces were taken.
        refused: how many did not fit.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes // _PAGE * _PAGE
        self.live = self.reach = self.takes = self.refused = 0
        no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
        self._arena = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
        self._free = [(0, self.nbytes)]  # by address; no two touch
        self._taken: dict[int, tuple[int, weakref.ref[ctypes.Array[ctypes.c_char]]]] = {}
        self._given = deque[int]()  # from any thread, and from within `take`: garbage is collected anywhere
        self._lock = threading.Lock()

    def empty(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """A tensor with what was there before; None if no piece is large enough."""
        piece = self.take(_count(shape, stride) * dtype.itemsize)
        return None if piece is None else _tensor(piece, 0, shape, stride, dtype)

    def take(self, nbytes: int) -> ctypes.Array[ctypes.c_char] | None:
        """A piece of ``nbytes``, which is given back with its last reference; None if there is none."""
        room = -(-nbytes // _PAGE) * _PAGE
        with self._lock:
            self._take_back()
            i = next((i for i, (start, stop) in enumerate(self._free) if stop - start >= room), None)
            if i is None:
                self.refused += 1
                return None
            start, stop = self._free[i]
            self._free[i : i + 1] = [(start + room, stop)] if start + room < stop else []
            piece = (ctypes.c_char * nbytes).from_buffer(self._arena, start)
            self._taken[start] = room, weakref.ref(piece, functools.partial(_give, self._given, start))
            self.live += room
            self.takes += 1
            self.reach = max(self.reach, start + room)
        return piece

    def free(self) -> list[tuple[int, int]]:
        """The free pieces, by address: where they start and stop."""
        with self._lock:
            self._take_back()
            return list(self._free)

    def _take_back(self) -> None:
        while self._given:
            start = self._given.popleft()
            room, _ = self._taken.pop(start)
            self.live -= room
            stop, i = start + room, bisect(self._free, (start, 0))
            if i < len(self._free) and self._free[i][0] == stop:
                stop = self._free.pop(i)[1]
            if i and self._free[i - 1][1] == start:
                i -= 1
                start = self._free.pop(i)[0]
            self._free.insert(i, (start, stop))


def _count(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of memory that a tensor spans; it has at least one."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _tensor(
    piece: ctypes.Array, start: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """A tensor of ``piece`` from byte ``start`` on, which holds it; by its storage no part of another."""
    count = _count(shape, stride)
    storage = torch.frombuffer(piece, dtype=dtype, count=count, offset=start).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape), tuple(stride))  # not a view of another tensor


def _give(given: deque[int], start: int, _: object) -> None:
    given.append(start)


@functools.cache
def the_pool() -> Pool:
    """The pieces of this process that are taken one by one: as many addresses as it may have bytes of memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * _PAGE
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    return Pool(min([memory, *(limit // 4 for limit in limits if limit != resource.RLIM_INFINITY)]))


@functools.cache
def the_frames() -> Pool:
    """The pieces of this process that are frames: as many addresses again."""
    return Pool(the_pool().nbytes)


def spare_pieces() -> list[int]:
    """Bytes of each piece of both that is free and has memory under it; none if nobody draws on them."""
    pools = [pool() for pool in (the_pool, the_frames) if pool.cache_info().currsize]
    return [min(stop, pool.reach) - start for pool in pools for start, stop in pool.free() if start < pool.reach]


@dataclass
class _Drawing:
    """What a graph that runs takes its buffers from; ``piece``: of its frame, None where there is none."""

    pool: Pool
    frame: Frame | None
    piece: ctypes.Array | None

    def at(
        self, room: Room | None, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """The buffer that has this ``room``; None where nothing of its size has."""
        if room is None or self.piece is None or _count(shape, stride) * dtype.itemsize != room.nbytes:
            return None
        return _tensor(self.piece, room.start, shape, stride, dtype)


_here = threading.local()


@contextlib.contextmanager
def drawing(frame: Frame | None = None) -> Iterator[None]:
    """A graph runs inside, in this thread: what it makes lies in ``frame``, other large buffers in `the_pool`."""
    before = _drawn_on()
    piece = the_frames().take(frame.nbytes) if frame is not None and frame.nbytes else None
    _here.drawing = _Drawing(the_pool(), frame, piece)
    del piece
    try:
        yield
    finally:
        _here.drawing = before


def _drawn_on() -> _Drawing | None:
    return getattr(_here, "drawing", None)


def new_buffer(like: torch.Tensor, numel: int, room: int = -1, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``like.new_empty(numel, dtype=dtype)``: in the room of that number, or from the pool, where that is drawn on."""
    drawn, dtype = _drawn_on(), dtype or like.dtype
    found = None
    if drawn is not None and like.device.type == "cpu":
        if room >= 0 and drawn.frame is not None:
            found = drawn.at(drawn.frame.numbered.get(room), [numel], [1], dtype)
        if found is None and numel * dtype.itemsize >= LEAST:
            found = drawn.pool.empty([numel], [1], dtype)
    return like.new_empty(numel, dtype=dtype) if found is None else found


def empty_strided(otherwise: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """What generated code allocates with in the place of ``otherwise``, which takes shape, stride and dtype.

    A line of that code that makes a buffer of the frame is told by its number.
    """
    if hasattr(otherwise, "otherwise"):
        return otherwise

    def allocate(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        drawn, found = _drawn_on(), None
        if drawn is not None:
            if drawn.frame is not None and drawn.frame.lines:
                found = drawn.at(drawn.frame.lines.get(sys._getframe(1).f_lineno), shape, stride, dtype)
            if found is None and math.prod(shape) * dtype.itemsize >= LEAST:
                found = drawn.pool.empty(shape, stride, dtype)
        return otherwise(shape, stride, dtype) if found is None else found

    allocate.otherwise = otherwise  # type: ignore[attr-defined]
    return allocate
