"""A home: state is kept in a second tensor. What is left in the first, at rest, is not a number."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from zerofx._torch import StorageWeakRef, storage_of, with_numbers
from zerofx.runtime.state.home import Home, Kind

brought: dict[Kind, int] = {"weights": 0, "gradient": 0, "moment": 0}
"""How often state of each kind was brought."""


class SecondTensor(Home):
    away = True

    def __init__(self) -> None:
        self._depth = 0
        self._kept: list[tuple[StorageWeakRef, Kind, torch.Tensor]] = []  # by storage: views hold it, nobody else may

    @classmethod
    def takes(cls, stage: int, device: torch.device, file: object) -> bool:
        return stage > 0

    def new(self, kind: Kind, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.keep(kind, torch.zeros(numel, dtype=dtype, device=device))

    def keep(self, kind: Kind, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self._kept.append((StorageWeakRef(storage), kind, torch.empty(storage.nbytes(), dtype=torch.uint8)))
        if not self._depth:
            self._away(*self._kept[-1])
        return tensor

    @contextlib.contextmanager
    def resident(self, *state: torch.Tensor) -> Iterator[None]:
        self._depth += 1
        if self._depth == 1:
            self._kept = [entry for entry in self._kept if storage_of(entry[0]) is not None]
            with with_numbers():  # PyTorch 2.11 asks a parameter things while it makes a fake one
                for ref, kind, second in self._kept:
                    _bytes(ref).copy_(second)
                    brought[kind] += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                for entry in self._kept:
                    self._away(*entry)

    def _away(self, ref: StorageWeakRef, kind: Kind, second: torch.Tensor) -> None:
        if storage_of(ref) is not None:
            with with_numbers():
                second.copy_(_bytes(ref))
                _bytes(ref).fill_(255)  # which floating-point types read as NaN


def _bytes(ref: StorageWeakRef) -> torch.Tensor:
    """The first tensor, with a version counter of its own."""
    storage = storage_of(ref)
    assert storage is not None
    return torch.empty(0, dtype=torch.uint8).set_(storage)
