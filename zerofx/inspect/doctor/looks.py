"""What can be seen without trying: versions, devices, libraries. Each look is a function that returns a `Finding`."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from zerofx.model.units import format_bytes

State = Literal["ok", "none", "FAILS"]

SUPPORTED = ((2, 11), (2, 15))
"""The oldest and the newest torch that zerofx works with."""
TESTED = ("2.11", "2.13", "2.15")
"""Those that its tests run on."""


OLDEST_PYTHON = (3, 10)


@dataclass(frozen=True)
class Finding:
    """One line.

    Attributes:
        name: what was looked at.
        state: "ok"; "none" where it is not there and need not be; "FAILS".
        found: what was found.
        do: what to do about it; "" where there is nothing to do.
    """

    name: str
    state: State
    found: str
    do: str = ""

    def __str__(self) -> str:
        line = f"{self.state:<5}  {self.name:<10}  {self.found}"
        return "\n".join([line, *(f"{'':19}{more}" for more in filter(None, [self.do]))])


def python() -> Finding:
    """Its version."""
    version = platform.python_version()
    if sys.version_info[:2] < OLDEST_PYTHON:
        return Finding("python", "FAILS", version, "zerofx needs Python 3.10 or newer")
    return Finding("python", "ok", version)


def pytorch() -> Finding:
    """Its version, and whether zerofx works with it."""
    if torch.__version__.startswith(tuple(f"{version}." for version in TESTED)):
        return Finding("torch", "ok", torch.__version__)
    oldest, newest = (".".join(map(str, version)) for version in SUPPORTED)
    if SUPPORTED[0] <= tuple(map(int, torch.__version__.split(".")[:2])) <= SUPPORTED[1]:
        return Finding("torch", "ok", f"{torch.__version__}; zerofx's own tests run on {', '.join(TESTED)}")
    do = f"it works with {oldest} to {newest}: pip install 'torch=={newest}.*'"
    return Finding("torch", "FAILS", f"{torch.__version__}, with which zerofx does not work", do)


def gpu() -> Finding:
    """The devices, and why there is none."""
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        names = [f"{d.name} (sm_{d.major}{d.minor}, {format_bytes(d.total_memory)})" for d in devices]
        old = any(d.major < 7 for d in devices)
        do = "Triton's kernels need compute capability 7.0 or newer: use another GPU, or the CPU" if old else ""
        return Finding("gpu", "FAILS" if old else "ok", ", ".join(names), do)
    if torch.version.cuda is None:
        return Finding(
            "gpu", "none", "torch is built for the CPU", "to train on a GPU: pip install torch, its CUDA build"
        )
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        return Finding("gpu", "none", "hidden by CUDA_VISIBLE_DEVICES", "unset CUDA_VISIBLE_DEVICES")
    if shutil.which("nvidia-smi") is None:
        do = "if there is a GPU, install NVIDIA's driver; without one, zerofx.dry_run(device='cuda') works"
        return Finding("gpu", "none", f"no driver; torch is built for CUDA {torch.version.cuda}", do)
    do = f"run nvidia-smi: the driver must be new enough for CUDA {torch.version.cuda}"
    return Finding("gpu", "FAILS", "there is nvidia-smi, and torch finds no device", do)


def triton() -> Finding:
    """In which kernels for a GPU are written, and zerofx.AdamW's."""
    needed = torch.cuda.is_available()
    try:
        version = importlib.import_module("triton").__version__
    except ImportError as e:
        do = "pip install triton, in the version that this torch asks for: pip show torch says which"
        return Finding("triton", "FAILS" if needed else "none", f"not there: {e}", do)
    return Finding("triton", "ok", version)


def compiler() -> Finding:
    """For C++, in which Inductor writes kernels for the CPU."""
    names = [os.environ.get("CXX"), "g++", "clang++"]
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        do = "install g++, or set CXX to a compiler: apt-get install g++"
        return Finding("compiler", "FAILS", "no C++ compiler", f'{do}; without one, pass executor="eager"')
    return Finding("compiler", "ok", found)


def processors() -> Finding:
    """Cores that this process may use, and threads that torch computes with."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    found = f"{cores} cores; torch computes with {threads} threads"
    if threads > cores:
        return Finding("cores", "FAILS", found, f"threads take turns: set OMP_NUM_THREADS={cores}, or less per rank")
    return Finding("cores", "ok", found)


def backends() -> Finding:
    """What ranks can talk by."""
    if not dist.is_available():
        return Finding("backends", "FAILS", "this torch has no torch.distributed", "use a build with USE_DISTRIBUTED=1")
    there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    names = [name for name, is_there in there.items() if is_there]
    if torch.cuda.is_available():
        if not there["nccl"]:
            do = "gloo moves a GPU's tensors through the host: install torch's CUDA build for Linux, which has nccl"
            return Finding("backends", "FAILS", f"{', '.join(names)}; no nccl", do)
        version = ".".join(map(str, torch.cuda.nccl.version()))
        names[names.index("nccl")] = f"nccl {version}"
    return Finding("backends", "ok" if names else "FAILS", ", ".join(names) or "none")


def shared_memory() -> Finding:
    """Where ranks of one host keep weights in common, and nccl its buffers."""
    folder = "/dev/shm"
    if not os.path.isdir(folder):
        return Finding("shm", "none", f"no {folder}: one_copy=True cannot be had")
    free = shutil.disk_usage(folder).free
    if free < 256 << 20:
        do = "one_copy=True and nccl need more: in a container, docker run --shm-size=8g"
        return Finding("shm", "FAILS", f"{format_bytes(free)} free in {folder}", do)
    return Finding("shm", "ok", f"{format_bytes(free)} free in {folder}")


LOOKS: tuple[Callable[[], Finding], ...] = (
    python,
    pytorch,
    gpu,
    triton,
    compiler,
    processors,
    backends,
    shared_memory,
)
"""All looks, in the order of the lines."""
