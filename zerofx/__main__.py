"""``python -m zerofx``: questions about a machine, and about a model, answered without the model.

::

    $ python -m zerofx doctor
    $ python -m zerofx plan --model llama-3.1-8b --world-size 16 --gpu-memory 80GB
    $ python -m zerofx choose llama-3.1-8b --gpus 8 --memory 80GB
    $ python -m zerofx plan --model llama-3.1-8b --world-size 16 --gpu-memory 80GB --bandwidth 400Gbit \
          --node-bandwidth 450GB --ranks-per-node 8 --flops 400T --tokens 8192 --sequence-length 4096

``--version`` says which zerofx and which PyTorch. What ``plan`` prints is `zerofx.plan`, and what ``choose`` prints is
`zerofx.choose`. Errors go to stderr, and the exit status is 2 then, or 1 if no stage fits. What ``doctor`` prints is
`zerofx.inspect.doctor`; 1 is something that fails.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from zerofx import __version__
from zerofx.inspect.choose.choice import Choice
from zerofx.inspect.choose.choose import choose
from zerofx.inspect.doctor.examine import SECONDS, doctor
from zerofx.inspect.predict import shapes
from zerofx.inspect.predict.plan import plan
from zerofx.model.memory import Memory
from zerofx.model.precision import MixedPrecision
from zerofx.model.units import BYTES, PREFIXES, parse_bytes, parse_number
from zerofx.runtime.state.account import state_of
from zerofx.simulate.clock import ordinary

_DTYPES = {
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
    "fp32": (torch.float32, None),
    "mixed": (torch.float32, MixedPrecision(torch.bfloat16)),
}
_BANDWIDTH = (
    BYTES
    | {unit + "/s": factor for unit, factor in BYTES.items() if unit}
    | {prefix + unit: factor / 8 for prefix, factor in PREFIXES.items() for unit in ("bit", "bit/s", "bps")}
)
_FLOPS = {prefix + unit: factor for prefix, factor in PREFIXES.items() for unit in ("", "flop/s", "flops")}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}


def parse_memory(text: str) -> float:
    """As `parse_bytes`, of a device.

    Raises:
        ValueError: less than a megabyte, which is 80 for 80GB.
    """
    if (found := parse_bytes(text)) < 1e6:
        raise ValueError(
            f"{text!r} is {found:g} bytes: expected a device's memory with its unit, such as 80GB or 80GiB."
        )
    return found


def parse_bandwidth(text: str) -> float:
    """``400Gbit`` and ``50GB`` as bytes per second, with or without ``/s``; raises as `parse_bytes`.

    ``400Gb`` is refused: to some it is bits, to others a sloppy 400GB, and eight times lie between.
    """
    expected = "a bandwidth, such as 400Gbit (per second) or 50GB"
    if re.search(r"b(/s)?\s*$", text):
        raise ValueError(f"{text!r}: expected {expected}. Bits are written bit or bps, bytes B.")
    return parse_number(text, _BANDWIDTH, expected)


def parse_flops(text: str) -> float:
    """``400T`` as floating-point operations per second; raises as `parse_bytes`."""
    return parse_number(text, _FLOPS, "operations per second, such as 400T")


def parse_seconds(text: str) -> float:
    """``20us`` as seconds; raises as `parse_bytes`."""
    return parse_number(text, _SECONDS, "seconds, such as 20us")


def _argument(parse: Callable[[str], float]) -> Callable[[str], float]:
    def of(text: str) -> float:
        try:
            return parse(text)
        except ValueError as e:
            raise argparse.ArgumentTypeError(str(e)) from e

    return of


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m zerofx", description="ZeRO as a compiler: questions about a model.")
    parser.add_argument("--version", action="version", version=f"zerofx {__version__} (torch {torch.__version__})")
    commands = parser.add_subparsers(dest="command", required=True)
    examining = commands.add_parser("doctor", help="what this machine has for zerofx, and whether it works")
    examining.add_argument(
        "--timeout",
        type=_argument(parse_seconds),
        default=SECONDS,
        metavar="TIME",
        help="for what has to be tried: 50s",
    )
    _add_choose(commands.add_parser("choose", help="how to train a model within a memory, and what would change that"))
    planning = commands.add_parser("plan", help="what each stage would cost, and which one fits")
    planning.add_argument(
        "--model", required=True, help=f"one of {', '.join(shapes.SHAPES)}; or a Hugging Face config.json"
    )
    planning.add_argument("--world-size", type=int, required=True, metavar="M", help="number of ranks")
    planning.add_argument(
        "--gpu-memory", type=_argument(parse_memory), metavar="BYTES", help="of one rank: 80GB, 80GiB"
    )
    _add_dtype(planning)
    planning.add_argument("--micro-batches", type=int, default=1, metavar="K", help="backwards per optimizer step")
    planning.add_argument("--no-sync", action="store_true", help="all but the last under zerofx.no_sync")
    planning.add_argument("--offload", metavar="PATH", help="a folder for the optimizer's state; not looked for")
    _add_rates(planning.add_argument_group("seconds", "--bandwidth for the wire; --flops and --tokens for the step"))
    return parser


def _add_rates(timing: Any) -> None:
    """What a plan's seconds rest on."""
    timing.add_argument(
        "--bandwidth",
        type=_argument(parse_bandwidth),
        metavar="RATE",
        help="of a node, all network cards together, in one direction: 400Gbit, 50GB (per second)",
    )
    timing.add_argument(
        "--node-bandwidth", type=_argument(parse_bandwidth), metavar="RATE", help="of a rank inside of its node: 450GB"
    )
    timing.add_argument("--ranks-per-node", type=int, metavar="R", help="how many share a node; one, if not said")
    timing.add_argument(
        "--disk-bandwidth",
        type=_argument(parse_bandwidth),
        metavar="RATE",
        help="with --offload, of a rank, reading and writing together: 1GB",
    )
    timing.add_argument(
        "--host-bandwidth",
        type=_argument(parse_bandwidth),
        metavar="RATE",
        help="with --offload cpu, between a device and its host, each way: 20GB",
    )
    timing.add_argument("--latency", type=_argument(parse_seconds), metavar="TIME", help="of a collective: 20us")
    timing.add_argument(
        "--flops", type=_argument(parse_flops), metavar="RATE", help="that a rank reaches, not its peak: 400T"
    )
    timing.add_argument("--tokens", type=int, metavar="T", help="of a micro-batch on one rank")
    timing.add_argument("--sequence-length", type=int, metavar="S", help="of a sample: counts attention, too")
    timing.add_argument(
        "--flops-per-token",
        type=_argument(parse_flops),
        metavar="N",
        help="of forward and backward; 6 per parameter, if not said",
    )


