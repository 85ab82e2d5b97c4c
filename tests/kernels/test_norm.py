"""The norm, the clip coefficient and the bias corrections, as torch has them."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels.shards import Row, Shard
from tests.slow import slow_if
from zerofx.kernels.norm import PARTIAL_SUMS, finalize, partial_sums
from zerofx.kernels.segments import make_tiles


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 31.9, 1e6, math.inf])
@pytest.mark.parametrize("scale", [None, 1024.0])
def test_gradients_are_clipped_and_unscaled_as_torch_does(device: str, max_norm: float, scale: float | None) -> None:
    grad = torch.randn(1023)
    shard = Shard(device, torch.zeros(1023))
    shard.step(grad * (scale or 1.0), max_norm=max_norm, scale=scale)
    parameter = torch.nn.Parameter(torch.zeros(1023))
    parameter.grad = grad.clone()
    norm = torch.nn.utils.clip_grad_norm_([parameter], max_norm)
    factor, found_inf, total_norm, _ = shard.control.tolist()
    assert found_inf == 0
    assert total_norm == pytest.approx(norm.item(), rel=1e-6)
    coefficient = min(1.0, max_norm / (norm.item() + 1e-6))
    assert factor * (scale or 1.0) == pytest.approx(coefficient, rel=1e-6)
    torch.testing.assert_close(grad * (factor * (scale or 1.0)), parameter.grad, rtol=1e-6, atol=0)


@slow_if(lambda device, parts, dtype: device == "cpu" and parts > 7 and dtype == torch.float32)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parts", [1, 7, PARTIAL_SUMS])
def test_any_number_of_parts_adds_up_to_the_sum_of_squares(device: str, parts: int, dtype: torch.dtype) -> None:
    grad = torch.randn(5000).to(dtype).to(device)
    segments = [(0, 1, 0), (32, 127, 0), (192, 0, 1), (192, 4000, 1)]
    tiles, row = make_tiles([segments], 128).to(device), [0, grad.data_ptr(), *[0] * 7]
    runs = torch.tensor([row], device=device)
    out, again = (torch.full((parts,), math.nan, dtype=torch.float64, device=device) for _ in range(2))
    partial_sums(dtype, runs, tiles, out, block=128)
    partial_sums(dtype, runs, tiles, again, aligned=False, block=128)
    expected = sum(grad[a : a + n].double().square().sum().item() for a, n, _ in segments)
    assert out.sum().item() == pytest.approx(expected, rel=1e-12)
    assert torch.equal(out, again)


@pytest.mark.parametrize("value", [3e38, 1e30, 1e-30, 1e-44])
def test_a_finite_gradient_is_clipped_however_large_and_counted_however_small(device: str, value: float) -> None:
    shard = Shard(device, torch.zeros(4))
    shard.step(torch.tensor([value, 0.0, 0.0, 0.0]), max_norm=1.0)
    factor, found_inf, norm, _ = shard.control.tolist()
    exact = torch.tensor(value).item()
    assert found_inf == 0 and norm == pytest.approx(exact, rel=1e-6)
    assert factor == pytest.approx(min(1.0, 1.0 / (exact + 1e-6)), rel=1e-6)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("at", [0, 500, 1022])
def test_an_infinite_gradient_or_a_nan_is_found_wherever_it_is(device: str, bad: float, at: int) -> None:
    grad = torch.randn(1023)
    grad[at] = bad
    shard = Shard(device, torch.zeros(1023), block=128)
    shard.step(grad)
    factor, found_inf, norm, _ = shard.control.tolist()
    assert found_inf == 1 and factor == 0 and not math.isfinite(norm)


def test_bias_corrections_are_those_of_python(device: str) -> None:
    rows = [Row(betas=betas) for betas in [(0.9, 0.999), (0.0, 0.9999), (0.95, 0.0), (0.99, 0.99999)]]
    shard = Shard(device, torch.zeros(32), rows=rows)
    total = torch.ones(1, dtype=torch.float64, device=device)
    for t in (1, 2, 3, 1000, 1_000_000):
        shard.steps.fill_(t - 1)
        finalize(total, math.inf, None, None, shard.hyper, shard.steps, shard.control)
        assert shard.steps.tolist() == [t] * len(rows)
        for row, numbers in zip(rows, shard.hyper.tolist()):
            beta1, beta2 = row.betas
            assert numbers[5:7] == pytest.approx([1 - beta1**t, math.sqrt(1 - beta2**t)], rel=1e-12)
            assert numbers[:5] == row.columns[:5] and numbers[7] == 1


def test_tables_of_other_dtypes_and_shapes_are_refused() -> None:
    total, hyper = torch.zeros(1, dtype=torch.float64), torch.zeros(2, 8, dtype=torch.float64)
    steps, control = torch.zeros(2), torch.zeros(4)
    with pytest.raises(TypeError, match="total must be"):
        finalize(total.float(), 1.0, None, None, hyper, steps, control)
    with pytest.raises(TypeError, match="hyper must be"):
        finalize(total, 1.0, None, None, hyper.float(), steps, control)
    with pytest.raises(ValueError, match=r"\[R, 8\]"):
        finalize(total, 1.0, None, None, hyper, torch.zeros(3), control)
    for number in (-1.0, math.nan):
        with pytest.raises(ValueError, match="max_norm"):
            finalize(total, number, None, None, hyper, steps, control)
    tiles, runs = make_tiles([[(0, 32, 0)]]), torch.zeros(1, 9, dtype=torch.int64)
    with pytest.raises(TypeError, match="out must be"):
        partial_sums(torch.float32, runs, tiles, torch.zeros(4))
    with pytest.raises(TypeError, match="runs must be"):
        partial_sums(torch.float32, runs.float(), tiles, total)
    with pytest.raises(TypeError, match="gradients must be floating"):
        partial_sums(torch.int32, runs, tiles, total)
