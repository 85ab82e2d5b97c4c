"""The process in which kernels run in Triton's interpreter.

``TRITON_INTERPRET`` is read when triton is imported and when a kernel is decorated, and it holds for good. The process
that runs the tests may have imported triton long before (Inductor does), and needs kernels that compile as well. So a
test of numbers is sent to a process of its own, by name, as ``tests/workers.py`` sends functions to ranks::

    tests                                      interpreter
    pytest, fixtures, parameters               TRITON_INTERPRET=1, one process for the whole run
    run(test, device="cpu", ...)   ──────▶     test(device="cpu", ...)
    the test passes, or raises     ◀──────     None, or what it raised

Nothing here may import triton, since the process imports this file before the variable is set.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

_process: ProcessPoolExecutor | None = None


def run(test: Callable[..., None], **arguments: Any) -> None:
    """``test(**arguments)`` in the interpreter's process; raises what it raised."""
    global _process
    if _process is None:
        _process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _enter)
    _process.submit(_call, test, arguments).result()


def stop() -> None:
    global _process
    if _process is not None:
        _process.shutdown()
    _process = None


def _call(test: Callable[..., None], arguments: dict[str, Any]) -> None:
    import torch

    torch.manual_seed(0)
    test(**arguments)


def _enter() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