def _add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        default="bf16",
        help="of the parameters; 16 bits have float32 masters in zerofx.AdamW, mixed is float32 and computes in bf16",
    )


def _add_choose(choosing: argparse.ArgumentParser) -> None:
    choosing.add_argument("model", help=f"one of {', '.join(shapes.SHAPES)}; or a Hugging Face config.json")
    choosing.add_argument("--gpus", type=int, required=True, metavar="M", help="number of ranks, a GPU each")
    choosing.add_argument(
        "--memory", type=_argument(parse_memory), required=True, metavar="BYTES", help="of one rank: 80GB, 80GiB"
    )
    _add_dtype(choosing)
    choosing.add_argument("--batch", type=int, default=1, metavar="B", help="samples of a micro-batch on one rank")
    choosing.add_argument("--sequence-length", type=int, default=2048, metavar="S", help="tokens of a sample")
    choosing.add_argument("--micro-batches", type=int, default=1, metavar="K", help="backwards per optimizer step")
    choosing.add_argument("--offload", metavar="PLACE", help='"cpu", for where nothing fits without')
    choosing.add_argument("--wire", choices=["auto"], help="collectives may be quantized, where it is worth it")
    rates = choosing.add_argument_group("rates", "those that are not given are an ordinary GPU's")
    for name, parse, words in (
        ("bandwidth", parse_bandwidth, "that a rank receives while it sends as much: 50GB"),
        ("latency", parse_seconds, "of a collective: 20us"),
        ("flops", parse_flops, "that a rank reaches, not its peak: 400T"),
        ("memory-bandwidth", parse_bandwidth, "of its memory: 2TB"),
    ):
        rates.add_argument(f"--{name}", type=_argument(parse), metavar="RATE", help=words)


def _choose(given: argparse.Namespace) -> Choice:
    """What `zerofx.choose` chooses for a model of the table.

    Raises:
        ValueError: nothing fits.
    """
    dtype, precision = _DTYPES[given.dtype]
    said = {
        "link_bytes_per_s": given.bandwidth,
        "link_latency_s": given.latency,
        "flops_per_s": given.flops,
        "memory_bytes_per_s": given.memory_bandwidth,
    }
    rates = replace(ordinary("cuda"), **{name: value for name, value in said.items() if value is not None})
    module = shapes.build(given.model, dtype, runs=True)
    masters, moments = state_of(dtype.itemsize)
    memory = Memory(
        int(given.memory), moments=(masters + moments) / dtype.itemsize, micro_batches=given.micro_batches, rates=rates
    )
    device = "cuda" if torch.version.cuda else "cpu"
    choice = choose(
        module,
        world_size=given.gpus,
        memory=memory,
        call=shapes.batch_of(module, given.batch, given.sequence_length),
        backend="nccl",
        device=device,
        mixed_precision=precision,
        offload=given.offload,
        wire=given.wire,
    )
    rates_of = choice.rates_of if None not in said.values() else "of an ordinary GPU, where they are not given"
    if device == "cpu":
        rates_of += "; graphs are a CPU's, for this build of PyTorch has no CUDA"
    return replace(choice, rates_of=rates_of)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    given = _parser().parse_args(arguments)
    if given.command == "doctor":
        return doctor(given.timeout)
    if given.command == "choose":
        try:
            print(_choose(given))
        except (ValueError, ModuleNotFoundError) as e:
            print(f"python -m zerofx choose: {e}", file=sys.stderr)
            return 2
        return 0
    dtype, precision = _DTYPES[given.dtype]
    try:
        made = plan(
            shapes.build(given.model, dtype),
            world_size=given.world_size,
            memory=given.gpu_memory,
            mixed_precision=precision,
            micro_batches=given.micro_batches,
            no_sync=given.no_sync,
            offload=given.offload,
            disk_bandwidth=given.disk_bandwidth,
            host_bandwidth=given.host_bandwidth,
            bandwidth=given.bandwidth,
            node_bandwidth=given.node_bandwidth,
            ranks_per_node=given.ranks_per_node,
            latency=given.latency,
            flops=given.flops,
            tokens=given.tokens,
            sequence_length=given.sequence_length,
            flops_per_token=given.flops_per_token,
        )
    except (ValueError, ModuleNotFoundError) as e:
        print(f"python -m zerofx plan: {e}", file=sys.stderr)
        return 2
    print(f"{given.model}, {given.dtype}: {made}")
    return 0 if made.memory is None or made.recommended is not None else 1


if __name__ == "__main__":
    sys.exit(main())
