"""What forward saves for backward, in a rank's file (`zerofx.Offload`, ``activations=``).

::

    autograd ──▶ handle ──▶ extent        a handle goes, and its place in the file is free

A handle is a tensor of one element (`new_handle`). Its storage says which extent is meant, whoever
looks at it. So a second backward through a retained graph finds it again, forwards that wait for their backwards have
handles of their own, and what autograd drops is given back.

The thread that reads and writes for graphs does this, too, in the order in which they ask.
"""

from __future__ import annotations

import math
from concurrent.futures import Future
from typing import NoReturn

import torch

from zerofx.features.offload.operators import new_handle
from zerofx.runtime.state.state_file import StateFile
from zerofx.runtime.state.transfers import transfers


def refuse_copy() -> NoReturn:
    """Backward was given what is no handle."""
    raise RuntimeError(
        "backward is given a copy of what forward saved, and not what it saved: a hook of "
        "torch.autograd.graph.saved_tensors_hooks (save_on_cpu?) has copied it. With "
        "zerofx.Offload(activations=...) the activations are elsewhere already. Leave one of both out."
    )


class ActivationStore:
    """Activations of one module's graphs.

    Attributes:
        file: where they go.
        smallest: bytes of a tensor from which on it goes.
        nbytes: of pinned memory: none.
    """

    nbytes = 0

    def __init__(self, file: StateFile, smallest: int) -> None:
        self.file = file
        self.smallest = smallest

    def offload(self, saved: torch.Tensor, order: list[int]) -> Future[torch.Tensor]:
        """Start to write ``saved``, whose dimensions lie in ``order``; the handle that stands for it."""
        return transfers().submit(self._leave, saved, order)

    def _leave(self, saved: torch.Tensor, order: list[int]) -> torch.Tensor:
        handle = new_handle(saved)
        with self.file.noting():
            self.file.write_activation(saved.permute(order).contiguous(), handle)
        return handle

    def reload(self, handle: torch.Tensor, here: torch.Tensor) -> Future[torch.Tensor]:
        """Start to read what ``handle`` stands for to the memory of ``here``."""
        return transfers().submit(self._reload, handle, here)

    def _reload(self, handle: torch.Tensor, here: torch.Tensor) -> torch.Tensor:
        with self.file.noting():
            self.file.check()
            extent = self.file.extent_of(handle)
            if extent is None:
                refuse_copy()
            self.file.copied(extent, here)
            return here
        # It was noted: the graph goes on, and all ranks raise before the step.
        return here.fill_(math.nan) if here.is_floating_point() or here.is_complex() else here.zero_()
