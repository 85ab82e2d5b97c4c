"""split and join lose no bit of a master weight."""

from __future__ import annotations

import pytest
import torch

from zerofx.kernels.split import join, split


def patterns() -> torch.Tensor:
    """float32 numbers: each upper half, with the lower halves at which rounding changes and random ones."""
    upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    lower = torch.tensor([0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    lower = torch.cat([lower, torch.randint(0, 1 << 16, (8,), dtype=torch.int32, generator=generator)])
    return (upper[:, None] | lower).flatten().view(torch.float32)


def test_every_number_comes_back_bit_for_bit_and_every_nan_as_the_usual_one() -> None:
    x = patterns()
    weight, remainder = split(x)
    wanted = torch.where(x.isnan(), 0x7FC00000, x.view(torch.int32))
    assert torch.equal(join(weight, remainder).view(torch.int32), wanted)
    assert weight[x.isnan()].isnan().all()


def test_every_weight_and_remainder_is_the_split_of_what_they_join_to() -> None:
    weight = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    for number in (-32768, -1, 0, 1, 32767):
        remainder = torch.full_like(weight, number, dtype=torch.int16)
        there = ~join(weight, remainder).isnan()
        again, rest = split(join(weight, remainder))
        assert torch.equal(again.view(torch.int16)[there], weight.view(torch.int16)[there])
        assert torch.equal(rest[there], remainder[there])


def test_the_weight_is_the_nearest_bfloat16_and_on_a_tie_the_farther_from_zero() -> None:
    x = patterns()
    x = x[x.isfinite()]
    weight, remainder = split(x)
    tie = remainder == -32768
    assert torch.equal(weight[~tie], x[~tie].bfloat16())
    assert weight[tie].float().abs().gt(x[tie].abs()).all()
    below = (x[tie].view(torch.int32) & -65536).view(torch.float32)
    finite = weight[tie].isfinite()
    assert torch.equal((weight[tie].double() + below.double())[finite] / 2, x[tie].double()[finite])


@pytest.mark.parametrize(
    "bits, weight",
    [
        (0x00000000, 0x0000),
        (0x80000000, 0x8000),  # −0.0
        (0x00000001, 0x0000),  # the smallest subnormal
        (0x807FFFFF, 0x8080),  # the largest, negative: the smallest normal number is nearer
        (0x7F7F7FFF, 0x7F7F),  # the largest that stays finite
        (0x7F7FFFFF, 0x7F80),  # the largest: reads as infinity
        (0xFF800000, 0xFF80),  # −infinity
        (0x7FC00000, 0x7FC0),  # NaN
        (0x7F800001, 0x7FC0),  # a NaN whose upper half is infinity's
        (0x7FFFFFFF, 0x7FC0),  # a GPU's NaN, which a carry would make −0.0
    ],
)
def test_what_special_numbers_read_as(bits: int, weight: int) -> None:
    x = torch.tensor([bits]).to(torch.int32).view(torch.float32)
    assert int(split(x)[0].view(torch.int16).item()) & 0xFFFF == weight


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match="float64"):
        split(torch.zeros(1, dtype=torch.float64))
    with pytest.raises(TypeError, match="int32"):
        join(torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int32))
