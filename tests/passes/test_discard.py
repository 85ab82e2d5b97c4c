"""discard: a gathered buffer is freed right behind its last use, and never before."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.fx import Interpreter, Node
from torch.testing import FileCheck

from tests.passes.graphs import (
    Sketch,
    apply,
    assert_documented,
    assert_left_alone,
    aten,
    events,
    mlp_backward,
    mlp_forward,
    up_to,
)
from zerofx.passes import discard, prefetch
from zerofx.passes.ops import discard as discard_storage


def test_each_buffer_is_discarded_right_behind_its_last_use() -> None:
    gm, ctx = mlp_forward(2, layers="ab")
    apply(gm, ctx, *up_to(prefetch))
    applied = apply(gm, ctx, discard)
    assert applied.edits == 2
    FileCheck().check("wait_tensor_default = ").check("addmm = ").check_next("discard(wait_tensor_default)").check_next(
        "relu = "
    ).check("addmm_1 = ").check_next("discard(wait_tensor_default_1)").check_next("relu_1 = ").run(gm.code)
    assert_documented(applied.inserted, {"discard": {1, 3}})  # the line that used it last


def test_backward_discards_behind_the_gradient_of_the_input() -> None:
    gm, ctx = mlp_backward(2, layers="ab")
    assert apply(gm, ctx, *up_to(discard)).edits == 2
    schedule = events(gm)
    for layer in "ab":
        at = schedule.index(f"discard {layer}")
        assert schedule[at - 3 : at] == [f"weight {layer}", "t", "mm"]


def test_uses_through_chains_of_views_count() -> None:
    s = Sketch()
    x = s.input("x", 4, 8)
    (w,) = s.parameters("a", w=(8, 8))
    t = s.call(aten.t.default, w)
    y = s.call(aten.mm.default, x, w)
    pieces = s.call(aten.split.Tensor, s.call(aten.view.default, s.call(aten.t.default, t), [4, 16]), 8, 1)
    y = s.call(aten.relu.default, y)
    hidden_view = s.call(aten._unsafe_view.default, s.call(operator.getitem, pieces, 1), [4, 8])  # by no schema
    y = s.call(aten.add.Tensor, y, hidden_view)
    gm, ctx = s.done(s.call(aten.relu.default, y))
    apply(gm, ctx, *up_to(discard))
    assert events(gm)[-8:] == ["view", "split", "relu", "getitem", "_unsafe_view", "add", "discard a", "relu"]


def test_what_was_computed_from_a_weight_is_no_use_of_it() -> None:
    s = Sketch()
    (w,) = s.parameters("a", w=(8, 8))
    cast = s.call(aten._to_copy.default, w, dtype=torch.bfloat16)
    top = s.call(aten.topk.default, s.call(aten.relu.default, cast), 2)
    values = s.call(operator.getitem, top, 0)
    gm, ctx = s.done(s.call(aten.neg.default, values), cast)
    apply(gm, ctx, *up_to(discard))
    assert events(gm) == [
        "all_gather a",
        "wait a",
        "weight a",
        "_to_copy",
        "discard a",
        "relu",
        "topk",
        "getitem",
        "neg",
    ]


@pytest.mark.parametrize("escapes", ["weight", "view", "piece"])
def test_a_buffer_that_leaves_the_graph_is_not_discarded(escapes: str) -> None:
    s = Sketch()
    x = s.input("x", 8, 8)
    w, b = s.parameters("a", w=(8, 8), b=(8,))
    (v,) = s.parameters("b", v=(8, 8))
    x = s.call(aten.mm.default, s.call(aten.addmm.default, b, x, w), v)
    out = {
        "weight": lambda: w,
        "view": lambda: s.call(aten.t.default, s.call(aten.view.default, w, [16, 4])),
        "piece": lambda: s.call(operator.getitem, s.call(aten.split.Tensor, w, 2), 0),
    }[escapes]()
    gm, ctx = s.done(x, out)
    assert apply(gm, ctx, *up_to(discard)).edits == 1
    assert events(gm, "discard") == ["discard b"]


def test_a_graph_without_gathers_is_left_alone() -> None:
    assert_left_alone(*mlp_forward(2), discard)
    gm, ctx = mlp_forward(1)
    apply(gm, ctx, *up_to(prefetch))
    assert_left_alone(gm, ctx, discard)  # one rank: the shard is the buffer, and stays


def test_discarding_frees_the_memory_though_views_remain() -> None:
    buffer = torch.ones(1024)
    view = buffer[:8].view(2, 4)
    discard_storage(buffer)
    assert buffer.untyped_storage().nbytes() == 0 == view.untyped_storage().nbytes()
    assert buffer.shape == (1024,) and view.shape == (2, 4)


class Watch(Interpreter):
    """Runs a graph; no node may read freed memory, and each discard must free some."""

    freed = 0

    def run_node(self, n: Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        nbytes = [t.untyped_storage().nbytes() for t in _tensors([args, kwargs]) if t.numel()]
        if n.op == "call_function":
            assert 0 not in nbytes, f"{n.format_node()} reads freed memory"
        result = super().run_node(n)
        if n.target is discard_storage:
            self.freed += nbytes[0]
            assert args[0].untyped_storage().nbytes() == 0
        return result


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, (list, tuple, dict)):
        return [t for item in (value.values() if isinstance(value, dict) else value) for t in _tensors(item)]
    return [value] if isinstance(value, torch.Tensor) else []


@pytest.mark.parametrize("memory_budget", [None, 1 << 20])
@pytest.mark.parametrize("graph", [mlp_forward, mlp_backward])
def test_a_run_frees_every_gathered_byte_and_reads_none_of_them_later(fake_world, graph, memory_budget) -> None:
    fake_world(4)
    gm, ctx = graph(4, process_group=dist.group.WORLD.group_name, memory_budget=memory_budget)
    apply(gm, ctx, *up_to(discard))
    watch = Watch(gm)
    watch.run(*(torch.randn(n.meta["val"].shape) for n in gm.graph.find_nodes(op="placeholder")))
    assert watch.freed == sum(layout.nbytes for layout in ctx.found.shards) > 0
