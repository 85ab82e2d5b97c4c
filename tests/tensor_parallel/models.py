"""Models of a "tp" dimension, by `parallelize_module`, and how they are trained on four ranks as 2 x 2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import zerofx

skip_old = pytest.mark.skipif(torch.__version__ < "2.12", reason="stages 1 to 3 are refused: check_version")
"""Of a file whose tests need stages 1 to 3."""

VOCAB, WIDTH, HEADS, HIDDEN, LENGTH, STEPS = 24, 8, 2, 12, 6, 3


class MLP(nn.Module):
    """A head that has no plan stays plain."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = F.one_hot(tokens, WIDTH).float()
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())

    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """One block; between layers activations are divided along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.attention = Attention()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(self.norms[0](x))
        x = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return F.cross_entropy(self.head(self.norms[2](x)).flatten(0, 1).float(), tokens.flatten())

    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norms.0": SequenceParallel(),
        "norms.1": SequenceParallel(),
        "norms.2": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.o": RowwiseParallel(output_layouts=Shard(1)),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


class Broken(MLP):
    """A graph break between layers, and a layer that Dynamo does not trace."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = F.one_hot(tokens, WIDTH).float()
        x = self.norm(x)
        torch._dynamo.graph_break()
        x = x + self.untraced(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())

    @torch.compiler.disable
    def untraced(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).clone()


class Pending(Broken):
    """What the untraced layer returns is still on its way."""

    @torch.compiler.disable
    def untraced(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Leaf(nn.Module):
    def __init__(self, layers: nn.ModuleDict) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers["down"](torch.relu(self.layers["up"](x)))


class Halves(MLP):
    """Layers of their own that gather whole: `leaf_modules`."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({"up": self.up, "down": self.down})
        del self.up, self.down
        self.leaf = Leaf(self.mlp)
        del self.mlp

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = F.one_hot(tokens, WIDTH).float()
        return F.cross_entropy(self.head(x + self.leaf(self.norm(x))).flatten(0, 1), tokens.flatten())

    plan = {"leaf.layers.up": ColwiseParallel(), "leaf.layers.down": RowwiseParallel()}


class Uneven(MLP):
    """11 hidden values over 2 ranks. They stay DTensors: of a plain part nobody knows what the whole is."""

    def __init__(self) -> None:
        super().__init__(hidden=11)

    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}


class Logits(Transformer):
    """It returns logits that stay divided over the vocabulary, for `loss_parallel`."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(self.norms[0](x))
        x = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return self.head(self.norms[2](x))

    plan = Transformer.plan | {"head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False)}


MODELS: dict[str, type[Any]] = {
    "mlp": MLP,
    "transformer": Transformer,
    "broken": Broken,
    "pending": Pending,
    "leaf": Halves,
    "uneven": Uneven,
    "logits": Logits,
}


def mesh_2d() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def build(kind: str, tp: Any = None, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = MODELS[kind]()
    return model if tp is None else parallelize_module(model, tp, dict(model.plan))


def compiled(kind: str, mesh: Any, stage: int = 3, executor: str = "eager", **options: Any) -> Any:
    """The first dp rank's weights are taken."""
    model = build(kind, mesh["tp"], seed=mesh["dp"].get_local_rank())
    options.setdefault("groups", zerofx.Grouping(min_bytes=0))
    return zerofx.compile(model, stage=stage, executor=executor, mesh=mesh["dp"], **options)


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, (DTensor, zerofx.ShardedTensor)) else x.detach().clone()


def batch(step: int) -> torch.Tensor:
    return torch.randint(WIDTH, (2, 2, LENGTH), generator=torch.Generator().manual_seed(step))


def train(model: Any, optimizer: Any, dp: Any = None, steps: int = STEPS, first: int = 0) -> list[float]:
    """The average losses of the dp ranks."""
    losses = []
    for step in range(first, first + steps):
        tokens = batch(step).flatten(0, 1) if dp is None else batch(step)[dp.get_local_rank()]
        loss = model(tokens)
        loss.backward()
        loss = whole(loss)
        if dp is not None:
            dist.all_reduce(loss, group=dp.get_group())
        losses.append(loss.item() / (1 if dp is None else 2))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def check_whole(model: Any, wanted: dict[str, torch.Tensor]) -> None:
    found = zerofx.full_state_dict(model, rank0_only=False)
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)
