"""partition_saved: parts are saved of what ranks have alike, and gathered in time; verify finds what does otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.testing import FileCheck

from tests.passes.facts import change
from tests.passes.graphs import Sketch, apply, assert_documented, assert_left_alone, aten, events
from tests.passes.mutants import set_arg, tagged, what_verify_misses
from zerofx.compiler.rewriting import copy_graph
from zerofx.features.partition_activations.facts import saved_parts
from zerofx.features.partition_activations.partition_saved import LEAST_BYTES, partition_saved
from zerofx.passes import PIPELINE, Context, rematerialize
from zerofx.passes.context import Handover

c10d = torch.ops._c10d_functional
PARTS: dict[str, Any] = {"parts_group": "tp", "parts_ranks": 3, "alike": frozenset({"wait_tensor", "neg", "relu"})}
Graph = tuple[GraphModule, Context]


def pair(n: int = 64, last: int = 64, **options: Any) -> tuple[Graph, Graph]:
    """Two layers. Forward saves x, the sum over "tp" and a view of it, of which relu lies the other way round."""
    shared: dict[str, Any] = {
        "handover": Handover(),
        **PARTS,
        **options,
    }
    s = Sketch(**shared)
    x, a = s.input("x", n, last), s.parameters("a", aw=(last, last))[0]
    total = s.call(
        c10d.wait_tensor.default, s.call(c10d.all_reduce.default, s.call(aten.mm.default, x, a), "sum", "tp")
    )
    seen = s.call(aten.t.default, total)
    turned = s.call(aten.relu.default, seen)
    small = s.call(aten.neg.default, s.call(aten.sum.dim_IntList, total, [0]))
    y = s.call(aten.mm.default, total, turned)
    forward = s.done(y, x, total, seen, turned, small, a, saved=[1, 2, 3, 4, 5, 6])
    s = Sketch("backward", **shared)
    s.group("a", aw=(last, last))
    x, total, seen = s.input("x", n, last), s.input("wait_tensor", n, last), s.input("t", n, last)
    seen.meta["val"], turned = total.meta["val"].t(), s.input("relu", n, last)
    turned.meta["val"] = torch.empty_like(seen.meta["val"])
    small, a, dy = s.input("neg", last), s.parameter("aw"), s.input("tangents_1", n, n)
    dturned = s.call(aten.mm.default, seen, s.call(aten.mul.Tensor, dy, small if n == last else 1.0))
    masked = s.call(aten.threshold_backward.default, dturned, turned, 0)
    dtotal = s.call(aten.add.Tensor, s.call(aten.t.default, masked), total)
    da = s.call(aten.mm.default, s.call(aten.t.default, x), dtotal)
    dx = s.call(aten.mm.default, dtotal, s.call(aten.t.default, a))
    return forward, s.done(da, dx, gradients={0: "aw"})


def finished(**options: Any) -> tuple[Graph, Graph]:
    graphs = pair(**options)
    for gm, ctx in graphs:
        ctx.before = copy_graph(gm)
    for gm, ctx in graphs:
        apply(gm, ctx, *PIPELINE)
    return graphs


def test_a_part_is_saved_behind_the_last_reader_and_gathered_ahead_of_the_first() -> None:
    (forward, ctx), (backward, back) = pair()
    done = apply(forward, ctx, rematerialize, partition_saved)
    assert done.edits == 2
    assert_documented(done.inserted)
    FileCheck().check("mm_1 = ").check("permute.default(relu, [1, 0])").check(
        "part.default(permute_default, 3, 'tp')"
    ).check("part.default(wait_tensor, 3, 'tp')").check(
        "return (mm_1, x, part_default, part_default, part_default_1, neg, aw)"
    ).run(forward.code)
    done = apply(backward, back, partition_saved)
    assert done.edits == 2
    assert_documented(done.inserted)
    kinds = events(backward, "gather_saved", "wait_saved")
    assert kinds == ["gather_saved wait_tensor", "gather_saved relu", "wait_saved wait_tensor", "wait_saved relu"]
    FileCheck().check("all_gather_into_tensor.default(wait_tensor, 3, 'tp')").check("mul.Tensor").check(
        "all_gather_into_tensor.default(relu, 3, 'tp')"
    ).check("as_strided.default(wait_tensor_default, [64, 64], [1, 64], 0)").check("mm.default(").check(
        "as_strided.default(wait_tensor_default_1, [64, 64], [1, 64], 0)"
    ).check("threshold_backward").run(backward.code)
    assert saved_parts(back)["wait_tensor"].numel_of_one == 1366  # of 4096, with 2 zeros at the end
    assert {n.name: tuple(n.meta["val"].shape) for n in backward.graph.find_nodes(op="placeholder")} == {
        "x": (64, 64), "wait_tensor": (1366,), "t": (1366,), "relu": (1366,), "neg": (64,), "aw": (64, 64),
        "tangents_1": (64, 64),
    }  # fmt: skip


def test_two_gathers_are_under_way_at_most() -> None:
    """The third starts in front of the wait for the second."""
    names = frozenset(f"neg{'' if i == 0 else f'_{i}'}" for i in range(4))
    shared: dict[str, Any] = {"handover": Handover(), **PARTS, "alike": names}
    s = Sketch(**shared)
    x = s.input("x", 64, 64)
    nodes = [x := s.call(aten.neg.default, x) for _ in range(4)]
    forward = s.done(x, *nodes[:3], s.call(aten.abs.default, x), nodes[3], saved=[1, 2, 3, 4])
    apply(*forward, rematerialize, partition_saved)
    s = Sketch("backward", **shared)
    inputs, dy = [s.input(node.name, 64, 64) for node in nodes[:3]], s.input("tangents_1", 64, 64)
    for value in reversed(inputs):
        dy = s.call(aten.mul.Tensor, dy, value)
    backward, ctx = s.done(dy)
    apply(backward, ctx, partition_saved)
    assert events(backward) == [
        "gather_saved neg_2", "gather_saved neg_1", "wait_saved neg_2", "saved neg_2", "mul",
        "gather_saved neg", "wait_saved neg_1", "saved neg_1", "mul", "wait_saved neg", "saved neg", "mul",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "what",
    [
        {"parts_group": "", "parts_ranks": 1},
        {"alike": frozenset({"neg"})},  # which is small
        {"n": LEAST_BYTES // 4 // 64 - 1},
    ],
)
def test_what_is_small_or_not_alike_or_of_one_rank_is_left_alone(what: dict[str, Any]) -> None:
    for gm, ctx in pair(**what):
        apply(gm, ctx, rematerialize)
        assert_left_alone(gm, ctx, partition_saved)


def test_what_the_caller_has_anyway_is_left_alone() -> None:
    """An input; what is returned; a view of that."""
    s = Sketch(**PARTS)
    x = s.input("x", 64, 64)
    y = s.call(aten.relu.default, s.call(aten.neg.default, x))
    gm, ctx = s.done(y, x, s.call(aten.t.default, y), saved=[1, 2])
    apply(gm, ctx, rematerialize)
    assert_left_alone(gm, ctx, partition_saved)


def test_memory_with_gaps_and_a_view_of_a_part_of_it_are_told_apart() -> None:
    s = Sketch(**{**PARTS, "alike": frozenset({"neg", "expand"})})
    x = s.input("x", 128, 64)
    rows = s.call(aten.slice.Tensor, s.call(aten.neg.default, x), 0, 64, 128)  # a view: of all of neg a part is saved
    same = s.call(aten.expand.default, s.call(aten.sum.dim_IntList, x, [0]), [128, 64])  # 64 elements of memory
    gm, ctx = s.done(s.call(aten.mul.Tensor, same, x), rows, same, saved=[1, 2])
    assert apply(gm, ctx, rematerialize, partition_saved).edits == 1
    assert saved_parts(ctx)["slice_1"].numel == 128 * 64
    assert saved_parts(ctx)["slice_1"].views == {"slice_1": ((64, 64), (64, 1), 64 * 64)}


def test_two_names_of_one_view_are_one_value() -> None:
    """As of what `tanh` returns and what its gradient reads."""
    shared: dict[str, Any] = {"handover": Handover(), **PARTS}
    s = Sketch(**shared)
    x, a = s.input("x", 64, 64), s.parameters("a", aw=(64, 64))[0]
    first = s.call(aten.neg.default, x)
    forward = s.done(s.call(aten.mm.default, first, a), first, s.call(aten.detach.default, first), a, saved=[1, 2, 3])
    s = Sketch("backward", **shared)
    s.group("a", aw=(64, 64))
    first, second = s.input("neg", 64, 64), s.input("detach", 64, 64)
    dy = s.call(aten.mul.Tensor, s.input("tangents_1", 64, 64), second)
    backward = s.done(s.call(aten.mm.default, s.call(aten.t.default, first), dy), gradients={0: "aw"})
    for gm, ctx in (forward, backward):
        ctx.before = copy_graph(gm)
    for gm, ctx in (forward, backward):
        apply(gm, ctx, *PIPELINE)
    assert saved_parts(backward[1])["neg"].views.keys() == {"neg", "detach"}


def a_part_among_other_ranks(gm: GraphModule, ctx: Context) -> None:
    set_arg(tagged(gm, "part")[0], 2, ctx.process_group)


def a_part_of_other_many(gm: GraphModule, ctx: Context) -> None:
    set_arg(tagged(gm, "part")[0], 1, 2)


def a_part_of_another_value(gm: GraphModule, ctx: Context) -> None:
    first, second = tagged(gm, "part")
    source = first.args[0]
    set_arg(first, 0, next(n for n in gm.graph.nodes if n.name == "mm_1"))
    assert source is not second


def parts_that_changed_places(gm: GraphModule, ctx: Context) -> None:
    first, second = tagged(gm, "part")
    output, swap = gm.graph.output_node(), {first: second, second: first}
    output.args = (tuple(swap.get(x, x) for x in output.args[0]),)


def a_part_in_another_order(gm: GraphModule, ctx: Context) -> None:
    turned = next(n for n in tagged(gm, "saved"))
    turned.replace_all_uses_with(turned.args[0])


def a_part_of_what_is_not_alike(gm: GraphModule, ctx: Context) -> None:
    change(ctx, alike=frozenset())


def a_gather_in_another_group(gm: GraphModule, ctx: Context) -> None:
    set_arg(tagged(gm, "gather_saved")[0], 2, ctx.process_group)


def a_gather_over_two_ranks(gm: GraphModule, ctx: Context) -> None:
    set_arg(tagged(gm, "gather_saved")[0], 1, 2)


def a_part_that_is_read(gm: GraphModule, ctx: Context) -> None:
    whole = tagged(gm, "saved")[0]
    set_arg(whole, 0, tagged(gm, "gather_saved")[0].args[0])


def a_gather_of_the_other_part(gm: GraphModule, ctx: Context) -> None:
    first, second = tagged(gm, "gather_saved")
    a, b = first.args[0], second.args[0]
    set_arg(first, 0, b)
    set_arg(second, 0, a)


def another_view_of_all_parts(gm: GraphModule, ctx: Context) -> None:
    set_arg(tagged(gm, "saved")[0], 3, 1)


def a_second_gather_of_one_part(gm: GraphModule, ctx: Context) -> None:
    first, second = tagged(gm, "gather_saved")
    set_arg(second, 0, first.args[0])


def a_wait_that_is_left_out(gm: GraphModule, ctx: Context) -> None:
    wait = tagged(gm, "wait_saved")[0]
    wait.replace_all_uses_with(wait.args[0])
    gm.graph.erase_node(wait)


def gathers_out_of_order(gm: GraphModule, ctx: Context) -> None:
    first, second = tagged(gm, "gather_saved")
    first.prepend(second)


def a_gather_that_nothing_reads(gm: GraphModule, ctx: Context) -> None:
    whole = tagged(gm, "saved")[-1]
    whole.replace_all_uses_with(next(n for n in gm.graph.nodes if n.name == "tangents_1"))
    gm.graph.erase_node(whole)


MUTANTS: list[tuple[int, Callable[[GraphModule, Context], None], set[str]]] = [
    (0, a_part_among_other_ranks, {"group"}),
    (0, a_part_of_other_many, {"group"}),
    (0, a_part_of_another_value, {"parts"}),
    (0, parts_that_changed_places, {"parts"}),
    (0, a_part_in_another_order, {"parts"}),
    (0, a_part_of_what_is_not_alike, {"parts"}),
    (1, a_gather_in_another_group, {"group"}),
    (1, a_gather_over_two_ranks, {"group"}),
    (1, a_part_that_is_read, {"parts"}),
    (1, a_gather_of_the_other_part, {"parts", "value", "reduction"}),
    (1, another_view_of_all_parts, {"parts"}),
    (1, a_second_gather_of_one_part, {"parts"}),
    (1, a_wait_that_is_left_out, {"wait"}),
    (1, gathers_out_of_order, {"parts"}),
    (1, a_gather_that_nothing_reads, {"parts", "value", "reduction"}),
]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_what_breaks_a_rule_of_saved_parts_is_found(backend: str) -> None:
    graphs = finished(backend=backend)
    missed = what_verify_misses((graphs[which], mutant, rules) for which, mutant, rules in MUTANTS)
    assert not missed, "\n".join(missed)


def test_for_inductor_gathers_are_kept_in_their_place_among_the_collectives_of_their_group() -> None:
    _, (backward, _) = finished(executor="inductor")
    calls = [n for n in backward.graph.nodes if n.op == "call_function"]
    starts = [n for n in calls if "zerofx" in n.meta and n.meta["zerofx"].kind == "gather_saved"]
    assert len(starts) == 2 and starts[0] in starts[1].all_input_nodes[0].all_input_nodes + starts[1].all_input_nodes
