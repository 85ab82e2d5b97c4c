"""Cases on ranks, of which one raises and one ends its rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import torch

from benchmarks.gpu.lines import Line, Setting, told
from benchmarks.gpu.ranks import on_ranks

LIMIT = 120


def lines(setting: Setting) -> Iterator[Line]:
    cases = {name: (name,) for name in ("fine", "raises", "dies", "fine again")}
    yield from on_ranks(setting, work, cases, lambda name, results: told(name, results[0]))


def work(device: torch.device, what: str) -> str:
    if what == "raises":
        raise ValueError(what)
    if what == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    return device.type
