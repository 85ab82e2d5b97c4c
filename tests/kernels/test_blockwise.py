"""The 8-bit code of moments: what it loses, what comes back, and that the kernel's is the same bit for bit."""

from __future__ import annotations

import math

import pytest
import torch

import zerofx
from tests.kernels.shards import Row, Shard, assert_same_bits, torch_adamw
from tests.kernels.test_adamw import gradients
from tests.slow import slow_if
from zerofx.kernels import blockwise, cpu
from zerofx.kernels.blockwise import BLOCK, LARGEST_FIRST, LARGEST_SECOND
from zerofx.model import layout

U = torch.arange(1 << 16) / (1 << 16)
"""Every number that 16 random bits stand for."""


def test_the_layout_and_the_kernels_mean_the_same_blocks() -> None:
    assert layout.BLOCK == BLOCK


def test_what_was_codes_is_the_same_codes_again_for_every_code_and_any_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    exponents, mantissas = torch.arange(-100, 127), 1 + torch.rand(227, 20, generator=generator)
    scales = (torch.exp2(exponents.double())[:, None] * mantissas).float().view(-1)
    for sign in (1, -1):
        first = (torch.arange(BLOCK) % 128 * sign).to(torch.int8).repeat(len(scales))  # 127 is in each block
        second = torch.arange(BLOCK).to(torch.uint8).repeat(len(scales))
        roots = scales.double().clamp(2.0**-46, 2.0**64 * (1 - 2.0**-24)).float()
        state = {"exp_avg_codes": first, "exp_avg_sq_codes": second}
        state |= {"exp_avg_scales": scales, "exp_avg_sq_scales": roots}
        again = blockwise.quantize(*blockwise.dequantize(state))
        for name in state:
            assert_same_bits(state[name], again[name])


def test_a_number_becomes_one_of_its_two_neighbours_and_on_average_itself() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BLOCK, generator=generator) * torch.randn(BLOCK, generator=generator).exp()
    scales = blockwise.scales_of(x[None])
    for encode, largest, values in [
        (blockwise.encode_first, LARGEST_FIRST, x),
        (blockwise.encode_second, LARGEST_SECOND, x.abs()),
    ]:
        codes = encode(values.expand(len(U), -1), scales, U[:, None])
        steps = (values.double().abs() / scales.double() * largest**2).sqrt().squeeze()
        assert (codes.double().abs() - steps).abs().max() <= 1
        decoded = blockwise.decode(codes, scales, largest).double()
        gap = (2 * steps + 1) / largest**2 * scales.double().squeeze()
        # All of U once: off by less than one of them, and by what the factor is too large.
        bound = gap * 2 / len(U) + 2.0**-20 * values.double().abs()
        tiny = (steps < 1) & (largest == LARGEST_SECOND)  # a root is never 0
        assert ((decoded.mean(0) - values.double()).abs() <= bound)[~tiny].all()
        nearest = blockwise.decode(encode(values[None], scales), scales, largest).double()
        assert ((nearest - values.double()).abs() <= gap / 2 * 1.001)[0][~tiny].all()


def test_a_root_that_is_not_zero_has_a_code_that_is_not_zero() -> None:
    v = torch.zeros(2 * BLOCK)
    v[:4] = torch.tensor([1.0, 1e-12, 1e-30, 1e-44])
    v[BLOCK] = 1e-44  # subnormal, alone in its block
    codes = blockwise.quantize(v, v)["exp_avg_sq_codes"]
    assert codes[:5].tolist() == [255, 1, 1, 1, 0] and codes[BLOCK] == 255


def test_the_largest_element_has_the_largest_code_however_it_is_rounded() -> None:
    scales = torch.rand(100_000, 1, generator=torch.Generator().manual_seed(0)).exp()
    for u in (0.0, U[-1].item()):
        assert (blockwise.encode_first(scales, scales, u) == LARGEST_FIRST).all()
        assert (blockwise.encode_second(scales, scales, u) == LARGEST_SECOND).all()


def test_a_step_leaves_no_second_moment_at_zero_where_there_was_a_gradient(device: str) -> None:
    grad = torch.randn(2000).mul(6).exp() * 1e-4  # twenty orders of magnitude: most round to nothing beside the largest
    grad[::7] = 0.0
    shard = Shard(device, torch.zeros(2000), moments=torch.int8)
    shard.step(grad)
    assert torch.equal(shard.exp_avg_sq.cpu() != 0, grad != 0)
    assert (shard.exp_avg.cpu() == 0).sum() > 1000


