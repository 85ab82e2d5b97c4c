"""Compile ``csrc``: one call of a compiler, kept in ``build/accelerator`` until sources, PyTorch or Python change."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

from tests.workers import ROOT

SOURCES = Path(__file__).parent / "csrc"
NAME = "simulated_device"


@functools.cache
def why_not() -> str:
    """Why it cannot be built here; "" if it can."""
    if sys.platform != "linux":
        return "the simulated accelerator is built on Linux alone"
    if _compiler() is None:
        return "the simulated accelerator needs a C++ compiler: g++, c++ or clang++, or CXX="
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "the simulated accelerator needs Python's headers (python3-dev)"
    return ""


def _compiler() -> str | None:
    named = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [named] if named else ["g++", "c++", "clang++"])), None)


def built() -> Path:
    """The library, compiled if it is not there: half a minute. Processes that ask for it together wait for one."""
    command = _command()
    digest = hashlib.sha256("\n".join([torch.__version__, sys.version, *command]).encode())
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.read_bytes())
    folder = ROOT / "build" / "accelerator"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{NAME}-{digest.hexdigest()[:16]}.so"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            unfinished = library.with_suffix(".unfinished")
            done = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"the simulated accelerator does not compile:\n{done.stderr[-5000:]}")
            unfinished.rename(library)
    return library


def _command() -> list[str]:
    torch_folder = Path(torch.__file__).parent
    include = torch_folder / "include"
    headers = [include, include / "torch" / "csrc" / "api" / "include", sysconfig.get_paths()["include"]]
    libraries = torch_folder / "lib"
    return [
        _compiler() or "c++",
        *("-O1", "-shared", "-fPIC", "-std=c++20"),
        f"-DTORCH_EXTENSION_NAME={NAME}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-isystem{folder}" for folder in headers),
        str(SOURCES / "module.cpp"),
        f"-L{libraries}",
        *("-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10", f"-Wl,-rpath,{libraries}"),
    ]


def loaded() -> ModuleType:
    """The module. From then on this process has the device: never call it in the process of the tests."""
    spec = importlib.util.spec_from_file_location(NAME, built())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
