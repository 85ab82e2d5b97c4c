"""An optimizer's step, and the hooks that PyTorch puts around it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

_FILE = torch.optim.Optimizer.profile_hook_step.__code__.co_filename


def step_of(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The ``step`` of its class without hooks; it takes the optimizer first (2.11, 2.13, 2.15)."""
    step: Any = type(optimizer).step
    return getattr(step, "__wrapped__", step)


def steps_running(optimizer: torch.optim.Optimizer) -> int:
    """How many steps of it are on this thread's stack: two where a subclass calls its parent's (2.11, 2.13, 2.15)."""
    found = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        hooked = frame.f_code.co_name == "wrapper" and frame.f_code.co_filename == _FILE
        found += hooked and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return found
