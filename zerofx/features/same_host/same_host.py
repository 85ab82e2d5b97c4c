"""Ranks of one host read what they are to receive straight out of each other's memory.

Gloo sends it through TCP: the sender's thread copies it into the kernel, the receiver's thread out of it again, and
both wake thousands of times a step to do so, on the cores that compute. Linux can copy from one process to another at
once (``process_vm_readv``, "cross memory attach"; Open MPI and UCX exchange messages so). What is left to tell each
other fits into 32 bytes, over a Unix socket for each pair of ranks::

    rank 0                                                       rank 1
    start     ready(tag, number, address, bytes) ──────▶
              ◀────── ready(tag, number, address, bytes)         start
    wait      reads out of rank 1's memory
              done(number) ──────▶
              ◀────── done(number)                               reads out of rank 0's memory
              over                                               over: wait

**A wait is over** when this rank has read what it receives, and the other what it sends: then either may be written.

**Nobody reads in the background.** A rank reads all that is ready, whichever exchange it belongs to, whenever it starts
one or waits for one. So ranks that start and wait in the same order never block each other, and one may be as far ahead
of the other as exchanges are started ahead of their wait.

**Who is a neighbour**: a rank of the same machine (since the same boot), network namespace and user, whose memory can
be read, tried once. Messages to all others go through gloo, and so do all where containers or hardened systems forbid
that call. ``ZEROFX_SAME_HOST=0`` forbids it, too, on the ranks that have it set. Where Linux lets a process be read by
its ancestors alone (Yama), a rank allows it to what its own parent has started, the other ranks.

**Messages meet by tag**, in order, as gloo's do. Those of two sizes, kinds or groups never meet: both sides wait, and
the watchdog says why (`zerofx.runtime.ranks.watch`). A rank that dies closes its sockets.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import struct
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerofx import _torch

_MESSAGE = struct.Struct("<QQQQ")  # the tag, or 0 for "done"; a number; address; bytes
_LOOK = 0.2
"""Seconds between two looks at whether what is waited for was given up."""
_MEETING = 60.0
"""Seconds that neighbours have to connect."""


class Neighbour:
    """Another rank of this host, in one process group.

    Attributes:
        group_name: of that.
        rank: its rank there.
        pid: its process, as this one sees it.
        lost: why nothing more is to be had of it; "" while it is there.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, connection: socket.socket) -> None:
        self.group_name: str = group.group_name
        self.rank = rank
        self.connection = connection
        self.timeout: float = _torch.timeout_of(group)
        self.pid: int = _process_behind(connection)[0]
        self.lost: str = ""
        self._count = 0
        self._ready: dict[int, deque[tuple[int, int, int]]] = defaultdict(deque)  # by tag: what it has for this rank
        self._to_read: dict[int, deque[Exchange]] = defaultdict(deque)  # by tag
        self._to_give: dict[int, Exchange] = {}  # by number
        self._unsaid: deque[bytes] = deque()

    def exchange(self, received: torch.Tensor, sent: torch.Tensor, tag: int) -> Exchange:
        """Start to fill ``received`` with what the other gives under ``tag``, and to give ``sent``.

        Both are contiguous and in this process's memory, and stay as they are until the exchange was waited for.
        """
        started = Exchange(self, received, sent)
        with _lock:
            self._count += 1
            self._to_read[tag].append(started)
            self._to_give[self._count] = started
            self._tell(tag, self._count, sent.data_ptr(), sent.nbytes)
            self._read(tag)
        advance()
        return started

    def hear(self) -> None:
        """Take in all that it has said so far, and read what can be read."""
        while not self.lost:
            try:
                message = self.connection.recv(_MESSAGE.size)
            except BlockingIOError:
                return
            except ConnectionResetError:  # said once; what it had to say before can still be read
                continue
            except OSError as e:
                self.lost = str(e)
                return
            if not message:
                self.lost = "it has closed the connection"
                return
            tag, number, address, nbytes = _MESSAGE.unpack(message)
            if tag:
                self._ready[tag].append((number, address, nbytes))
                self._read(tag)
            else:
                self._to_give.pop(number).given = True

    def _read(self, tag: int) -> None:
        ready, to_read = self._ready[tag], self._to_read[tag]
        while ready and to_read and ready[0][2] == to_read[0].received.nbytes:
            number, address, _ = ready.popleft()
            exchange = to_read.popleft()
            try:
                read_memory(self.pid, address, exchange.received)
            except OSError as e:
                self.lost = str(e)
                return
            exchange.has_read = True
            self._tell(0, number, 0, 0)

    def _tell(self, *message: int) -> None:
        self._unsaid.append(_MESSAGE.pack(*message))
        self.say()

    def say(self) -> None:
        """Tell it what there was no room for in the socket, as far as there is now. Never waits: it may do the same."""
        while self._unsaid and not self.lost:
            try:
                self.connection.send(self._unsaid[0])
                self._unsaid.popleft()
            except BlockingIOError:
                return
            except OSError as e:
                self.lost = str(e)

    @property
    def awaited(self) -> int:
        """What `select.poll` is to wait for."""
        return select.POLLIN | (select.POLLOUT if self._unsaid else 0)


