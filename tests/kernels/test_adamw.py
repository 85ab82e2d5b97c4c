"""AdamW's numbers: against float64, over many steps and within one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.kernels.shards import Row, Shard, assert_same_bits, torch_adamw
from tests.slow import slow_if
from zerofx.kernels.adamw import adamw
from zerofx.kernels.runs import Buffers, Kind, aligned
from zerofx.kernels.segments import make_tiles

EPS = 2.0**-24
"""What rounding to float32 may be off, relatively; 2^-8 for bfloat16, 2^-11 for float16."""
HALF_ULP = {torch.float32: EPS, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

SEVERAL_ROWS = (
    Row(),
    Row(lr=3e-4, betas=(0.8, 0.95), weight_decay=0.0),
    Row(lr=1e-1, betas=(0.0, 0.99), eps=1e-3, maximize=True),
)
SEGMENTS = [(0, 127, 0), (128, 0, 2), (128, 1, 1), (160, 700, 2), (864, 96, 1), (960, 64, 0)]

MASTERS: dict[torch.dtype, list[torch.dtype | None]] = {
    torch.float32: [None],
    torch.bfloat16: [None, torch.float32, torch.int16],
    torch.float16: [None, torch.float32],
}
KINDS = [
    (param, grad, moments, master)
    for param, masters in MASTERS.items()
    for grad in dict.fromkeys([torch.float32, param])
    for moments in (torch.float32, torch.bfloat16, torch.int8)
    for master in masters
]


def gradients(steps: int, numel: int, seed: int = 1) -> list[torch.Tensor]:
    """Of many magnitudes, as those of different layers are."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(numel, generator=generator).mul(3).exp()
    return [torch.randn(numel, generator=generator) * sizes for _ in range(steps)]


def rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item() if x.numel() else 0.0


def assert_as_close_as_torch(ours: torch.Tensor, exact: torch.Tensor, torchs: torch.Tensor, steps: int) -> None:
    """Twice torch's error, since both are chance; and what `steps` roundings of p add up to, lest one be lucky."""
    drift = math.sqrt(steps) * EPS * rms(exact)
    assert rms(ours.double() - exact) <= 2 * rms(torchs.double() - exact) + drift


@slow_if(lambda device, numel: device == "cpu" and numel < 1023)
@pytest.mark.parametrize("numel, steps", [(0, 100), (1, 100), (127, 100), (1023, 100), ((1 << 20) + 3, 4)])
def test_after_many_steps_it_is_as_close_to_float64_as_torch_is(device: str, numel: int, steps: int) -> None:
    initial, grads = torch.randn(numel), gradients(steps, numel)
    shard = Shard(device, initial)
    for grad in grads:
        shard.step(grad)
    exact, torchs = (torch_adamw(initial, grads, dtype=dtype) for dtype in (torch.float64, torch.float32))
    assert shard.steps.tolist() == [steps]
    assert_as_close_as_torch(shard.weights, exact, torchs, steps)


@slow_if(lambda device: device == "cpu")
def test_segments_follow_their_own_rows_and_all_between_them_stays(device: str) -> None:
    initial, grads = torch.randn(1024), gradients(100, 1024)
    shard = Shard(device, initial, SEGMENTS, SEVERAL_ROWS)
    between = torch.ones(1024, dtype=torch.bool)
    for start, length, _ in SEGMENTS:
        between[start : start + length] = False
    for grad in grads:
        grad[between] = math.nan  # neither the norm nor the update may look there
        shard.step(grad)
    arguments = (initial, grads, SEGMENTS, SEVERAL_ROWS)
    exact, torchs = (torch_adamw(*arguments, dtype=dtype) for dtype in (torch.float64, torch.float32))
    for start, length, _ in SEGMENTS:
        piece = slice(start, start + length)
        assert_as_close_as_torch(shard.weights[piece], exact[piece], torchs[piece], len(grads))
    assert_same_bits(shard.weights[between], initial[between])
    for moment in (shard.exp_avg, shard.exp_avg_sq):
        assert not moment.cpu()[between].any()


@slow_if(lambda device, dtype: device == "cpu" and dtype == torch.bfloat16)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights_without_master_are_as_close_as_torchs(device: str, dtype: torch.dtype) -> None:
    initial, grads = torch.randn(1023).to(dtype).float(), [grad.clamp(-50, 50) for grad in gradients(50, 1023)]
    grads, rows = [grad.to(dtype) for grad in grads], [Row(eps=1e-4)]  # 1e-8 is zero in float16, and torch's step NaN
    shard = Shard(device, initial, rows=rows, dtype=dtype)
    for grad in grads:
        shard.step(grad)
    exact, torchs = (torch_adamw(initial, grads, rows=rows, dtype=t).double() for t in (torch.float64, dtype))
    assert_as_close_as_torch(shard.weights, exact, torchs, len(grads))


