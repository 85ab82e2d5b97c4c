"""save_random: what draws is saved; attention that draws nothing, and what a checkpoint marked, stay as they are."""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule

from zerofx._torch import saving_is_decided
from zerofx.passes import save_random

_aten = torch.ops.aten


def joint() -> tuple[GraphModule, dict[str, torch.fx.Node]]:
    """Dropout, attention with and without dropout in forward; another drawing behind the tangent."""
    graph = Graph()
    x, tangent = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
    attention = _aten._scaled_dot_product_flash_attention_for_cpu.default
    nodes = {
        "dropout": graph.call_function(_aten.native_dropout.default, (x, 0.5, True)),
        "plain": graph.call_function(attention, (x, x, x)),
        "nothing": graph.call_function(attention, (x, x, x, 0.0)),
        "dropped": graph.call_function(attention, (x, x, x, 0.1)),
        "late": graph.call_function(_aten.rand_like.default, (tangent,)),
        "marked": graph.call_function(_aten.rand_like.default, (x,)),
    }
    nodes["marked"].meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
    graph.output((tuple(nodes.values()),))
    return GraphModule(torch.nn.Module(), graph), nodes


def test_what_draws_is_marked_and_nothing_else() -> None:
    gm, nodes = joint()
    assert save_random(gm) == 2
    assert [name for name, node in nodes.items() if saving_is_decided(node)] == ["dropout", "dropped", "marked"]
    assert save_random(gm) == 0
