"""``make cuda-dry``: writes, reads and compiles the CUDA code of every model in every stage, without a GPU.

    make cuda-dry                                                   # all of it, anew
    make cuda-dry ARGS=--resume                                     # what a run that was cut off has left
    make cuda-dry ARGS="--models gpt --stages 3 --precisions mixed --architectures sm_90"

What was found is in benchmarks/results/cuda_dry.json, and as tables in docs/cuda-dry.md. Exit status 1 where code was
not written, a rule did not hold, or a kernel was not compiled.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import triton

import zerofx
from tests.cuda_dry import adamw
from tests.cuda_dry.models import MODELS
from tests.cuda_dry.page import write_page
from tests.cuda_dry.reading import facts
from zerofx._torch import ARCHITECTURES, KernelText, kernel_texts, machine_code

RESULTS = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "results" / "cuda_dry.json"
PRECISIONS = {"float32": None, "mixed": zerofx.MixedPrecision(torch.bfloat16, torch.float32)}
WORLD = 8


def main() -> int:
    args = _arguments()
    found = json.loads(RESULTS.read_text()) if args.resume and RESULTS.exists() else {"rows": {}, "adamw": {}}
    found |= {"torch": torch.__version__, "triton": triton.__version__, "world_size": WORLD}
    known: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for architecture in args.architectures:
        if architecture not in found["adamw"]:
            found["adamw"][architecture] = adamw.kernels(ARCHITECTURES[architecture].capability)
        for precision in args.precisions:
            for model in args.models:
                for stage in args.stages:
                    name = f"{model}, stage {stage}, {precision}, {architecture}"
                    if name not in found["rows"]:
                        found["rows"][name] = row = _row(model, stage, precision, architecture, known)
                        print(name, f"{row['seconds']} s", row.get("error", "")[:300], flush=True)
                        _write(found)
                        write_page(found)
    write_page(found)
    rows = found["rows"].values()
    return int(any("error" in row or any(code["error"] for code in row["compiled"]) for row in rows))


def _write(found: dict[str, Any]) -> None:
    """A line for each row."""
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in found["rows"].items())
    rest = json.dumps({key: value for key, value in found.items() if key != "rows"}, indent=1).removesuffix("\n}")
    RESULTS.write_text(f'{rest},\n "rows": {{\n{rows}\n }}\n}}\n')


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make cuda-dry ARGS=...")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--stages", nargs="+", type=int, choices=range(4), default=range(4))
    parser.add_argument("--precisions", nargs="+", choices=list(PRECISIONS), default=list(PRECISIONS))
    parser.add_argument("--architectures", nargs="+", choices=list(ARCHITECTURES), default=["sm_90", "sm_80"])
    parser.add_argument("--resume", action="store_true", help="keep what was found, run what is not there")
    return parser.parse_args()


def _row(
    model: str, stage: int, precision: str, architecture: str, known: dict[tuple[str, str], list[dict[str, Any]]]
) -> dict[str, Any]:
    """One model in one stage."""
    start = time.monotonic()
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, batch = MODELS[model]()
    row: dict[str, Any] = {
        **{"model": model, "stage": stage, "precision": precision, "architecture": architecture},
        **{"phases": {}, "compiled": [], "kernels": 0},
    }
    try:
        record = zerofx.dry_run(
            module,
            call=batch,
            world_size=WORLD,
            backend="nccl",
            device="cuda",
            code=True,
            architecture=architecture,
            stage=stage,
            mixed_precision=PRECISIONS[precision],
            groups=zerofx.Grouping(min_bytes=0),
        )
    except Exception as e:  # a line of the table
        return row | {"error": f"{type(e).__name__}: {e}", "seconds": round(time.monotonic() - start)}
    for trace in record.traces():
        row["phases"][trace.name] = facts(trace)
        kernels = kernel_texts(trace.code or "")
        row["kernels"] += len(kernels)
        row["compiled"] += [{"phase": trace.name, **code} for code in _compile(kernels, architecture, known)]
    row["seconds"] = round(time.monotonic() - start)
    return row


def _compile(
    kernels: list[KernelText], architecture: str, known: dict[tuple[str, str], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Each configuration of each kernel; one that another row had, under whatever name, is not compiled again."""
    new = [kernel for kernel in kernels if (kernel.nameless, architecture) not in known]
    found = machine_code(new, architecture) if new else []
    for kernel in new:
        known[kernel.nameless, architecture] = [vars(code) for code in found if code.kernel == kernel.name]
    return [{**code, "kernel": kernel.name} for kernel in kernels for code in known[kernel.nameless, architecture]]


if __name__ == "__main__":
    sys.exit(main())
