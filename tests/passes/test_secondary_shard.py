"""secondary_shard: forward leaves a part of each group, backward gathers these; verify finds what does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.fx import GraphModule

from tests.passes.graphs import Sketch, apply, aten, events, up_to
from tests.passes.mutants import bypass, set_arg, tagged, what_verify_misses
from zerofx.compiler.rewriting import copy_graph
from zerofx.features.meshes.secondary_shard import secondary_shard
from zerofx.passes import PIPELINE, Context
from zerofx.passes.context import Handover

NEAR: dict[str, Any] = {"secondary_group": "row", "secondary_ranks": 2, "memory_budget": 600}


def pair(width: int = 8, **options: Any) -> tuple[tuple[GraphModule, Context], tuple[GraphModule, Context]]:
    """Forward and backward of two layers, on four ranks if not told otherwise; each weight is saved for backward."""
    shared: dict[str, Any] = {"handover": Handover(), "world_size": 4}
    shared |= {**NEAR, **options}
    s = Sketch(**shared)
    x = s.input("x", 4, width)
    a, b = s.parameters("a", aw=(width, width))[0], s.parameters("b", bw=(width, width))[0]
    h = s.call(aten.mm.default, x, a)
    y = s.call(aten.mm.default, h, b)
    forward = s.done(y, x, h, a, b, saved=[1, 2, 3, 4])
    s = Sketch("backward", **shared)
    s.group("a", aw=(width, width)), s.group("b", bw=(width, width))
    x, h = s.input("x", 4, width), s.input("mm", 4, width)
    a, b = s.parameter("aw"), s.parameter("bw")
    dy = s.input("tangents_1", 4, width)
    dh = s.call(aten.mm.default, dy, s.call(aten.t.default, b))
    db = s.call(aten.mm.default, s.call(aten.t.default, h), dy)
    dx = s.call(aten.mm.default, dh, s.call(aten.t.default, a))
    da = s.call(aten.mm.default, s.call(aten.t.default, x), dh)
    return forward, s.done(db, da, dx, gradients={0: "bw", 1: "aw"})


def finished(**options: Any) -> tuple[tuple[GraphModule, Context], tuple[GraphModule, Context]]:
    graphs = pair(**options)
    for gm, ctx in graphs:
        ctx.before = copy_graph(gm)
    for gm, ctx in graphs:
        apply(gm, ctx, *PIPELINE)
    return graphs


def test_forward_leaves_its_part_and_backward_gathers_from_it() -> None:
    (forward, ctx), (backward, back) = pair()
    assert apply(forward, ctx, *up_to(secondary_shard)).edits == 2
    assert events(forward, "wait", "secondary") == [
        "wait a",
        "secondary a",
        "secondary a",
        "wait b",
        "secondary b",
        "secondary b",
    ]
    assert {kept.ranks for kept in ctx.handover.kept_gathered.values()} == {2} and not ctx.found.saved_parameters
    assert apply(backward, back, *up_to(secondary_shard)).edits == 2
    for start in tagged(backward, "all_gather"):
        assert start.args[1:] == (2, "row") and start.args[0].meta["zerofx"].kind == "secondary"
        assert start.args[0].meta["val"].numel() * 2 == start.meta["val"].numel()
    assert back.found.shards == [] and back.found.gathered == ["b", "a"]


def test_without_near_ranks_it_changes_nothing() -> None:
    for gm, ctx in pair(secondary_group="", secondary_ranks=1):
        assert apply(gm, ctx, *up_to(secondary_shard)).edits == 0


def a_part_among_other_ranks(gm: GraphModule, ctx: Context) -> None:
    node = next(n for n in tagged(gm, "secondary") if n.op == "call_function")
    set_arg(node, 2, ctx.process_group)


def a_part_of_four(gm: GraphModule, ctx: Context) -> None:
    node = next(n for n in tagged(gm, "secondary") if n.op == "call_function")
    set_arg(node, 1, 4)


def a_part_of_another_group(gm: GraphModule, ctx: Context) -> None:
    first, second = (n for n in tagged(gm, "secondary") if n.target is aten.clone.default)
    outputs = gm.graph.output_node()
    swap = {first: second, second: first}
    outputs.args = (tuple(swap.get(x, x) for x in outputs.args[0]),)


def a_whole_group_in_the_place_of_a_part(gm: GraphModule, ctx: Context) -> None:
    clone = next(n for n in tagged(gm, "secondary") if n.target is aten.clone.default)
    bypass(clone)
    part = next(n for n in tagged(gm, "secondary") if n.op == "call_function")
    bypass(part)


def a_gather_over_all_ranks(gm: GraphModule, ctx: Context) -> None:
    set_arg(tagged(gm, "all_gather")[0], 2, ctx.process_group)


def a_gather_of_the_other_part(gm: GraphModule, ctx: Context) -> None:
    first, second = tagged(gm, "all_gather")[:2]
    a, b = first.args[0], second.args[0]
    set_arg(first, 0, b)
    set_arg(second, 0, a)


MUTANTS: list[tuple[int, Callable[[GraphModule, Context], None], set[str]]] = [
    (0, a_part_among_other_ranks, {"group"}),
    (0, a_part_of_four, {"group"}),
    (0, a_part_of_another_group, {"saved"}),
    (0, a_whole_group_in_the_place_of_a_part, {"saved", "discard"}),
    (1, a_gather_over_all_ranks, {"group"}),
    (1, a_gather_of_the_other_part, {"value", "reduction", "order"}),
]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_what_breaks_a_rule_of_near_parts_is_found(backend: str) -> None:
    graphs = finished(backend=backend)
    missed = what_verify_misses((graphs[which], mutant, rules) for which, mutant, rules in MUTANTS)
    assert not missed, "\n".join(missed)
