"""What `zerofx.AdamW` launches on a GPU, compiled: each kernel for each kind of weights, gradients and moments."""

from __future__ import annotations

import re
import subprocess
import tempfile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from tests.kernels.test_adamw import KINDS
from tests.kernels.test_machine_code import TABLES, compiled
from zerofx.kernels import adamw, norm
from zerofx.kernels.runs import TRITON, Kind
from zerofx.kernels.segments import BLOCK


def kernels(capability: int) -> list[dict[str, Any]]:
    """Each kernel's name, what it is for, registers and spills."""
    target, found = GPUTarget("cuda", capability, 32), []
    for param, grad, moments, master in KINDS:
        kind = Kind(param, grad, moments, master)
        seeds = torch.int64 if kind.seeded else None
        constants = {**adamw.constants(kind), "BLOCK": BLOCK}
        kernel = compiled(adamw._adamw, target, adamw._OPTIONS, **TABLES, seeds=seeds, **constants)
        of = ", ".join(_text(dtype) for dtype in (param, grad, moments, master))
        found.append({"kernel": "adamw", "of": of, **_usage(kernel)})
    for grad in (torch.float32, torch.bfloat16, torch.float16):
        tables = {"runs": torch.int64, "tiles": torch.int64, "n_tiles": "i32", "out": torch.float64}
        constants = {"GRAD": TRITON[grad], "ALIGNED": True, "BLOCK": BLOCK}
        options = norm._OPTIONS | {"num_warps": 4}
        kernel = compiled(norm._partial_sums, target, options, **tables, **constants)
        found.append({"kernel": "partial_sums", "of": _text(grad), **_usage(kernel)})
    for given in (True, False):
        tables = {"total": torch.float64, "hyper": torch.float64, "steps": torch.float32, "control": torch.float32}
        scaling = dict.fromkeys(("scale", "found_inf"), torch.float32 if given else None)
        arguments = {**tables, **scaling, "max_norm": "fp32", "rows": "i32", "ROWS": 8}
        kernel = compiled(norm._finalize, target, norm._OPTIONS | {"num_warps": 1}, **arguments)
        found.append({"kernel": "finalize", "of": "scaled losses" if given else "", **_usage(kernel)})
    return found


def _text(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _usage(kernel: Any) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=850).stdout
    registers, stack = (int(re.search(rf"{word}:(\d+)", said)[1]) for word in ("REG", "STACK"))  # type: ignore[index]
    return {"registers": registers, "spilled": stack}
