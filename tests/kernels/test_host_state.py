"""zerofx.AdamW on a device, with state of some groups in the host's memory: torch's numbers, and one norm for all."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_

import zerofx
from tests.kernels.test_optimizer import assert_same, groups, nets, set_gradients, six_steps
from tests.seams.copies import staged
from tests.slow import slow_if

HALF = zerofx.Offload(optimizer="cpu", groups=["2"])
"""Of the last layer."""


@contextlib.contextmanager
def alone(device: str) -> Iterator[None]:
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with staged() if device == "cpu" else contextlib.nullcontext():
            yield
    finally:
        dist.destroy_process_group()


def sharded(device: str, offload: Any) -> tuple[nn.Module, nn.Module]:
    net, other = nets(device)
    zerofx.shard(net, groups=zerofx.Grouping(blocks=(nn.Linear, nn.LayerNorm), min_bytes=0), offload=offload)
    return net, other


def on_host(optimizer: zerofx.AdamW) -> list[bool]:
    return [p._group.home.staging is not None for p in optimizer.state]  # type: ignore[attr-defined]


@slow_if(lambda device, clip, offload: device == "cpu" and clip and offload != "cpu")
@pytest.mark.parametrize("offload", ["cpu", HALF], ids=["all", "half"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_updates_are_torchs_where_the_state_is(device: str, offload: Any, clip: float | None) -> None:
    with alone(device):
        net, other = sharded(device, offload)
        mine, theirs = six_steps(net, other, clip)
        assert sorted(on_host(mine)) == ([True] * 6 if offload == "cpu" else [False] * 4 + [True] * 2)
        assert all(s["exp_avg"].to_local().device.type == "cpu" for p, s in mine.state.items() if p._group.home.hosts)
        again = zerofx.AdamW(groups(net), max_grad_norm=clip)
        again.load_state_dict(mine.state_dict())
        for optimizer in (again, theirs):
            set_gradients(net, other, 7)
            if clip is not None:
                clip_grad_norm_(other.parameters(), clip)
            optimizer.step()
        assert_same(net, other)


def test_a_step_that_is_not_finite_changes_nothing_where_the_state_is(device: str) -> None:
    with alone(device):
        net, other = sharded(device, HALF)
        mine, theirs = zerofx.AdamW(groups(net), max_grad_norm=0.5), torch.optim.AdamW(groups(other))
        for step in range(4):
            set_gradients(net, other, step, scale=math.inf if step == 1 else 1.0)
            mine.step()
            if step != 1:
                clip_grad_norm_(other.parameters(), 0.5)
                theirs.step()
        assert_same(net, other)


def test_a_scale_that_was_too_large_is_taken_off_or_the_step_skipped(device: str) -> None:
    """As ``GradScaler`` says it: ``grad_scale`` and ``found_inf`` are on the device."""
    with alone(device):
        net, other = sharded(device, "cpu")
        mine, theirs = zerofx.AdamW(groups(net)), torch.optim.AdamW(groups(other))
        for step in range(4):
            set_gradients(net, other, step, scale=1024.0)
            mine.grad_scale = torch.full((), 1024.0, device=device)
            mine.found_inf = torch.full((), float(step == 2), device=device)
            mine.step()
            if step != 2:
                theirs.step()
        assert_same(net, other)
