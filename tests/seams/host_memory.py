"""A home: the host's memory, as `zerofx.runtime.state.host_memory` has it, with counts of a test's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from zerofx.runtime.state.home import HOMES
from zerofx.runtime.state.host_memory import HostMemory, Traffic


class Counted(HostMemory):
    """Every group lives there."""

    @classmethod
    def takes(cls, stage: int, device: torch.device, file: object = None) -> bool:
        return stage > 0


@contextlib.contextmanager
def counting() -> Iterator[Traffic]:
    """Models that are sharded inside live there; yields what is copied."""
    Counted.traffic = Traffic()
    HOMES.insert(0, Counted)
    try:
        yield Counted.traffic
    finally:
        HOMES.remove(Counted)
