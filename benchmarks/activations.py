"""Step time against peak memory under `activation_budget`, beside torch.utils.checkpoint of every block.

    python benchmarks/activations.py                                  # all models, eager, ten budgets each
    python benchmarks/activations.py --models gpt-8 --executor inductor --budgets 1 0.5 0
    python benchmarks/activations.py --models gpt-8 --budgets 1 0.5 0 --offload /local/scratch --steps 7
    python benchmarks/activations.py --plot                           # draws docs/pictures/activations.svg

Two gloo ranks, one core each. What is asked for at each budget: the peak that is measured (the allocator's, over
forward and backward), the one that `zerofx.predict(probe=True)` says, what forward saves, the losses of a few steps,
and the median time of a step, forward and backward, on the slower rank. Budgets of one model take turns, step by step,
so whatever else the machine does hits all alike. "checkpoint": no budget, every block in torch.utils.checkpoint. With
``--offload`` each budget comes once more, "offload 0.5", with a file for what exceeds it; "offload 1" has all there.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import zerofx  # noqa: E402
from benchmarks import themed  # noqa: E402
from tests.memory import allocated_peak  # noqa: E402
from tests.models import GPT  # noqa: E402
from tests.workers import Workers  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
VOCAB, LENGTH, DIM = 512, 64, 128


class Experts(nn.Module):
    """A mixture of experts in place of a block's MLP; every expert sees all tokens, weighted by the router."""

    def __init__(self, dim: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, experts)
        self.norm = nn.LayerNorm(dim)
        self.up = nn.ModuleDict({str(i) + "e": nn.Linear(dim, 2 * dim) for i in range(experts)})
        self.down = nn.ModuleDict({str(i) + "e": nn.Linear(2 * dim, dim) for i in range(experts)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        weights = self.router(h).softmax(-1)
        for i, name in enumerate(self.up):
            x = x + weights[..., i : i + 1] * self.down[name](F.gelu(self.up[name](h)))
        return x


class MixtureOfExperts(nn.Module):
    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.blocks = nn.ModuleList(Experts(DIM, 4) for _ in range(layers))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class OfTransformers(nn.Module):
    """A model of transformers, called as ours are; it returns the loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        name = "input_ids" if x.dtype == torch.long else "pixel_values"
        return self.model(**{name: x}, labels=y).loss


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": DIM, "intermediate_size": 3 * DIM, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCAB, max_position_embeddings=LENGTH, use_cache=False, **sizes, **heads)
    return OfTransformers(LlamaForCausalLM._from_config(config, attn_implementation="sdpa"))


def convnext() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(
        hidden_sizes=[32, 64, 128],
        depths=[2, 4, 2],
        num_stages=3,
        num_labels=10,
        problem_type="single_label_classification",
    )
    return OfTransformers(ConvNextForImageClassification(config))


MODELS = {
    "gpt-8": lambda: GPT(8, DIM, 4, VOCAB, LENGTH),
    "gpt-24": lambda: GPT(24, DIM // 2, 4, VOCAB, LENGTH),
    "llama": llama,
    "convnext": convnext,
    "moe": MixtureOfExperts,
}
BUDGETS = [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0]
CHECKPOINT, OFFLOAD = "checkpoint", "offload"
BLOCKS = ("Block", "Experts", "LlamaDecoderLayer", "ConvNextLayer")
"""Classes of the modules that repeat."""


def checkpoint_blocks(model: nn.Module) -> None:
    """Every block of ``model`` runs in a checkpoint."""
    for module in model.modules():
        if type(module).__name__ in BLOCKS:
            module.forward = _checkpointed(module.forward)  # type: ignore[method-assign]


def _checkpointed(forward: Any) -> Any:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def batch_of(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    if name == "convnext":
        return torch.randn(8, 3, 64, 64, generator=generator), torch.randint(10, (8,), generator=generator)
    x, y = torch.randint(VOCAB, (2, 8, LENGTH), generator=generator)
    return x, y


def run(name: str, executor: str, points: list[Any], steps: int, folder: str = "") -> list[dict[str, Any]]:
    """One rank: every point of the curve of one model."""
    x, y = batch_of(name)
    built, found = [], []
    for point in points:
        torch.manual_seed(0)
        model = MODELS[name]()
        if point == CHECKPOINT:
            checkpoint_blocks(model)
        offloads = str(point).startswith(OFFLOAD)
        budget = None if point == CHECKPOINT else float(str(point).removeprefix(OFFLOAD))
        options: dict[str, Any] = {"groups": zerofx.Grouping(min_bytes=64 << 10), "activation_budget": budget}
        if offloads:
            options["offload"] = zerofx.Offload(activations=folder)
        start = time.perf_counter()
        zerofx.compile(model, executor=executor, **options)
        model(x, y).backward()
        compiling = time.perf_counter() - start
        built.append(model)
        # The generator's state, which PyTorch keeps for a checkpointed attention, cannot be followed without numbers.
        prediction = None if point == CHECKPOINT else zerofx.predict(model, probe=True)
        model.zero_grad()
        peaks = []
        for _ in range(2):
            gc.collect()
            peaks.append(allocated_peak(lambda model=model: model(x, y).backward()))
            model.zero_grad()
        chosen = zerofx.graphs(model)[0].forward.activations
        losses = []
        for _ in range(2):
            loss = model(x, y)
            loss.backward()
            losses.append(loss.item())
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
            model.zero_grad()
        found.append(
            {
                "point": point,
                "peak": min(peaks),
                "predicted": prediction and prediction.peak_bytes,
                "by_class": prediction and prediction.peak,
                "saved": chosen and chosen.saved_bytes,
                "offloaded": chosen and chosen.offloaded_bytes,
                "written": prediction and prediction.file_written,
                "whole": chosen and chosen.whole_bytes,
                "recomputed_flops": chosen and chosen.flops,
                "losses": losses,
                "compile_s": round(compiling, 1),
                "seconds": [],
            }
        )
    for _ in range(steps):
        for model, result in zip(built, found, strict=True):
            model(x, y).backward()
            model.zero_grad()
            dist.barrier()
            start = time.perf_counter()
            model(x, y).backward()
            result["seconds"].append(time.perf_counter() - start)
            model.zero_grad()
    return found


def table(found: list[dict[str, Any]]) -> str:
    lines = ["| point | peak | predicted | off by | saved | step |", "| --- | --- | --- | --- | --- | --- |"]
    for r in found:
        off = "" if r["predicted"] is None else f"{100 * (r['predicted'] / r['peak'] - 1):+.2f} %"
        predicted, saved = ("" if r[key] is None else f"{r[key] / 1e6:.2f} MB" for key in ("predicted", "saved"))
        step = f"{1e3 * r['median_s']:.0f} ms" if "median_s" in r else ""
        numbers = f"{r['peak'] / 1e6:.2f} MB | {predicted} | {off}"
        lines.append(f"| {r['point']} | {numbers} | {saved} | {step} |")
    return "\n".join(lines)


def measure(args: argparse.Namespace) -> None:
    path = RESULTS / "activations-cpu-2.json"
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    kept["torch"] = torch.__version__
    for name in args.models:
        points = [*args.budgets, CHECKPOINT]
        if args.offload:
            points += [f"{OFFLOAD} {budget}" for budget in args.budgets]
        given = name, args.executor, points, args.steps, args.offload
        ranks = Workers(2).run("benchmarks.activations:run", *given, timeout=args.timeout)
        found = ranks[0]
        for mine, other in zip(*ranks, strict=True):
            seconds = list(map(max, mine.pop("seconds"), other["seconds"]))
            if seconds:
                mine["median_s"] = round(statistics.median(seconds), 4)
        kept[f"{name} {args.executor}{' beside a file' if args.offload else ''}"] = found
        path.write_text(json.dumps(kept, indent=1) + "\n")
        print(f"\n{name}, {args.executor}\n{table(found)}", flush=True)


def plot() -> None:
    import matplotlib.pyplot as plt

    kept = json.loads((RESULTS / "activations-cpu-2.json").read_text())
    curves = {
        name: found for name, found in kept.items() if name != "torch" and "file" not in name and "median_s" in found[0]
    }
    figure, axes = plt.subplots(1, len(curves), figsize=(4.2 * len(curves), 3.4), squeeze=False)
    for axis, (name, found) in zip(axes[0], curves.items(), strict=True):
        ours = [r for r in found if r["point"] != CHECKPOINT]
        axis.plot([r["peak"] / 1e6 for r in ours], [1e3 * r["median_s"] for r in ours], "o-", label="activation_budget")
        for r in found:
            if r["point"] == CHECKPOINT:
                axis.plot(r["peak"] / 1e6, 1e3 * r["median_s"], "s", label="torch.utils.checkpoint per block")
        top = 1.1e3 * max(r["median_s"] for r in found)
        axis.set(title=name, xlabel="peak, MB", ylabel="step, ms", ylim=(0, top))
        axis.legend(fontsize=7)
    figure.tight_layout()
    themed.save(figure, ROOT / "docs" / "pictures" / "activations.svg")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--executor", choices=["eager", "inductor"], default="eager")
    parser.add_argument("--budgets", nargs="+", type=float, default=BUDGETS)
    parser.add_argument("--steps", type=int, default=0, help="timed, of each point")
    parser.add_argument("--offload", default="", metavar="FOLDER", help="each budget also with activations in a file")
    parser.add_argument("--timeout", type=float, default=1800)
    parser.add_argument("--plot", action="store_true", help="draw, and measure nothing")
    arguments = parser.parse_args()
    plot() if arguments.plot else measure(arguments)
