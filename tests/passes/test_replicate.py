"""replicate: gradients are summed over rows, then over replicas, each once; verify finds what does otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from tests.passes.facts import change
from tests.passes.graphs import apply, assert_documented, assert_left_alone, events, mlp_backward, mlp_forward, up_to
from tests.passes.mutants import bypass, inner, instead, like, set_arg, tagged, what_verify_misses
from zerofx import _torch
from zerofx.compiler.rewriting import copy_graph
from zerofx.features.meshes.replicate import replicate
from zerofx.passes import PIPELINE, Context
from zerofx.passes.context import Meanings

c10d, aten = torch.ops._c10d_functional, torch.ops.aten
KINDS = ("reduce_scatter", "wait_grad", "sum_replicas", "wait_replicas")
REPLICAS: dict[str, Any] = {"second_group": "columns", "replicas": 3}


def test_sums_start_behind_the_next_reduction_and_are_waited_for_at_the_end() -> None:
    gm, ctx = mlp_backward(**REPLICAS)
    applied = apply(gm, ctx, *up_to(replicate))
    assert applied.edits == 3
    assert events(gm, *KINDS) == (
        "reduce_scatter c, reduce_scatter b, wait_grad c, sum_replicas c, reduce_scatter a, wait_grad b, "
        "sum_replicas b, wait_grad a, sum_replicas a, wait_replicas c, wait_replicas b, wait_replicas a"
    ).split(", ")
    assert_documented(applied.inserted)
    for start in tagged(gm, "sum_replicas"):
        assert start.args[1:] == ("sum", "columns")
        assert start.args[0].meta["zerofx"].kind == "wait_grad"
    scales = [node.args[1] for node in tagged(gm, "gradient")]
    assert scales == [1.0 / (2 * 3)] * 3


def test_where_the_graph_updates_weights_a_sum_is_waited_for_behind_the_next_one() -> None:
    gm, ctx = mlp_backward(**REPLICAS, steps=True)
    apply(gm, ctx, *PIPELINE[:-1])
    order = events(gm, "sum_replicas", "wait_replicas", "step")
    assert order.index("sum_replicas b") < order.index("wait_replicas c") < order.index("step c")
    assert order.index("step c") < order.index("wait_replicas b") < order.index("step b")


def test_of_one_rank_in_a_row_the_packed_gradient_is_summed() -> None:
    gm, ctx = mlp_backward(world_size=1, **REPLICAS)
    assert apply(gm, ctx, *up_to(replicate)).edits == 3
    assert [node.args[0].meta["zerofx"].kind for node in tagged(gm, "sum_replicas")] == ["pack"] * 3
    assert [node.args[1] for node in tagged(gm, "gradient")] == [1.0 / 3] * 3


@pytest.mark.parametrize(
    "graph",
    [
        lambda: mlp_backward(),
        lambda: mlp_backward(**REPLICAS, sync="keep"),
        lambda: mlp_forward(**REPLICAS),
    ],
)
def test_without_replicas_without_gradients_and_in_no_sync_it_changes_nothing(graph: Callable[[], Any]) -> None:
    gm, ctx = graph()
    apply(gm, ctx, *PIPELINE[: PIPELINE.index(replicate)])
    assert_left_alone(gm, ctx, replicate)


def test_for_inductor_reductions_sums_and_waits_are_pinned_in_turns() -> None:
    gm, ctx = mlp_backward(**REPLICAS, executor="inductor")
    apply(gm, ctx, *PIPELINE[:-1])
    previous: Node | None = None
    for node in tagged(gm, *KINDS):
        after = pinned[3] if (pinned := _torch.pinned(node)) is not None else ()
        own = pinned[1][0] if pinned is not None else node.args[0]
        assert previous is None or previous in after or own is previous, node
        if not node.meta["zerofx"].kind.startswith("wait"):
            previous = node


# ---- verify ---------------------------------------------------------------------------------------------------------

GRAPHS = {
    f"{world_size} in a row, {backend}, {executor}": dict(world_size=world_size, backend=backend, executor=executor)
    for world_size in (1, 2)
    for backend in ("gloo", "nccl")
    for executor in ("eager", "inductor")
}


BETWEEN = {"second_group": "columns", "replicas": 2, "divides_between": True}


def test_where_replicas_share_the_optimizers_work_shards_are_awaited_and_sums_divided() -> None:
    gm, ctx = mlp_backward(**BETWEEN)
    assert apply(gm, ctx, *up_to(replicate)).edits == 3 + 3
    for wait in tagged(gm, "refresh"):
        assert wait.args[0].meta["zerofx"].kind == "shard"
        assert {user.meta["zerofx"].kind for user in wait.users} == {"all_gather"}
    for start in tagged(gm, "sum_replicas"):
        assert start.args[1:] == ("sum", 2, "columns")
        assert start.meta["val"].numel() * 2 == start.args[0].meta["val"].numel()
    gm, ctx = mlp_forward(**BETWEEN)
    assert apply(gm, ctx, *up_to(replicate)).edits == 3


def finished(**options: Any) -> tuple[GraphModule, Context]:
    gm, ctx = mlp_backward(**(REPLICAS | options))
    ctx.before, ctx.handover.meanings = copy_graph(gm), Meanings()
    apply(gm, ctx, *PIPELINE)
    return gm, ctx


def a_sum_over_replicas_left_out(gm: GraphModule, ctx: Context) -> None:
    (start, *_) = tagged(gm, "sum_replicas")
    bypass(tagged(gm, "wait_replicas")[0], _argument(start))
    gm.graph.erase_node(start)


def a_gradient_summed_over_the_replicas_twice(gm: GraphModule, ctx: Context) -> None:
    wait = tagged(gm, "wait_replicas")[0]
    again = instead(wait, c10d.all_reduce.default, "sum", "columns")
    again.meta["zerofx"] = replace(wait.meta["zerofx"], kind="sum_replicas")
    instead(again, c10d.wait_tensor.default).meta["zerofx"] = wait.meta["zerofx"]


def a_sum_over_the_row_once_more(gm: GraphModule, ctx: Context) -> None:
    _set(gm, tagged(gm, "sum_replicas")[0], -1, ctx.reduce_group)


def a_sum_in_no_group(gm: GraphModule, ctx: Context) -> None:
    _set(gm, tagged(gm, "sum_replicas")[0], -1, "elsewhere")


def an_average_over_replicas(gm: GraphModule, ctx: Context) -> None:
    _set(gm, tagged(gm, "sum_replicas")[0], -2, "avg")


def an_average_over_the_row_alone(gm: GraphModule, ctx: Context) -> None:
    set_arg(_scaling(gm), 1, 1.0 / 2 if ctx.found.reductions[0].layout.world_size == 2 else 1.0)


def a_scale_that_is_applied_once_more(gm: GraphModule, ctx: Context) -> None:
    instead(_scaling(gm), aten.mul.Tensor, 1.0 / 3)


def a_sum_that_is_never_waited_for(gm: GraphModule, ctx: Context) -> None:
    bypass(tagged(gm, "wait_replicas")[0])


def a_sum_that_is_waited_for_twice(gm: GraphModule, ctx: Context) -> None:
    wait = tagged(gm, "wait_replicas")[0]
    like(wait, c10d.wait_tensor.default, tagged(gm, "sum_replicas")[0], tag=wait.meta["zerofx"])


def sums_that_are_waited_for_in_another_order(gm: GraphModule, ctx: Context) -> None:
    first, second, *_ = tagged(gm, "wait_replicas")
    first.prepend(second)


def a_graph_that_was_not_told_of_replicas(gm: GraphModule, ctx: Context) -> None:
    ctx.replicas, ctx.second_group = 1, ""


def a_sum_in_place_of_what_others_read(gm: GraphModule, ctx: Context) -> None:
    start = tagged(gm, "sum_replicas")[0]
    inner(gm, start).target = c10d.all_reduce_.default
    if _torch.pinned(start) is None:
        start.target = c10d.all_reduce_.default
    with gm.graph.inserting_before(start):
        reader = gm.graph.call_function(aten.neg.default, (_argument(start),))
    reader.meta["val"] = start.meta["val"]


def _argument(start: Node) -> Node:
    pinned = _torch.pinned(start)
    return pinned[1][0] if pinned is not None else start.args[0]  # type: ignore[return-value]


def _set(gm: GraphModule, node: Node, i: int, value: Any) -> None:
    call = inner(gm, node)
    set_arg(call, len(call.args) + i, value)


def _scaling(gm: GraphModule) -> Node:
    return next(n for n in tagged(gm, "gradient") if n.target is aten.mul.Tensor)


RULES: dict[Callable[[GraphModule, Context], None], set[str]] = {
    a_sum_over_replicas_left_out: {"reduction"},
    a_gradient_summed_over_the_replicas_twice: {"reduction"},
    a_sum_over_the_row_once_more: {"group", "reduction"},
    a_sum_in_no_group: {"group", "reduction"},
    an_average_over_replicas: {"group"},
    an_average_over_the_row_alone: {"reduction"},
    a_scale_that_is_applied_once_more: {"reduction"},
    a_sum_that_is_never_waited_for: {"wait"},
    a_sum_that_is_waited_for_twice: {"wait"},
    sums_that_are_waited_for_in_another_order: {"order"},
    a_graph_that_was_not_told_of_replicas: {"group", "reduction"},
    a_sum_in_place_of_what_others_read: {"write", "reduction", "value"},
}


AS_IT_READS = (a_sum_over_replicas_left_out, a_gradient_summed_over_the_replicas_twice)
"""What can be done where nothing is pinned behind the node."""


@pytest.mark.parametrize("name", GRAPHS)
def test_what_breaks_a_rule_of_replicas_is_found(name: str) -> None:
    graph = finished(**GRAPHS[name])
    left_out = AS_IT_READS if graph[1].executor == "inductor" else ()
    missed = what_verify_misses((graph, mutant, rules) for mutant, rules in RULES.items() if mutant not in left_out)
    assert not missed, "\n".join(missed)


def a_part_of_a_sum_over_replicas_that_is_taken_for_all(gm: GraphModule, ctx: Context) -> None:
    change(ctx, divides_between=False)


def a_part_among_one_replica_more(gm: GraphModule, ctx: Context) -> None:
    ctx.replicas += 1


def a_shard_that_is_read_before_it_came(gm: GraphModule, ctx: Context) -> None:
    bypass(tagged(gm, "refresh")[0])


def a_part_that_goes_around_in_the_row(gm: GraphModule, ctx: Context) -> None:
    _set(gm, tagged(gm, "sum_replicas")[0], -1, ctx.reduce_group)


DIVIDED: dict[Callable[[GraphModule, Context], None], set[str]] = {
    a_part_of_a_sum_over_replicas_that_is_taken_for_all: {"reduction", "wait"},
    a_part_among_one_replica_more: {"group"},
    a_shard_that_is_read_before_it_came: {"wait"},
    a_part_that_goes_around_in_the_row: {"group", "reduction"},
    an_average_over_the_row_alone: {"reduction"},
    a_sum_that_is_waited_for_twice: {"wait"},
    sums_that_are_waited_for_in_another_order: {"order", "wait"},
}


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_what_breaks_a_rule_where_replicas_share_the_work_is_found(backend: str) -> None:
    layout = {"world_size": 2, "backend": backend, "executor": "eager"}
    graph = finished(**BETWEEN, **layout)
    missed = what_verify_misses((graph, mutant, rules) for mutant, rules in DIVIDED.items())
    assert not missed, "\n".join(missed)