def test_a_last_block_may_be_short_and_no_block_knows_of_another() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    whole = blockwise.quantize(x, x.square())
    assert [len(part) for part in whole.values()] == [1000, 4, 1000, 4]
    for at in range(0, 1000, BLOCK):
        part = blockwise.quantize(x[at : at + BLOCK], x[at : at + BLOCK].square())
        for name, codes in part.items():
            start = at // BLOCK if name.endswith("_scales") else at
            assert torch.equal(codes, whole[name][start : start + len(codes)])


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_block_with_a_number_that_is_not_finite_reads_as_not_finite(bad: float) -> None:
    x = torch.ones(2 * BLOCK)
    x[3] = bad
    first, second = blockwise.dequantize(blockwise.quantize(x, x.abs()))
    for moment in (first, second):
        assert not moment[3].isfinite() and moment[BLOCK:].isfinite().all()


def edge_cases() -> torch.Tensor:
    """Blocks of ordinary, spread, tiny, subnormal, equal, huge, no and not finite numbers, and a short one."""
    torch.manual_seed(0)
    rows = [torch.randn(BLOCK) for _ in range(8)]
    rows[1] *= torch.randn(BLOCK).mul(5).exp()
    rows[2] *= 2.0**-99
    rows[3] *= 1e-40
    rows[4].fill_(3.0)
    rows[5] *= 1e30
    rows[6].zero_()
    rows[7][9] = math.inf
    return torch.cat([*rows, torch.randn(100)])


def test_the_kernel_encodes_and_decodes_as_torch_does_bit_for_bit(device: str) -> None:
    from tests.kernels.codes import codes_of

    x = edge_cases().to(device)
    bits = torch.randint(1 << 16, (x.numel(),), device=device, dtype=torch.int32)
    u = blockwise.rows_of(bits).float() / (1 << 16)
    for encode, largest in [(blockwise.encode_first, LARGEST_FIRST), (blockwise.encode_second, LARGEST_SECOND)]:
        rows = blockwise.rows_of(x.abs())
        scales = blockwise.scales_of(rows)
        expected = encode(rows, scales, u)
        codes, kernels, decoded = codes_of(x.abs(), bits, largest)
        assert_same_bits(kernels, scales.view(-1))
        read = blockwise.decode(blockwise.rows_of(codes), scales, largest).view(-1)[: x.numel()]
        finite = read.isfinite()
        assert torch.equal(finite, decoded.isfinite()) and finite[: 7 * BLOCK].all() and not finite[7 * BLOCK + 9]
        assert_same_bits(decoded[finite], read[finite])
        if largest == LARGEST_SECOND:
            codes = torch.where(x != 0, codes.clamp_min(1), codes)  # what is not zero: the caller's part
        assert torch.equal(codes.int(), expected.view(-1)[: x.numel()].int())


def test_a_nan_reaches_the_moments_of_the_kernel(device: str) -> None:
    shard = Shard(device, torch.zeros(2 * BLOCK), moments=torch.int8, block=2 * BLOCK)
    grad = torch.ones(2 * BLOCK, device=device)
    grad[5] = math.nan
    shard.decide(torch.zeros(1, dtype=torch.float64, device=device))  # as without max_grad_norm: nobody looks
    shard.update(grad)
    for moment in shard.moments():
        assert moment[5].isnan() and moment[BLOCK:].isfinite().all()


@pytest.mark.parametrize("numel", [4096, 5000])
def test_randomness_follows_the_position_so_that_a_cut_between_blocks_changes_nothing(device: str, numel: int) -> None:
    initial, grads, cut = torch.randn(numel), gradients(4, numel), 3 * BLOCK
    whole = Shard(device, initial, moments=torch.int8, block=1024, seed=3)
    parts = [
        Shard(device, initial[a:b], moments=torch.int8, block=1024, seed=3, position=a)
        for a, b in ((0, cut), (cut, numel))
    ]
    for grad in grads:
        whole.step(grad)
        for part, its_grad in zip(parts, grad.split([cut, numel - cut]), strict=True):
            part.step(its_grad.contiguous())
    for name, value in whole.state().items():
        if name not in ("hyper", "steps"):
            assert_same_bits(torch.cat([part.state()[name] for part in parts]), value)
    other = Shard(device, initial, moments=torch.int8, block=1024, seed=3, position=BLOCK)
    for grad in grads:
        other.step(grad)
    assert not torch.equal(other.exp_avg, whole.exp_avg)


