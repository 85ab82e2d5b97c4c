"""A master split into weight and remainder is the float32 master, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.shards import Row, Shard, assert_same_bits
from tests.kernels.test_split import patterns
from tests.slow import slow_if
from zerofx.kernels.split import split


@slow_if(lambda device: device == "cpu")
def test_a_split_master_takes_hundreds_of_steps_as_a_whole_one_does(device: str) -> None:
    steps = 1000 if device == "cuda" else 200  # of some 20 ms in the interpreter
    generator = torch.Generator().manual_seed(0)
    initial = torch.randn(320, generator=generator) * torch.logspace(-6, 2, 320)
    whole = Shard(device, initial, dtype=torch.bfloat16, master=torch.float32)
    parts = Shard(device, initial, dtype=torch.bfloat16, master=torch.int16)
    parts.hyper, parts.control = whole.hyper, whole.control
    total = torch.full((1,), 400.0, dtype=torch.float64, device=device)
    for i in range(steps):
        grad = torch.randn(320, generator=generator).bfloat16().to(device)
        whole.decide(total, max_norm=10.0)
        whole.update(grad)
        parts.update(grad)
        if i % 100 == 99:
            assert_same_bits(parts.weights, whole.weights)
            assert_same_bits(parts.param.cpu(), split(whole.weights)[0])
            assert_same_bits(whole.param.cpu(), whole.weights.bfloat16())
    assert whole.steps.item() == steps
    for name in ("exp_avg", "exp_avg_sq"):
        assert_same_bits(parts.state()[name], whole.state()[name])


@pytest.mark.parametrize("master", [torch.int16, torch.float32])
def test_the_kernel_reads_and_writes_every_finite_number_as_split_does(device: str, master: torch.dtype) -> None:
    x = patterns()
    x = x[x.isfinite() & (x.view(torch.int32) != -(1 << 31))]  # −0.0 − 0.0 · lr is 0.0, here as in torch
    shard = Shard(device, x, rows=[Row(lr=0.0)], dtype=torch.bfloat16, master=master)
    shard.step(torch.ones_like(x))
    assert shard.steps.item() == 1
    assert_same_bits(shard.weights, x)
    assert_same_bits(shard.param.cpu(), split(x)[0] if master is torch.int16 else x.bfloat16())
