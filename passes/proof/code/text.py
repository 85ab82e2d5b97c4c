"""What an expression of a wrapper says: names, numbers, sizes."""

from __future__ import annotations

import ast
import contextlib
import math
import re
from collections.abc import Iterator
from typing import Any


def is_own(name: ast.Name) -> bool:
    """Whether a name belongs to the function: it is bound or deleted there, or is called as Inductor calls memory."""
    return not isinstance(name.ctx, ast.Load) or re.fullmatch(r"buf\d+", name.id) is not None


def names_in(node: ast.expr | None) -> frozenset[str]:
    return frozenset() if node is None else frozenset(n.id for n in ast.walk(node) if isinstance(n, ast.Name))


def product_of(sizes: ast.expr) -> int | None:
    elements = sizes.elts if isinstance(sizes, (ast.Tuple, ast.List)) else [None]
    numbers = [e.value for e in elements if isinstance(e, ast.Constant) and isinstance(e.value, int)]
    return math.prod(numbers) if len(numbers) == len(elements) else None


def constants_in(arguments: list[ast.expr]) -> Iterator[Any]:
    """The values of those that are written out."""
    for argument in arguments:
        with contextlib.suppress(ValueError):  # it names something
            yield ast.literal_eval(argument)


def asserted(name: str, args: list[ast.expr]) -> Iterator[tuple[str, int]]:
    """Names, and how many elements each has, by an assertion of one tensor's sizes or of several tensors'."""
    if name not in ("assert_size_stride", "assert_tensor_metadata", "assert_size_stride_grouped") or len(args) < 2:
        return
    tensors, sizes = [args[0]], [args[1]]
    if isinstance(args[0], ast.Tuple) and isinstance(args[1], ast.Tuple):
        tensors, sizes = args[0].elts, args[1].elts
    for tensor, size in zip(tensors, sizes):
        if isinstance(tensor, ast.Name) and (numel := product_of(size)) is not None:
            yield tensor.id, numel


def dotted(node: ast.expr) -> str:
    """``a.b.c`` as text; empty where it begins with something else than a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""
