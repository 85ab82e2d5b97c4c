"""Hooks on the gradients of one group's parameters: what ``parameter.register_hook`` is to a plain parameter.

A backward of two graphs, each of which reduces a part of the gradient of ``p``::

    graph 2      graph 1      the engine comes to p
    average a    average b
    a            a + b        hooks(a + b) ──▶ added to p.grad

A hook sees the gradient of this backward, averaged over the ranks, once, and before it is added to ``.grad``. So the
parts wait until the autograd engine comes to the parameter, which it does after every graph that uses it. In stages 1
to 3 it is a sharded tensor: elementwise operations run on the slice, norms and sums are of the whole.

What waits ends with its backward, also where that fails: the engine holds it, among what it calls at the end.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from zerofx._torch import DTensorLayout, backward_number, end_of_backward
from zerofx.model.layout import Slot

Hook = Callable[[Any], Any]


class _Waiting(dict[Slot, torch.Tensor]):
    """The parts of one backward, added up, by parameter."""


class GradientHooks:
    """The hooks of one group's parameters, and gradients that wait for them."""

    def __init__(self) -> None:
        self._hooks: dict[Slot, OrderedDict[int, Hook]] = {}
        self._waiting: weakref.WeakValueDictionary[int, _Waiting] = weakref.WeakValueDictionary()
        self._alone = ""

    def __contains__(self, slot: Slot) -> bool:
        return bool(self._hooks.get(slot))

    def any(self) -> bool:
        """Whether there is a hook."""
        return any(self._hooks.values())

    def adopt(self, slot: Slot, hooks: OrderedDict[int, Hook] | None) -> None:
        """Take over what was registered on the plain parameter; its handles go on to work."""
        if hooks:
            self._hooks[slot] = hooks

    def register(self, slot: Slot, hook: Hook) -> RemovableHandle:
        """``hook`` is called last of those of ``slot``."""
        hooks = self._hooks.setdefault(slot, OrderedDict())
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def wait(self, slot: Slot, part: torch.Tensor) -> None:
        """Inside of a backward: ``part`` of the gradient is there."""
        number = backward_number()
        if (waiting := self._waiting.get(number)) is None:
            self._waiting[number] = waiting = _Waiting()
            end_of_backward(waiting.clear)
        waiting[slot] = waiting[slot] + part if slot in waiting else part

    def take(self, slot: Slot) -> torch.Tensor | None:
        """What waits in this backward, once."""
        waiting = self._waiting.get(backward_number())
        return None if waiting is None else waiting.pop(slot, None)

    def run(self, slot: Slot, gradient: Any) -> Any:
        """What the hooks make of ``gradient``. A sharded tensor is written to.

        Raises:
            RuntimeError: a hook returned what is no gradient of the parameter.
        """
        for hook in list(self._hooks.get(slot, {}).values()):
            with torch.no_grad():
                result = hook(gradient)
            if result is None or result is gradient:
                continue
            found = (result.shape, result.dtype) if isinstance(result, torch.Tensor) else type(result).__name__
            if found != (gradient.shape, gradient.dtype):
                raise RuntimeError(
                    f"the hook {getattr(hook, '__qualname__', hook)!r} on the gradient of {slot.name!r} returned "
                    f"{_in_words(result)}: expected None, or {_in_words(gradient)}, as the gradient is."
                )
            if hasattr(gradient, "_local"):
                with torch.no_grad():
                    gradient.copy_(result)  # of a whole tensor this rank's slice
            else:
                gradient = result
        return gradient

    @contextlib.contextmanager
    def unused_here(self, slot: Slot) -> Iterator[None]:
        """Hooks run inside for a parameter of which other ranks alone have a gradient."""
        self._alone = slot.name
        try:
            yield
        finally:
            self._alone = ""

    def check_alike(self, what: str) -> None:
        """Raise where not all ranks run the same hooks now, in the same order, and ``what`` needs all of them."""
        if self._alone:
            raise RuntimeError(
                f"a hook on the gradient of {self._alone!r} asks for {what}, which every rank must ask for at once, "
                "and this rank has not used the parameter in this forward: ranks run their hooks in different orders "
                "then. Compute elementwise on the slice, or look at .grad before optimizer.step()."
            )


def check_hooks(name: str, *, uneven: bool, parts: bool) -> None:
    """Refuse a hook on the gradient of the parameter ``name`` where nobody could say what it sees.

    ``parts``: it stands for a `DTensor`, of which this rank trains a part.
    """
    if uneven or parts:
        why = "with uneven=True, where ranks add to a gradient by turns" if uneven else "which stands for a DTensor"
        raise ValueError(
            f"register_hook() of {name!r}, {why}: a hook would see a part of the gradient. Change .grad between "
            "backward and optimizer.step()."
        )


class Hooked(torch.Tensor):
    """A parameter of ours: hooks on its gradient are kept with its group."""

    _group: Any
    _slot: Slot
    _dtensor: DTensorLayout | None

    def register_hook(self, hook: Callable[[Any], Any]) -> RemovableHandle:
        """Have ``hook(gradient)`` called with the gradient of each backward, as ``torch.Tensor.register_hook`` does.

        The gradient is averaged over the ranks, and not yet added to ``.grad``. In stages 1 to 3 it is a
        `ShardedTensor`, of the parameter's shape and dtype; what the hook returns may be one, or a whole tensor.

        Raises:
            RuntimeError: the parameter is frozen.
            ValueError: with ``uneven=True``; or it stands for a `DTensor`.
        """
        if not self.requires_grad:
            raise RuntimeError(
                f"register_hook() of {self._slot.name!r}, which is frozen: it gets no gradient. Call requires_grad_() "
                "first."
            )
        check_hooks(self._slot.name, uneven=self._group.family.turns is not None, parts=self._dtensor is not None)
        return self._group.gradients.hooks.register(self._slot, hook)


def _in_words(x: Any) -> str:
    if not isinstance(x, torch.Tensor):
        return f"a {type(x).__name__}"
    return f"a tensor of shape {list(x.shape)} and {x.dtype}"
