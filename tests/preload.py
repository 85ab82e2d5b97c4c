"""What the process that ranks are forked from imports before it forks: see tests/workers.py."""

import torch
import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed.checkpoint

import zerofx

__all__ = ["torch", "zerofx"]
