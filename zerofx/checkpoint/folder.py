"""A checkpoint is a folder that is either whole or not there.

::

    checkpoints/
    ├── step-00000100/          whole: it has zerofx.json, which is written last
    │   ├── .metadata           torch.distributed.checkpoint's index
    │   ├── __0_0.distcp        the tensors that rank 0 wrote
    │   ├── __1_0.distcp
    │   ├── extra_0.pt          what rank 0 saved besides: its random generators, the scheduler, ...
    │   ├── extra_1.pt
    │   └── zerofx.json         version, step, and size and checksum of every other file
    ├── step-00000200/
    └── .step-00000300.tmp/     being written, or of a save that died: nobody reads it

A save writes to the hidden folder, forces every file to the disk, then writes ``zerofx.json``, then renames. To
replace a folder takes two renames, and between them the new one stands ready under its hidden name, whole:

==================================  ===================================  ==========================
a save that replaces ``c`` does     found if it dies after that          what `whole` finds
==================================  ===================================  ==========================
write ``.c.tmp``                    ``c``, ``.c.tmp`` without its mark   ``c``
write ``.c.tmp/zerofx.json``        ``c``, ``.c.tmp``                    ``c``
rename ``c`` to ``.c.old``          ``.c.old``, ``.c.tmp``               ``.c.tmp``
rename ``.c.tmp`` to ``c``          ``.c.old``, ``c``                    ``c``
remove ``.c.old``                   ``c``                                ``c``
==================================  ===================================  ==========================

Checksums find what hardware and accidents do to files. Whoever can write to the folder can make them right again: it
is `zerofx.checkpoint.dcp` that keeps a forged file from running code.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from zerofx.checkpoint.dcp import INDEX, is_plain_name
from zerofx.checkpoint.ranks import CheckpointError
from zerofx.kernels.checksum import Checksum, checksum_of

MARK = "zerofx.json"
FORMAT = 1
_STEP = re.compile(r"step-(\d{8,})")


@dataclass
class Mark:
    """What ``zerofx.json`` says.

    Attributes:
        format: the version of all this; a reader refuses one that is newer than itself.
        zerofx, torch: the versions that wrote it.
        step: of training, if one was given.
        world_size: how many ranks wrote it.
        files: size in bytes and checksum (`zerofx.kernels.checksum`) of every other file.
    """

    zerofx: str
    torch: str
    step: int | None
    world_size: int
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """The last file of a checkpoint. It gets its name when it is whole: the name alone says that all is."""
        part = folder / f"{MARK}.part"
        with part.open("w") as file:
            json.dump(asdict(self), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        part.rename(folder / MARK)
        sync(folder)

    @staticmethod
    def read(folder: Path) -> Mark:
        """The mark of a whole checkpoint.

        Raises:
            CheckpointError: it cannot be read, is of a newer format, or names files outside of the folder.
        """
        path = folder / MARK
        try:
            found = json.loads(path.read_text())
            newer = found["format"] > FORMAT
            mark = None if newer else Mark(**found)
            names = [] if mark is None else [str(name) for name, (_size, _checksum) in mark.files.items()]
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as e:
            raise CheckpointError(f"{path} cannot be read: {type(e).__name__}: {e}.") from e
        if mark is None:
            raise CheckpointError(
                f"{folder} is a checkpoint of format {found['format']}, written by zerofx {found.get('zerofx')}; this "
                f"zerofx reads formats up to {FORMAT}: use a newer one."
            )
        for name in names:
            if not is_plain_name(name):
                raise CheckpointError(f"{path} is refused: it names the file {name!r}, which is not in its folder.")
        return mark

    def verify(self, folder: Path, names: list[str]) -> None:
        """Whether the files of these ``names`` are what was written.

        Raises:
            CheckpointError: one is missing, or has another size or checksum.
        """
        for name in names:
            size, checksum = self.files[name]
            path = folder / name
            if not path.is_file() or path.is_symlink():
                raise CheckpointError(f"{path} is missing.{_others(folder)}")
            if path.stat().st_size != size:
                raise CheckpointError(
                    f"{path} has {path.stat().st_size} bytes, {size} were written: it is truncated or was changed."
                    + _others(folder)
                )
            if (found := checksum_of(path)) != checksum:
                raise CheckpointError(
                    f"{path} is damaged or was changed: its checksum is {found:08x}, {checksum:08x} was written."
                    + _others(folder)
                )


class Written:
    """A new file whose size and checksum are known once it is written; `close` forces it to the disk."""

    def __init__(self, path: Path) -> None:
        self.name: str = path.name
        self.size: int = 0
        self._checksum = Checksum()
        self._file: BinaryIO = path.open("xb")

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._checksum.update(view)
        self.size += len(view)
        at = 0
        while at < len(view):
            at += self._file.write(view[at:])
        return len(view)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    @property
    def facts(self) -> tuple[str, tuple[int, int]]:
        """What `Mark.files` has for it."""
        return self.name, (self.size, self._checksum.value)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Written]:
    """A new file to write to."""
    file = Written(path)
    try:
        yield file
    finally:
        file.close()


def place(path: Path, step: int | None) -> Path:
    """Where the checkpoint goes that is saved to ``path``: the folder itself, or the one of ``step`` in it."""
    return path if step is None else path / f"step-{step:08}"


def begin(folder: Path) -> Path:
    """An empty folder to write the checkpoint ``folder`` to, after what earlier saves left was cleared away."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.is_symlink() or (folder.exists() and not _is_checkpoint(folder) and any(folder.iterdir())):
        raise CheckpointError(
            f"{folder} exists and is no checkpoint: it is not replaced. Choose another path, or remove it."
        )
    tmp, old = _tmp(folder), _old(folder)
    if not folder.exists() and (tmp / MARK).exists():
        tmp.rename(folder)  # a save died between its two renames
    for left in (tmp, old):
        if left.exists():
            shutil.rmtree(left)
    tmp.mkdir()
    return tmp