class Exchange(_torch.PythonWork):
    """What one rank gives to a neighbour and gets from it."""

    def __init__(self, neighbour: Neighbour, received: torch.Tensor, sent: torch.Tensor) -> None:
        super().__init__()
        self.neighbour = neighbour
        self.received = received
        self.sent = sent
        self.has_read = False
        self.given = False

    def wait(self, timeout: Any = None) -> bool:
        """Until this rank has read and was read.

        Raises:
            RuntimeError: the neighbour is gone, was given up, or took longer than the process group's timeout.
        """
        began, other = time.monotonic(), self.neighbour
        with self.ending():
            advance()
            while not (self.has_read and self.given):
                if not other.lost and time.monotonic() - began > other.timeout:
                    other.lost = f"it has not answered for {other.timeout:g} s"
                if other.lost:
                    raise RuntimeError(f"{_torch.SAME_HOST_ERROR} with rank {other.rank}: {other.lost}")
                advance(_LOOK)
        return True


def advance(seconds: float = 0.0) -> None:
    """Take in what neighbours have said, of all process groups; if nothing, wait for it so long at most."""
    others = [other for _, found in list(_met.values()) for other in found.values() if not other.lost]
    if seconds:
        poll = select.poll()
        for other in others:
            poll.register(other.connection, other.awaited)
        poll.poll(1000 * seconds)
    with _lock:
        for other in others:
            other.hear()
            other.say()


def give_up(name: str) -> None:
    """End what this rank waits for in a process group; the waits raise."""
    for other in neighbours(name).values():
        other.lost = other.lost or "it was given up"


# ---- who is there ---------------------------------------------------------------------------------------------------


def neighbours(name: str) -> Mapping[int, Neighbour]:
    """By rank, who of a process group reads this rank's memory as this one reads theirs; nobody before they `meet`."""
    store, found = _met.get(name, (None, {}))
    return found if store is _torch.default_store() else {}


def connect(name: str) -> None:
    """Find out who of a process group is on this host; the second time nothing. A collective.

    Raises:
        RuntimeError: a rank of this host did not come.
    """
    group, store = _torch.resolve_process_group(name), _torch.default_store()
    before, found = _met.get(name, (None, {}))
    if before is store or group.size() == 1 or not _torch.has_backend(group, ("gloo",)):
        return
    for other in found.values():  # of a process group of the same name, which was destroyed
        other.lost = "its process group was destroyed"
        other.connection.close()
    _met[name] = store, _who_is_there(group)


def _who_is_there(group: dist.ProcessGroup) -> dict[int, Neighbour]:
    rank, place = group.rank(), _place()
    with contextlib.ExitStack() as open_here:
        door = open_here.enter_context(_door(group.size())) if place else None
        at: list[Any] = [None] * group.size()
        dist.all_gather_object(at, (place, door and door.getsockname()), group=group)
        near = {other: name for other, (its_place, name) in enumerate(at) if its_place == place and other != rank}
        if door is None:
            return {}
        try:
            return _try(group, _connect(rank, near, door))
        except OSError as e:
            raise RuntimeError(
                f"rank {rank} could not connect to the other ranks on this host ({', '.join(map(str, near))}): {e}. "
                "ZEROFX_SAME_HOST=0, set for all ranks, leaves messages between them to gloo."
            ) from e


