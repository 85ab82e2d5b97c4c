"""Layers that keep or use their weights in ways of their own: other memory formats, views, parametrizations, vmap.

Each is made of a `Layer` and the width it is given, and has ``width``, that of what it returns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.fuzz.recipe import VOCAB, Layer


class Kind(nn.Module):
    """A layer that returns what it gets, as wide as it gets it."""

    def __init__(self, layer: Layer, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return x


class ChannelsLast(Kind):
    """A convolution over an image of one column, its weight and its input in channels-last."""

    def __init__(self, layer: Layer, width: int) -> None:
        super().__init__(layer, layer.width)
        inner = nn.Conv2d(width, layer.width, 3, padding=1, bias=layer.bias)
        self.inner = inner.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        image = x.transpose(1, 2).unsqueeze(-1).contiguous(memory_format=torch.channels_last)
        return torch.tanh(self.inner(image)).squeeze(-1).transpose(1, 2)


class Recurrent(Kind):
    """PyTorch's own recurrences. Every second one has two layers."""

    cls: type[nn.RNNBase]

    def __init__(self, layer: Layer, width: int) -> None:
        super().__init__(layer, layer.width)
        self.inner = self.cls(width, layer.width, 1 + layer.of % 2, bias=layer.bias, batch_first=True)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]


class GRU(Recurrent):
    cls = nn.GRU


class LSTM(Recurrent):
    cls = nn.LSTM


class RNN(Recurrent):
    cls = nn.RNN


class Complex(Kind):
    """A filter: frequencies times a complex view of a real parameter."""

    def __init__(self, layer: Layer, width: int) -> None:
        super().__init__(layer, width)
        self.filter = nn.Parameter(torch.randn(width // 2 + 1, 2))

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.filter), n=self.width)


class Bag(Kind):
    """Adds one row for all tokens of a row: their sum, mean or largest."""

    def __init__(self, layer: Layer, width: int) -> None:
        super().__init__(layer, width)
        self.inner = nn.EmbeddingBag(VOCAB, width, mode=("sum", "mean", "max")[layer.of % 3])

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return x + self.inner(tokens)[:, None]


class WeightNorm(Kind):
    """A matrix that is computed anew at each use, of a direction and a length."""

    def __init__(self, layer: Layer, width: int) -> None:
        super().__init__(layer, layer.width)
        self.inner = parametrizations.weight_norm(nn.Linear(width, layer.width, layer.bias))

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


class SpectralNorm(WeightNorm):
    """A matrix by its largest singular value, of which buffers know more with each call."""

    def __init__(self, layer: Layer, width: int) -> None:
        Kind.__init__(self, layer, layer.width)
        self.inner = parametrizations.spectral_norm(nn.Linear(width, layer.width, layer.bias))


class Affine(torch.autograd.Function):
    """A matrix and maybe a bias, in the newer way: ``setup_context``, gradients only of what needs them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: float) -> torch.Tensor:
        out = x @ weight.t() * scale
        return out if bias is None else out + bias

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, weight, _, ctx.scale = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x = gradient @ weight * ctx.scale if ctx.needs_input_grad[0] else None
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = gradient.flatten(0, -2).t() @ x.flatten(0, -2) * ctx.scale
        return of_x, of_weight, gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None, None


class Function(Kind):
    """`Affine`."""

    def __init__(self, layer: Layer, width: int) -> None:
        super().__init__(layer, layer.width)
        self.weight = nn.Parameter(torch.randn(layer.width, width))
        self.bias = nn.Parameter(torch.randn(layer.width)) if layer.bias else None

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(Affine.apply(x, self.weight, self.bias, 0.5))


class Mapped(Kind):
    """``torch.vmap`` over rows with the weights the same for each, or over weights: an ensemble's mean."""

    def __init__(self, layer: Layer, width: int) -> None:
        super().__init__(layer, layer.width)
        self.over_rows = layer.of % 2 == 0
        self.weight = nn.Parameter(torch.randn(2, width, layer.width))

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        if self.over_rows:
            return torch.vmap(lambda row, weight: torch.tanh(row @ weight[0] + row @ weight[1]), (0, None))(
                x, self.weight
            )
        return torch.vmap(lambda weight: torch.tanh(x @ weight))(self.weight).mean(0)


class Cond(Kind):
    """``torch.cond`` by what the data are, so ranks take branches of their own: two matrices, or one in both."""

    def __init__(self, layer: Layer, width: int) -> None:
        super().__init__(layer, layer.width)
        self.yes = nn.Linear(width, layer.width, layer.bias)
        self.no = self.yes if layer.of % 2 else nn.Linear(width, layer.width, layer.bias)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.cond(
            tokens.sum() % 2 == 0, lambda x: torch.tanh(self.yes(x)), lambda x: torch.sin(self.no(x)), (x,)
        )


KINDS: dict[str, type[Kind]] = {
    "channels_last": ChannelsLast,
    "gru": GRU,
    "lstm": LSTM,
    "rnn": RNN,
    "complex": Complex,
    "bag": Bag,
    "weight_norm": WeightNorm,
    "spectral_norm": SpectralNorm,
    "function": Function,
    "vmap": Mapped,
    "cond": Cond,
}
