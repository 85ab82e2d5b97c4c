"""``torch.autograd.grad``, walked from Python: for tensors on a device that is not there.

The engine in C++ asks the CUDA driver which streams are current before it runs the first node, and cannot do without an
answer. AOTAutograd needs no streams: it runs the engine on fake tensors, to see which operators backward is made of.
The same nodes are called here, in the same order, and no stream is asked for::

    outputs ──▶ pending: by node, how many edges still bring something
                ready:   nodes that have all their gradients; the one that forward made last comes first
    inputs  ◀── what arrives at their edges
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

Edge = tuple[Any, int]
"""A node of the autograd graph, and which of its forward's outputs a gradient is of."""


def gradients(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    grad_outputs: Sequence[torch.Tensor | None],
    around: Callable[[Any], Any],
) -> tuple[torch.Tensor | None, ...]:
    """What ``torch.autograd.grad(outputs, inputs, grad_outputs, allow_unused=True)`` returns (2.11, 2.13, 2.15).

    Hooks of nodes and tensors are not called. ``around``: of a node, the context in which it runs.
    """
    roots = [(x.grad_fn, x.output_nr) for x in outputs]
    nodes = _reached(roots)
    places = _places(nodes, inputs)
    needed = _lead_to(nodes, {node for node, _ in places})
    pending = Counter(nxt for node in needed for nxt, _ in node.next_functions if nxt in needed)
    arrived: dict[Any, dict[int, torch.Tensor]] = defaultdict(dict)
    with torch.no_grad():
        for (node, i), gradient in zip(roots, grad_outputs, strict=True):
            if node in needed:
                _add(arrived[node], node, i, gradient)
        found: dict[Edge, torch.Tensor] = {}
        ready = [(-node._sequence_nr(), k, node) for k, node in enumerate(needed) if not pending[node]]
        heapq.heapify(ready)
        order = len(nodes)
        while ready:
            *_, node = heapq.heappop(ready)
            came = arrived.pop(node, {})
            found |= {(node, i): gradient for i, gradient in came.items() if (node, i) in places}
            edges = [edge for edge in node.next_functions if edge[0] in needed]
            results: Sequence[Any] = ()
            if edges and came:
                with around(node):
                    results = _call(node, came)
            for (nxt, i), gradient in zip(node.next_functions, results):
                if nxt in needed:
                    _add(arrived[nxt], nxt, i, gradient)
            for nxt, _ in edges:
                pending[nxt] -= 1
                if not pending[nxt]:
                    order += 1
                    heapq.heappush(ready, (-nxt._sequence_nr(), order, nxt))
    edges_of = {k: edge for edge, ks in places.items() for k in ks}
    return tuple(found.get(edges_of[k]) if k in edges_of else None for k in range(len(inputs)))


def _reached(roots: Sequence[Edge]) -> list[Any]:
    """All nodes, each once; they are held, for a node's Python object is what it is known by."""
    seen: dict[Any, None] = {}
    todo = [node for node, _ in roots if node is not None]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen[node] = None
            todo += [nxt for nxt, _ in node.next_functions if nxt is not None]
    return list(seen)


def _places(nodes: Sequence[Any], inputs: Sequence[torch.Tensor]) -> dict[Edge, list[int]]:
    """Where the gradients of ``inputs`` arrive -> which of them."""
    leaves = {id(node.variable): node for node in nodes if hasattr(node, "variable")}
    found: dict[Edge, list[int]] = defaultdict(list)
    for k, x in enumerate(inputs):
        node, i = (leaves.get(id(x)), 0) if x.grad_fn is None else (x.grad_fn, x.output_nr)
        if node is not None:
            found[node, i].append(k)
    return dict(found)


def _lead_to(nodes: Sequence[Any], targets: set[Any]) -> dict[Any, None]:
    """Those of ``nodes`` from which one of ``targets`` is reached, themselves included."""
    readers: dict[Any, list[Any]] = defaultdict(list)
    for node in nodes:
        for nxt, _ in node.next_functions:
            if nxt is not None:
                readers[nxt].append(node)
    found: dict[Any, None] = {}
    todo = [node for node in nodes if node in targets]
    while todo:
        node = todo.pop()
        if node not in found:
            found[node] = None
            todo += readers[node]
    return found


def _add(arrived: dict[int, torch.Tensor], node: Any, i: int, gradient: torch.Tensor | None) -> None:
    """One more gradient arrives at ``node``: as large as the value it is of, and of its dtype."""
    if gradient is None:
        return
    expected = node._input_metadata[i]
    if gradient.shape != torch.Size(expected.shape):
        gradient = gradient.sum_to_size(tuple(expected.shape))
    if gradient.dtype != expected.dtype:
        gradient = gradient.to(expected.dtype)
    arrived[i] = arrived[i] + gradient if i in arrived else gradient


def _call(node: Any, came: dict[int, torch.Tensor]) -> Sequence[Any]:
    metadata = node._input_metadata
    given = [came.get(i) for i in range(len(metadata))]
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        results = node(*given)
    else:  # of a torch.autograd.Function: the engine fills in what did not come
        if node.materialize_grads:
            like = next(iter(came.values()))
            facts = [(tuple(m.shape), m.dtype) for m in metadata]
            given = [like.new_zeros(f[0], dtype=f[1]) if x is None else x for x, f in zip(given, facts)]
        results = node.apply(*given)
    return results if isinstance(results, tuple) else (results,)
