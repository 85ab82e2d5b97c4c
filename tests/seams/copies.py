"""Copies: a CPU is taken for a device with memory of its own. Each copy is done as it is started."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from zerofx.runtime.state import staging
from zerofx.runtime.state.copies import COPIES, Copies


class Done:
    """All is done by then."""

    def synchronize(self) -> None:
        pass


class AtOnce(Copies):
    captured = False

    @classmethod
    def takes(cls, device: torch.device) -> bool:
        return device.type == "cpu"

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 255, dtype=torch.uint8)  # which floating-point types read as NaN

    def begin(self) -> None:
        pass

    def out(self, into: torch.Tensor, source: torch.Tensor) -> None:
        assert into.numel() == source.numel() and into.is_contiguous() and source.is_contiguous()
        into.copy_(source)

    def mark_out(self) -> Done:
        return Done()

    def out_behind(self, mark: object) -> None:
        pass

    back = out
    mark_back = mark_out
    begin_back = end = begin
    go_on_behind = out_behind


@contextlib.contextmanager
def staged(case: type[Copies] = AtOnce, buffer: int = 1 << 13) -> Iterator[None]:
    """The CPU is a device inside, and buffers are so small that a small net has several chunks."""
    before = staging.BUFFER
    COPIES.insert(0, case)
    staging.BUFFER = buffer
    try:
        yield
    finally:
        COPIES.remove(case)
        staging.BUFFER = before
