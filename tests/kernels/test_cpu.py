"""The CPU's step: against float64, in both of its ways, and the sum of squares that decides about it."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels.shards import Row, assert_same_bits, torch_adamw
from tests.kernels.test_adamw import KINDS, SEVERAL_ROWS, assert_as_close_as_torch, gradients
from tests.slow import slow_if
from zerofx.kernels import blockwise, cpu
from zerofx.kernels.split import join, split

CODED = [kind for kind in KINDS if kind[2] is torch.int8 and kind[0] is not torch.float16 and kind[1] is torch.float32]
"""A few of those with moments in 8 bits, as each is compiled by itself."""
COMPILED_ALONE = [*CODED, *((dtype, torch.float32, torch.bfloat16, None) for dtype in (torch.float32, torch.bfloat16))]


def hyper(row: Row, step: int) -> cpu.Hyper:
    return cpu.Hyper(row.lr, *row.betas, row.eps, row.weight_decay, row.maximize, step)


class Flat:
    """One run of weights with its state."""

    def __init__(
        self,
        initial: torch.Tensor,
        dtype: torch.dtype = torch.float32,
        moments: torch.dtype = torch.float32,
        master: torch.dtype | None = None,
    ) -> None:
        self.param = initial.to(dtype, copy=True)
        self.exp_avg, self.exp_avg_sq = (torch.zeros(initial.numel(), dtype=moments) for _ in range(2))
        self.scales = None
        if moments == torch.int8:
            self.exp_avg_sq = self.exp_avg_sq.to(torch.uint8)
            blocks = blockwise.blocks_in(initial.numel())
            self.scales = (torch.zeros(blocks), torch.zeros(blocks))
        self.master = initial.clone() if master == torch.float32 else None
        if master == torch.int16:
            self.param, self.master = split(initial)

    def step(self, row: Row, step: int, grad: torch.Tensor, factor: float = 1.0, seed: int = 0) -> None:
        run = (self.param, grad.clone(), self.exp_avg, self.exp_avg_sq, self.master)
        cpu.adamw(*([x] for x in run), hyper(row, step), factor, [seed + 7 * step], [self.scales])  # type: ignore[misc, arg-type]

    @property
    def weights(self) -> torch.Tensor:
        """The masters, where there are any."""
        if self.master is None:
            return self.param.float()
        return join(self.param, self.master) if self.master.dtype == torch.int16 else self.master


@pytest.mark.parametrize("master", [None, torch.float32, torch.int16])  # the first by PyTorch, the others compiled
@pytest.mark.parametrize("numel, steps", [(0, 100), (1, 100), (127, 100), (1023, 100), ((1 << 20) + 3, 10)])
def test_after_many_steps_it_is_as_close_to_float64_as_torch_is(
    numel: int, steps: int, master: torch.dtype | None
) -> None:
    initial, grads = torch.randn(numel, generator=torch.Generator().manual_seed(0)), gradients(steps, numel)
    flat = Flat(initial, torch.float32 if master is None else torch.bfloat16, master=master)
    for t, grad in enumerate(grads, start=1):
        flat.step(Row(), t, grad)
    exact, torchs = (torch_adamw(initial, grads, dtype=dtype) for dtype in (torch.float64, torch.float32))
    assert_as_close_as_torch(flat.weights, exact, torchs, steps)


@pytest.mark.parametrize("row", SEVERAL_ROWS)
def test_both_ways_follow_the_hyper_parameters(row: Row) -> None:
    initial, grads = torch.randn(300, generator=torch.Generator().manual_seed(0)), gradients(20, 300)
    fused, compiled = Flat(initial), Flat(initial, torch.bfloat16, master=torch.float32)
    for t, grad in enumerate(grads, start=1):
        for flat in (fused, compiled):
            flat.step(row, t, grad, factor=0.25)
    scaled = [grad * 0.25 for grad in grads]
    exact, torchs = (torch_adamw(initial, scaled, rows=[row], dtype=d) for d in (torch.float64, torch.float32))
    for flat in (fused, compiled):
        assert_as_close_as_torch(flat.weights, exact, torchs, len(grads))
    torch.testing.assert_close(compiled.param, compiled.weights.bfloat16(), rtol=0, atol=0)


@slow_if(lambda param, grad, moments, master: (param, grad, moments, master) in COMPILED_ALONE)
@pytest.mark.parametrize(
    "param, grad, moments, master",
    [kind for kind in KINDS if kind[2] is not torch.int8] + CODED,
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
def test_every_combination_of_dtypes_takes_a_step(
    param: torch.dtype, grad: torch.dtype, moments: torch.dtype, master: torch.dtype | None
) -> None:
    initial = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(param).float()
    row = Row(lr=0.5, weight_decay=0.2)
    flat, same = (Flat(initial, param, moments, master) for _ in range(2))
    g = gradients(1, 1000)[0].clamp(-100, 100).to(grad)
    for each in (flat, same):
        each.step(row, 1, g, seed=3)
    exact = torch_adamw(initial, [g.float()], rows=[row], dtype=torch.float64)
    # The first step is lr · sign(g), to the precision of the weight and of the two moments.
    stored = 1e-6 if moments is torch.int8 else torch.finfo(moments).eps  # codes are made after the weights are
    precision = max(torch.finfo(param).eps if master is None else 1e-6, stored)
    torch.testing.assert_close(flat.weights.double(), exact, rtol=2 * precision, atol=2 * precision)
    for name in ("param", "exp_avg", "exp_avg_sq"):
        assert_same_bits(getattr(flat, name), getattr(same, name))


def test_a_split_master_is_bitwise_a_float32_one() -> None:
    initial, grads = torch.randn(333, generator=torch.Generator().manual_seed(0)), gradients(200, 333)
    full, halves = (
        Flat(initial, torch.bfloat16, master=torch.float32),
        Flat(initial, torch.bfloat16, master=torch.int16),
    )
    for t, grad in enumerate(grads, start=1):
        full.step(Row(), t, grad)
        halves.step(Row(), t, grad)
    assert_same_bits(full.weights, halves.weights)


def test_rounding_is_unbiased_and_its_bits_are_uniform() -> None:
    n = 1 << 16
    bits = cpu._random_bits(11 + torch.arange(n, dtype=torch.int32))
    for half in (bits & 0xFFFF, (bits >> 16) & 0xFFFF):
        mean, expected = half.double().mean().item(), (1 << 16) / 2 - 0.5
        assert abs(mean - expected) < 5 * (1 << 16) / math.sqrt(12 * n)
    x = torch.full((n,), 1.0 + 2.0**-10)  # an eighth of the way from 1 to the next bfloat16
    rounded = cpu._round_stochastically(x, bits & 0xFFFF).double()
    assert set(rounded.tolist()) == {1.0, 1.0 + 2.0**-7}
    assert abs(rounded.mean().item() - x[0].item()) < 5 * 2.0**-7 * math.sqrt(1 / 8 * 7 / 8 / n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_sum_of_squares_is_right_to_six_digits_and_finite_where_gradients_are(dtype: torch.dtype) -> None:
    grad = torch.randn(3 * cpu.CHUNK + 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert cpu.sum_of_squares(grad) == pytest.approx(grad.double().square().sum().item(), rel=2e-6)
    assert cpu.sum_of_squares(grad[:0]) == 0.0
    large = torch.full((4,), torch.finfo(dtype).max / 2, dtype=dtype)
    if dtype != torch.float64:
        assert cpu.sum_of_squares(large) == pytest.approx(large.double().square().sum().item(), rel=1e-6)
    for bad in (math.inf, -math.inf, math.nan):
        grad[7] = bad
        assert not math.isfinite(cpu.sum_of_squares(grad))
