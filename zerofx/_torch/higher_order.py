"""Operators whose arguments are graphs: branches, loops, regions, what attention does to its scores."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.fx import Interpreter, Node

_ANEW = frozenset({"cond", "flex_attention", "flex_attention_backward", "map_impl", "scan", "associative_scan"})


def is_region(node: Node) -> bool:
    """Whether it calls what ``torch.compiler.nested_compile_region`` marks (2.11, 2.13, 2.15)."""
    return isinstance(node.target, HigherOrderOperator) and node.target.name() == "invoke_subgraph"


def computes_anew(target: Any) -> bool:
    """Whether it is an operator with graphs whose results are new memory (2.11, 2.13, 2.15).

    PyTorch refuses branches that return an argument, or a view of one. Not so a loop, which may run no times, nor a
    region, which may return anything.
    """
    return isinstance(target, HigherOrderOperator) and target.name() in _ANEW


def followed(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a higher-order operator returns, run without numbers; NotImplemented for those that need some.

    ======================  ===========================================================  ===========================
    ``cond``                ``(predicate, branch, branch, operands)``                    both branches, one by one
    with_effects            ``(token, operator, *arguments)``: what may fail, or print   the operator
    run_and_save_rng_state  ``(operator, *arguments)``: a draw that is checkpointed      a state's memory, the operator
    run_with_rng_state      ``(state, operator, *arguments)``: that draw, once more      the operator
    ======================  ===========================================================  ===========================

    Their arguments are the same on 2.11, 2.13 and 2.15.
    """
    if not isinstance(target, HigherOrderOperator):
        return NotImplemented
    if target.name() == "cond":
        _, first, second, operands = args
        Interpreter(first).run(*operands)  # its code may not have been written
        return Interpreter(second).run(*operands)
    if target.name() == "with_effects":
        token, operator, *given = args
        found = operator(*given, **kwargs)
        return (token, *found) if isinstance(found, tuple) else (token, found)
    if target.name() == "run_and_save_rng_state":
        operator, *given = args
        return torch.empty_like(torch.get_rng_state()), operator(*given, **kwargs)
    if target.name() == "run_with_rng_state":
        state, operator, *given = args
        _before = torch.empty_like(state)  # what it goes back to
        return operator(*given, **kwargs)
    return NotImplemented
