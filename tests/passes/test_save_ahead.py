"""save_ahead: what reads weights too far ahead of their turn is saved; what reads them in turn is recomputed."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from tests.passes.graphs import Sketch, aten
from zerofx.passes import save_ahead
from zerofx.passes.context import ParameterRef


def chain(layers: str = "abcd", *, seen: bool = False) -> tuple[Graph, list[Node], dict[str, ParameterRef]]:
    """``x = x * w``, once per layer, and its gradients in autograd's order; what enters each layer; the parameters.

    ``seen``: each layer looks at what enters it through a view.
    """
    s = Sketch()
    weights = {name: s.parameters(name, **{f"{name}w": (8,)})[0] for name in layers}
    entries, views = [s.input("x", 4, 8)], []
    for name in layers:
        views.append(s.call(aten.view.default, entries[-1], [4, 8]) if seen else entries[-1])
        entries.append(s.call(aten.mul.Tensor, views[-1], weights[name]))
    dy, grads = s.input("tangents_1", 4, 8), []
    for name, x in zip(reversed(layers), reversed(views), strict=True):
        dx = s.call(aten.mul.Tensor, dy, weights[name])
        grads.append(s.call(aten.mul.Tensor, dy, x))
        dy = dx
    gm, ctx = s.done(entries[-1], *grads)
    return gm.graph, entries, ctx.parameters


def test_what_reads_weights_two_turns_ahead_is_saved() -> None:
    graph, (x, *_, d, _y), parameters = chain()
    # dd needs what entered d: of c, whose turn is next, and of b and a. From there one layer is recomputed.
    assert save_ahead(graph, [x], parameters) == [d, *d.all_input_nodes[:1]]


def test_one_turn_ahead_is_recomputed() -> None:
    graph, (x, b, c, d, _y), parameters = chain()
    assert save_ahead(graph, [x, b, c], parameters) == []
    assert save_ahead(graph, [x, b, c], parameters, ahead=0) == [d]
    assert save_ahead(graph, [x, b, c, d], parameters, ahead=0) == []


def test_of_a_view_the_value_is_saved() -> None:
    graph, (x, b, *_), parameters = chain("abc", seen=True)
    assert save_ahead(graph, [x], parameters, ahead=0)[-1] is b


def test_what_a_checkpoint_recomputes_is_left_alone() -> None:
    graph, (x, *_, d, _y), parameters = chain()
    d.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    assert d not in save_ahead(graph, [x], parameters)


def test_what_reads_no_weights_is_left_to_the_partitioner() -> None:
    graph, (x, *_), _ = chain()
    assert save_ahead(graph, [x], {}) == []


@pytest.mark.parametrize("ahead", [0, 1])
def test_what_is_recomputed_then_reads_no_weights_out_of_turn(ahead: int) -> None:
    graph, (x, *_), parameters = chain("abcdefgh")
    saved = [x, *save_ahead(graph, [x], parameters, ahead)]
    turns = {name: i for i, name in enumerate("hgfedcba")}
    for i, grad in enumerate(graph.output_node().args[0][1:]):  # of the weight whose turn is number i
        todo = [n for n in grad.all_input_nodes if n.op == "call_function" and n not in saved and n.args[0] is not None]
        todo = [n for n in todo if not _is_late(n)]
        while todo:
            node = todo.pop()
            assert turns[node.args[1].name[0]] <= i + ahead
            todo += [node.args[0]] if node.args[0] not in saved else []


def _is_late(node: Node) -> bool:
    return any(n.name == "tangents_1" or (n.op == "call_function" and _is_late(n)) for n in node.all_input_nodes)


def test_a_weight_is_told_through_views_and_casts() -> None:
    s = Sketch()
    (a,), (b,), (c,) = (s.parameters(name, torch.half, **{f"{name}w": (8,)}) for name in "abc")
    x, wide = s.input("x", 4, 8), {}
    entries = [x]
    for w in (a, b, c):
        wide[w] = s.call(aten._to_copy.default, s.call(aten.view.default, w, [1, 8]), dtype=torch.float32)
        entries.append(s.call(aten.mul.Tensor, entries[-1], wide[w]))
    dy, grads = s.input("tangents_1", 4, 8), []
    for w, entry in ((c, entries[2]), (b, entries[1]), (a, x)):
        dx = s.call(aten.mul.Tensor, dy, wide[w])
        grads.append(s.call(aten.mul.Tensor, dy, entry))
        dy = dx
    gm, ctx = s.done(entries[-1], *grads)
    assert save_ahead(gm.graph, [x], ctx.parameters) == [entries[2]]
