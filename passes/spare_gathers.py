"""Backward does not recompute what would have to gather weights that it needs for nothing else.

::

    forward     e = embedding(tokens, ids)                 forward     e = embedding(tokens, ids)
                h = e + positions                                      h = e + positions
                y = mm(h, w)                     ─────▶                y = mm(h, w)
    saved       ids, w                                     saved       h, w
    backward    gather tokens                              backward    dw = mm(h_t, dy)
                h = embedding(tokens, ids) + …
                dw = mm(h_t, dy)

Inductor's partitioner saves what takes the fewest bytes, and recomputes the rest where that is cheap. A parameter is
saved for nothing, as it is there anyway; sharded, it is not: reading it in backward is a gather, of the whole group.
So what reads a parameter of a group that backward has no other use for is marked to be saved, if anything after it
is needed. An embedding, mostly: the largest gather of many models.

Runs on the joint graph, before it is cut into forward and backward. Sound because it moves that cut, and nothing else.
Leaves alone what somebody has marked already: who wraps an embedding in a checkpoint wants it recomputed.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import GraphModule, Node

from zerofx._torch import must_save, saving_is_decided
from zerofx.passes import edit
from zerofx.passes.context import ParameterRef


def spare_gathers(gm: GraphModule, parameters: Mapping[str, ParameterRef]) -> int:
    """Mark what is to be saved; returns how many nodes were marked. ``parameters``: by the placeholder's name."""
    late = edit.behind_tangents(gm.graph)
    readers: dict[str, list[Node]] = {}
    for placeholder in gm.graph.find_nodes(op="placeholder"):
        if placeholder.name in parameters:
            name = parameters[placeholder.name].layout.name
            readers.setdefault(name, []).extend(_readers(placeholder))
    marked = 0
    for nodes in readers.values():
        if any(node in late for node in nodes):
            continue
        for node in nodes:
            if node.op == "call_function" and not saving_is_decided(node):
                must_save(node)
                marked += 1
    return marked


def _readers(parameter: Node) -> list[Node]:
    """What reads the parameter, or a view or a cast of it, and is none itself."""
    found: list[Node] = []
    todo = [parameter]
    while todo:
        for user in todo.pop().users:
            (todo if edit.is_view_or_cast(user) else found).append(user)
    return found
