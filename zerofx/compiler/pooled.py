"""A compiled graph that takes its frame, and other large buffers, from the pool: `zerofx.passes.pool`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from zerofx import _torch
from zerofx.passes.pool import Frame, drawing, empty_strided


def pooled(compiled: Callable, frame: Frame | None) -> Callable:
    """The boxed function ``compiled``, with its ``frame``; if Inductor wrote it, its lines draw on the pool, too."""
    _torch.allocate_with(compiled, empty_strided)

    def run(args: list[Any]) -> Any:
        with drawing(frame):
            return compiled(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def check_pool(device: torch.device) -> None:
    """Refuse ``pool=True`` where there is none."""
    if device.type != "cpu":
        raise ValueError(
            f"pool=True: the module is on {device}, where PyTorch's allocator keeps what is freed. Leave it out."
        )
    if sys.platform != "linux":
        raise ValueError(f"pool=True on {sys.platform}: expected Linux, which backs an address only once it is used.")
