"""Every kernel compiles for A100 and H100, without a GPU: no register spills, and 16 bytes per load and store."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels.test_adamw import KINDS
from zerofx.kernels import adamw, norm, quantize
from zerofx.kernels.code import Code
from zerofx.kernels.runs import TRITON, Kind
from zerofx.kernels.segments import BLOCK

POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}
TABLES = {"runs": torch.int64, "tiles": torch.int64, "hyper": torch.float64, "control": torch.float32}
WIDE = r"\.(?:v4\.[bf]32|v2\.[bf]64|v8\.[bf]16)\b"

pytestmark = [
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET is set: kernels do not compile"),
    pytest.mark.skipif(not Path(triton.knobs.nvidia.ptxas.path).exists(), reason="this triton brings no ptxas"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]


@pytest.fixture(params=[80, 90], ids="sm_{}".format)
def target(request: pytest.FixtureRequest) -> GPUTarget:
    return GPUTarget("cuda", request.param, 32)


def compiled(kernel: Any, target: GPUTarget, options: Mapping[str, Any], **arguments: Any) -> Any:
    """``kernel`` as a launch with these arguments compiles it: dtypes of pointers, "i32", "fp32", or a constant."""
    signature: dict[str, str] = {}
    constants, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        argument = arguments.pop(name)
        if isinstance(argument, torch.dtype):
            signature[name] = POINTERS[argument]
            attributes[(i,)] = [["tt.divisibility", 16]]  # as every tensor that torch allocates
        elif isinstance(argument, str):
            signature[name] = argument
        else:
            signature[name] = "constexpr"
            constants[(i,)] = argument
    assert not arguments
    annotated = {parameter.name: parameter.annotation_type for parameter in kernel.params}
    assert all(annotated[name] in ("", kind) for name, kind in signature.items() if kind[0] == "i"), annotated
    return triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options=dict(options))


def assert_no_spills(kernel: Any, tmp_path: Path) -> None:
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"STACK:(\d+)", usage) == ["0"], usage
    assert set(re.findall(r"LOCAL:(\d+)", usage)) <= {"0"}, usage


def wide(kernel: Any, operation: str) -> int:
    """Global loads ("ld") or stores ("st") of 16 bytes in a kernel's PTX."""
    return len(re.findall(rf"\b{operation}\.global[\w.]*?{WIDE}", kernel.asm["ptx"]))


def bytes_per_thread(*dtypes: torch.dtype | None) -> int:
    return sum(dtype.itemsize for dtype in dtypes if dtype) * BLOCK // (32 * adamw._OPTIONS["num_warps"])


@pytest.mark.parametrize("param, grad, moments, master", KINDS, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_adamw_moves_16_bytes_at_a_time_and_spills_nothing(
    target: GPUTarget,
    tmp_path: Path,
    param: torch.dtype,
    grad: torch.dtype,
    moments: torch.dtype,
    master: torch.dtype | None,
) -> None:
    codes = moments is torch.int8  # read and written 8 bytes at a time
    kind = Kind(param, grad, moments, master)
    seeds = torch.int64 if kind.seeded else None
    constants = {**adamw.constants(kind), "BLOCK": BLOCK}
    kernel = compiled(adamw._adamw, target, adamw._OPTIONS, **TABLES, seeds=seeds, **constants)
    assert_no_spills(kernel, tmp_path)
    wide_moments = (None, None) if codes else (moments, moments)
    written = bytes_per_thread(param, *wide_moments, master)
    read = bytes_per_thread(grad, *wide_moments, master if master is torch.float32 else param)
    if master is torch.int16:
        read += bytes_per_thread(master)
    assert 16 * wide(kernel, "st") == written
    assert 16 * wide(kernel, "ld") == read
    assert "fma.rn.f32" not in kernel.asm["ptx"].replace("fma.rn.f32x2", "")


@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16, torch.float16])
def test_the_norm_moves_16_bytes_at_a_time_and_spills_nothing(
    target: GPUTarget, tmp_path: Path, grad: torch.dtype
) -> None:
    tables = {"runs": torch.int64, "tiles": torch.int64, "n_tiles": "i32", "out": torch.float64}
    constants = {"GRAD": TRITON[grad], "ALIGNED": True, "BLOCK": BLOCK}
    kernel = compiled(norm._partial_sums, target, norm._OPTIONS | {"num_warps": 4}, **tables, **constants)
    assert_no_spills(kernel, tmp_path)
    assert 16 * wide(kernel, "ld") == bytes_per_thread(grad)


@pytest.mark.parametrize("given", [True, False])
def test_finalize_compiles_once_for_any_number_of_parameters(target: GPUTarget, tmp_path: Path, given: bool) -> None:
    tables = {"total": torch.float64, "hyper": torch.float64, "steps": torch.float32, "control": torch.float32}
    scaling = dict.fromkeys(("scale", "found_inf"), torch.float32 if given else None)
    arguments = {**tables, **scaling, "max_norm": "fp32", "rows": "i32", "ROWS": norm.ROWS}
    assert_no_spills(compiled(norm._finalize, target, norm._OPTIONS | {"num_warps": 4}, **arguments), tmp_path)


@pytest.mark.parametrize("code", [Code("int8"), Code("int4"), Code("fp8"), Code("int8", 96), Code("int4", 96)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_written_and_read_without_spills(
    target: GPUTarget, tmp_path: Path, dtype: torch.dtype, code: Code
) -> None:
    layout = {"blocks": "i32", **quantize._shape(code)}
    strides = dict.fromkeys(("codes_stride", "scales_stride"), "i64")
    buffers = {"codes": torch.uint8, "scales": torch.float32}
    arguments = {"x": dtype, **buffers, **strides, "x_stride": "i64", "largest": "fp32", "step": "fp32", **layout}
    for stochastic in (False, True) if code.name != "fp8" else (False,):
        writes = compiled(quantize._encode, target, quantize._OPTIONS, **arguments, STOCHASTIC=stochastic)
        assert_no_spills(writes, tmp_path)
    for add in (False, True) if dtype == torch.float32 else (False,):
        arguments = {**buffers, "out": dtype, **strides, "out_stride": "i64", **layout, "ADD": add}
        assert_no_spills(compiled(quantize._decode, target, quantize._OPTIONS, **arguments), tmp_path)
