"""A file in which a rank keeps state, and what of it is in memory.

::

    rank0-0.state   | mark | exp_avg of group 0 | exp_avg_sq of group 0 | exp_avg of group 1 | ...
                    4 KiB    extents: from a multiple of 4 KiB on, in chunks of half a million elements

An *extent* is the memory of one storage. At rest the storage is empty, and the bytes are in the file. ``pin`` brings
them; views of the storage stay views of it. What was pinned last stays in memory until there is more than `KEPT` bytes.

The file is scratch. A run makes it anew, locks it, and removes it in the end; what a run that died has left is never
read. The truth is the checkpoint. So the checksums of the chunks are kept in memory, and nothing is forced to the disk.

Reads and writes go around the kernel's cache (``O_DIRECT``) where the file system can: else the cache would fill with
bytes that are read once a step, and count as this process's memory (docs/offload.md has the means that were measured).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from zerofx._torch import StorageWeakRef, storage_of
from zerofx.kernels.checksum import Checksum
from zerofx.runtime.ranks.sharing import RankGroup
from zerofx.runtime.state.raw_file import PAGE, aligned, identity, locked, made_direct, memory_at, padded, remove
from zerofx.runtime.state.space import Space

CHUNK = 1 << 19
"""Elements that are read, checked and written at once."""

KEPT = 32 << 20
"""Bytes of extents that stay in memory though nobody uses them now."""

BUFFER = 8 << 20
"""Bytes of what passes through memory at once; a chunk of all state of one kind of elements fits."""

_numbers = itertools.count()
_T = TypeVar("_T")


def leaving(kept: Sequence[tuple[_T, int, bool]], nbytes: int) -> list[_T]:
    """What leaves memory, the longest unused first, until ``nbytes`` more are at most `KEPT`.

    ``kept``: what is there, its bytes, and whether it must stay; in the order of its last use.
    """
    total, found = nbytes + sum(size for _, size, _ in kept), []
    for each, size, stays in kept:
        if total > KEPT and not stays:
            found.append(each)
            total -= size
    return found


class OffloadError(RuntimeError):
    """A file with state could not be made, read or written: the same on every rank."""


@dataclass
class Extent:
    """The bytes of one storage in the file.

    Attributes:
        at: where they begin.
        nbytes: how many they are.
        itemsize: of an element.
        ref: the storage.
        sums: the checksum of each chunk; None: it has not been written, and is zeros.
        pins: how many are using the storage now.
        here: whether it is in memory.
        passing: it stands for an activation, and its place is for others like it.
    """

    at: int
    nbytes: int
    itemsize: int
    ref: StorageWeakRef
    sums: list[int | None] = field(default_factory=list)
    pins: int = 0
    here: bool = True
    passing: bool = False

    def chunk(self, i: int) -> tuple[int, int]:
        """Where in the extent chunk ``i`` begins, and how many bytes it has."""
        start = i * CHUNK * self.itemsize
        return start, min(CHUNK * self.itemsize, self.nbytes - start)

    def memory(self) -> memoryview:
        """The storage's bytes; it is here."""
        storage = storage_of(self.ref)
        assert storage is not None
        assert storage.nbytes() == self.nbytes
        return memory_at(storage.data_ptr(), self.nbytes)

    def resize(self, nbytes: int) -> None:
        """Give the storage memory, or take it."""
        storage = storage_of(self.ref)
        if storage is not None:
            storage.resize_(nbytes)


Piece = tuple[Extent, int, int]
"""A chunk's transfer: the extent, the chunk's number, and where in the buffer it lies."""


