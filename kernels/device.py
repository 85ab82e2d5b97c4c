"""Which devices run the kernels in Triton, which of them is current, and what goes there from the host."""

from __future__ import annotations

import torch

TRITON = ["cuda"]
"""Kinds of devices that run them. Another accelerator that Triton compiles for is a line."""


def runs_triton(device: torch.device) -> bool:
    return device.type in TRITON


def device_of(x: torch.Tensor) -> torch.accelerator.device_index:
    """Inside of it the current device is that of ``x``: Triton launches there. On the CPU it changes nothing."""
    return torch.accelerator.device_index(None if x.device.type == "cpu" else x.device.index)


def is_captured(device: torch.device) -> bool:
    """Whether what is put on ``device`` now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def there(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``x``, of the host's, on ``device``. The host goes on: PyTorch keeps pinned memory until it was read."""
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)
