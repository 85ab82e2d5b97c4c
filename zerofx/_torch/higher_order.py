"""Operators whose arguments are graphs: branches, loops, regions, what attention does to its scores."""

from __future__ import annotations

from typing import Any

from torch._ops import HigherOrderOperator
from torch.fx import Node

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
