"""What a file is to the operating system: a lock, direct transfers, memory for them."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from pathlib import Path

PAGE = 4096
"""What positions in the file, lengths and addresses of direct transfers are multiples of."""


def padded(nbytes: int) -> int:
    """Up to the next page."""
    return -(-nbytes // PAGE) * PAGE


def locked(path: Path) -> int:
    """A descriptor of the file, which no other run has."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        os.close(fd)
        raise OSError("another run keeps its state there; give each run a folder of its own") from e
    return fd


def made_direct(fd: int) -> bool:
    """Have transfers go around the kernel's cache, if the file system can."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | getattr(os, "O_DIRECT", 0))
    except OSError:
        return False
    return hasattr(os, "O_DIRECT")


def memory_at(address: int, nbytes: int) -> memoryview:
    """The bytes of a tensor. (Not by ``numpy()``, which forbids to resize its storage.)"""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def aligned(nbytes: int) -> memoryview:
    """Memory that begins with a page, and is this process's own."""
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def identity(stat: os.stat_result) -> tuple[int, int]:
    """Which file it is, whatever its name."""
    return stat.st_dev, stat.st_ino


def remove(fd: int, path: Path, pid: int) -> None:
    """The run is over. (A fork of it is not the run.)"""
    if os.getpid() == pid:
        path.unlink(missing_ok=True)
    os.close(fd)