def assert_rounded_independently(first: torch.Tensor, second: torch.Tensor) -> None:
    """Of equal numbers' codes two neighbours occur, and which it is says nothing of the other moment or element."""
    ordinary = torch.arange(len(first)) % BLOCK > 0
    ups = []
    for codes in (first, second):
        some = codes.cpu()[ordinary].int()
        assert some.unique().numel() == 2
        ups.append((some - some.min()).double())
    pairs = [tuple(ups), *((up[:-lag], up[lag:]) for up in ups for lag in (1, 2, 4, BLOCK - 1))]
    for a, b in pairs:
        assert torch.corrcoef(torch.stack([a, b]))[0, 1].abs() < 5 / math.sqrt(len(a))


def equal_gradients() -> torch.Tensor:
    """One larger than the others in each block."""
    grad = torch.full((1 << 17,), 0.37)
    grad[::BLOCK] = 1.0
    return grad


def test_the_kernel_rounds_neighbours_and_both_moments_independently(device: str) -> None:
    shard = Shard(device, torch.zeros(1 << 17), moments=torch.int8, seed=7)
    shard.step(equal_gradients())
    assert_rounded_independently(shard.exp_avg, shard.exp_avg_sq)


@pytest.mark.slow
def test_the_cpu_rounds_neighbours_and_both_moments_independently() -> None:
    n = 1 << 17
    codes, roots = torch.zeros(n, dtype=torch.int8), torch.zeros(n, dtype=torch.uint8)
    scales = (torch.zeros(n // BLOCK), torch.zeros(n // BLOCK))
    hyper = cpu.Hyper(1e-3, 0.9, 0.999, 1e-8, 0.0, False, 1)
    cpu.adamw([torch.zeros(n)], [equal_gradients()], [codes], [roots], [None], hyper, 1.0, [7], [scales])
    assert_rounded_independently(codes, roots)


ERROR = 0.06
"""Of what AdamW moves weights by in 100 steps, root mean square: what 8-bit moments may change. 0.048 was measured."""


@pytest.mark.slow
def test_the_cpu_may_take_the_elements_in_chunks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for chunk in (1 << 19, 8 * BLOCK):
        monkeypatch.setattr(cpu, "CHUNK_8BIT", chunk)
        p = torch.nn.Parameter(torch.zeros(20 * BLOCK + 7))
        optimizer = zerofx.AdamW([p], moments="8bit")
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
        optimizer.step()
        found.append([p.detach(), *optimizer.state[p].values()])
    for whole, chunked in zip(*found, strict=True):
        assert torch.equal(whole, chunked)


def error_of(weights: torch.Tensor, initial: torch.Tensor, exact: torch.Tensor) -> float:
    moved = exact - initial.double()
    return ((weights.double() - exact).square().mean() / moved.square().mean()).sqrt().item()


def steady_gradients(numel: int) -> list[torch.Tensor]:
    """As of a layer that learns: half signal, half noise, sizes that differ by a factor of e or so within a block."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randn(numel, generator=generator).exp()
    signal = torch.randn(numel, generator=generator)
    return [(signal + torch.randn(numel, generator=generator)) * sizes for _ in range(100)]


@slow_if(lambda device: device == "cpu")
def test_after_100_steps_the_kernel_is_near_float64(device: str) -> None:
    initial, grads, row = torch.randn(5000), steady_gradients(5000), Row(lr=1e-3, weight_decay=0.0)
    shard = Shard(device, initial, rows=[row], moments=torch.int8)
    for grad in grads:
        shard.step(grad)
    exact = torch_adamw(initial, grads, rows=[row])
    assert error_of(shard.weights, initial, exact) < ERROR


@pytest.mark.slow
def test_after_100_steps_the_cpus_step_is_near_float64() -> None:
    initial, grads = torch.randn(5000, generator=torch.Generator().manual_seed(0)), steady_gradients(5000)
    param, codes, roots = initial.clone(), torch.zeros(5000, dtype=torch.int8), torch.zeros(5000, dtype=torch.uint8)
    scales = (torch.zeros(20), torch.zeros(20))
    for t, grad in enumerate(grads, start=1):
        hyper = cpu.Hyper(1e-3, 0.9, 0.999, 1e-8, 0.0, False, t)
        cpu.adamw([param], [grad], [codes], [roots], [None], hyper, 1.0, [t << 16], [scales])
    exact = torch_adamw(initial, grads, rows=[Row(lr=1e-3, weight_decay=0.0)])
    assert error_of(param, initial, exact) < ERROR