def _door(visitors: int) -> socket.socket:
    """Where others may come to; Linux chooses its name, which lives in the network namespace and not among files."""
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door.bind("")
    door.listen(visitors)
    door.settimeout(_MEETING)
    return door


def _place() -> str:
    """Ranks with the same can be neighbours; "": none can."""
    if not sys.platform.startswith("linux") or os.environ.get("ZEROFX_SAME_HOST") == "0":
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')} {os.getuid()}"


def _connect(rank: int, names: dict[int, bytes], door: socket.socket) -> dict[int, socket.socket]:
    """One connection with each rank of ``names``; it is the higher rank that comes to the door."""
    found = {}
    for other in (other for other in names if other < rank):
        found[other] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        found[other].settimeout(_MEETING)
        found[other].connect(names[other])
        found[other].send(rank.to_bytes(8, "little"))
    while len(found) < len(names):
        connection, _ = door.accept()
        connection.settimeout(_MEETING)
        if _process_behind(connection)[1] == os.getuid():  # anybody may knock at such a door
            found[int.from_bytes(connection.recv(8), "little")] = connection
    return found


def _try(group: dist.ProcessGroup, found: dict[int, socket.socket]) -> dict[int, Neighbour]:
    """Those who can read this rank's memory, and it theirs: each has tried with a number."""
    allow_siblings()
    number = torch.tensor(int.from_bytes(os.urandom(7), "little"))  # not of torch's generator, which is the user's
    read = torch.zeros_like(number)
    others = {rank: Neighbour(group, rank, connection) for rank, connection in found.items()}
    for connection in found.values():
        connection.send(struct.pack("<QQ", number.data_ptr(), number.item()))
    can = {}
    for rank, other in others.items():
        address, expected = struct.unpack("<QQ", other.connection.recv(16))
        with contextlib.suppress(OSError):
            read_memory(other.pid, address, read)
        can[rank] = read.item() == expected
        other.connection.send(bytes([can[rank]]))
    both = {rank for rank, other in others.items() if other.connection.recv(1)[0] and can[rank]}
    for rank, other in others.items():
        other.connection.setblocking(False)
        if rank not in both:
            other.connection.close()
    return {rank: others[rank] for rank in both}


# ---- Linux ----------------------------------------------------------------------------------------------------------


class _Piece(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def read_memory(pid: int, address: int, into: torch.Tensor) -> None:
    """Fill ``into`` with what process ``pid`` has from ``address`` on.

    Raises:
        OSError: there is no such process or no such memory, or it may not be read.
    """
    done = 0
    while done < into.nbytes:  # Linux copies up to 2 GiB at once
        here = _Piece(into.data_ptr() + done, into.nbytes - done)
        there = _Piece(address + done, into.nbytes - done)
        copied = _libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if copied <= 0:
            code = ctypes.get_errno()
            raise OSError(code, f"its memory cannot be read ({os.strerror(code)})")
        done += copied


def allow_siblings() -> None:
    """What this process's parent has started may read this one's memory, where Yama keeps that to ancestors."""
    _libc.prctl(_PR_SET_PTRACER, os.getppid(), 0, 0, 0)  # fails where there is no Yama


def _process_behind(connection: socket.socket) -> tuple[int, int]:
    """The process at the other end, and its user, as Linux says."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


_libc = ctypes.CDLL(None, use_errno=True)
if sys.platform.startswith("linux"):
    _libc.process_vm_readv.restype = ctypes.c_ssize_t
    _pieces = ctypes.c_void_p, ctypes.c_ulong
    _libc.process_vm_readv.argtypes = (ctypes.c_int, *_pieces, *_pieces, ctypes.c_ulong)
    _libc.prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
_PR_SET_PTRACER = 0x59616D61
_lock = threading.RLock()
_met: dict[str, tuple[dist.Store, dict[int, Neighbour]]] = {}
"""By process group: the store of those days, and who is there."""


class SameHost:
    """The shortcut, for `zerofx.passes.pairwise`."""

    connect, neighbours, give_up = staticmethod(connect), staticmethod(neighbours), staticmethod(give_up)
