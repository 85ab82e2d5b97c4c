"""Backward dequantizes frozen weights once more, instead of being handed what forward has dequantized.

::

    forward     w8 = primals_2                   int8, 1 byte an element      forward     …
                w = to(w8, f32) * scale          float32, 4 bytes             saved       x
                y = mm(x, w)                                          ─────▶
    saved       x, w                                                          backward    w = to(w8, f32) * scale
    backward    dx = mm(dy, w_t)                                                          dx = mm(dy, w_t)

Without it a partitioner saves ``w`` as it saves any activation: of each layer four times the bytes that the quantized
weight has (QLoRA: Dettmers et al. 2023, whose kernels recompute it as well). Weights are there again in backward:
gathered, or whole.

Marked is what follows from frozen weights alone, one of them quantized (`zerofx.model.layout.is_quantized`), by
operators that are no products of matrices, and draw and write nothing; and of that what backward reads.

Runs on the joint graph, before it is cut into forward and backward. Sound because a value that follows from weights
alone is the same in both, as long as no weight was written in between; that is checked when backward starts. Leaves
alone what somebody has marked already.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch.fx import GraphModule, Node

from zerofx._torch import OpOverload, must_recompute, saving_is_decided
from zerofx.model.layout import is_quantized
from zerofx.passes import edit
from zerofx.passes.context import ParameterRef


def recompute_dequantized(gm: GraphModule, parameters: Mapping[str, ParameterRef]) -> int:
    """Mark what backward is to recompute; returns how many nodes were marked.

    ``parameters``: of the joint graph, by the placeholder's name.
    """
    frozen = {name: ref.layout.dtype for name, ref in parameters.items() if not ref.layout.requires_grad}
    if not any(map(is_quantized, frozen.values())):
        return 0
    late = edit.behind_tangents(gm.graph)
    quantized: dict[Node, bool] = {}  # what follows from frozen weights: whether one of them is quantized
    for node in gm.graph.nodes:
        if node.op == "placeholder" and node.name in frozen:
            quantized[node] = is_quantized(frozen[node.name])
        elif node.op == "call_function" and node not in late and _is_cheap(node):
            inputs = node.all_input_nodes
            if all(x in quantized for x in inputs):
                quantized[node] = any(quantized[x] for x in inputs)
    marked: set[Node] = set()
    for node in reversed(gm.graph.nodes):
        if quantized.get(node) and node.op == "call_function" and not saving_is_decided(node):
            if any(user in late or user in marked for user in node.users):
                marked.add(node)
    for node in marked:
        must_recompute(node)
    return len(marked)


def _is_cheap(node: Node) -> bool:
    """Whether the node costs about what its bytes cost, and has the same value whenever it runs."""
    if not isinstance(node.target, OpOverload):
        return node.target is operator.getitem  # of a split
    draws = torch.Tag.nondeterministic_seeded in node.target.tags
    return not draws and not node.target._schema.is_mutable and not edit.is_kernel(node)
