"""The invariant of every training: all ranks hold the same whole weights.

step()
assert_ranks_agree(net)            # on every rank
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import nn

import zerofx
from zerofx.runtime.state.group import groups_of


def assert_ranks_agree(net: nn.Module) -> None:
    """A collective. Raises AssertionError with the names of the weights that two ranks hold in different bits."""
    assert not (names := disagreements(net)), f"ranks hold different weights: {', '.join(names)}"


def disagreements(net: nn.Module) -> list[str]:
    """A collective. The names of the weights that are not the same, bit for bit, on all ranks.

    The same of the groups that ranks compute with. In stages 1 and 2 this brings replicas up to date, as the next
    forward would: a test of that calls this at its end.
    """
    held = {}
    with torch.no_grad():
        for name, p in net.named_parameters():
            held[name] = p.full_tensor() if isinstance(p, zerofx.ShardedTensor) else p.detach()
        if any(isinstance(p, zerofx.ShardedTensor) for p in net.parameters()):
            for group in groups_of(net):
                whole = torch.ops._c10d_functional.wait_tensor(group.weights.start_gather())
                held[f"group {group.layout.name}"] = whole
    digests = {name: _digest(tensor) for name, tensor in held.items()}
    everyone: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, digests)
    names = dict.fromkeys(name for theirs in everyone for name in theirs)
    return [name for name in names if len({theirs.get(name) for theirs in everyone}) > 1]


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.contiguous().reshape(-1).cpu()
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()
