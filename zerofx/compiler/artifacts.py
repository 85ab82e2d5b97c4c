"""What a start compiled, in a folder for other hosts: ``zerofx.compile(..., cache=folder)``.

PyTorch's caches stay where they are, on a disk of each host. From the folder they are filled before the first graph is
compiled; there each rank leaves what it has compiled, or was served, when a graph is called for the second time::

    folder/rank3-<digest of what is in it>.zip     versions (the comment)    who can take it: `versions`
                                                   artifacts                 PyTorch's, and what zerofx adds to them
                                                   libraries/ab/cab….so      kernels for CPUs, compiled

A file is written under another name and renamed, so it is there whole or not at all. Nothing here is an error: what
cannot be read, or is of other versions, is left alone, with one line.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import platform
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule

from zerofx import _torch
from zerofx.compiler.observed import log
from zerofx.compiler.warm import source_digest

_ARTIFACTS, _LIBRARIES = "artifacts", "libraries"


@functools.cache
def versions() -> str:
    """A digest of what must be equal where a file is taken: zerofx, PyTorch, Python, the processor."""
    what = source_digest(), torch.__version__, platform.python_version(), platform.machine(), _processor()
    return hashlib.sha256(repr(what).encode()).hexdigest()


def _processor() -> list[str]:
    """What the processor can do: kernels are compiled for all of it."""
    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.exists() else platform.processor()
    return sorted(set(re.findall(r"^(?:model name|flags|Features)\s*:.*$", text, re.M))) or [text]


class Artifacts:
    """Such a folder, as this process uses it. What is there for its rank is taken when this is made."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rank = folder, dist.get_rank()
        self._mine: Path | None = None
        self._known: set[tuple[str, str]] = set()  # what was taken
        found = Counter(self._take(path) for path in sorted(folder.glob(f"rank{self.rank}-*.zip")))
        if found["damaged"] or found["other"]:
            log.warning(
                "cache=%r: of %d files for rank %d, %d are damaged and %d of another zerofx, PyTorch or processor: "
                "these are ignored",
                *(str(folder), found.total(), self.rank, found["damaged"], found["other"]),
            )

    @staticmethod
    def of(folder: str | Path | None) -> Artifacts | None:
        """That of this process: one for each folder, and each folder of PyTorch's caches."""
        return None if folder is None else _of(Path(folder).absolute(), _torch.code_folder())

    def _take(self, path: Path) -> str:
        """Fill PyTorch's caches with what is in a file; whether it was "taken", "damaged", or of an "other" version."""
        try:
            with zipfile.ZipFile(path) as file:
                if file.comment.decode() != versions():
                    return "other"
                parts = {name: file.read(name) for name in file.namelist()}  # each has a checksum
            if (info := torch.compiler.load_cache_artifacts(parts.pop(_ARTIFACTS))) is None:
                return "damaged"
            for name, content in parts.items():
                inside = PurePosixPath(name).relative_to(_LIBRARIES)
                target = _torch.code_folder() / inside
                if ".." not in inside.parts and not target.exists():
                    _write(target, content)
            self._known |= _names(info, [name.removeprefix(f"{_LIBRARIES}/") for name in parts])
        except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error):
            return "damaged"
        return "taken"

    def leave(self) -> None:
        """Write what PyTorch's caches got from this process, or gave it, if that is more than before."""
        made = torch.compiler.save_cache_artifacts() if _torch.artifacts_are_new() else None
        if made is None:
            return
        content, info = made
        libraries = _torch.libraries()
        if (names := _names(info, libraries)) <= self._known:
            return
        digest = hashlib.sha256(repr((versions(), sorted(names))).encode()).hexdigest()[:16]
        path, before = self.folder / f"rank{self.rank}-{digest}.zip", self._mine
        try:
            if not path.exists():
                _write(path, _packed(content, libraries))
                self._mine = path
                if before is not None:  # all of it is in the new one
                    before.unlink(missing_ok=True)
        except OSError as e:
            log.warning("cache=%r: %s; what was compiled is not there for others", str(self.folder), e)

    def leaving(self, compiled: Callable) -> Callable:
        """Wrap a compiled function: from the second call on its backward is compiled, too, and written."""
        called = False

        def run(*args: Any) -> Any:
            nonlocal called
            if called:
                self.leave()
            called = True
            return compiled(*args)

        return run


def with_artifacts(call: Callable) -> Callable:
    """Wrap the call of a `zerofx.compiler.backend.Backend`: its folder serves it, and gets what is new."""

    @functools.wraps(call)
    def run(backend: Any, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable:
        artifacts = None if backend.pretend is not None else Artifacts.of(backend.options.cache)
        compiled = call(backend, gm, example_inputs)
        return compiled if artifacts is None else artifacts.leaving(compiled)

    return run


@functools.cache
def _of(folder: Path, code_folder: Path) -> Artifacts:
    return Artifacts(folder)


def _names(info: Any, libraries: Iterable[str]) -> set[tuple[str, str]]:
    """What PyTorch's artifacts, and libraries, are: kinds and keys."""
    keys = {(kind, key) for kind, keys in info.artifacts.items() for key in keys}
    return keys | {(_LIBRARIES, name) for name in libraries}


def _packed(artifacts: bytes, libraries: dict[str, Path]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as file:
        file.comment = versions().encode()
        file.writestr(_ARTIFACTS, artifacts)
        for name, path in libraries.items():
            file.writestr(f"{_LIBRARIES}/{name}", path.read_bytes())
    return made.getvalue()


def _write(path: Path, content: bytes) -> None:
    """A file that is there whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}")
    part.write_bytes(content)
    os.replace(part, path)
