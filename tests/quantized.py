"""Layers with quantized, frozen weights and trained adapters beside them, in the forms in which libraries have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 64


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes of the shape of ``weight``, and a float32 scale for each row."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round().to(torch.int8), scale


class Int8(nn.Module):
    """Codes and scales are two parameters."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        codes, scale = quantized(weight)
        self.codes, self.scale = (nn.Parameter(x, requires_grad=False) for x in (codes, scale))

    def weight(self) -> torch.Tensor:
        return self.codes.to(self.scale.dtype) * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight().to(x.dtype))


class Float8(Int8):
    """Codes are floats of 8 bits."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(weight)
        scale = weight.abs().amax(1, keepdim=True) / 400
        self.codes, self.scale = (
            nn.Parameter(x, requires_grad=False) for x in ((weight / scale).to(torch.float8_e4m3fn), scale)
        )


class Packed4(Int8):
    """Two codes of 4 bits in one byte, which is what the parameter counts."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(weight)
        codes = (self.codes // 16 + 8).to(torch.uint8)
        self.codes = nn.Parameter(codes[:, ::2] * 16 + codes[:, 1::2], requires_grad=False)

    def weight(self) -> torch.Tensor:
        codes = torch.stack([self.codes >> 4, self.codes & 15], dim=-1).flatten(1)
        return (codes.to(self.scale.dtype) - 8) * 16 * self.scale


class Scaled(torch.Tensor):
    """A tensor subclass as those of torchao: codes and scales inside, and a weight to whoever asks."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Scaled:
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)
        return made  # type: ignore[no-any-return]

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], meta: Any, size: Any, stride: Any) -> Scaled:
        return Scaled(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return Scaled(func(args[0].codes), func(args[0].scale))
        plain = [x.codes.to(x.scale.dtype) * x.scale if isinstance(x, Scaled) else x for x in args]
        return func(*plain, **(kwargs or {}))


class Subclass(nn.Module):
    """The parameter is a `Scaled`."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(Scaled(*quantized(weight)), requires_grad=False)
        self.bias = nn.Parameter(torch.full((len(weight),), 0.1), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class Codes(nn.Parameter):
    """A parameter with its quantization beside it, as bitsandbytes' ``Params4bit``."""

    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Codes:
        made: Any = torch.Tensor._make_subclass(cls, codes, False)
        made.scale = scale
        return made  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: Any) -> Any:
        return Codes(self.detach().clone(), self.scale.clone())

    scale: torch.Tensor


class Attribute(nn.Module):
    """Codes are a `Codes`, whose scale forward looks for."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.codes = Codes(*quantized(weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.codes.to(x.dtype) * self.codes.scale.to(x.dtype))


FORMS: dict[str, Callable[[torch.Tensor], nn.Module]] = {
    "int8": Int8,
    "float8": Float8,
    "packed": Packed4,
    "subclass": Subclass,
    "attribute": Attribute,
}


class Adapted(nn.Module):
    """A frozen base, and a low-rank update that is trained (LoRA)."""

    def __init__(self, base: nn.Module, rows: int, columns: int) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(columns, 4, bias=False), nn.Linear(4, rows, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def build(form: str, layers: int = 3) -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(0)
    shapes = [(2 * WIDTH, WIDTH), (WIDTH, 2 * WIDTH)]
    made: list[nn.Module] = []
    for i in range(layers):
        rows, columns = shapes[i % 2]
        made += [Adapted(FORMS[form](torch.randn(rows, columns) / 8), rows, columns), nn.Tanh()]
    return nn.Sequential(*made)


def adapters(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]
