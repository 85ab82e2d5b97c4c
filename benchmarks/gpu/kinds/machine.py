"""What the report is of: device, driver, versions."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator

import torch

from benchmarks.gpu.lines import Line, Setting, attempt, not_run, told

LIMIT = 60


def lines(setting: Setting) -> Iterator[Line]:
    yield told("python", platform.python_version())
    yield told("torch", torch.__version__)
    for package in ("triton", "transformers"):
        yield from attempt(package, "", lambda package=package: told(package, importlib.metadata.version(package)))  # type: ignore[misc]
    if setting.device == "cpu":
        yield not_run("device")
        yield not_run("NCCL")
        return
    yield from attempt("NCCL", "", lambda: told("NCCL", ".".join(map(str, torch.cuda.nccl.version()))))
    for i in range(setting.ranks):
        yield from attempt(f"device {i}", "", lambda i=i: _device(i))  # type: ignore[misc]


def _device(i: int) -> Line:
    of = torch.cuda.get_device_properties(i)
    free, total = torch.cuda.mem_get_info(i)
    what = f"{of.name}, sm_{of.major}{of.minor}, {of.multi_processor_count} multiprocessors"
    return told(f"device {i}", f"{what}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
