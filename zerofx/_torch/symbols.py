"""Sizes that are symbols: which there are, and the number that each counts as.

::

    mark_dynamic(x, 1, max=512)             counts as 512, the longest that it may be
    mark_dynamic(x, 1); dynamic=True;       counts as it was when the graph was captured
    a second length, without any mark
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.fx import GraphModule

from zerofx._torch.tensors import pytree

_counted: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()
"""Of the environment of a capture: what each symbol counts as; nothing where no bound was stated."""


def symbols_of(value: Any) -> set[Any]:
    """The symbols in a fake value's sizes (2.11, 2.13, 2.15)."""
    from torch.fx.experimental.symbolic_shapes import free_symbols

    found: set[Any] = set()
    for each in pytree.tree_leaves(value):
        if isinstance(each, (torch.Tensor, torch.SymInt)):
            found |= free_symbols(each)
    return found


def without_symbols(value: Any) -> Any:
    """``value`` (or a tuple) with the numbers that its symbols count as."""
    return pytree.tree_map_only((torch.SymInt, torch.SymFloat, torch.SymBool), _number, value)


def _number(value: Any) -> Any:
    counted = _counted.get(value.node.shape_env) if isinstance(value, torch.SymInt) else None
    size = value.node.expr.xreplace(counted) if counted else None
    return value.node.hint if size is None or size.free_symbols else int(size)


def know_bounds(gm: GraphModule) -> None:
    """Note what ``mark_dynamic`` has stated of the inputs of a graph of Dynamo's, which forgets it afterwards."""
    for env in _envs([node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]):
        sizes = list(_sizes(env))
        if any(bound is not None for _, bound in sizes):
            hints = {size.node.expr: size.node.hint for size, _ in sizes}
            _counted[env] = hints | {size.node.expr: bound for size, bound in sizes if bound is not None}


def hold_up_to_counted(values: Sequence[Any]) -> None:
    """Have Dynamo compile anew where an input's size that is in ``values`` is larger than it counts.

    Where a bound was stated Dynamo does not ask for more, and where a range has no end it says so in an error.
    """
    used = symbols_of(values)
    for env in _envs(values):
        for size, bound in _sizes(env):
            if bound is None and size.node.expr in used:
                bool(size <= without_symbols(size))


def _envs(values: Sequence[Any]) -> set[Any]:
    """Where the symbols among ``values`` come from: of each there is an input beside the tensors that have it."""
    return {x.node.shape_env for x in values if isinstance(x, torch.SymInt)}


def _sizes(env: Any) -> Iterator[tuple[torch.SymInt, Any]]:
    """Each symbol that is a size of an input, and the upper bound that was stated of it (2.11, 2.13, 2.15)."""
    from sympy import Integer
    from torch.fx.experimental.symbolic_shapes import StrictMinMaxConstraint

    for tracked in env.tracked_fakes or ():
        stated = getattr(tracked.symbolic_context, "constraint_sizes", None) or ()
        sizes = tuple(tracked.fake.shape) if isinstance(tracked.fake, torch.Tensor) else (tracked.fake,)
        for size, constraint in zip_longest(sizes, stated[: len(sizes)]):
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol and size.node.has_hint():
                bound = constraint.vr.upper if isinstance(constraint, StrictMinMaxConstraint) else None
                yield size, bound if isinstance(bound, Integer) and int(bound) < sys.maxsize - 1 else None
