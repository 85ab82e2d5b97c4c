"""A step that is not taken leaves no trace, and the next one is taken as if it had never been tried."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels.shards import Row, Shard, assert_same_bits

FORMATS = [
    {},
    {"dtype": torch.bfloat16, "master": torch.int16, "moments": torch.bfloat16},
    {"dtype": torch.float16, "master": torch.float32},
    {"moments": torch.int8},
]


def assert_same_state(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert_same_bits(a[name], b[name])


@pytest.mark.parametrize("options", FORMATS)
@pytest.mark.parametrize("why", ["found_inf", "inf", "nan"])
def test_a_step_that_is_not_taken_changes_nothing(device: str, why: str, options: dict) -> None:
    shard = Shard(device, torch.randn(1000), rows=[Row(), Row()], block=256, **options)
    good = torch.randn(1000)
    bad = good.clone()
    if why != "found_inf":
        bad[777] = math.inf if why == "inf" else math.nan
    shard.step(good)
    before = shard.state()
    shard.step(bad, max_norm=1.0, scale=2.0, found_inf=float(why == "found_inf"))
    assert shard.control[1].item() == 1
    assert_same_state(shard.state(), before)
    shard.step(good, found_inf=0.0)
    assert shard.control[1].item() == 0 and shard.steps.tolist() == [2, 2]
    assert not torch.equal(shard.param, before["param"])


def test_steps_count_what_was_taken(device: str) -> None:
    shard, other = (Shard(device, torch.ones(100)) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    for skipped in (False, True, False, True, True, False):
        grad = torch.randn(100, generator=generator)
        shard.step(grad * math.inf if skipped else grad)
        if not skipped:
            other.step(grad)
    assert shard.steps.item() == 3
    assert_same_state(shard.state(), other.state())
