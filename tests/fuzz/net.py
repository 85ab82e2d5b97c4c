"""The module that a recipe describes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.fuzz.kinds import KINDS
from tests.fuzz.recipe import COMPILED, CONTAINERS, COUNTERS, LENGTH, VOCAB, WIDTH, Layer, Recipe


def fit(x: torch.Tensor, width: int) -> torch.Tensor:
    """``x`` with its last dimension cut or padded to ``width``."""
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x[..., :width]


class Scaled(torch.autograd.Function):
    """``x * weight`` with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum((0, 1))


class Stashed(torch.autograd.Function):
    """The same, keeping what it needs as attributes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.both = x, weight
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.both
        return gradient * weight, (gradient * x).sum((0, 1))


class Leaf(nn.Module):
    """A layer without children."""

    def __init__(self, layer: Layer, width: int, earlier: list[Leaf]) -> None:
        super().__init__()
        kind = self.kind = layer.kind
        self.inputs, self.width = width, width
        if kind in ("linear", "sometimes", "unused", "strided", "single"):
            self.inner = nn.Linear(width, layer.width, layer.bias)
            if kind in ("linear", "strided", "single"):
                self.width = layer.width
        elif kind == "conv":
            self.inner, self.width = nn.Conv1d(width, layer.width, 3, padding=1, bias=layer.bias), layer.width
        elif kind in KINDS:
            self.inner = KINDS[kind](layer, width)
            self.width = self.inner.width
        elif kind == "attention":
            self.inner = nn.MultiheadAttention(width, 1, bias=layer.bias, batch_first=True)
        elif kind == "norm":
            self.inner = nn.LayerNorm(width, bias=layer.bias)
        elif kind == "batch_norm":
            self.inner = nn.BatchNorm1d(width)
        elif kind == "embedding":
            self.inner = nn.Embedding(VOCAB, width)
        elif kind in ("positions", "scalar", "scale", "empty", "custom", "stash"):
            shapes = {"positions": (LENGTH + 2, width), "scalar": (), "empty": (0,)}
            self.weight = nn.Parameter(torch.randn(shapes.get(kind, (width,))))
        elif kind == "count":
            self.register_buffer("calls", torch.zeros(1))  # of no dimensions, torch.compile forgets the write
        elif kind in ("tied", "transposed", "peek", "again"):
            # A counter is called once: in a checkpoint it would count twice, and `again` may stand in one. It may stand
            # outside of any graph, where what is `COMPILED` cannot.
            others = [
                leaf
                for leaf in earlier
                if leaf.kind in ("linear", "strided") or (kind == "again" and leaf.kind not in (*COUNTERS, *COMPILED))
            ]
            other = others[layer.of % len(others)] if others else None
            # Not a submodule where it is called again: the parameters keep their one name.
            self.other = [other] if other is not None and kind == "again" else []
            if other is not None and kind != "again":
                self.weight = other.inner.weight
                if kind == "tied":
                    self.width = self.weight.shape[0]
                elif kind == "transposed":
                    self.width = self.weight.shape[1]
            elif other is not None:
                self.inputs, self.width = other.inputs, other.width
        if kind == "strided":
            self.inner.weight = nn.Parameter(torch.randn(width, layer.width).t())
        if layer.frozen and kind not in ("tied", "transposed", "peek"):
            self.requires_grad_(False)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, sometimes: bool) -> torch.Tensor:
        kind = self.kind
        if kind in ("linear", "strided"):
            return torch.tanh(self.inner(x))
        if kind == "single":
            return torch.tanh(self.inner(x.to(self.inner.weight.dtype))).to(x.dtype)
        if kind == "conv":
            return torch.tanh(self.inner(x.transpose(1, 2)).transpose(1, 2))
        if kind == "batch_norm":
            return self.inner(x.flatten(0, 1)).view(x.shape)
        if kind in KINDS:
            return self.inner(x, tokens)
        if kind == "attention":
            return self.inner(x, x, x, need_weights=False)[0]
        if kind == "norm":
            return self.inner(x)
        if kind == "embedding":
            return x + self.inner(tokens)
        if kind == "positions":
            return x + self.weight[:LENGTH]
        if kind in ("scalar", "scale"):
            return x * (1 + self.weight)
        if kind == "empty":
            return x + self.weight.sum()
        if kind == "custom":
            return Scaled.apply(x, self.weight)
        if kind == "stash":
            return Stashed.apply(x, self.weight)
        if kind == "sometimes" and sometimes:
            return x + fit(self.inner(x), x.shape[-1])
        if kind == "break":
            torch._dynamo.graph_break()
        if kind == "count":
            self.calls.add_(1)
            return x * (1 + self.calls / 8)
        if kind == "stop":
            return (x + x.detach()) / 2
        if kind == "again" and self.other:
            return self.other[0](fit(x, self.inputs), tokens, sometimes)
        if kind in ("tied", "transposed", "peek") and hasattr(self, "weight"):
            if kind == "peek":
                return x * (1 + outside(self.weight))
            weight = self.weight if kind == "tied" else self.weight.t()
            return torch.tanh(F.linear(fit(x, weight.shape[1]), weight))
        return x


@torch.compiler.disable
def outside(weight: torch.Tensor) -> torch.Tensor:
    """Code that no graph holds and that reads a weight in several ways."""
    return weight[0].mean() + (weight * 2).tanh().mean() + weight.square().sum() / 16


class Container(nn.Module):
    """A layer of layers."""

    def __init__(self, layer: Layer, width: int, earlier: list[Leaf]) -> None:
        super().__init__()
        self.kind, before = layer.kind, width
        children = []
        for child in layer.children:
            children.append(made := make(child, before if self.kind == "branch" else width, earlier))
            width = made.width
        self.inner = nn.ModuleList(children)
        self.width = before if self.kind in ("residual", "branch") else width
        if layer.frozen:
            self.requires_grad_(False)

    def run(self, x: torch.Tensor, tokens: torch.Tensor, sometimes: bool) -> torch.Tensor:
        for child in self.inner:
            x = child(x, tokens, sometimes)
        return x

    @torch.compiler.disable
    def run_eagerly(self, x: torch.Tensor, tokens: torch.Tensor, sometimes: bool) -> torch.Tensor:
        return self.run(x, tokens, sometimes)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, sometimes: bool) -> torch.Tensor:
        args = (x, tokens, sometimes)
        if self.kind == "residual":
            return x + fit(self.run(*args), x.shape[-1])
        if self.kind == "branch":
            return torch.stack([fit(child(*args), x.shape[-1]) for child in self.inner] or [x]).mean(0)
        if self.kind == "checkpoint":
            return checkpoint(self.run, *args, use_reentrant=False)
        if self.kind == "reentrant" and x.requires_grad:  # else its gradients are lost, says PyTorch
            return checkpoint(self.run, *args, use_reentrant=True)
        if self.kind == "eager":
            return self.run_eagerly(*args)
        if self.kind == "no_grad":
            with torch.no_grad():
                x = self.run(*args)
            return x
        return self.run(*args)


def make(layer: Layer, width: int, earlier: list[Leaf]) -> Any:
    """The module of ``layer``; a leaf joins those ``earlier``."""
    if layer.kind in CONTAINERS:
        return Container(layer, width, earlier)
    leaf = Leaf(layer, width, earlier)
    earlier.append(leaf)
    return leaf


class Net(nn.Module):
    """All layers, and a head that is always trained."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        earlier: list[Leaf] = []
        self.output = recipe.output
        modules, width = [], WIDTH
        for layer in recipe.layers:
            modules.append(made := make(layer, width, earlier))
            width = made.width
        self.layers = nn.ModuleList(modules)
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, sometimes: bool = False) -> Any:
        for layer in self.layers:
            x = layer(x, tokens, sometimes)
        out = self.head(x)
        if self.output == "tuple":
            return x, (out, tokens)
        if self.output == "dict":
            return {"hidden": x, "logits": out, "none": None}
        if self.output == "shared":
            return {
                "hidden": x,
                "rows": x[:1],
                "again": x,
                "logits": out,
                "same": (out, out.view(-1)),
                "cut": out.detach(),
            }
        return out.square().mean()


def loss_of(net: nn.Module, penalty: bool, call: Callable[..., Any], *args: Any) -> torch.Tensor:
    """The loss of one call, and where the recipe has it a penalty on the head, outside of any graph."""
    out = call(*args)
    if isinstance(out, tuple):
        out = out[1][0].square().mean()
    elif isinstance(out, dict):
        twice = (
            (out["same"][0] * out["cut"]).mean() + out["same"][1].mean() + out["rows"].mean() if "same" in out else 0
        )
        out = out["logits"].square().mean() + 0.1 * out["hidden"].mean() + twice
    return out + 0.01 * net.head.weight.square().sum() if penalty else out


def build(recipe: Recipe, seed: int) -> Net:
    """The net in float64, but for its ``single`` layers; weights from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = Net(recipe).double()
        for module in leaves(net):
            if module.kind == "single":
                module.float()
        return net


def leaves(net: nn.Module) -> Iterator[Leaf]:
    return (module for module in net.modules() if isinstance(module, Leaf))
