"""Every optimizer that can be found, sharded and in one process: `make optimizers`.

::

    one process     4 steps
    2 or 3 ranks    4 steps of the same gradients, in stage 1, 2 or 3

Both start from the same weights; gradients are of a plain model with the weights that each has come to, so that nothing
but the optimizer can make a difference. (Where ranks sum parts of a gradient, the last digit may differ, and an SVD
makes much of that.) An optimizer is *equal* where the weights agree to 1e-5, *refused* where zerofx says which of its
numbers it cannot have, and *wrong* otherwise. One that draws random numbers draws others where ranks share the work: of
such it is asked that all ranks have the same weights. What does not train in one process is left out.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.workers import Workers

STEPS = 4
BATCH = 12


class Net(nn.Module):
    """A convolution, two layers, a norm: sizes that neither 2 nor 3 divides."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 3, 3)
        self.first = nn.Linear(15, 22)
        self.norm = nn.LayerNorm(22)
        self.second = nn.Linear(22, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x[:, None]).flatten(1)
        return self.second(self.norm(torch.tanh(self.first(x))))


Maker = Callable[[nn.Module], torch.optim.Optimizer]


def makers() -> dict[str, Maker]:
    """Every optimizer that is installed, by ``package.name``."""
    found: dict[str, Maker] = {}
    for name, kind in vars(torch.optim).items():
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            found[f"torch.{name}"] = _of_parameters(kind)
    try:
        import pytorch_optimizer

        for name in pytorch_optimizer.get_supported_optimizers():
            found[f"pytorch_optimizer.{name}"] = _of_parameters(pytorch_optimizer.load_optimizer(name))
    except ImportError:
        pass
    try:
        from transformers.optimization import Adafactor

        found["transformers.Adafactor"] = _of_parameters(Adafactor)
        found["transformers.Adafactor, lr"] = lambda net: Adafactor(
            net.parameters(), lr=1e-2, relative_step=False, scale_parameter=False
        )
    except ImportError:
        pass
    return found


def _of_parameters(kind: Any) -> Maker:
    """By parameters; by matrices and others, as Muon and its kin are called; by the module."""

    def make(net: nn.Module) -> torch.optim.Optimizer:
        matrices, others = [[p for p in net.parameters() if (p.dim() == 2) == matrix] for matrix in (True, False)]
        groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
        errors = []
        if "muon" in kind.__name__.lower() or kind.__name__ == "AdaGO":
            return kind(matrices if kind.__module__.startswith("torch.") else groups)
        for first in (lambda: net.parameters(), lambda: net):
            for options in ({}, {"lr": 1e-2}, {"lr": 1e-2, "num_iterations": 10}, {"num_data": BATCH}):
                try:
                    return kind(first(), **options)
                except (TypeError, AttributeError) as e:
                    errors.append(str(e))
        raise TypeError("; ".join(errors))

    return make


def train(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> list[torch.Tensor]:
    """The weights after ``STEPS`` steps."""
    random.seed(seed)
    torch.manual_seed(seed)
    generator, plain = torch.Generator().manual_seed(1), Net()
    for _ in range(STEPS):
        x, y = torch.randn(BATCH, 7, generator=generator), torch.randn(BATCH, 5, generator=generator)

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            with torch.no_grad():
                for p, whole in zip(plain.parameters(), weights(net), strict=True):
                    p.copy_(whole)
            loss = nn.functional.mse_loss(plain(x), y)
            for p, gradient in zip(net.parameters(), torch.autograd.grad(loss, list(plain.parameters())), strict=True):
                p.grad = gradient
            return loss.detach()

        closure()
        try:
            optimizer.step()
        except Exception as e:
            if "closure" not in str(e).lower():
                raise
            optimizer.step(closure)
    return weights(net)


def weights(net: nn.Module) -> list[torch.Tensor]:
    """A copy of them, whole."""
    with torch.no_grad():
        return [
            p.full_tensor() if isinstance(p, zerofx.ShardedTensor) else p.detach().clone() for p in net.parameters()
        ]


def made(name: str) -> tuple[nn.Module, Callable[[nn.Module], torch.optim.Optimizer]]:
    torch.manual_seed(0)
    return Net(), makers()[name]


def compare(name: str, stage: int) -> tuple[str, str]:
    """On one of several ranks: what became of it, and why."""
    warnings.simplefilter("ignore")
    net, make = made(name)
    try:
        expected = train(net, make(net))
    except Exception as e:
        return "does not train", f"{type(e).__name__}: {e}"
    if not all(x.isfinite().all() for x in expected):
        return "does not train", "not finite"
    again, make = made(name)
    other = train(again, make(again), seed=1)
    drawn = any(not torch.equal(a, b) for a, b in zip(expected, other, strict=True))
    net, make = made(name)
    start = [p.detach().clone() for p in net.parameters()]
    zerofx.shard(net, stage=stage)
    try:
        got = train(net, make(net))
    except Exception as e:
        if "is not elementwise" in str(e) or "zerofx" in str(e).lower():
            return "refused", str(e)
        return "error", "".join(traceback.format_exception(e)[-3:])
    if drawn:  # other numbers on other ranks: what can be told is that all ranks have the same
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, got)
        same = all(torch.equal(a, b) and bool(a.isfinite().all()) for x in told for a, b in zip(x, got, strict=True))
        moved = any(not torch.equal(a, b) for a, b in zip(got, start, strict=True))
        return ("random", "all ranks agree") if same and moved else ("wrong", "ranks differ, or nothing moved")
    worst = max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in zip(got, expected, strict=True))
    moved = max(float((a - b).abs().max()) for a, b in zip(expected, start, strict=True))
    if worst > 1e-5:
        return "wrong", f"by {worst:.1e}; one process moved by {moved:.1e}"
    return "equal", f"{worst:.1e}"


def sweep(names: Iterable[str], worlds: Iterable[int], stages: Iterable[int]) -> dict[str, dict[str, Any]]:
    """What became of each: name -> "2 ranks, stage 3" -> what and why."""
    found: dict[str, dict[str, Any]] = {}
    groups = {world: Workers(world) for world in worlds}
    for name in names:
        for world, workers in groups.items():
            for stage in stages:
                try:
                    results = workers.run(compare, name, stage, timeout=180)
                except AssertionError as e:
                    results = [("error", str(e))]
                kinds = {kind for kind, _ in results}
                result = results[0] if len(kinds) == 1 else ("error", f"ranks differ: {results}")
                found.setdefault(name, {})[f"{world} ranks, stage {stage}"] = result
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = sweep(options.names or makers(), options.worlds, options.stages)
    counts: dict[str, collections.Counter[str]] = {}
    for name, cases in found.items():
        for case, (kind, why) in cases.items():
            counts.setdefault(case, collections.Counter())[kind] += 1
            if kind not in ("equal", "random"):
                print(f"{name:40} {case}: {kind}: {why.strip().splitlines()[-1][:230]}")
    for case, counter in counts.items():
        print(case, dict(counter))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    sys.exit(any(kind in ("wrong", "error") for cases in found.values() for kind, _ in cases.values()))


if __name__ == "__main__":
    main()
