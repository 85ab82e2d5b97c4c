"""Whole buffers of one group that outlive what gathered them.

Forward may leave a group gathered for its backward (`zerofx.passes.keep`). Then backward reads what forward has read,
and this notes which version of the shard that was. A leaf module's buffers are noted too, to be counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NoReturn

import torch

from zerofx._torch import StorageWeakRef, storage_of
from zerofx.runtime.state.weights import Weights


class Gathered:
    """The whole buffers of one group that are there now."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._left: dict[int, tuple[int, StorageWeakRef]] = {}  # address -> the shard's version then; the buffer
        self._alone: list[StorageWeakRef] = []  # outside of graphs: a leaf module's

    def leave(self, buffer: torch.Tensor) -> None:
        """``buffer``, gathered in this forward, waits for its backward."""
        self._left = {address: left for address, left in self._left.items() if not left[1].expired()}
        ref = StorageWeakRef(buffer.untyped_storage())
        self._left[buffer.data_ptr()] = self._weights.shard._version, ref

    def check(self, buffer: torch.Tensor) -> None:
        """What autograd checks of a saved parameter: that none was written since ``buffer`` was gathered. Once.

        A copy, as a hook for saved tensors makes, is what forward has read, whatever was written since.
        """
        version, ref = self._left.pop(buffer.data_ptr(), (0, None))
        if ref is not None and not ref.expired() and version != self._weights.shard._version:
            raise_written(f"a parameter of the group {self._weights.layout.name!r}")

    @contextlib.contextmanager
    def outdated(self) -> Iterator[None]:
        """Inside the group is written by the forward that has left buffers: its backward reads what forward has read.

        Of what is written it reads a copy (`zerofx.compiler.written`).
        """
        before = self._weights.shard._version
        yield
        after = self._weights.shard._version
        self._left = {
            address: (after if version == before else version, ref) for address, (version, ref) in self._left.items()
        }

    def start(self) -> torch.Tensor:
        """Start to gather the group for a leaf module; see `Weights.start_gather`."""
        buffer = self._weights.start_gather()
        if buffer is not self._weights.own_replica:
            alive = [ref for ref in self._alone if not ref.expired()]
            self._alone = [*alive, StorageWeakRef(buffer.untyped_storage())]
        return buffer

    def now(self) -> list[torch.UntypedStorage]:
        """The buffers that are there; what was let go is not among them."""
        refs = [*(ref for _, ref in self._left.values()), *self._alone]
        return [storage for ref in refs if (storage := storage_of(ref)) is not None]


def raise_written(what: str) -> NoReturn:
    """Raise as autograd does for a saved tensor that was written to."""
    raise RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: {what}, "
        "between forward and backward. Run backward before the optimizer's step, and update weights by hand only "
        "between steps."
    )