def commit(folder: Path, mark: Mark) -> None:
    """Make what was written since `begin` the checkpoint ``folder``."""
    tmp, old = _tmp(folder), _old(folder)
    mark.write(tmp)
    if folder.exists():
        folder.rename(old)
    try:
        tmp.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def abandon(folder: Path) -> None:
    """Remove what was written since `begin`, unless it is all there is."""
    if folder.exists() or not (_tmp(folder) / MARK).exists():
        shutil.rmtree(_tmp(folder), ignore_errors=True)


def retire(newest: Path, keep: int) -> None:
    """Remove what is older than the last ``keep`` checkpoints up to ``newest``, and what dead saves left.

    Steps after ``newest``, of a run that had gone further before it was resumed from an earlier step, are left alone.
    """
    folder = newest.parent
    until = [found for found in _steps(folder) if found[0] <= _step_of(newest)]
    for step, path in until[: max(0, len(until) - keep)]:
        old = _old(place(folder, step))  # path may be its hidden name
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)  # first out of sight: a checkpoint half removed must not look like one
    ready = {path.name for _, path in _steps(folder)}  # with one that is whole under its hidden name
    for path in folder.iterdir():
        if re.fullmatch(r"\.step-\d+\.(tmp|old)", path.name) and path.name not in ready:
            shutil.rmtree(path)


def whole(path: Path) -> Path | None:
    """The whole checkpoint that ``path`` stands for: itself, or the one of the latest step in it. None: there is none.

    A folder that torch.distributed.checkpoint wrote counts, being all it can be.
    """
    for candidate in (path, _tmp(path)):
        if (candidate / MARK).is_file():
            return candidate
    if (path / INDEX).is_file():
        return path
    steps = _steps(path)
    return steps[-1][1] if steps else None


def _steps(folder: Path) -> list[tuple[int, Path]]:
    """The whole checkpoints in ``folder`` by step, the latest last."""
    if not folder.is_dir():
        return []
    names = {path.name for path in folder.iterdir()}
    names |= {name[1:-4] for name in names if name.startswith(".step-") and name.endswith(".tmp")}
    found = []
    for name in names:
        match = _STEP.fullmatch(name)
        if match and not (folder / name).is_symlink():
            for candidate in (folder / name, _tmp(folder / name)):
                if (candidate / MARK).is_file():
                    found.append((int(match[1]), candidate))
                    break
    return sorted(found)


def _step_of(folder: Path) -> int:
    match = _STEP.fullmatch(folder.name)
    assert match is not None, f"{folder} was named by `place`"
    return int(match[1])


def _others(folder: Path) -> str:
    """What else there is to load, in words."""
    others = [path.name for _, path in _steps(folder.parent) if path != folder]
    return f" Whole, for all that is known: {', '.join(others)}." if others else ""


def _is_checkpoint(folder: Path) -> bool:
    return folder.is_dir() and not folder.is_symlink() and any((folder / name).is_file() for name in (MARK, INDEX))


def _tmp(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.tmp")


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def sync(folder: Path) -> None:
    """Force the names in ``folder`` to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
