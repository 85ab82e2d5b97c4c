"""What runs at every step: boxed functions that put shards where a compiled graph expects them.

A compiled forward is called with the module's parameters among its inputs and must return what autograd saves::

    called with      [x, weight, bias]         (weight and bias: ShardedParameter, no memory)
    graph gets       [x, shard]
    graph returns    [y, x, None]
    returned         [y, x, weight]            the parameter itself is saved: a write before backward is noticed

A compiled backward is called with what was saved; its extra outputs are shards of gradients, which go to ``.grad``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zerofx.group import ShardGroup
from zerofx.layout import Slot
from zerofx.parameter import ShardedTensor


def forward_runner(
    compiled: Callable, kept: Sequence[int], groups: Sequence[ShardGroup], saved: dict[int, Any]
) -> Callable:
    """The boxed forward: ``kept`` are the inputs that are no parameters, ``saved`` the parameters to return."""
    live = [weakref.ref(group) for group in groups]
    saved_refs = {i: weakref.ref(parameter) for i, parameter in saved.items()}

    def forward(args: list[Any]) -> list[Any]:
        outputs = list(compiled(_inputs(args, kept, live)))
        for i, ref in saved_refs.items():
            outputs[i] = ref()
        return outputs

    forward._boxed_call = True  # type: ignore[attr-defined]
    return forward


def backward_runner(
    compiled: Callable,
    kept: Sequence[int],
    groups: Sequence[ShardGroup],
    n_outputs: int,
    reductions: Sequence[tuple[ShardGroup, tuple[Slot, ...]]],
) -> Callable:
    """The boxed backward: returns the first ``n_outputs`` outputs, adds the others to the parameters' gradients."""
    live = [weakref.ref(group) for group in groups]
    targets = [(weakref.ref(group), slots) for group, slots in reductions]

    def backward(args: list[Any]) -> list[Any]:
        outputs = list(compiled(_inputs(args, kept, live)))
        for (group, slots), flat in zip(targets, outputs[n_outputs:], strict=True):
            group().accumulate(slots, flat)  # type: ignore[union-attr]
        return outputs[:n_outputs]

    backward._boxed_call = True  # type: ignore[attr-defined]
    return backward


def _inputs(args: list[Any], kept: Sequence[int], groups: Sequence[weakref.ref[ShardGroup]]) -> list[Any]:
    inputs = [args[i] for i in kept]
    args.clear()  # boxed: what is not an input any more may be freed while the graph runs
    for x in inputs:
        if isinstance(x, ShardedTensor):
            raise RuntimeError(f"{x!r} reaches compiled code that did not expect it: please report this.")
    return inputs + [group().shard for group in groups]  # type: ignore[union-attr]


def refuse_double_backward(compiled: Callable) -> Callable:
    """Wrap a compiled function so that ``create_graph=True`` is refused when its backward starts."""

    def run(*args: Any) -> Any:
        outputs = compiled(*args)
        node = next((x.grad_fn for x in outputs if isinstance(x, torch.Tensor) and x.grad_fn is not None), None)
        if node is not None:
            node.register_prehook(_check_single_backward)
        return outputs

    return run


def _check_single_backward(grad_outputs: Any) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "double backward (create_graph=True) through a module that zerofx compiled: gradients of gradients are not "
            "supported, because gradients leave the graph as reduced shards. Compute this loss on the module before "
            "zerofx.compile."
        )
