"""Inductor's cache on disk: what a process that was killed left there half written is thrown away.

The compiler writes a kernel straight to its place in the cache. Where it is ended while it does so, every later
process finds the file and cannot load it, and Inductor never writes it anew. So such files are looked for once, before
the first graph is compiled::

    ELF header │ sections ......... │ table of sections        whole: the table, whose place the header says, is there
    ELF header │ sections ..                                   cut off
    zeros      │ sections ......                               cut off: linkers write the header last
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path


@functools.cache
def drop_cut_off(folder: str | None = None) -> int:
    """Delete the cut-off libraries below Inductor's folder (2.11, 2.13, 2.15); how many. Once a process and folder.

    What another process is writing now is left alone: it holds the file's lock.
    """
    if folder is None:
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        folder = cache_dir()
    dropped = [path for path in _libraries(folder) if _is_cut_off(path) and _delete(path, Path(folder, "locks"))]
    if dropped:
        warnings.warn(
            f"zerofx: {len(dropped)} compiled kernels in {folder} were cut off, by a process that ended while it wrote "
            "them. They were deleted, and are compiled anew.",
            stacklevel=2,
        )
    return len(dropped)


def _libraries(folder: str) -> Iterator[str]:
    for parent, _, names in os.walk(folder):
        yield from (os.path.join(parent, name) for name in names if name.endswith(".so"))


def _is_cut_off(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            header, size = file.read(64), os.fstat(file.fileno()).st_size
    except OSError:  # another process was faster
        return False
    if size >= 64 and header[:4] != b"\x7fELF":
        return not any(header[:4])  # a library of another system's is whole as far as we know
    if size < 64:
        return True
    (table,) = struct.unpack_from("<Q", header, 0x28)
    entry, entries = struct.unpack_from("<HH", header, 0x3A)
    return size < table + entry * entries


def _delete(path: str, locks: Path) -> bool:
    from filelock import FileLock, Timeout

    key = Path(path).name.split(".")[0]
    locks.mkdir(exist_ok=True)
    with contextlib.suppress(Timeout), FileLock(locks / f"{key}.lock", timeout=0):
        if _is_cut_off(path):
            os.unlink(path)
            return True
    return False