@pytest.mark.parametrize("param, grad, moments, master", KINDS, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_a_step_rounds_every_number_once(
    device: str, param: torch.dtype, grad: torch.dtype, moments: torch.dtype, master: torch.dtype | None
) -> None:
    row = Row(lr=0.03, betas=(0.9, 0.99), weight_decay=0.2)
    shard = Shard(device, torch.randn(1000), rows=[row], dtype=param, moments=moments, master=master)
    for t, g in enumerate(gradients(6, 1000), start=1):
        g = g.clamp(-100, 100).to(grad)
        p, m, v = (x.cpu().double() for x in (shard.weights, *shard.moments()))
        shard.step(g, max_norm=3.0, scale=128.0)
        g = g.double() * shard.control[0].item()
        *_, size = exact_step(row, t, g.abs(), m.abs(), v)  # of what may cancel
        m_before, (m, v, update) = m, exact_step(row, t, g, m, v)
        within(shard.weights, p * (1 - row.lr * row.weight_decay) - update, p, size)
        if master is torch.float32:
            assert_same_bits(shard.param, shard.weights.to(param))
        if moments is torch.int8:
            for scales, got, exact, largest in zip(
                shard.scales or (), shard.moments(), (m, v.sqrt()), (127, 255), strict=True
            ):
                got = got.double() if largest == 127 else got.double().sqrt()
                within_a_code(got, exact, scales.cpu(), largest)
            continue
        once = 1 if moments is torch.float32 else 2  # rounded up or down, not to nearest
        within(shard.exp_avg, m, m_before, g, once=once)
        within(shard.exp_avg_sq, v, v, once=once)


def within_a_code(got: torch.Tensor, exact: torch.Tensor, scales: torch.Tensor, largest: int) -> None:
    """``got`` is a code next to ``exact``: nothing is between them but less than a step of the code."""
    scale = scales.double().repeat_interleave(256)[: len(exact)]
    steps, wanted = ((x.abs() / scale).sqrt() * largest for x in (got, exact))
    assert ((steps - wanted).abs() <= 1.001).all()
    assert ((got == 0) | (got.sign() == exact.sign())).all()


def exact_step(
    row: Row, t: int, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both moments after step t, and what is taken from the weights, in float64."""
    beta1, beta2 = row.betas
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    update = row.lr / (1 - beta1**t) * m / (v.sqrt() / math.sqrt(1 - beta2**t) + row.eps)
    return m, v, update


def within(got: torch.Tensor, exact: torch.Tensor, *sizes: torch.Tensor, once: int = 1) -> None:
    """``got`` is ``exact`` rounded once to its dtype, after a handful of float32 operations on ``sizes``."""
    stored = HALF_ULP[got.dtype] * once * exact.abs() * 1.001
    worked = sum(8 * EPS * size.abs() for size in sizes)
    error = (got.cpu().double() - exact).abs()
    subnormal = 2 * HALF_ULP[got.dtype] * torch.finfo(got.dtype).smallest_normal
    assert (error <= stored + worked + subnormal).all()


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16, torch.int8])
def test_two_runs_and_any_block_give_the_same_bits(device: str, moments: torch.dtype) -> None:
    initial, grads = torch.randn(1000), gradients(3, 1000)
    states = []
    for block in (1024, 1024, 256, 4096):
        shard = Shard(device, initial, moments=moments, block=block, seed=5)
        for grad in grads:
            shard.step(grad)
        states.append(shard.state())
    for state in states[1:]:
        for name in state:
            assert_same_bits(state[name], states[0][name])


def test_a_tile_may_be_longer_than_the_block_that_works_through_it(device: str) -> None:
    initial, (grad,) = torch.randn(1000), gradients(1, 1000)
    whole, parts = Shard(device, initial, block=1024), Shard(device, initial, block=1024)
    whole.step(grad)
    parts.block = 128
    parts.step(grad)
    assert_same_bits(whole.param, parts.param)
    assert whole.control[2].item() == pytest.approx(parts.control[2].item(), rel=EPS * 2)


@pytest.mark.parametrize("master", [None, torch.float32, torch.int16])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16, torch.int8])
def test_a_gpus_nan_stays_nan(device: str, moments: torch.dtype, master: torch.dtype | None) -> None:
    shard = Shard(device, torch.ones(256), dtype=torch.bfloat16, moments=moments, master=master)
    grad = torch.ones(256)
    grad[3] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)  # what a GPU makes, all bits set
    shard.control[0] = 1.0  # as without max_grad_norm: nobody looks whether it is finite
    shard.hyper[:, 5:7] = 0.5
    shard.update(grad.to(device))
    state = shard.state()
    odd = [name for name, x in state.items() if x.is_floating_point() and x.numel() == 256 and not x[3].isnan()]
    assert not odd
    if moments is torch.int8:
        assert all(scale.isnan().all() for scale in shard.scales)  # type: ignore[union-attr]


def test_runs_of_one_launch_are_stepped_as_each_alone_wherever_they_lie(device: str) -> None:
    """Of several buffers, one of which starts on no multiple of 16 bytes."""
    initial, grads = torch.randn(3000), [g.to(device) for g in gradients(3, 3000)]
    ends = [(0, 1000), (1000, 1001), (1001, 3000)]
    alone = [Shard(device, initial[a:b], moments=torch.bfloat16, seed=7, position=4 * a) for a, b in ends]
    flat, ours = torch.zeros(3100, device=device), []
    for (a, b), offset in zip(ends, (0, 1001, 1020), strict=True):
        param = flat[offset : offset + b - a].copy_(initial[a:b].to(device))
        ours.append(Buffers(param, *(torch.zeros(b - a, dtype=torch.bfloat16, device=device) for _ in range(2))))
    whole, block = Shard(device, initial), alone[2].block
    tiles = make_tiles([[(0, b - a, 0)] for a, b in ends], block).to(device)
    seeds = torch.tensor([0, 7], device=device)
    for step, grad in enumerate(grads):
        for one, (a, b) in zip(alone, ends, strict=True):
            one.step(grad[a:b].clone())
        whole.decide(torch.ones(1, dtype=torch.float64, device=device))
        rows = [buffers.row(0, grad[a:].data_ptr(), 4 * a, 1) for buffers, (a, _) in zip(ours, ends, strict=True)]
        assert [aligned(row) for row in rows] == [True, False, False]
        kind = ours[0].kind(torch.float32, aligned=False)
        adamw(kind, torch.tensor(rows, device=device), tiles, whole.hyper, whole.control, seeds + step, block=block)
    for one, buffers in zip(alone, ours, strict=True):
        assert_same_bits(one.param, buffers.param)
        assert_same_bits(one.exp_avg, buffers.exp_avg)
        assert_same_bits(one.exp_avg_sq, buffers.exp_avg_sq)
    assert not flat[1000] and not flat[3019:].any()


def test_buffers_that_it_cannot_step_are_refused() -> None:
    p, low, whole = torch.zeros(32), torch.zeros(32, dtype=torch.bfloat16), torch.zeros(32, dtype=torch.int16)
    codes, roots, scales = p.to(torch.int8), p.to(torch.uint8), (torch.zeros(1), torch.zeros(1))
    refused: list[tuple[tuple[torch.Tensor, ...], dict[str, Any], str]] = [
        ((p.int(), p, p), {}, "param is float32"),
        ((p.double(), p, p), {}, "takes no torch.float32 moments"),
        ((p, p.double(), p.double()), {}, "takes no torch.float64 moments"),
        ((p, p, low), {}, "moments are both"),
        ((p, codes, codes), {"scales": scales}, "int8 and uint8, not torch.int8 and torch.int8"),
        ((p, codes, roots), {}, "need scales"),
        ((p, p, p), {"scales": scales}, "need scales"),
        ((p, p, p), {"master": p}, "takes no torch.float32 master"),
        ((low.half(), p, p), {"master": whole}, "takes no torch.int16 master"),
    ]
    for buffers, options, message in refused:
        with pytest.raises(TypeError, match=message):
            Buffers(*buffers, **options)
    for buffers in [(p, p[:31], p), (p, p[None], p), (p, torch.zeros(64)[::2], p)]:
        with pytest.raises(ValueError, match="32 contiguous elements"):
            Buffers(*buffers)
    for wrong, message in [
        ((scales[0], torch.zeros(2)), r"scales are contiguous float32 \[1\], not torch.float32 \[2\]"),
        ((scales[0], scales[1].half()), "not torch.float16"),
    ]:
        with pytest.raises(ValueError, match=message):
            Buffers(p, codes, roots, wrong)
    with pytest.raises(TypeError, match="grad is float32"):
        Buffers(p, p, p).kind(torch.bfloat16)
    with pytest.raises(ValueError, match="position=2"):
        Buffers(p, p, p).row(0, 0, 2, 0)


def test_tables_that_it_cannot_read_are_refused() -> None:
    integers = torch.zeros(0, 9, dtype=torch.int64), torch.zeros(0, 4, dtype=torch.int64)
    tables = (*integers, torch.zeros(1, 8, dtype=torch.float64), torch.zeros(4))
    float32, codes = (Kind(torch.float32, torch.float32, moments) for moments in (torch.float32, torch.int8))
    seeds = torch.zeros(1, dtype=torch.int64)
    adamw(float32, *tables)
    adamw(codes, *tables, seeds)
    with pytest.raises(TypeError, match="need seeds"):
        adamw(codes, *tables)
    with pytest.raises(TypeError, match="seeds are int64"):
        adamw(codes, *tables, seeds.int())
    with pytest.raises(ValueError, match="block=128 is a multiple of 256"):
        adamw(codes, *tables, seeds, block=128)
    for i, name in enumerate(("runs", "tiles", "hyper", "control")):
        wrong = [*tables[:i], tables[i].half(), *tables[i + 1 :]]
        with pytest.raises(ValueError, match=name):
            adamw(float32, *wrong)
