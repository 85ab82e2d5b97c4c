"""How long compiling takes, and how much of that is zerofx's.

::

    python benchmarks/compile_time.py --share 8,24             # zerofx's share of compile time, of a GPT
    python benchmarks/compile_time.py --scale 8,16,32,64,126   # Llama 3.1 405B on 1,024 ranks: the graphs alone

``--share``: a GPT of so many layers. In one process plain ``torch.compile`` compiles its forward and backward, with
empty caches (the first step, less the second). In another `zerofx.dry_run` takes it through the same Dynamo,
AOTAutograd and Inductor passes, for two gloo ranks, and all that zerofx does to its graphs is timed: the copies for the
record, and the passes. The figure is the one time over the other.

``--scale``: Llama with the sizes published for 405B, of so many layers, on the meta device. Rewriting is linear where
seconds per node do not grow.

Each number is of a process of its own, so that nothing is in any cache. What is not asked for stays in the result as
it was.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402
from torch import nn  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "compile_time.json"
LLAMA_405B = {
    **{"vocab_size": 128256, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126},
    **{"num_attention_heads": 128, "num_key_value_heads": 8, "max_position_embeddings": 131072},
}


def gpt(layers: int) -> tuple[nn.Module, torch.Tensor]:
    from tests.models import GPT

    return GPT(layers), torch.randint(4096, (1, 256))


def llama(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**{**LLAMA_405B, "num_hidden_layers": layers, "use_cache": False}))


def plain(layers: int) -> dict[str, Any]:
    """Seconds of ``torch.compile``: what the first step takes beyond the second."""
    model, x = gpt(layers)
    compiled = torch.compile(model)
    times = []
    for _ in range(2):
        start = time.perf_counter()
        compiled(x, x).backward()
        times.append(time.perf_counter() - start)
    return {"torch_compile_s": times[0] - times[1]}


def share(layers: int) -> dict[str, Any]:
    """Seconds of zerofx's, with the graphs that Inductor gets."""
    import zerofx

    model, x = gpt(layers)
    record = zerofx.dry_run(model, x, x, world_size=2)
    return {"layers": layers, "parameters": sum(p.numel() for p in model.parameters()), **rewriting(record)}


def scale(layers: int) -> dict[str, Any]:
    """Seconds of zerofx's for Llama 3.1 405B, or the first layers of it, on 1,024 ranks."""
    import zerofx

    model = llama(layers)
    tokens = torch.zeros(1, 8192, dtype=torch.long, device="meta")
    start = time.perf_counter()
    record = zerofx.dry_run(
        model, call={"input_ids": tokens, "labels": tokens}, world_size=1024, executor="eager", backend="nccl"
    )
    whole = time.perf_counter() - start
    found = {"layers": layers, "parameters": sum(p.numel() for p in model.parameters()), **rewriting(record)}
    found["s_per_node"] = found["zerofx_s"] / found["nodes"]
    return {**found, "with_dynamo_and_aot_autograd_s": whole}


def rewriting(record: Any) -> dict[str, Any]:
    """Nodes before rewriting, and seconds by graph and pass."""
    seconds = {name: trace.seconds for name in ("forward", "backward") if (trace := getattr(record, name))}
    nodes = sum(len(trace.before.graph.nodes) for trace in record.traces())
    return {"nodes": nodes, "zerofx_s": sum(sum(s.values()) for s in seconds.values()), "seconds": seconds}


def apart(work: Callable[[int], dict[str, Any]], layers: int) -> dict[str, Any]:
    """``work(layers)`` in a fresh process with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(work, (layers,))


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description="How long compiling takes, and how much of that is zerofx's.")
    parser.add_argument("--share", type=numbers, default=[], help="layers of GPTs, such as 8,24")
    parser.add_argument("--scale", type=numbers, default=[], help="layers of Llama 3.1 405B, such as 8,16,32,64,126")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    result = json.loads(args.out.read_text()) if args.out.exists() else {}

    def report(kind: str, rows: Iterable[dict[str, Any]]) -> None:
        for row in rows:
            print({name: value for name, value in row.items() if name != "seconds"}, flush=True)
            result.setdefault(kind, {})[str(row["layers"])] = {
                **row,
                "command": f"python benchmarks/compile_time.py --{kind} {row['layers']}",
                "date": datetime.date.today().isoformat(),
                "torch": torch.__version__,
                "load_average": os.getloadavg()[0],
            }
            result["machine"] = f"{platform.machine()}, {os.cpu_count()} cores"
            args.out.write_text(json.dumps(result, indent=1) + "\n")

    def shares() -> Iterable[dict[str, Any]]:
        for layers in args.share:
            row = apart(share, layers) | apart(plain, layers)
            yield {**row, "share": row["zerofx_s"] / row["torch_compile_s"]}

    report("share", shares())
    report("scale", (apart(scale, layers) for layers in args.scale))


if __name__ == "__main__":
    main()
