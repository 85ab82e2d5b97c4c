"""What Inductor writes for small models of several kinds: the text alone, of which no kernel is compiled."""

from __future__ import annotations

import unittest.mock
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule

import zerofx
from tests.models import GPT
from tests.passes.mutants import rewritten
from zerofx import _torch
from zerofx.passes import Context
from zerofx.passes.proof.code import Promise


class Convolutions(nn.Module):
    """Convolutions, a normalisation that writes to its buffers, a classifier."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width)
        self.second, self.head = nn.Conv2d(width, width, 3, padding=1), nn.Linear(width, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norm(self.first(x)))
        h = h + F.relu(self.second(h))
        return F.cross_entropy(self.head(h.mean((2, 3))), y)


class Experts(nn.Module):
    """A mixture: experts of one matrix each behind a gate, and others in one batched product."""

    def __init__(self, dim: int = 16, experts: int = 3) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(dim, experts), nn.Linear(dim, dim)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(experts))
        self.up = nn.Parameter(torch.randn(experts, dim, 2 * dim) / 4)
        self.down = nn.Parameter(torch.randn(experts, 2 * dim, dim) / 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weight = torch.softmax(self.gate(x), -1)
        hidden = torch.bmm(F.gelu(torch.einsum("bd,ndh->nbh", x, self.up)), self.down)
        x = x + torch.einsum("nbd,bn->bd", hidden, weight)
        chosen = weight.argmax(-1)
        for i, expert in enumerate(self.experts):
            x = x + expert(x) * (chosen == i).unsqueeze(-1) * weight[:, i : i + 1]
        return F.mse_loss(self.head(x), y)


class Moved(nn.Module):
    """Parts of a weight that are put together anew: each product's matrix is a copy that the model asks for."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(dim, dim)), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows, columns = self.weight.chunk(2)[0], self.weight.chunk(2, dim=1)[0]
        x = x @ rows.repeat(2, 1) + x @ columns.repeat(1, 2)
        x = x @ torch.cat([rows, rows]) + x @ torch.cat([rows[:2]] * 4)
        x = x @ rows.flip(0).repeat(2, 1) + (x.double() @ rows.double().repeat(2, 1)).float()
        return F.mse_loss(self.head(x), y)


def tokens(vocab: int = 64) -> torch.Tensor:
    return torch.randint(vocab, (2, 16))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "gpt": (lambda: GPT(layers=2, dim=32, heads=2, vocab=64, length=16), lambda: (tokens(), tokens())),
    "convolutions": (Convolutions, lambda: (torch.randn(2, 3, 8, 8), torch.randint(5, (2,)))),
    "moved": (Moved, lambda: (torch.randn(4, 8), torch.randn(4, 8))),
    "experts": (Experts, lambda: (torch.randn(6, 16), torch.randn(6, 16))),
}


@dataclass(frozen=True)
class Generated:
    """One graph's code, and what the graph asks of it."""

    name: str
    gm: GraphModule
    context: Context
    promise: Promise
    code: str


class _Written(Exception):
    pass


def code_of(gm: GraphModule, **options: Any) -> str:
    """What Inductor writes for ``gm``. No kernel is compiled."""
    from torch._inductor.graph import GraphLowering

    found: list[str] = []

    def stop(graph: Any) -> None:
        code, _ = graph.codegen()
        found.append(getattr(code, "value", code))
        raise _Written

    fakes = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    with (
        unittest.mock.patch.object(GraphLowering, "compile_to_module", stop),
        torch.compiler.config.patch(force_disable_caches=True),
        _torch.fake_mode_of(fakes),
    ):
        try:
            _torch.generate_code(gm, fakes, **options)
        except Exception as e:
            if not found:
                raise e
    return found[0]


def generated(
    model: str | tuple[nn.Module, torch.Tensor], *, world_size: int = 2, steps: bool = False, **options: Any
) -> list[Generated]:
    """Forward and backward of a model, as gloo ranks get them."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    if isinstance(model, str):
        build, draw = MODELS[model]
        module, inputs = build(), draw()
    else:
        module, *inputs = model  # type: ignore[assignment]
        model = type(module).__name__
    options.setdefault("groups", zerofx.Grouping(min_bytes=0))
    record = zerofx.dry_run(module, *inputs, world_size=world_size, **options)
    found = []
    for phase, (gm, ctx) in rewritten(record, steps=steps, executor="inductor", backend="gloo").items():
        promise = Promise.of(gm, ctx)
        code = code_of(gm, is_backward=phase == "backward")
        name = f"{model}, stage {ctx.stage}{', updated' * steps}, {phase}"
        found.append(Generated(name, gm, ctx, promise, code))
    return found
