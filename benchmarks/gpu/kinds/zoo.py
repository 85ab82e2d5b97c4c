"""Models that nobody prepared, from tests/zoo, in every stage against plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

import zerofx
from benchmarks.gpu.lines import Line, Setting, at_most, not_run
from benchmarks.gpu.ranks import on_ranks
from tests.zoo.architectures import ARCHITECTURES
from tests.zoo.base import make_batch

LIMIT = 150
ROWS, STEPS = 2, 3
BOUND = 1e-4
SELECTION = ("llama", "gpt2", "bert", "vit", "t5", "mixtral")


def lines(setting: Setting) -> Iterator[Line]:
    cases = [(name, stage, "eager") for name in SELECTION for stage in (3, 2, 1, 0)]
    cases += [(name, stage, "inductor") for name in SELECTION[:2] for stage in (3, 2)]
    if setting.small:
        cases = [("gpt2", 3, "eager")]
    named = {}
    for name, stage, executor in cases:
        title = f"{name}, stage {stage}, {executor}: losses off plain PyTorch's"
        if ARCHITECTURES[name].is_here:
            named[title] = name, stage, executor
        else:
            yield not_run(title, f"at most {BOUND:g}", f"not run: needs {ARCHITECTURES[name].needs}")
    yield from on_ranks(setting, train, named, lambda title, off: at_most(title, max(off), BOUND))


def train(device: torch.device, name: str, stage: int, executor: str) -> float:
    """On each rank: the largest relative difference of a loss."""
    rank, world, architecture = dist.get_rank(), dist.get_world_size(), ARCHITECTURES[name]
    dtype = torch.float64 if architecture.chaotic else torch.float32
    plain: nn.Module = architecture.build(0).to(device, dtype)
    model: nn.Module = architecture.build(0).to(device, dtype)
    zerofx.compile(model, stage=stage, executor=executor, groups=zerofx.Grouping(min_bytes=0))  # type: ignore[arg-type]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model, plain)]
    worst = 0.0
    for step in range(STEPS):
        batches = [make_batch(architecture.batch, ROWS, 10 * step + r, dtype) for r in range(world)]
        batches = [{key: _to(value, device) for key, value in batch.items()} for batch in batches]
        got = _loss(model, batches[rank])
        got.backward()
        wanted = torch.stack([_loss(plain, batch) for batch in batches]).mean()
        wanted.backward()
        dist.all_reduce(mean := got.detach().clone())
        worst = max(worst, abs(mean.item() / world / wanted.item() - 1))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return worst


def _to(value: object, device: torch.device) -> object:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _loss(model: nn.Module, batch: dict[str, object]) -> torch.Tensor:
    out = model(**batch)
    return out if isinstance(out, torch.Tensor) else out.loss
