"""Codes on the wire: what they lose against float64, what is not finite, and that Triton writes the same bits."""

from __future__ import annotations

import functools
import itertools
from importlib.util import find_spec

import pytest
import torch

from tests.slow import quick_if
from zerofx.kernels import wire
from zerofx.kernels.code import LARGEST, TINY, Code

CODES = [Code("bf16"), Code("fp8"), Code("int8"), Code("int4"), Code("int8", stochastic=True)]
CODES += [Code("int4", stochastic=True)]
SIZES = [32, 64, 96, 128, 256, 1024]


def blocks_of_all_kinds(length: int) -> torch.Tensor:
    """[2, 12 · length]: two rows of blocks, each block of another kind."""
    generator = torch.Generator().manual_seed(length)

    def normal() -> torch.Tensor:
        return torch.randn(length, generator=generator)

    outlier, one = normal() * 1e-6, torch.zeros(length)
    outlier[length // 3], one[-1] = 1e6, -3.0
    wide = normal() * (normal() * 3).exp()
    kinds = [normal(), wide, outlier, one, torch.zeros(length), normal() * 1e-40, normal() * TINY, normal() * 1e30]
    kinds += [normal().abs(), -normal().abs(), torch.full((length,), 0.1), torch.arange(length) - length / 2]
    return torch.stack([torch.cat(kinds), torch.cat(kinds[::-1])])


def there_and_back(x: torch.Tensor, code: Code) -> torch.Tensor:
    row = torch.full((len(x), code.nbytes(x.shape[1]) + 32), 77, dtype=torch.uint8)
    wire.encode(x, code, row)
    assert row[:, -32:].eq(77).all()  # what stands behind a row is somebody else's
    out = torch.empty_like(x)
    wire.decode(row, code, out)
    return out


def bound(x: torch.Tensor, code: Code) -> torch.Tensor:
    """The table's, in float64."""
    x = x.double().abs()
    if code.name == "bf16":
        return x / 256 + 2.0**-134
    most = x.unflatten(1, (-1, code.block)).amax(-1, keepdim=True).expand(-1, -1, code.block).flatten(1)
    step = most / LARGEST[code.name]
    of_codes = (x / 16).clamp_min(most / 448 / 1024) if code.name == "fp8" else step * (1.0 if code.stochastic else 0.5)
    return torch.where(most < TINY, most, of_codes * (1 + 1e-4))


@quick_if(lambda block: block in (96, 256))
@pytest.mark.parametrize("block", SIZES)
@pytest.mark.parametrize("code", CODES, ids=str)
def test_every_block_comes_back_within_the_bound_of_its_formula(code: Code, block: int) -> None:
    code = Code(code.name, block, code.stochastic)
    x = blocks_of_all_kinds(block)
    error = (there_and_back(x, code).double() - x.double()).abs()
    assert (error <= bound(x, code)).all(), (error / bound(x, code)).max()


@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("odd", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_seen_in_its_block_and_in_no_other(code: Code, odd: float) -> None:
    x = torch.randn(1, 3 * code.block, generator=torch.Generator().manual_seed(0))
    x[0, code.block + 5] = odd
    finite = there_and_back(x, code).isfinite().view(3, -1)
    assert finite[0].all() and finite[2].all() and not finite[1].all()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_rounded_stochastically_a_number_goes_up_as_often_as_it_is_near_to_the_upper_code(name: str) -> None:
    code = Code(name, stochastic=True)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1, 4096 * code.block, generator=generator) * 2 - 1
    x *= (1 + torch.rand(4096, generator=generator)).repeat_interleave(code.block)
    step = (x.view(4096, -1).abs().amax(-1) / LARGEST[name]).double().repeat_interleave(code.block)
    exact = x.double()[0] / step
    found = there_and_back(x, code).double()[0] / step
    up, part = (found.round() > exact).double(), exact - exact.floor()
    for tenth in range(10):
        inside = (part >= tenth / 10) & (part < (tenth + 1) / 10)
        n = int(inside.sum())
        assert n > 50_000
        assert abs(up[inside].mean() - part[inside].mean()) < 5 * 0.5 / n**0.5, tenth


@pytest.mark.parametrize("code", CODES, ids=str)
def test_what_was_coded_is_added_in_float32(code: Code) -> None:
    x = blocks_of_all_kinds(256)[:1]
    row = torch.zeros(1, code.nbytes(x.shape[1]), dtype=torch.uint8)
    wire.encode(x, code, row)
    alone, start = torch.empty_like(x), torch.randn_like(x)
    wire.decode(row, code, alone)
    total = start.clone()
    wire.add(row, code, total)
    assert total.equal(start + alone)


@pytest.mark.parametrize(("name", "bits"), [("bf16", 16), ("fp8", 8.125), ("int8", 8.125), ("int4", 4.125)])
def test_a_row_takes_the_bytes_of_its_codes_and_scales(name: str, bits: float) -> None:
    code = Code(name)  # type: ignore[arg-type]
    assert code.nbytes(1024 * 256) == 1024 * 256 * bits / 8
    assert Code.of(str(code)) == code


@quick_if(lambda device, block: device == "cuda" or block in (96, 256))
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("block", SIZES)
@pytest.mark.parametrize("code", [c for c in CODES if c.name != "bf16"], ids=str)
def test_triton_writes_and_reads_the_same_bits(device: str, code: Code, block: int) -> None:
    import torch

    from tests.kernels.test_wire import blocks_of_all_kinds, bound
    from zerofx.kernels import quantize, wire
    from zerofx.kernels.code import Code

    code = Code(code.name, block, code.stochastic)
    x = blocks_of_all_kinds(block)
    finite = x.clone()
    x[0, 3], x[1, 2 * block + 3], x[1, 3 * block + 1], x[0, -1] = torch.inf, torch.nan, -torch.inf, -torch.nan
    if code.name == "fp8":
        wanted, scales = wire._encode_fp8(x.unflatten(1, (-1, block)))
    else:
        how = wire.LARGEST[code.name], code.name == "int4", code.stochastic
        wanted, scales = wire._encode(x.unflatten(1, (-1, block)), *how)
    row = torch.zeros(2, code.nbytes(x.shape[1]), dtype=torch.uint8, device=device)
    codes, found = code.parts(row, x.shape[1])
    quantize.encode(x.to(device).unflatten(1, (-1, block)), code, codes, found)
    assert codes.cpu().equal(wanted)
    odd = scales.isnan()  # whose bits are the device's
    assert found.cpu().isnan().equal(odd)
    assert found.cpu()[~odd].view(torch.int32).equal(scales[~odd].view(torch.int32))

    for dtype in (torch.float32, torch.bfloat16):
        out = torch.ones(2, x.shape[1], dtype=dtype, device=device)
        plain = torch.ones(2, x.shape[1], dtype=dtype)
        for add in (False, True) if dtype == torch.float32 else (False,):
            quantize.decode(codes, found, code, out.unflatten(1, (-1, block)), add)
            if code.name == "fp8":
                wire._decode_fp8(wanted, scales, plain.unflatten(1, (-1, block)), add)
            else:
                wire._decode(wanted, scales, plain.unflatten(1, (-1, block)), code.name == "int4", add)
            assert torch.equal(out.cpu().nan_to_num(), plain.nan_to_num())
            assert torch.equal(out.cpu().isnan(), plain.isnan())
            assert torch.equal(out.cpu().signbit() & out.cpu().isfinite(), plain.signbit() & plain.isfinite())

    quantize.encode(finite.to(device).unflatten(1, (-1, block)), code, codes, found)
    back = torch.empty(2, x.shape[1], device=device)
    quantize.decode(codes, found, code, back.unflatten(1, (-1, block)), False)
    assert ((back.cpu().double() - finite.double()).abs() <= bound(finite, code)).all()


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
def test_a_gpus_nan_is_read_as_nan_by_all_of_its_block(device: str, name: str, dtype: str) -> None:
    import torch

    from zerofx.kernels import quantize
    from zerofx.kernels.code import Code

    code = Code(name)  # type: ignore[arg-type]
    x = torch.ones(1, 2, 256, device=device)
    x[0, 1, 3] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)  # what a GPU makes, all bits set
    codes, scales = code.parts(torch.zeros(1, code.nbytes(512), dtype=torch.uint8, device=device), 512)
    quantize.encode(x, code, codes, scales)
    out = torch.empty(1, 2, 256, dtype=getattr(torch, dtype), device=device)
    quantize.decode(codes, scales, code, out, False)
    assert out[0, 1].isnan().all() and out[0, 0].isfinite().all()


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_triton_rounds_to_fp8_as_pytorch_does_at_every_code_and_between(device: str) -> None:
    """All codes, what lies half-way between two, and the floats next to that on both sides. A scale of one."""
    import torch

    from zerofx.kernels import quantize
    from zerofx.kernels.code import Code

    code = Code("fp8", block=1024)
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (codes[1:] + codes[:-1]) / 2
    near = [codes, halves, halves.nextafter(torch.zeros(())), halves.nextafter(torch.tensor(448.0))]
    near += [codes.nextafter(torch.zeros(())), codes[:-1].nextafter(torch.tensor(448.0))]
    x = torch.cat([*near, torch.tensor([1e-3, 2.0**-10, 1e-38, 1e-45])])
    x = torch.cat([x, torch.full((1024 - len(x),), 448.0)])
    x = torch.stack([x, -x])
    row = torch.zeros(2, code.nbytes(1024), dtype=torch.uint8, device=device)
    bytes_, scales = code.parts(row, 1024)
    quantize.encode(x.to(device).view(2, 1, 1024), code, bytes_, scales)
    assert scales.eq(1).all()
    assert bytes_.cpu().view(2, 1024).equal(x.to(torch.float8_e4m3fn).view(torch.uint8))

    every = torch.arange(256, dtype=torch.uint8, device=device).view(1, 1, 256)
    out = torch.empty(1, 1, 256, device=device)
    quantize.decode(every, torch.ones(1, 1, 1, device=device), Code("fp8", block=256), out, False)
    wanted = every.cpu().view(torch.float8_e4m3fn).float()
    assert out.cpu().isnan().equal(wanted.isnan())
    there = ~wanted.isnan()
    assert out.cpu()[there].view(torch.int32).equal(wanted[there].view(torch.int32))


def test_no_number_of_codes_dtypes_and_blocks_reaches_the_limit_at_which_dynamo_stops_compiling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    wire._compiled.cache_clear()
    try:
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            for block, dtype in itertools.product((32, 64, 96), (torch.float32, torch.bfloat16)):
                code = Code("int8", block)
                for rows, blocks in ((1, 1), (2, 3)):
                    x = torch.ones(rows, blocks * block, dtype=dtype)
                    coded = torch.empty(rows, code.nbytes(x.shape[1]), dtype=torch.uint8)
                    wire.encode(x, code, coded)
                    wire.decode(coded, code, x)
                    wire.add(coded, code, x)
                    assert torch.equal(x, torch.full_like(x, 2.0))
    finally:
        wire._compiled.cache_clear()
