"""offload_gradients: reduced gradients leave the device, two at a time; the graph returns nothing in their place."""

from __future__ import annotations

import pytest
import torch
from torch.fx import GraphModule

from tests.passes.elsewhere import Elsewhere
from tests.passes.graphs import (
    Numbers,
    apply,
    assert_documented,
    assert_left_alone,
    events,
    gradients,
    mlp_backward,
    mlp_forward,
    run,
    up_to,
)
from zerofx.features.offload.offload_gradients import offload_gradients
from zerofx.features.offload.operators import OFFLOAD, carrying
from zerofx.features.step_in_backward.step import step
from zerofx.features.wire.quantize import quantize
from zerofx.passes import Context, lower, verify
from zerofx.passes.proof.meaning import Op


def put_away(*, away: str = "abc", **context: object) -> tuple[GraphModule, Context]:
    gm, ctx = mlp_backward(gradients_away=frozenset(away), **context)
    apply(gm, ctx, *up_to(offload_gradients))
    return gm, ctx


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gradient_leaves_right_behind_its_reduction(stage: int) -> None:
    gm, _ = put_away(stage=stage)
    assert events(gm, "gradient", "offload", "wait_offload") == [
        *("gradient c", "offload c", "gradient b", "offload b", "gradient a"),
        *("wait_offload c", "offload a", "wait_offload b", "wait_offload a"),
    ]


def test_the_graph_returns_nothing_in_its_place() -> None:
    gm, ctx = put_away(away="ac")
    outputs = gm.graph.output_node().args[0]
    assert [node.meta["val"].numel() for node in outputs[-3:]] == [0, 64, 0]
    assert [reduction.layout.name for reduction in ctx.found.reductions] == ["c", "b", "a"]
    apply(gm, ctx, quantize, lower)
    verify(gm, ctx)


@pytest.mark.parametrize("letters", ["abcdef", "abcdefghijkl"])
def test_what_leaves_is_what_the_graph_returned_and_two_are_on_their_way_at_most(letters: str) -> None:
    plain, known = mlp_backward(1, letters)
    numbers = Numbers.random(plain, known)
    apply(plain, known, *up_to(step))
    wanted = gradients(known, run(plain, known, numbers))
    for last in (offload_gradients, lower):
        gm, ctx = mlp_backward(1, letters, gradients_away=frozenset(letters))
        apply(gm, ctx, *up_to(last))
        here = Elsewhere.of(ctx, numbers)
        with carrying(here):
            run(gm, ctx, numbers)
        assert here.most["gradients"] == 2 and not here.flying["gradients"]
        for place, reduction in enumerate(ctx.found.reductions):
            assert here.gradients[place].equal(wanted[reduction.layout])


@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_the_wait_reads_the_gradient_so_that_nobody_is_given_its_memory(executor: str) -> None:
    gm, ctx = put_away(executor=executor)
    apply(gm, ctx, quantize, lower)
    verify(gm, ctx)
    ops = [Op.of(n) for n in gm.graph.nodes if n.op == "call_function"]
    starts = {op.args[1]: op.args[0] for op in ops if op.target is OFFLOAD}
    waits = {op.args[2]: op.args[1] for op in ops if op.args[2:3] and op.args[2] in starts and len(op.args) == 4}
    assert starts == {name: waits[name] for name in starts}


@pytest.mark.parametrize("changes", [{}, {"sync": "keep", "away": "abc"}, {"steps": True, "away": "abc"}])
def test_it_leaves_other_graphs_alone(changes: dict) -> None:
    away = changes.pop("away", "")
    gm, ctx = mlp_backward(gradients_away=frozenset(away), **changes)
    apply(gm, ctx, *up_to(step))
    assert_left_alone(gm, ctx, offload_gradients)


def test_a_forward_has_no_gradients() -> None:
    gm, ctx = mlp_forward(gradients_away=frozenset("abc"))
    apply(gm, ctx, *up_to(step))
    assert_left_alone(gm, ctx, offload_gradients)


def test_new_nodes_say_what_they_are_for() -> None:
    gm, ctx = mlp_backward(gradients_away=frozenset("abc"))
    apply(gm, ctx, *up_to(step))
    assert_documented(apply(gm, ctx, offload_gradients).inserted)


def test_without_a_carrier_nobody_knows_where_gradients_live() -> None:
    gm, ctx = put_away(world_size=1)
    numbers = Numbers({n.name: torch.ones(n.meta["val"].shape) for n in gm.graph.find_nodes(op="placeholder")})
    numbers.flats |= {layout: torch.zeros(layout.numel) for layout in ctx.found.shards}
    with pytest.raises(RuntimeError, match="nobody said where its state lives"):
        run(gm, ctx, numbers)
