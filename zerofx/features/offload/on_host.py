"""A home: the optimizer's state lives in the host's memory, and it steps there. A corner.

Moments are tensors of the host at any time: in ``optimizer.state``, in checkpoints, in ``to_local()``. So nothing has
to be brought for `resident`. Weights and gradients are on the device. `zerofx.AdamW` steps so
(`zerofx.runtime.optim.through_host`), and no other optimizer.
"""

from __future__ import annotations

import torch

from zerofx.runtime.state.home import Kind, OnDevice, Place
from zerofx.runtime.state.staging import Staging


class OnHost(OnDevice):
    """Moments in the host's memory, everything else on the device."""

    hosts = True

    @classmethod
    def takes(cls, stage: int, device: torch.device, place: Place) -> bool:
        return stage > 0 and isinstance(place, Staging)

    def new(self, kind: Kind, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return super().new(kind, numel, dtype, torch.device("cpu") if kind == "moment" else device)
