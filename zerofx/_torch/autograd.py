"""What zerofx asks of the autograd engine, while a backward pass runs and before."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from zerofx._torch.tensors import DisableTorchFunction


def end_of_backward(callback: Callable[[], None]) -> None:
    """Inside a backward pass: call ``callback`` once it is through (2.11, 2.13, 2.15)."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def keeps_graph() -> bool:
    """Whether the backward pass that runs was called with ``retain_graph=True`` (2.11, 2.13, 2.15)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def inside_backward() -> bool:
    """Whether the engine runs a backward pass on this thread (2.11, 2.13, 2.15)."""
    return backward_number() != -1


def backward_number() -> int:
    """Of the backward pass that the engine runs on this thread; -1: none (2.11, 2.13, 2.15)."""
    return torch._C._current_graph_task_id()


def post_accumulate_hooks(parameter: torch.Tensor) -> int:
    """How many ``register_post_accumulate_grad_hook`` has put there (2.11, 2.13, 2.15)."""
    with DisableTorchFunction():  # else a parameter that lives in a file would come to memory to answer
        return len(parameter._post_accumulate_grad_hooks or ())


def take_hooks(parameter: torch.Tensor) -> Any:
    """What ``register_hook`` has put on a plain ``parameter``, by number: the engine calls it no more.

    The handles that ``register_hook`` has returned refer to this dictionary. None: there was nothing. Seen in 2.11,
    2.13, 2.15.
    """
    hooks = parameter._backward_hooks
    parameter._backward_hooks = None
    return hooks


def run_post_accumulate_hooks(parameter: torch.Tensor) -> None:
    """Run those hooks, as the engine does when it has accumulated into ``parameter`` (2.11, 2.13, 2.15)."""
    with DisableTorchFunction():
        hooks = list((parameter._post_accumulate_grad_hooks or {}).values())
    for hook in hooks:
        hook(parameter)


def gradient_edge(tensor: torch.Tensor) -> Any:
    """Where the gradient of ``tensor`` arrives in the autograd graph (2.11, 2.13, 2.15)."""
    with DisableTorchFunction():
        return torch.autograd.graph.get_gradient_edge(tensor)


def will_accumulate(parameter: torch.Tensor) -> bool:
    """Inside a backward pass: whether the engine would accumulate into ``parameter.grad`` in this pass.

    False under ``backward(inputs=...)`` without this parameter (2.11, 2.13, 2.15).

    Raises:
        RuntimeError: the pass is ``torch.autograd.grad`` with respect to this parameter.
    """
    return torch._C._will_engine_execute_node(gradient_edge(parameter).node)


def saved_tensors_are_hooked() -> bool:
    """Whether ``torch.autograd.graph.saved_tensors_hooks`` are active: a checkpoint's, say (2.11, 2.13, 2.15)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def node_behind(outputs: Iterable[torch.Tensor]) -> Any:
    """AOTAutograd's node among those that made ``outputs``, or None; looks through views (2.11, 2.13, 2.15)."""
    nodes = [x.grad_fn for x in outputs if x.grad_fn is not None]
    while nodes:
        for node in nodes:
            if node.name() == "CompiledFunctionBackward":
                return node
        nodes = [nexts[0][0] for node in nodes if len(nexts := node.next_functions) == 1 and nexts[0][0] is not None]
    return None