class StateFile:
    """One rank's file.

    Attributes:
        path: where it is.
        holds: what kinds of state are in it.
        ranks: those whose state is kept with this rank's: an error of one is an error of all.
        error: what went wrong, on this rank or another; "" so far. State is a mixture then.
        in_step: an optimizer's step is under way: what goes wrong is noted, and raised as it ends.
    """

    def __init__(self, folder: Path, rank: int, run: str, ranks: RankGroup) -> None:
        """Make the file, and lock it.

        Raises:
            OffloadError: it cannot be made, or another run has it.
        """
        self.path: Path = folder / f"rank{rank}-{next(_numbers)}.state"
        self.ranks = ranks
        self.holds: frozenset[str] = frozenset({"moment"})
        self.error: str = ""
        self.in_step: bool = False
        self._nbytes = 0
        with self._told("made"):
            folder.mkdir(parents=True, exist_ok=True)
            self._fd = locked(self.path)
            mark = {"zerofx": "state of a run, worth nothing without it", "run": run, "pid": os.getpid()}
            os.ftruncate(self._fd, 0)
            os.write(self._fd, json.dumps(mark | {"host": socket.gethostname()}).encode().ljust(PAGE))
            self._identity = identity(os.fstat(self._fd))
            self._direct = made_direct(self._fd)
        self._end = PAGE
        self._free: dict[int, list[int]] = {}
        self._passed = Space()
        self._extents: dict[int, Extent] = {}
        self._recent: dict[int, Extent] = {}
        self._dead: deque[int] = deque()
        self._buffers: list[memoryview] = []
        self._stage: memoryview = aligned(padded(CHUNK * 16))
        self._lock = threading.RLock()
        self._finalizer = weakref.finalize(self, remove, self._fd, self.path, os.getpid())

    @property
    def nbytes(self) -> int:
        """Of all extents."""
        self._bury()
        return self._nbytes

    # ---- extents ----------------------------------------------------------------------------------------------------

    def take(self, tensor: torch.Tensor, *, fresh: bool = False) -> None:
        """The storage of ``tensor`` lives in the file from now on. ``fresh``: it is all zeros, or empty already.

        Raises:
            OffloadError: there is no space.
        """
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes() or (tensor.nbytes if fresh else 0)
        if not nbytes or self.extent_of(tensor) is not None:
            return
        with self._lock:
            at = self._place(padded(nbytes))
            extent = Extent(at, nbytes, tensor.itemsize, StorageWeakRef(storage))
            extent.sums = [None] * -(-extent.nbytes // (CHUNK * extent.itemsize))
            self._note(storage, extent)
            if fresh:
                extent.resize(0)
                extent.here = False
            else:
                self._recent[id(extent)] = extent
                self._make_room(0)

    def extent_of(self, tensor: torch.Tensor) -> Extent | None:
        """The extent that ``tensor`` is a view of; None: it is not in the file."""
        if self._dead:
            self._bury()
        return self._extents.get(tensor.untyped_storage()._cdata)

    def pin(self, extent: Extent) -> None:
        """Bring it, and keep it until it is unpinned.

        Raises:
            OffloadError: it cannot be read, or is not what was written.
        """
        with self._lock:
            if not extent.here:
                extent.resize(extent.nbytes)
                extent.here = True
                try:
                    self.check()
                    self._make_room(extent.nbytes)
                    self._read_extent(extent, extent.memory())
                except OffloadError:
                    if self.in_step:  # it goes on, to raise with all ranks: with memory, and no numbers in it
                        extent.memory()[:] = b"\xff" * extent.nbytes
                    else:
                        extent.resize(0)
                        extent.here = False
                    raise
            extent.pins += 1
            self._recent.pop(id(extent), None)
            self._recent[id(extent)] = extent  # now the last

    def unpin(self, extent: Extent) -> None:
        """One user less. It leaves memory when there is need."""
        with self._lock:
            extent.pins -= 1

    def copied(self, extent: Extent, into: torch.Tensor) -> None:
        """Its numbers in the memory of ``into``. It stays where it is. Raises as `pin`."""
        with self._lock:
            if extent.here:
                memory_at(into.data_ptr(), extent.nbytes)[:] = extent.memory()
            else:
                self.check()
                self._read_extent(extent, memory_at(into.data_ptr(), extent.nbytes))

    def store(self, tensor: torch.Tensor, place: torch.Tensor) -> None:
        """``place`` is ``tensor``, 1-D, in the file; its storage stays empty. Raises as `take` and `write`."""
        with self._lock:
            self.check()
            self.take(place, fresh=True)
            if (extent := self.extent_of(place)) is not None:
                self._send(extent, memory_at(tensor.data_ptr(), extent.nbytes))

    def write_activation(self, tensor: torch.Tensor, handle: torch.Tensor) -> None:
        """Write ``tensor``, which is contiguous. It is in the file for as long as the storage of ``handle`` is there.

        `extent_of` finds it by the handle, `copied` reads it. Raises as `take` and `write`.
        """
        with self._lock:
            self.check()
            self._bury()
            storage, nbytes = handle.untyped_storage(), tensor.numel() * tensor.itemsize
            at = self._passed.take(padded(nbytes))
            at = self._enlarged(padded(nbytes)) if at is None else at
            extent = Extent(at, nbytes, tensor.itemsize, StorageWeakRef(storage), here=False, passing=True)
            extent.sums = [None] * -(-nbytes // (CHUNK * extent.itemsize))
            self._note(storage, extent)
            self._send(extent, memory_at(tensor.data_ptr(), nbytes))

    def _note(self, storage: torch.UntypedStorage, extent: Extent) -> None:
        """``extent`` is that of ``storage``, and ends with it."""
        self._extents[storage._cdata] = extent
        self._nbytes += extent.nbytes
        weakref.finalize(storage, self._dead.append, storage._cdata).atexit = False

    @contextlib.contextmanager
    def shaping(self, extent: Extent) -> Iterator[None]:
        """Views of its storage can be made inside: PyTorch asks whether it is large enough."""
        with self._lock:
            if not extent.here:
                extent.resize(extent.nbytes)
            try:
                yield
            finally:
                if not extent.here:
                    extent.resize(0)

    def settle(self) -> None:
        """All that nobody uses leaves memory."""
        with self._lock:
            self._make_room(KEPT)

    def _place(self, nbytes: int) -> int:
        """``nbytes`` of the file that are nobody's; of what the disk has for sure, so that it is not full later."""
        return self._free[nbytes].pop() if self._free.get(nbytes) else self._enlarged(nbytes)

    def _enlarged(self, nbytes: int) -> int:
        at = self._end
        with self._told("enlarged"):
            os.posix_fallocate(self._fd, at, nbytes)
        self._end += nbytes
        return at

    def _bury(self) -> None:
        """Extents of storages that are gone are free."""
        with self._lock:
            while self._dead:
                extent = self._extents.pop(self._dead.popleft())
                self._recent.pop(id(extent), None)
                self._nbytes -= extent.nbytes
                if extent.passing:
                    self._passed.give(extent.at, padded(extent.nbytes))
                else:
                    self._free.setdefault(padded(extent.nbytes), []).append(extent.at)

    def _make_room(self, nbytes: int) -> None:
        """What is not pinned leaves memory as `leaving` says."""
        recent = [(extent, extent.nbytes, extent.pins > 0) for extent in self._recent.values()]
        for extent in leaving(recent, nbytes):
            self._put_away(extent)

    # ---- transfers --------------------------------------------------------------------------------------------------

    def read(self, pieces: Sequence[Piece], buffer: memoryview) -> None:
        """Bring chunks to ``buffer``, what lies together in one read, and check them.

        Raises:
            OffloadError: it cannot be read, or is not what was written.
        """
        for run in _together([piece for piece in pieces if piece[0].sums[piece[1]] is not None]):
            extent, i, at = run[0]
            nbytes = sum(padded(e.chunk(n)[1]) for e, n, _ in run)
            self._transfer(os.preadv, buffer[at : at + nbytes], extent.at + extent.chunk(i)[0], "read")
        for extent, i, at in pieces:
            nbytes = extent.chunk(i)[1]
            if extent.sums[i] is None:
                buffer[at : at + nbytes] = bytes(nbytes)
            elif (found := _sum(buffer[at : at + nbytes])) != extent.sums[i]:
                raise OffloadError(
                    f"{self.path} is damaged, or somebody writes to it: {nbytes} bytes at "
                    f"{extent.at + extent.chunk(i)[0]} have the checksum {found:08x}, {extent.sums[i]:08x} was written."
                )

    def write(self, pieces: Sequence[Piece], buffer: memoryview) -> None:
        """Write chunks from ``buffer`` that are not what the file has, what lies together in one write.

        Raises:
            OffloadError: it cannot be written.
        """
        sums = [_sum(buffer[at : at + extent.chunk(i)[1]]) for extent, i, at in pieces]
        new = [piece for piece, found in zip(pieces, sums, strict=True) if piece[0].sums[piece[1]] != found]
        for (extent, i, _), found in zip(pieces, sums, strict=True):
            extent.sums[i] = found
        for run in _together(new):
            extent, i, at = run[0]
            nbytes = sum(padded(e.chunk(n)[1]) for e, n, _ in run)
            self._transfer(os.pwritev, buffer[at : at + nbytes], extent.at + extent.chunk(i)[0], "written")

    def buffers(self, count: int, nbytes: int) -> list[memoryview]:
        """Memory for transfers, the same at each call as long as it is large enough."""
        if len(self._buffers) < count or len(self._buffers[0]) < nbytes:
            self._buffers = [aligned(padded(nbytes)) for _ in range(count)]
        return self._buffers

    def _transfer(self, move: Any, buffer: memoryview, at: int, what: str) -> None:
        done = 0
        with self._told(what):
            while done < len(buffer):
                count = move(self._fd, [buffer[done:]], at + done)
                if count <= 0:
                    raise OSError(f"it ends at {at + done}, and should have {at + len(buffer)} bytes or more")
                done += count
            if not self._direct:
                os.posix_fadvise(self._fd, at, len(buffer), os.POSIX_FADV_DONTNEED)

    def _read_extent(self, extent: Extent, memory: memoryview) -> None:
        buffer = self._stage
        for i in range(len(extent.sums)):
            start, nbytes = extent.chunk(i)
            if extent.sums[i] is None:
                memory[start : start + nbytes] = bytes(nbytes)
                continue
            self.read([(extent, i, 0)], buffer)
            memory[start : start + nbytes] = buffer[:nbytes]

    def _put_away(self, extent: Extent) -> None:
        """Write what has changed, and empty the storage."""
        if storage_of(extent.ref) is not None:
            self._send(extent, extent.memory())
            extent.resize(0)
        extent.here = False
        self._recent.pop(id(extent), None)

    def _send(self, extent: Extent, memory: memoryview) -> None:
        """Write what of ``memory`` is not what the file has."""
        buffer = self._stage
        for i, known in enumerate(extent.sums):
            start, nbytes = extent.chunk(i)
            part = memory[start : start + nbytes]
            if (_sum(part) == known) if known is not None else not torch.frombuffer(part, dtype=torch.uint8).any():
                continue
            buffer[:nbytes] = part
            self.write([(extent, i, 0)], buffer)

    # ---- errors -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Whether state can be had from the file.

        Raises:
            OffloadError: an error before, or the file is not at its path any more.
        """
        if self.error:
            raise OffloadError(self.error)
        with self._told("found"):
            if identity(os.stat(self.path)) != self._identity:
                raise OSError("another file is in its place")

    def begin(self) -> None:
        """A step begins: from now on errors are noted."""
        self.in_step = True
        with self.noting():
            self.check()

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """What goes wrong inside of a step is noted, and raised by `agree`, so that no rank waits for this one."""
        try:
            yield
        except OffloadError as e:
            if not self.in_step:
                raise
            self.error = self.error or str(e)

    def agree(self, lost: str = "The optimizer's state is a mixture of two steps now, on every rank.") -> None:
        """The step, or what else computes with the file, is over: whether it went well on every rank. A collective.

        ``lost``: what the error says of what is not right now.

        Raises:
            OffloadError: it did not, on one of them.
        """
        with self.noting():
            self.settle()
        self.in_step = False
        self.compare(lost)

    def compare(self, lost: str) -> None:
        """Whether all went well so far, on every rank. A collective. Raises as `agree`."""
        failed = torch.tensor([1 if self.error else 0])
        if not self.ranks.sum_(failed).item():
            return
        texts = self.ranks.all_gathered(self.error)
        rank, text = next((rank, text) for rank, text in enumerate(texts) if text)
        self.error = f"rank {rank}: {text}"
        raise OffloadError(f"{self.error} {lost} Start again from the last checkpoint.")

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise OffloadError(f"{self.path} cannot be {what}: {e.strerror or e}.") from e


def opened(folder: Path, ranks: RankGroup, run: str) -> StateFile:
    """This rank's file. A collective.

    Raises:
        OffloadError: on every rank, where one of them cannot make its own.
    """
    run = ranks.all_gathered(run)[0]
    return ranks.all_or_none("offload=", lambda: StateFile(folder, ranks.rank, run, ranks), OffloadError)


def _sum(part: memoryview) -> int:
    checksum = Checksum()
    checksum.update(part)
    return checksum.value


def _together(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Runs of pieces that follow each other in the file as they do in the buffer."""
    run: list[Piece] = []
    for piece in pieces:
        extent, i, at = piece
        if run:
            before, n, end = run[-1]
            length = padded(before.chunk(n)[1])
            follows = extent.at + extent.chunk(i)[0] == before.at + before.chunk(n)[0] + length and at == end + length
            if not follows:
                yield run
                run = []
        run.append(piece)
    if run:
        yield run
