"""``python -m zerofx``: questions about a model, answered without the model.

::

    $ python -m zerofx plan --model llama-3.1-8b --world-size 16 --gpu-memory 80GB

What it prints is `zerofx.plan`; errors go to stderr, and the exit status is 2 then, or 1 if no stage fits.
"""

from __future__ import annotations

import argparse
import re
import sys

import torch

from zerofx import shapes
from zerofx.plan import plan
from zerofx.precision import MixedPrecision

_DTYPES = {
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
    "fp32": (torch.float32, None),
    "mixed": (torch.float32, MixedPrecision(torch.bfloat16)),
}
_UNITS = {"": 1, "B": 1} | {
    prefix + unit: base**power
    for unit, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT", start=1)
}


def parse_bytes(text: str) -> float:
    """``80GB`` and ``80GiB`` as bytes: decimal units and binary ones.

    Raises:
        ValueError: no number of bytes, more than 0.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = match[2].upper().replace("I", "i") if match else None
    if match is None or unit not in _UNITS or not float(match[1]) > 0:
        raise ValueError(f"{text!r}: expected bytes, such as 80GB or 80GiB.")
    return float(match[1]) * _UNITS[unit]


def _bytes(text: str) -> float:
    try:
        return parse_bytes(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from e


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m zerofx", description="ZeRO as a compiler: questions about a model.")
    commands = parser.add_subparsers(dest="command", required=True)
    planning = commands.add_parser("plan", help="what each stage would cost, and which one fits")
    planning.add_argument(
        "--model", required=True, help=f"one of {', '.join(shapes.SHAPES)}; or a Hugging Face config.json"
    )
    planning.add_argument("--world-size", type=int, required=True, metavar="M", help="number of ranks")
    planning.add_argument("--gpu-memory", type=_bytes, metavar="BYTES", help="of one rank: 80GB, 80GiB")
    planning.add_argument(
        "--dtype",
        choices=_DTYPES,
        default="bf16",
        help="of the parameters; 16 bits have float32 masters in zerofx.AdamW, mixed is float32 and computes in bf16",
    )
    planning.add_argument("--micro-batches", type=int, default=1, metavar="K", help="backwards per optimizer step")
    planning.add_argument("--no-sync", action="store_true", help="all but the last under zerofx.no_sync")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    given = _parser().parse_args(arguments)
    dtype, precision = _DTYPES[given.dtype]
    try:
        made = plan(
            shapes.build(given.model, dtype),
            world_size=given.world_size,
            memory=given.gpu_memory,
            mixed_precision=precision,
            micro_batches=given.micro_batches,
            no_sync=given.no_sync,
        )
    except (ValueError, ModuleNotFoundError) as e:
        print(f"python -m zerofx plan: {e}", file=sys.stderr)
        return 2
    print(f"{given.model}, {given.dtype}: {made}")
    return 0 if made.memory is None or made.recommended is not None else 1


if __name__ == "__main__":
    sys.exit(main())
