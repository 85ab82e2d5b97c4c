"""save_parameters: what forward saves of parameters is no output of the graph; the caller has it."""

from __future__ import annotations

import pytest
import torch
from torch.testing import FileCheck

from tests.passes.captured import MODELS, capture
from tests.passes.graphs import Numbers, Sketch, apply, assert_left_alone, aten, mlp_backward, mlp_forward, run
from zerofx.passes import gather, pipeline, rematerialize, save_parameters


def test_a_saved_parameter_leaves_the_outputs_and_all_else_stays_where_it_was() -> None:
    s = Sketch(stage=0)
    x = s.input("x", 4, 8)
    w, unused = s.parameters("a", w=(8, 8), unused=(8,))
    gm, ctx = s.done(s.call(aten.mm.default, x, w), x, w, unused, saved=[1, 2, 3])
    numbers = Numbers.random(gm, ctx)
    result, saved, *_ = run(gm, ctx, numbers)
    applied = apply(gm, ctx, save_parameters)
    assert applied.edits == 2 and not applied.inserted
    FileCheck().check("def forward(self, x, w, unused)").check_next("mm.default(x, w)").check(
        "return (mm, x, None, None)"
    ).run(gm.code)
    assert {i: ref.slot.name for i, ref in ctx.found.saved_parameters.items()} == {2: "w", 3: "unused"}
    torch.testing.assert_close(run(gm, ctx, numbers), [result, saved, None, None], rtol=0, atol=0)


def test_what_the_model_returns_stays_though_the_same_parameter_is_saved() -> None:
    s = Sketch(stage=0)
    w, b = s.parameters("a", w=(8, 8), b=(8,))
    gm, ctx = s.done(w, b, w, saved=[2])
    assert apply(gm, ctx, save_parameters).edits == 1
    FileCheck().check("return (w, b, None)").run(gm.code)
    assert list(ctx.found.saved_parameters) == [2]


def test_a_parameter_that_is_saved_twice_is_put_in_both_places() -> None:
    s = Sketch(stage=0)
    (w,) = s.parameters("a", w=(8, 8))
    gm, ctx = s.done(s.call(aten.relu.default, w), w, w, saved=[1, 2])
    assert apply(gm, ctx, save_parameters).edits == 2
    assert {i: ref.slot.name for i, ref in ctx.found.saved_parameters.items()} == {1: "w", 2: "w"}


def test_what_was_a_view_of_a_parameter_is_left_to_the_caller_too() -> None:
    s = Sketch(stage=0)
    x = s.input("x", 4, 8)
    (w,) = s.parameters("a", w=(8, 8))
    t = s.call(aten.t.default, w)
    gm, ctx = s.done(s.call(aten.mm.default, x, t), x, t, saved=[1, 2])
    assert apply(gm, ctx, rematerialize, save_parameters).edits == 1
    FileCheck().check("return (mm, x, None)").run(gm.code)
    assert ctx.found.saved_parameters[2].slot.name == "w"


def test_graphs_that_save_no_parameter_are_left_alone() -> None:
    s = Sketch(stage=0)
    x = s.input("x", 4, 8)
    (w,) = s.parameters("a", w=(8, 8))
    assert_left_alone(*s.done(s.call(aten.mm.default, x, w), x, w, saved=[1]), save_parameters)  # w: for the user
    assert_left_alone(*mlp_forward(2, stage=0), save_parameters)
    assert_left_alone(*mlp_backward(2, stage=0), save_parameters)


def test_it_is_done_once_whoever_comes_first() -> None:
    s = Sketch()
    (w,) = s.parameters("a", w=(8, 8))
    gm, ctx = s.done(s.call(aten.relu.default, w), w, saved=[1])
    apply(gm, ctx, save_parameters)
    assert_left_alone(gm, ctx, save_parameters)
    apply(gm, ctx, gather)
    FileCheck().check("return (relu, None)").run(gm.code)
    assert list(ctx.found.saved_parameters) == [1]


def test_stage_0_does_it_before_anything_is_reduced_and_the_other_stages_in_gather() -> None:
    names = [pass_.__name__ for pass_ in pipeline(0)]
    assert names[:4] == ["rematerialize", "save_parameters", "all_reduce", "prefetch"]
    assert save_parameters not in pipeline(3) and gather in pipeline(3)


@pytest.mark.parametrize("min_cut", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_a_real_forward_of_stage_0_returns_no_parameter_to_backward(model: str, min_cut: bool) -> None:
    pair = capture(MODELS[model](), torch.randn(4, 5), world_size=2, min_cut=min_cut, stage=0)
    gm, ctx = pair.get("forward")
    apply(gm, ctx, rematerialize)
    outputs = gm.graph.output_node().args[0]
    theirs = {i for i in ctx.saved if outputs[i].name in ctx.parameters}
    assert theirs
    assert apply(gm, ctx, save_parameters).edits == len(theirs)
    outputs = gm.graph.output_node().args[0]
    assert {i for i in ctx.saved if outputs[i] is None} == theirs == set(ctx.found.saved_parameters)
