"""What PyTorch's caches got from this process, or gave it, and the libraries that it has loaded from their folder."""

from __future__ import annotations

import os
from pathlib import Path


def code_folder() -> Path:
    """The folder of PyTorch's caches (2.11, 2.13, 2.15)."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(os.path.realpath(cache_dir()))


def artifacts_are_new() -> bool:
    """Whether `torch.compiler.save_cache_artifacts` has more than when it was called last (2.11, 2.13, 2.15)."""
    from torch.compiler._cache import CacheArtifactManager

    return CacheArtifactManager.need_serialize()


def libraries() -> dict[str, Path]:
    """Of compiled kernels that are loaded now, by their path in `code_folder`: PyTorch's artifacts have their text."""
    folder, maps = code_folder(), Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []  # not on Linux
    paths = {Path(line.split(maxsplit=5)[-1]) for line in lines if line.endswith(".so")}
    return {str(path.relative_to(folder)): path for path in sorted(paths) if path.is_relative_to(folder)}
