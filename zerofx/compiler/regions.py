"""Regions of ``torch.compiler.nested_compile_region``, in the graphs of Dynamo's that call them."""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from zerofx import _torch
from zerofx.passes import edit


def inline_regions(gm: GraphModule) -> None:
    """Put regions where they are called.

    They are there to compile one layer's code for all. Forward would return, among what a region saves, weights as
    they are or as views, and backward would get them whole; a region's gathers could only be before all of it.
    """
    for each in [m for m in gm.modules() if isinstance(m, GraphModule)]:
        edits = 0
        while regions := [node for node in each.graph.nodes if _torch.is_region(node)]:
            for node in regions:
                _inline(each, node)
            edits += len(regions)
        if edits:
            edit.finish(each, edits)


def _inline(gm: GraphModule, region: Node) -> None:
    """Put the graph of ``region`` in its place."""
    (graph, _, *operands) = region.args
    inner = getattr(gm, graph.target)  # type: ignore[union-attr, arg-type]
    env: dict[Node, Any] = dict(zip(inner.graph.find_nodes(op="placeholder"), operands, strict=True))
    with gm.graph.inserting_before(region):
        for node in inner.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            env[node] = gm.graph.node_copy(node, env.__getitem__)
            if node.op == "get_attr":
                env[node].target = _attribute(gm, getattr(inner, node.target))
    results = map_arg(inner.graph.output_node().args[0], env.__getitem__)
    for user in list(region.users):
        assert user.target is operator.getitem, "Dynamo unpacks what a region returns"
        user.replace_all_uses_with(results[user.args[1]])
        gm.graph.erase_node(user)
    gm.graph.erase_node(region)
    if not graph.users:  # type: ignore[union-attr]
        gm.graph.erase_node(graph)  # type: ignore[arg-type]


def _attribute(gm: GraphModule, value: Any) -> str:
    """A name of its own for ``value`` in ``gm``."""
    n = 0
    while hasattr(gm, f"inlined_{n}"):
        n += 1
    setattr(gm, f"inlined_{n}", value)
    return f"inlined_{n}"
