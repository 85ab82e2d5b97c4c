"""The layers of a deep module that are alike, and the same module with fewer of them.

::

    embedding  0  1  2  3  4  5  …  125  norm  head        Stack.of(module).count == 126
    embedding  0  1  2  3                norm  head        Stack.of(module).of_first(4): shares all that it has

Layers are alike if they have the same classes, the same parameters and buffers (names, shapes, dtypes, what is
trained), and the same settings: numbers, texts and flags in their attributes, but for a layer's own number. Layers that
share a parameter, with each other or with the rest, are no stack.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn

SETTINGS = (bool, int, float, str, type(None))
"""Attributes of these types decide what a layer does."""


@dataclass(frozen=True)
class Stack:
    """Where they are.

    Attributes:
        name: of their container, a `ModuleList` or `Sequential`, seen from the module.
        count: how many there are.
        nbytes: of the parameters of one.
    """

    module: nn.Module
    name: str
    count: int
    nbytes: int

    @staticmethod
    def of(module: nn.Module) -> Stack | None:
        """The stack that has most of the parameters; None: there is none, or it has less than half of them."""
        whole = sum(p.nbytes for p in module.parameters())
        for name, container in module.named_modules():
            layers = list(container.children())
            nbytes = sum(p.nbytes for p in container.parameters())
            if len(layers) < 2 or not isinstance(container, (nn.ModuleList, nn.Sequential)) or 2 * nbytes <= whole:
                continue
            if all(_alike(layers[0], layer, i) for i, layer in enumerate(layers)) and not _shares(module, container):
                return Stack(module, name, len(layers), nbytes // len(layers))
        return None

    def of_first(self, count: int) -> nn.Module:
        """The module with its first ``count`` layers. Whatever it has it shares; the module is left as it is."""
        top = at = _shell(self.module)
        *path, last = self.name.split(".") if self.name else [""]
        if not last:
            at._modules = dict(list(at._modules.items())[:count])
            return top
        for name in path:
            at._modules[name] = at = _shell(at._modules[name])
        layers = _shell(at._modules[last])
        layers._modules = dict(list(layers._modules.items())[:count])
        at._modules[last] = layers
        return top


def _shell(module: Any) -> Any:
    """A module with the same attributes, parameters and children, which can be given others."""
    shell = copy.copy(module)
    shell._modules = dict(module._modules)
    return shell


def _alike(first: nn.Module, other: nn.Module, number: int) -> bool:
    """Whether ``other`` does with other numbers what the first layer does; it is the layer with this ``number``."""
    if _tensors(first) != _tensors(other):
        return False
    for (a, one), (b, two) in zip(first.named_modules(), other.named_modules(), strict=False):
        mine, yours = _settings(one), _settings(two)
        if (a, type(one), mine.keys()) != (b, type(two), yours.keys()):
            return False
        if any(not _is_setting(value, yours[key], number) for key, value in mine.items()):
            return False
    return True


def _is_setting(first: Any, other: Any, number: int) -> bool:
    """Whether both are the same, or each the number of its layer."""
    kinds = type(first), type(other)
    return kinds[0] is kinds[1] and (first == other or (kinds[0] is int and (first, other) == (0, number)))


def _tensors(layer: nn.Module) -> list[Any]:
    """What is known of a layer's parameters and buffers without looking at their values; and its modules' names."""
    found = [*layer.named_parameters(), *layer.named_buffers()]
    named = [(name, type(x), x.shape, x.dtype, x.requires_grad) for name, x in found]
    return [named, [name for name, _ in layer.named_modules()]]


def _settings(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if isinstance(value, SETTINGS)}


def _shares(module: nn.Module, container: nn.Module) -> bool:
    """Whether a parameter of ``container`` stands anywhere else, or in two of its layers."""
    times = Counter(id(x) for _, x in module.named_parameters(remove_duplicate=False))
    inside: Counter[int] = Counter()
    for layer in container.children():
        inside.update({id(p): 1 for p in layer.parameters()})
    own = Counter(id(x) for layer in container.children() for _, x in layer.named_parameters(remove_duplicate=False))
    return any(n > 1 for n in inside.values()) or any(times[key] != n for key, n in own.items())
