"""Which values are the same on all ranks of a process group, as far as the graph itself says so.

::

    x: the same                      "x"
    w: a part of a layer             -              other ranks have other parts
    y = mm(x, w)                     -              of a value that differs
    s = all_reduce(y, "sum", tp)     "s"            what the collective brings is one thing
    h = add(x, wait(s))              "h"            an operator of values that are the same
    d = native_dropout(h, 0.1)       -              it draws: other ranks draw other numbers

Each such value has a digest, of its operators and constants down to the inputs. A graph can have constants that are
this rank's own (``x[rank]``). So a digest alone says little: two ranks have one value where they have one digest.

Not the same is, whatever its inputs are: what a rank draws or leaves uninitialised, what is written to, what an
operator that is not PyTorch's returns, and what other collectives bring.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from zerofx._torch import OpOverload
from zerofx.passes import edit

_c10d = torch.ops._c10d_functional
_BRING_ONE_THING = (_c10d.all_reduce.default, _c10d.all_gather_into_tensor.default, _c10d.broadcast.default)
_WAIT = _c10d.wait_tensor.default
_OWN = ("empty", "new_empty", "rand", "rng", "philox", "seed", "bernoulli", "inductor")
"""In the names of operators whose result is a rank's own."""


def alike(graph: Graph, given: Mapping[str, str], groups: Collection[str]) -> dict[Node, str]:
    """The digest of each value that ranks have alike if they have its digest alike.

    Args:
        given: by placeholder, those that ranks have alike, with a digest each.
        groups: the names of the process groups whose collectives bring all of these ranks one thing.
    """
    written = {x for node in graph.nodes if isinstance(node.target, OpOverload) for x in edit.written_by(node)}
    found: dict[Node, str] = {}
    collectives = itertools.count()
    for node in graph.nodes:
        if node.op == "placeholder":
            if node.name in given and node not in written:
                found[node] = given[node.name]
        elif node.op == "call_function":
            key: tuple[Any, ...] | None = None
            if node.target in _BRING_ONE_THING:
                number, constants = next(collectives), [x for x in node.args if not isinstance(x, (Node, str))]
                if node.args[-1] in groups:
                    key = "brought", number, str(node.target), constants, _shape(node)
            elif all(x in found for x in node.all_input_nodes) and _determined(node) and node not in written:
                key = str(node.target), _key(node.args, found), _key(node.kwargs, found), _shape(node)
            if key is not None:
                found[node] = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    return found


def _determined(node: Node) -> bool:
    """Whether what it returns follows from what it is given."""
    target = node.target
    if target is operator.getitem or target is _WAIT:
        return True
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    own = any(word in target._schema.name.split("::")[1] for word in _OWN)
    return not own and not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags


def _key(value: Any, found: Mapping[Node, str]) -> Any:
    """``value`` with digests for nodes; a device is what it is of, for each rank has its own."""
    if isinstance(value, Node):
        return found[value]
    if isinstance(value, (list, tuple)):
        return [_key(x, found) for x in value]
    if isinstance(value, dict):
        return [(k, _key(v, found)) for k, v in sorted(value.items())]
    return value.type if isinstance(value, torch.device) else value


def _shape(node: Node) -> Any:
    value = node.meta.get("val")
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None
