"""Stochastic rounding of moments: to a neighbour, right on average, and different everywhere."""

from __future__ import annotations

import math

import torch

from tests.kernels.shards import Row, Shard

NUMEL = 1 << 18
SIGMAS = 5
"""Chance exceeds five standard deviations once in two million; with a fixed seed it either does or never does."""


def rounded(device: str, x: torch.Tensor, seed: int) -> tuple[Shard, torch.Tensor, torch.Tensor]:
    """A shard whose moments are x and x² rounded, and the errors of both in units of the last place."""
    shard = Shard(device, torch.zeros_like(x), rows=[Row(betas=(0.0, 0.0))], moments=torch.bfloat16, seed=seed)
    shard.step(x)
    return shard, errors(shard.exp_avg, x), errors(shard.exp_avg_sq, x * x)


def errors(got: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    ulp = torch.exp2(exact.abs().log2().floor() - 7).double()
    return (got.cpu().double() - exact.double()) / ulp


def test_the_mean_is_exact_and_the_result_a_neighbour(device: str) -> None:
    seed = 1234
    x = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)) * 3
    _, first, second = rounded(device, x, seed)
    for error in (first, second):
        assert error.abs().max() < 1
        # A number f of the way up rounds up with probability f: variance f (1 − f), at most 1/4.
        bound = SIGMAS * 0.5 / math.sqrt(NUMEL)
        print(f"seed {seed}: mean error {error.mean():+.2e} ulp, bound {bound:.2e}")
        assert error.mean().abs() < bound
        assert 0.12 < error.square().mean() < 0.21  # 1/6, if f is uniform: it does round both ways


def test_one_number_rounds_up_as_often_as_it_lies_above_its_lower_neighbour(device: str) -> None:
    seed = 99
    for fraction in (1 / 65536, 0.25, 0.5, 1 - 1 / 65536):
        x = torch.full((NUMEL,), 1 + fraction * 2.0**-7)
        _, error, _ = rounded(device, x, seed)
        bound = SIGMAS * math.sqrt(fraction * (1 - fraction) / NUMEL)
        print(f"seed {seed}: fraction {fraction:.6f}, mean error {error.mean():+.2e} ulp, bound {bound:.2e}")
        assert error.mean().abs() < bound


def test_neighbours_both_moments_and_two_seeds_are_rounded_independently(device: str) -> None:
    x = torch.full((NUMEL,), math.sqrt(1.5) * (1 + 2.0**-9))
    _, first, second = rounded(device, x, 7)
    _, other, _ = rounded(device, x, 8)
    pairs = [(first, second), (first, other), (second, other)]
    pairs += [(error[:-lag], error[lag:]) for error in (first, second) for lag in (1, 2, 3, 4, 32, 1024)]
    for a, b in pairs:
        correlation = torch.corrcoef(torch.stack([a, b]))[0, 1].item()
        assert abs(correlation) < SIGMAS / math.sqrt(len(a)), correlation


def test_a_second_moment_in_bfloat16_follows_where_rounding_to_nearest_would_stand_still(device: str) -> None:
    x = torch.full((4096,), 1.05)
    shard = Shard(device, torch.zeros(4096), rows=[Row(betas=(0.9, 0.999))], moments=torch.bfloat16)
    shard.exp_avg_sq.fill_(1.0)
    for _ in range(100):
        shard.step(x)
    exact = 1.05**2 + (1 - 1.05**2) * 0.999**100  # 1.0098, where the next bfloat16 after 1 is 1.0078
    spread = math.sqrt(100 * 0.25 / 4096) * 2.0**-7
    assert abs(shard.exp_avg_sq.double().mean().item() - exact) < SIGMAS * spread
    step = 0.001 * (1.05**2 - 1)
    assert torch.tensor(1.0 + step).bfloat16() == 1
