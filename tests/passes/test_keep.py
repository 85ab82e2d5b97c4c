"""keep: the last groups of forward stay gathered for backward, within the budget."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import GraphModule
from torch.testing import FileCheck

from tests.passes.graphs import (
    Numbers,
    Sketch,
    apply,
    assert_left_alone,
    aten,
    events,
    mlp_backward,
    mlp_forward,
    run,
    up_to,
)
from zerofx.passes import PIPELINE, Context, discard, group, keep, prefetch

BEFORE, AFTER = up_to(group), PIPELINE[PIPELINE.index(keep) :]


def forward(layers: str = "abc", sizes: dict[str, int] | None = None, **context: Any) -> tuple[GraphModule, Context]:
    """``x = x @ w`` once per layer, every weight saved. A group is 256 bytes, or ``sizes`` columns wide."""
    s = Sketch(**context)
    x = s.input("x", 4, 8)
    weights = [s.parameters(name, **{f"{name}w": (8, (sizes or {}).get(name, 8))})[0] for name in layers]
    for w in weights:
        x = s.call(aten.mm.default, x, s.call(aten.slice.Tensor, w, 1, 0, 8))
    return s.done(x, *weights, saved=range(1, len(weights) + 1))


def kept(gm: GraphModule, ctx: Context) -> list[str]:
    apply(gm, ctx, *BEFORE)
    assert apply(gm, ctx, keep).edits == len(ctx.handover.kept_gathered)
    return list(ctx.handover.kept_gathered)


def test_the_buffer_is_returned_in_the_place_of_a_saved_parameter() -> None:
    gm, ctx = forward("abcde", memory_budget=4 * 256)
    assert kept(gm, ctx) == ["e", "d"]
    FileCheck().check("return (mm_4, None, None, None, wait_tensor_default_3, wait_tensor_default_4)").run(gm.code)
    assert [ctx.handover.kept_gathered[g].saved for g in "de"] == ["dw", "ew"]
    assert {ref.slot.name for ref in ctx.found.saved_parameters.values()} == {"aw", "bw", "cw"}
    apply(gm, ctx, prefetch, discard)
    assert [e for e in events(gm) if e.startswith("discard")] == ["discard a", "discard b", "discard c"]
    assert ctx.found.gathered_bytes == 4 * 256


@pytest.mark.parametrize(
    ("budget", "groups"),
    [(256, ""), (2 * 256, "e"), (3 * 256, "e"), (4 * 256, "ed"), (5 * 256, "edcba"), (math.inf, "edcba"), (None, "e")],
)
def test_as_many_are_kept_as_leave_room_for_two_more_or_one_where_there_is_none(
    budget: float | None, groups: str
) -> None:
    gm, ctx = forward("abcde", memory_budget=budget)
    assert kept(gm, ctx) == list(groups)


def test_with_a_budget_room_is_left_for_the_two_largest_of_the_others_wherever_they_are() -> None:
    sizes = {"a": 16, "b": 16, "c": 8, "d": 8, "e": 8, "f": 8}  # in columns; f, e and d: 24, a and b beside them: 32
    assert kept(*forward("abcdef", sizes, memory_budget=8 * 4 * 55)) == ["f", "e"]
    assert kept(*forward("abcdef", sizes, memory_budget=8 * 4 * 56)) == ["f", "e", "d"]


def test_room_is_left_for_the_largest_group_of_other_graphs_and_for_what_they_keep() -> None:
    gm, ctx = forward("abcde", memory_budget=4 * 256, largest_elsewhere=3 * 256)
    assert kept(gm, ctx) == ["e"]
    gm, ctx = forward("abcde", memory_budget=5 * 256, held_elsewhere=2 * 256)
    assert kept(gm, ctx) == ["e"]
    gm, ctx = forward("abcde", held_elsewhere=256)
    assert kept(gm, ctx) == []


def test_by_default_what_is_kept_has_room_beside_the_group_that_backward_gathers_next() -> None:
    sizes = {"a": 16, "b": 8, "c": 16, "d": 8, "e": 16}  # the least budget for one group ahead: 24 columns
    assert kept(*forward("abcde", sizes)) == ["e"]
    assert kept(*forward("abcde", sizes, largest_elsewhere=8 * 16 * 4)) == []


def test_by_default_not_all_of_three_groups_are_kept_though_two_ahead_is_all_of_them() -> None:
    assert kept(*forward("abc")) == ["c"]
    assert kept(*forward("abc", memory_budget=3 * 256)) == ["c", "b", "a"]


def test_a_group_that_backward_does_not_need_is_not_kept() -> None:
    s = Sketch(memory_budget=math.inf)
    x = s.input("x", 4, 8)
    (a,), (b,) = s.parameters("a", aw=(8, 8)), s.parameters("b", bw=(8, 8))
    y = s.call(aten.mm.default, s.call(aten.mm.default, x, a), b)
    assert kept(*s.done(y, a, saved=[1])) == ["a"]


@pytest.mark.parametrize("phase", ["inference", "forward"])
def test_a_graph_that_saves_nothing_is_left_alone(phase: str) -> None:
    gm, ctx = mlp_forward(2, memory_budget=math.inf)
    ctx.phase = phase  # type: ignore[assignment]
    apply(gm, ctx, *BEFORE)
    assert_left_alone(gm, ctx, keep)


@pytest.mark.parametrize("changes", [{"stage": 2}, {"world_size": 1}])
def test_where_nothing_is_gathered_nothing_is_kept(changes: dict[str, Any]) -> None:
    gm, ctx = forward(memory_budget=math.inf, **changes)
    apply(gm, ctx, *BEFORE)
    assert_left_alone(gm, ctx, keep)


def backward(**context: Any) -> tuple[GraphModule, Context]:
    """Of layers a, b and c; c was left gathered in the place of its weight."""
    before, ctx = forward(memory_budget=2 * 256)
    assert kept(before, ctx) == ["c"]
    s = Sketch("backward", **context)
    weights = {name: s.parameters(name, **{f"{name}w": (8, 8)})[0] for name in "abc"}
    dy = s.input("tangents_1", 4, 8)
    for w in reversed(weights.values()):
        dy = s.call(aten.mm.default, dy, s.call(aten.t.default, w))
    gm, bctx = s.done(dy)
    bctx.handover = ctx.handover
    return gm, bctx


def test_backward_reads_what_came_and_gathers_the_rest() -> None:
    gm, ctx = backward()
    apply(gm, ctx, *BEFORE)
    assert apply(gm, ctx, keep).edits == 1
    assert [n.name for n in gm.graph.find_nodes(op="placeholder")] == ["tangents_1", "shard_b", "shard_a", "gathered_c"]
    assert ctx.found.gathered == ["c"] and [layout.name for layout in ctx.found.shards] == ["b", "a"]
    apply(gm, ctx, prefetch, discard)
    plan = [e for e in events(gm) if e.split()[0] in ("all_gather", "wait", "discard", "mm")]
    assert plan == [
        *("all_gather b", "all_gather a", "mm", "discard c", "wait b", "mm", "discard b", "wait a", "mm", "discard a")
    ]
    assert ctx.found.gathered_bytes == 3 * 256  # two ahead of c


def test_backward_gathers_anew_what_came_in_another_dtype() -> None:
    gm, ctx = backward()
    ctx.handover.kept_gathered["c"] = ctx.handover.kept_gathered["c"]._replace(dtype=torch.bfloat16)
    apply(gm, ctx, *BEFORE)
    assert_left_alone(gm, ctx, keep)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_backward_of_a_forward_that_kept_nothing_is_left_alone(stage: int) -> None:
    gm, ctx = mlp_backward(2, stage=stage)
    apply(gm, ctx, *BEFORE)
    inputs = list(ctx.found.shards)
    assert_left_alone(gm, ctx, keep)
    assert ctx.found.shards == inputs and inputs


def test_a_group_that_is_gathered_in_two_parts_is_not_kept() -> None:
    from tests.passes.test_narrow_wide import blocks

    gm, ctx = blocks("ab", memory_budget=math.inf)
    outputs = len(gm.graph.output_node().args[0])  # type: ignore[arg-type]
    weights = [n for n in gm.graph.find_nodes(op="placeholder") if n.name in ctx.parameters]
    gm.graph.output_node().args = ((*gm.graph.output_node().args[0], *weights),)  # type: ignore[misc]
    ctx.saved = frozenset(range(outputs, outputs + len(weights)))
    assert kept(gm, ctx) == []


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(8, 40), min_size=1, max_size=7),
    share=st.floats(0, 1.2),
    largest=st.integers(0, 3000),
)
def test_forward_stays_within_any_budget_that_it_can_be_run_in(sizes: list[int], share: float, largest: int) -> None:
    layers = "abcdefg"[: len(sizes)]
    gm, ctx = forward(layers, dict(zip(layers, sizes)), memory_budget=math.inf, largest_elsewhere=largest)
    numbers = Numbers.random(gm, ctx)
    (wanted, *_) = run(gm, ctx, numbers)
    layouts = [ref.layout for ref in ctx.parameters.values()]
    least, whole = max(layout.nbytes for layout in layouts), sum(layout.nbytes for layout in layouts)
    ctx.memory_budget = least + int(share * (whole - least))
    apply(gm, ctx, *BEFORE, keep, prefetch, discard)
    assert ctx.found.gathered_bytes <= ctx.memory_budget
    room = sum(value.nbytes for value in ctx.handover.kept_gathered.values()) + max(largest, 0)
    assert room <= ctx.memory_budget or not ctx.handover.kept_gathered
    assert list(ctx.handover.kept_gathered) == list(reversed(layers))[: len(ctx.handover.kept_gathered)]
    assert wanted.shape == (4, 8)
