"""Frozen weights that are tensor subclasses: the tensors inside of one are sharded, and it is rebuilt where it is read.

::

    before    base.weight                              Int8Tensor of (64, 32)          torchao's quantize_ made it
    at rest   base.parametrizations.weight.original0   int8 (64, 32), 1/M of it        its values
              base.parametrizations.weight.original1   float32 (64, 1), 1/M of it      its scales
    in graphs both, gathered ──▶ Int8Tensor of (64, 32)                                as AOTAutograd does it

What is gathered are bytes: the subclass's own code dequantizes after the gather, in backward once more
(`zerofx.passes.recompute_dequantized`). So a quantized base of QLoRA (Dettmers et al. 2023) takes a rank what it takes
one process, divided by the number of ranks.

A subclass says by itself what is inside of it (``__tensor_flatten__``), and ``torch.nn.utils.parametrize`` makes the
module's attribute a computed one. Nothing here knows a subclass by name. Those with trained values are refused: their
gradients and their optimizer's steps would be those of the subclass.

Outside of graphs, to read ``base.weight`` gathers it: every rank must.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from zerofx._torch import UnwrapTensorSubclass, is_dtensor, is_wrapper_subclass
from zerofx.model.policies import Policies, Policy
from zerofx.model.precision import note_inside
from zerofx.runtime.eager.whole import is_whole
from zerofx.runtime.state.parameter import ShardedTensor


class Rebuilt(UnwrapTensorSubclass):
    """The parametrization: from the tensors inside of a subclass to the subclass.

    Attributes:
        dtype: what the part that it is in computes in (`zerofx.model.policies`), so the subclass is cast to it, as any
            weight; None: it stays as it is.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, *inner: torch.Tensor) -> torch.Tensor:
        """The subclass of ``inner``."""
        return self._rebuilt(inner, self.dtype) if torch.compiler.is_compiling() else self._outside(inner)

    @torch.compiler.disable
    def _outside(self, inner: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Outside of graphs: of gathered tensors, also in what plain code between two graphs calls.

        Whole ones (`zerofx.unsharded`) are masters, and nothing is cast.
        """
        dtype = None if any(map(is_whole, inner)) else self.dtype
        return self._rebuilt(tuple(x.full_tensor() if isinstance(x, ShardedTensor) else x for x in inner), dtype)

    def _rebuilt(self, inner: tuple[torch.Tensor, ...], dtype: torch.dtype | None) -> torch.Tensor:
        weight = super().forward(*inner)
        return weight if dtype is None else weight.to(dtype)


class Subclasses:
    """The parameters of a module that are tensor subclasses, and where each stands."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._places: dict[Any, list[tuple[nn.Module, str]]] = {}
        self._names: dict[Any, str] = {}
        for prefix, m in module.named_modules() if isinstance(module, nn.Module) else ():
            for name, p in m.named_parameters(recurse=False, remove_duplicate=False):
                if is_wrapper_subclass(p) and not is_dtensor(p):
                    self._places.setdefault(p, []).append((m, name))
                    self._names.setdefault(p, f"{prefix}.{name}".lstrip("."))
        self._before: list[tuple[nn.Module, str, type[nn.Module], dict[str, Any]]] = []

    def leave(self, ignored: Iterable[nn.Parameter]) -> None:
        """Those of ``ignored`` stay where they are."""
        for p in ignored:
            self._names.pop(p, None)
            self._places.pop(p, None)

    def take(self, mixed_precision: Policy | None) -> None:
        """Put the tensors inside of each in its place. ``mixed_precision`` is what a user gave.

        Raises:
            ValueError: one that is trained, by name. Nothing has changed then.
        """
        if not self._names:
            return
        policies = Policies(self._module, mixed_precision)
        for p, name in self._names.items():
            if p.requires_grad:
                raise ValueError(
                    f"{name!r} is a {type(p).__name__} and requires grad: expected an nn.Parameter, whose gradient "
                    "zerofx reduces. Freeze it, parameter.requires_grad_(False), and train adapters beside it."
                )
        for p, places in self._places.items():
            first: Any = None
            for module, name in places:
                self._before.append((module, name, type(module), dict(module._parameters)))
                rebuilt = Rebuilt(policies.of(self._names[p]).param_dtype)
                parametrize.register_parametrization(module, name, rebuilt, unsafe=True)
                inner: Any = module.parametrizations[name]  # type: ignore[index]
                for x in inner.parameters(recurse=False):
                    note_inside(x)
                first = first or inner
                inner._parameters.update(first._parameters)  # of a tied weight, one for all its places

    def undo(self) -> None:
        """Everything is as it was."""
        for module, name, before, parameters in reversed(self._before):
            if type(module) is before:  # it had others of its own
                delattr(before, name)
                del module.parametrizations[name]
            else:  # a copy may have the class that parametrize has made
                module.__class__ = before
                del module._modules["parametrizations"]
            module._parameters.clear()
            module._parameters.update(parameters)
        self._before.clear()

    def settle(self) -> None:
        """There is no way back: the subclasses may go."""
        for kept in (self._before, self._places, self._names):
            kept.clear()
