"""What a rank holds on the simulated accelerator, and takes in a step: as its allocator counts, and as zerofx says."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from typing import Any

import torch

import zerofx
from tests.accelerator import device
from tests.accelerator.timed import WIDTH, Block, Blocks, Training


def held(layers: int, options: dict[str, Any]) -> dict[str, int]:
    """Bytes::

    predicted        `zerofx.predict` of the peak of forward and backward, above what is held at rest
    asked, blocks    that peak by the allocator: of what was asked for, and of blocks, which are multiples of 512
    at_rest          asked for when nothing runs, without the batch
    said             of that `zerofx.memory_summary`
    parameters       4 N
    """
    before = _rest().asked
    training = Training(layers, tokens=128, **options)
    rest = _rest()
    device.reset_peak()
    training.model(training.x).backward()
    torch.accelerator.synchronize()
    most = device.in_use()
    training.optimizer.step()
    training.optimizer.zero_grad()
    found = dict(
        predicted=zerofx.predict(training.model).peak_bytes,
        asked=most.most_asked - rest.asked,
        blocks=most.most_blocks - rest.blocks,
        at_rest=_rest().asked - before - training.x.nbytes,
        said=zerofx.memory_summary(training.model, training.optimizer).total,
        parameters=4 * sum(p.numel() for p in training.model.parameters()),
    )
    del training
    _rest()
    return found


def _rest() -> device.InUse:
    gc.collect()
    torch.accelerator.synchronize()
    return device.in_use()


def chosen(nbytes: Sequence[int], **options: Any) -> list[list[tuple[str, float]]]:
    """By budget, names and seconds of the alternatives that fit, the best first; [] where nothing fits."""
    known = zerofx.Rates(1e12, 1e12, 1e10, host_copy_bytes_per_s=1e9)
    groups = zerofx.Grouping(blocks=(Block,), min_bytes=0)
    asked: dict[str, Any] = {"world_size": 2, "rates": known, "groups": groups, "executor": "eager", "offload": "cpu"}
    found = []
    for memory in nbytes:
        with contextlib.suppress(ValueError):
            choice = zerofx.choose(Blocks(4), torch.ones(128, WIDTH), device="sim", memory=memory, **asked, **options)
            found.append([(each.name, each.step_s) for each in choice.alternatives if each.division is not None])
            continue
        found.append([])
    return found
