"""step: groups are updated inside of backward, behind all that reads their weights; some replicas follow there."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.fx import GraphModule

from tests.passes.graphs import (
    Numbers,
    Sketch,
    apply,
    assert_documented,
    assert_left_alone,
    aten,
    events,
    gradients,
    mlp_backward,
    mlp_forward,
    run,
    up_to,
)
from zerofx.features.step_in_backward.step import step
from zerofx.passes import Context, discard, lower, verify
from zerofx.passes.ops import stepping
from zerofx.passes.proof.meaning import Op

KINDS = "reduce_scatter", "gradient", "step", "ahead"


def stepped(*, layers: str = "abc", **context: object) -> tuple[GraphModule, Context]:
    gm, ctx = mlp_backward(2, layers=layers, steps=True, **context)
    apply(gm, ctx, *up_to(step))
    return gm, ctx


def test_an_update_stands_behind_the_start_of_the_next_reduction() -> None:
    gm, _ = stepped()
    assert events(gm, *KINDS) == [
        *("reduce_scatter c", "reduce_scatter b", "gradient c", "reduce_scatter a", "step c"),
        *("gradient b", "step b"),
        *("gradient a", "step a"),
    ]


@pytest.mark.parametrize("stage", [2, 3])
def test_it_stands_behind_the_last_reader_of_the_weights(stage: int) -> None:
    s = Sketch("backward", stage=stage, steps=True)
    x, dy = s.input("x", 4, 8), s.input("tangents_1", 4, 8)
    s.group("a", aw=(8, 8))
    s.group("c", cw=(8, 8))
    (w,) = s.parameters("b", bw=(8, 8))
    of_b = s.call(aten.mm.default, s.call(aten.t.default, x), dy)
    of_a = s.call(aten.mm.default, s.call(aten.t.default, dy), x)
    of_c = s.call(aten.mm.default, s.call(aten.t.default, dy), dy)
    dx = s.call(aten.mm.default, dy, s.call(aten.t.default, w))
    gm, ctx = s.done(of_b, of_a, of_c, dx, gradients={0: "bw", 1: "aw", 2: "cw"})
    apply(gm, ctx, *up_to(step))
    schedule = events(gm)
    assert schedule.index("step b") > len(schedule) - 1 - schedule[::-1].index("mm") > schedule.index("gradient b")
    verify(gm, ctx)


def test_the_graph_returns_nothing_in_the_place_of_gradients() -> None:
    gm, ctx = stepped()
    outputs = gm.graph.output_node().args[0]
    assert [node.meta["val"].numel() for node in outputs[-3:]] == [0, 0, 0]
    assert [reduction.layout.name for reduction in ctx.found.reductions] == ["c", "b", "a"]
    verify(gm, ctx)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_third_of_the_replicas_is_refreshed_in_backward(stage: int) -> None:
    """Where weights and gradients have one dtype: those that forward needs last."""
    gm, _ = stepped(stage=stage)
    assert events(gm, "step", "ahead") == ["step c", "ahead c", "step b", "step a"]
    gm, _ = stepped(stage=stage, layers="abcdef")
    assert events(gm, "ahead") == ["ahead f", "ahead e"]


def test_where_gradients_have_twice_the_bytes_of_weights_backward_refreshes_none() -> None:
    gm, _ = stepped(stage=2, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert events(gm, "step", "ahead") == ["step c", "step b", "step a"]


def test_where_weights_have_twice_the_bytes_of_gradients_backward_refreshes_half() -> None:
    gm, _ = stepped(stage=2, layers="abcd", reduce_dtype=torch.bfloat16)
    assert events(gm, "ahead") == ["ahead d", "ahead c"]


def test_stage_3_has_no_replicas_to_refresh() -> None:
    gm, _ = stepped(stage=3)
    assert events(gm, "ahead") == []


def test_what_is_inserted_says_what_it_serves() -> None:
    gm, ctx = mlp_backward(2, stage=2, steps=True)
    apply(gm, ctx, *up_to(discard))
    applied = apply(gm, ctx, step)
    assert applied.edits == len(applied.inserted) == 4
    assert_documented(applied.inserted)


def test_graphs_that_are_not_to_update_are_left_alone() -> None:
    gm, ctx = mlp_backward(2)
    apply(gm, ctx, *up_to(discard))
    assert_left_alone(gm, ctx, step)
    gm, ctx = mlp_forward(2, steps=True)
    apply(gm, ctx, *up_to(discard))
    assert_left_alone(gm, ctx, step)


def test_updates_get_the_gradients_that_the_graph_returned_before() -> None:
    gm, ctx = mlp_backward(1)
    numbers = Numbers.random(gm, ctx)
    expected = gradients(ctx, run(gm, ctx, numbers))
    gm, ctx = mlp_backward(1, steps=True)
    apply(gm, ctx, *up_to(step))
    told: list[tuple[str, torch.Tensor]] = []

    class Stepper:
        def step(self, group: str, gradient: torch.Tensor) -> None:
            told.append((group, gradient))

        def refresh(self, group: str) -> None:
            raise AssertionError("one rank has no replicas")

    with stepping(Stepper()):
        outputs = run(gm, ctx, numbers)
    assert [group for group, _ in told] == ["c", "b", "a"]
    assert all(output.numel() == 0 for output in outputs[-3:])
    for layout, gradient in expected.items():
        torch.testing.assert_close(dict(told)[layout.name], gradient)


def test_outside_of_a_backward_that_steps_the_graph_does_not_run() -> None:
    gm, ctx = mlp_backward(1, steps=True)
    numbers = Numbers.random(gm, ctx)
    apply(gm, ctx, *up_to(step))
    with pytest.raises(RuntimeError, match=r"group .c. outside of a backward"):
        run(gm, ctx, numbers)


@pytest.mark.parametrize("stage", [2, 3])
def test_for_inductor_updates_depend_on_readers_and_take_turns_with_reductions(stage: int) -> None:
    gm, ctx = mlp_backward(2, stage=stage, steps=True, executor="inductor")
    apply(gm, ctx, *up_to(lower))
    verify(gm, ctx)
    ops = [Op.of(node) for node in gm.graph.nodes if node.op == "call_function"]
    turns = [op for op in ops if str(op.target).startswith(("zerofx.step", "zerofx.refresh", "zerofx.all_to_all"))]
    assert len(turns) == 6 + (stage == 2)
    for before, op in itertools.pairwise(turns):
        assert before.node in (*op.after, *op.inputs)
