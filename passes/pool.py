"""Large buffers on a CPU come from one arena, and go back to it: no allocation is left in a step after the first.

::

    arena   ┌──────────────┬────────┬──────────────────────┬──────────────────────────────
            │ gathered h.1 │ pack   │ free                 │ never touched: no memory yet
            └──────────────┴────────┴──────────────────────┴──────────────────────────────
    take    the first free piece that is large enough
    give    when the last tensor on it is gone; free neighbours become one piece

A step asks for the same buffers in the same order as the step before. The first fit is then the same, too: what a
buffer needs was touched by the last step, and the arena does not grow. malloc gives such buffers back to the kernel,
which zeroes every page of the next one; or it keeps them, and fits none into the place of the last (docs/tuning.md). On
GPUs PyTorch has an allocator that keeps memory; on CPUs it has none.

The arena is address space, as much as the machine has memory. Linux puts pages under it where something is written.

Who runs a graph says whether it draws on the pool (`drawing`). Then what gathers and exchanges bring is taken from it
(`new_buffer`), and what generated code allocates (`empty_strided`), from `LEAST` bytes on.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import os
import resource
import threading
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

LEAST = 1 << 20
"""Bytes of the smallest buffer that is taken from the pool. Smaller ones malloc serves well."""

_PAGE = mmap.PAGESIZE


class Pool:
    """Pieces of one arena.

    Attributes:
        nbytes: of the arena's addresses.
        live: bytes of pieces that are taken.
        reach: bytes from the arena's beginning that were taken at any time: what has memory under it.
        refused: how many pieces did not fit.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes // _PAGE * _PAGE
        self.live = self.reach = self.refused = 0
        no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
        self._arena = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
        self._free = [(0, self.nbytes)]  # by address; no two touch
        self._taken: dict[int, tuple[int, weakref.ref[ctypes.Array[ctypes.c_char]]]] = {}
        self._given = deque[int]()  # from any thread, and from within `take`: garbage is collected anywhere
        self._lock = threading.Lock()

    def empty(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """A tensor with what was there before; None if no piece is large enough."""
        count = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        piece = self.take(count * dtype.itemsize)
        if piece is None:
            return None
        storage = torch.frombuffer(piece, dtype=dtype, count=count).untyped_storage()
        return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape), tuple(stride))  # not a view of another tensor

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


def _give(given: deque[int], start: int, _: object) -> None:
    given.append(start)


@functools.cache
def the_pool() -> Pool:
    """The pool of this process: as many addresses as it may have bytes of memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * _PAGE
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    return Pool(min([memory, *(limit // 2 for limit in limits if limit != resource.RLIM_INFINITY)]))


def spare_pieces() -> list[int]:
    """Bytes of each piece of `the_pool` that is free and has memory under it; none if nobody draws on it."""
    if not the_pool.cache_info().currsize:
        return []
    free, reach = the_pool().free(), the_pool().reach
    return [min(stop, reach) - start for start, stop in free if start < reach]


_here = threading.local()


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Large buffers that this thread allocates for a graph inside come from `the_pool`."""
    before, _here.pool = _drawn_on(), the_pool()
    try:
        yield
    finally:
        _here.pool = before


def _drawn_on() -> Pool | None:
    return getattr(_here, "pool", None)


def new_buffer(like: torch.Tensor, numel: int) -> torch.Tensor:
    """``like.new_empty(numel)``, from the pool where that is drawn on."""
    pool, nbytes = _drawn_on(), numel * like.dtype.itemsize
    found = None
    if pool is not None and nbytes >= LEAST and like.device.type == "cpu":
        found = pool.empty([numel], [1], like.dtype)
    return like.new_empty(numel) if found is None else found


def empty_strided(otherwise: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """What generated code allocates with in the place of ``otherwise``, which takes shape, stride and dtype."""
    if hasattr(otherwise, "otherwise"):
        return otherwise

    def allocate(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        pool, found = _drawn_on(), None
        if pool is not None and math.prod(shape) * dtype.itemsize >= LEAST:
            found = pool.empty(shape, stride, dtype)
        return otherwise(shape, stride, dtype) if found is None else found

    allocate.otherwise = otherwise  # type: ignore[attr-defined]
    return allocate
