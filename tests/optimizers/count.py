"""How many all-reduces a step of each optimizer makes: `python -m tests.optimizers.count`.

Stage 3 of 5 layers with a norm each, 20 parameters, on a process group that sends nothing. The fourth step counts, for
the first ones also find out how the optimizer steps. Optimizers without any are left out.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import zerofx
from tests.optimizers.sweep import Maker, makers
from zerofx.runtime.eager import norms

STEPS = 4


def count(make: Maker) -> int:
    """The all-reduces of numbers in the last of ``STEPS`` steps."""
    net = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)) for _ in range(5)])
    module = zerofx.compile(net, stage=3, executor="eager")
    optimizer, made, theirs = make(module), 0, norms._over

    def counted(*args: Any) -> None:
        nonlocal made
        made += 1
        theirs(*args)

    norms._over = counted
    try:
        for _ in range(STEPS):
            module(torch.randn(6, 16)).square().mean().backward()
            made = 0
            optimizer.step()
            optimizer.zero_grad()
    finally:
        norms._over = theirs
    return made


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    for name, make in makers().items():
        try:
            made = count(make)
        except Exception as error:  # refused, or it does not train by itself: `sweep` says which
            print(f"{name}: {type(error).__name__}")
            continue
        if made:
            print(f"{name}: {made}")
