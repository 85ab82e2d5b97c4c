"""What the fork server of `tests.checkpoint.faults` imports before it forks."""

import torch
import torch.distributed.checkpoint

import tests.checkpoint.nets
import zerofx

__all__ = ["tests", "torch", "zerofx"]
