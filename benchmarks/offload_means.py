"""Three means of bringing state from a file and writing it back: which is fastest, and what it leaves in memory.

A pass is what an optimizer's step does to its file: every chunk is read, changed in one place and written back. One
thread reads ahead, one writes behind, as `zerofx.Offload` does.

    python benchmarks/offload_means.py --path /tmp --megabytes 1024 --out benchmarks/results/offload-means.json
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CHUNK = 4 << 20
BUFFERS = 4


def passes(read: Callable[[memoryview, int], Any], write: Callable[[memoryview, int], Any], nbytes: int) -> None:
    """Every chunk once: read ahead, change a byte, write behind."""
    free: queue.Queue[Any] = queue.Queue()
    full: queue.Queue[Any] = queue.Queue()
    changed: queue.Queue[Any] = queue.Queue()
    for _ in range(BUFFERS):
        free.put(memoryview(mmap.mmap(-1, CHUNK)))

    def reader() -> None:
        for at in range(0, nbytes, CHUNK):
            buffer = free.get()
            read(buffer, at)
            full.put((buffer, at))
        full.put(None)

    def writer() -> None:
        while (item := changed.get()) is not None:
            write(*item)
            free.put(item[0])

    threads = [threading.Thread(target=reader), threading.Thread(target=writer)]
    for thread in threads:
        thread.start()
    while (item := full.get()) is not None:
        item[0][0] = (item[0][0] + 1) % 256
        changed.put(item)
    changed.put(None)
    for thread in threads:
        thread.join()


def descriptors(path: Path, nbytes: int, flags: int, forget: bool) -> None:
    fd = os.open(path, os.O_RDWR | flags)

    def write(buffer: memoryview, at: int) -> None:
        os.pwritev(fd, [buffer], at)
        if forget:
            os.fdatasync(fd)  # pages that are not on the disk yet are not forgotten
            os.posix_fadvise(fd, at, CHUNK, os.POSIX_FADV_DONTNEED)

    passes(lambda buffer, at: os.preadv(fd, [buffer], at), write, nbytes)
    os.fdatasync(fd)
    os.close(fd)


def mapped(path: Path, nbytes: int) -> None:
    """A storage mapped from the file; the kernel reads and writes pages as it sees fit."""
    storage = torch.UntypedStorage.from_file(str(path), True, nbytes)
    tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
    words = tensor.view(torch.int64)
    for at in range(0, nbytes // 8, CHUNK // 8):
        words[at : at + CHUNK // 8].add_(1)
    del words, tensor, storage
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    os.close(fd)


def cold(path: Path) -> None:
    """The file's pages leave the cache."""
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def cached() -> int:
    """Bytes of the kernel's page cache."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["Cached"].split()[0]) * 1024


def measure(path: Path, nbytes: int, repeats: int) -> dict[str, Any]:
    means: dict[str, Callable[[], None]] = {
        "mapped (UntypedStorage.from_file)": lambda: mapped(path, nbytes),
        "preadv/pwritev, O_DIRECT": lambda: descriptors(path, nbytes, os.O_DIRECT, forget=False),
        "preadv/pwritev, buffered, fadvise": lambda: descriptors(path, nbytes, 0, forget=True),
    }
    found: dict[str, Any] = {name: {"seconds": [], "left_in_cache_bytes": []} for name in means}
    for _ in range(repeats):
        for name, run in means.items():
            cold(path)
            before, start = cached(), time.perf_counter()
            run()
            found[name]["seconds"].append(round(time.perf_counter() - start, 3))
            found[name]["left_in_cache_bytes"].append(max(0, cached() - before))
            print(name, found[name]["seconds"][-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    nbytes = args.megabytes << 20
    with tempfile.TemporaryDirectory(dir=args.path) as folder:
        path = Path(folder, "state")
        with path.open("wb") as file:
            for _ in range(nbytes // CHUNK):
                file.write(os.urandom(CHUNK))
        found = measure(path, nbytes, args.repeats)
    result = {"command": " ".join(["python", *sys.argv]), "bytes": nbytes, "chunk": CHUNK, "means": found}
    print(json.dumps(result, indent=2))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
