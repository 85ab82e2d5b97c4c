"""prefetch: gathers start ahead of their use within a budget; reductions are waited for behind the next one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import GraphModule
from torch.testing import FileCheck

from tests.passes.graphs import Pass, Sketch, apply, assert_left_alone, aten, events, mlp_backward, mlp_forward, up_to
from zerofx.passes import Context, discard, edit, group, prefetch

STARTS_AND_WAITS = ("all_gather", "wait")


def test_by_default_each_gather_starts_two_groups_ahead() -> None:
    gm, ctx = mlp_forward(2, layers="abcd")
    apply(gm, ctx, *up_to(group))
    assert apply(gm, ctx, prefetch).inserted == []
    use = {layer: [f"wait {layer}", *[f"weight {layer}"] * 2, "addmm", "relu"] for layer in "abcd"}
    first = [f"all_gather {layer}" for layer in "abc"]
    assert events(gm) == [*first, *use["a"], "all_gather d", *use["b"], *use["c"], *use["d"]]
    assert ctx.found.gathered_bytes == 3 * 512  # groups of 72 elements, padded to 128


def test_in_backward_each_gather_starts_two_groups_ahead_from_the_start() -> None:
    gm, ctx = mlp_backward(2, layers="abcdefgh")
    apply(gm, ctx, *up_to(prefetch))
    ahead = {"h": "hgf", "g": "e", "f": "d", "e": "c", "d": "b", "c": "a", "b": "", "a": ""}
    assert events(gm, *STARTS_AND_WAITS) == [
        event for layer in "hgfedcba" for event in (*(f"all_gather {other}" for other in ahead[layer]), f"wait {layer}")
    ]
    assert ctx.found.gathered_bytes == 3 * 512


@pytest.mark.parametrize("early", ["", "g", "gfedcb", "gec"])
def test_in_backward_what_is_recomputed_with_the_next_groups_weights_moves_no_collective(early: str) -> None:
    collectives = "all_gather", "reduce_scatter"
    expected = events(planned_backward("abcdefgh", ""), *collectives)
    gm = planned_backward("abcdefgh", early)
    assert events(gm, *collectives) == expected
    line = gathers_and_reductions(gm)
    for layer in "abcdefgh":
        assert line.index(f"all_gather {layer}") < line.index(f"wait {layer}")
    for layer in early:  # it is there ahead of its turn
        assert line.index(f"wait {layer}") < line.index(f"reduce_scatter {chr(ord(layer) + 1)}")


def planned_backward(layers: str, early: str) -> GraphModule:
    """Of layers ``x = x @ w * s``: of those in ``early`` backward recomputes what left them, for the gradient of ``w``
    in the layer behind."""
    s = Sketch("backward")
    inside = {name: s.input(f"x_{name}", 4, 8) for name in layers}
    for name in layers:
        s.group(name, **{f"{name}w": (8, 8), f"{name}k": (8,)})
    w, scale = ({name: s.parameter(f"{name}{kind}") for name in layers} for kind in "wk")
    dy, grads, gradients = s.input("tangents_1", 4, 8), [], {}
    for name, before in zip(reversed(layers), [*reversed(layers[:-1]), ""], strict=True):
        ds = s.call(aten.sum.dim_IntList, s.call(aten.mul.Tensor, dy, inside[name]), [0])
        dy = s.call(aten.mul.Tensor, dy, scale[name])
        dx = s.call(aten.mm.default, dy, s.call(aten.t.default, w[name]))
        x = inside[before or name]
        if before and before in early:
            x = s.call(aten.mul.Tensor, x, scale[before])
        dw = s.call(aten.mm.default, s.call(aten.t.default, x), dy)
        gradients |= {len(grads): f"{name}k", len(grads) + 1: f"{name}w"}
        grads += [ds, dw]
        dy = dx
    gm, ctx = s.done(*grads, dy, gradients=gradients)
    apply(gm, ctx, *up_to(prefetch))
    return gm


def test_in_backward_the_largest_budget_starts_no_gather_more_than_two_groups_ahead() -> None:
    starts = {}
    for budget in (None, 1 << 30):
        gm, ctx = mlp_backward(2, layers="abcdefgh", memory_budget=budget)
        apply(gm, ctx, *up_to(prefetch))
        starts[budget] = gathers_and_reductions(gm)
        assert ctx.found.gathered_bytes == 3 * 512
    assert starts[None] == starts[1 << 30]  # reductions queue behind as few gathers as without a number


def test_in_backward_what_is_small_beside_the_largest_goes_further_ahead() -> None:
    gm, ctx = backward_of_a_large_head(memory_budget=1 << 30, layers=6)
    apply(gm, ctx, *up_to(prefetch))
    line = gathers_and_reductions(gm)
    assert line[: line.index("wait head")] == [f"all_gather {name}" for name in ("head", *"abcdef")]


@pytest.mark.parametrize("budget", [None, float("inf")])
@pytest.mark.parametrize(("make", "layers"), [(mlp_forward, "abcd"), (mlp_backward, "dcba")])
def test_where_shards_come_from_the_host_no_gather_starts_more_than_one_group_ahead(
    make: Callable[..., tuple[GraphModule, Context]], layers: str, budget: float | None
) -> None:
    """A start waits for its shard, and what computes stands behind it. Other groups go further ahead as ever."""
    gm, ctx = make(2, layers="abcd", memory_budget=budget, reloaded=frozenset("abcd"))
    apply(gm, ctx, *up_to(prefetch))
    first, *others = layers
    expected = [f"all_gather {first}"]
    for layer, following in zip(layers, [*others, ""], strict=True):
        expected += [f"all_gather {following}"] * bool(following) + [f"wait {layer}"]
    assert events(gm, *STARTS_AND_WAITS) == expected
    gm, ctx = make(2, layers="abcd", memory_budget=budget, reloaded=frozenset())
    apply(gm, ctx, *up_to(prefetch))
    assert events(gm, *STARTS_AND_WAITS)[:3] == [f"all_gather {layer}" for layer in layers[:3]]


def test_gathers_that_stood_behind_other_work_start_at_the_top() -> None:
    s = Sketch()
    x = s.call(aten.relu.default, s.input("x", 4, 8))
    (w,) = s.parameters("a", w=(8, 8))
    gm, ctx = s.done(s.call(aten.mm.default, x, w))
    apply(gm, ctx, *up_to(prefetch))
    assert events(gm) == ["all_gather a", "relu", "wait a", "weight a", "mm"]


def test_an_exact_budget_for_one_group_hoists_nothing_but_the_first() -> None:
    gm, ctx = mlp_forward(2, memory_budget=512)
    apply(gm, ctx, *up_to(prefetch))
    assert events(gm, *STARTS_AND_WAITS) == [f"{kind} {layer}" for layer in "abc" for kind in STARTS_AND_WAITS]
    assert ctx.found.gathered_bytes == 512


def test_a_large_budget_starts_several_gathers_ahead_in_order() -> None:
    gm, ctx = mlp_forward(2, layers="abcd", memory_budget=3 * 512 + 511)
    apply(gm, ctx, *up_to(prefetch))
    FileCheck().check("shard_a, 2").check_next("shard_b, 2").check_next("shard_c, 2").check_next("wait_tensor").check(
        "addmm"
    ).check("shard_d, 2").check_next("wait_tensor").run(gm.code)
    assert ctx.found.gathered_bytes == 3 * 512
    gm, ctx = mlp_forward(2, layers="abcd", memory_budget=1 << 30)
    apply(gm, ctx, *up_to(prefetch))
    assert events(gm)[:5] == [*(f"all_gather {layer}" for layer in "abcd"), "wait a"]
    assert ctx.found.gathered_bytes == 4 * 512


def test_a_small_group_does_not_overtake_a_large_one_that_has_to_wait() -> None:
    s = Sketch(memory_budget=4 * 256)
    x = s.input("x", 8, 8)
    for name, rows in {"a": 8, "b": 8, "large": 32, "small": 8}.items():
        w = s.parameters(name, **{name: (rows, 8)})[0]
        x = s.call(aten.mm.default, x, s.call(aten.slice.Tensor, w, 0, 0, 8))
    gm, ctx = s.done(x)
    apply(gm, ctx, *up_to(prefetch))
    order = ["all_gather a", "all_gather b", "wait a", "wait b", "all_gather large", "wait large", "all_gather small"]
    assert events(gm, *STARTS_AND_WAITS) == [*order, "wait small"]


def test_a_budget_below_the_largest_group_is_refused_by_its_name() -> None:
    s = Sketch(memory_budget=20_000)
    x = s.input("x", 4, 8)
    weights = [*s.parameters("small", w=(8, 8)), *s.parameters("h.1.big", v=(8, 800))]
    for w in weights:
        x = s.call(aten.mm.default, x, w)
    gm, ctx = s.done(x)
    apply(gm, ctx, *up_to(group))
    with pytest.raises(ValueError, match=r"memory_budget=20,000 .*'h\.1\.big'.* 25,600 ") as caught:
        apply(gm, ctx, prefetch)
    ctx.memory_budget = 25_600  # what the message says is enough
    assert "at least 25,600" in str(caught.value)
    apply(gm, ctx, prefetch)
    assert ctx.found.gathered_bytes == 25_600


def test_a_weight_used_first_and_last_counts_all_the_way() -> None:
    s = Sketch()
    x = s.input("x", 8, 8)
    (tied,) = s.parameters("tied", w=(8, 8))
    weights = [s.parameters(name, **{name: (8, 8)})[0] for name in "abcd"]
    for w in (tied, *weights, tied):
        x = s.call(aten.mm.default, x, w)
    gm, ctx = s.done(x)
    apply(gm, ctx, *up_to(prefetch))
    assert ctx.found.gathered_bytes == 4 * 256  # one in use, the next two, and the tied one
    assert events(gm, "all_gather")[-1] == "all_gather d"


def test_in_backward_the_next_gather_goes_ahead_of_the_current_reduction() -> None:
    gm, ctx = mlp_backward(2, layers="abcd")
    apply(gm, ctx, *up_to(prefetch))
    pack = {layer: ["mm", "t", "mm", "sum", *[f"pack {layer}"] * 4, f"reduce_scatter {layer}"] for layer in "abcd"}
    pack["c"][4:4] = ["wait_grad d", "gradient d"]
    pack["a"][4:4] = ["wait_grad c", "gradient c"]
    assert events(gm) == [
        *(f"all_gather {layer}" for layer in "dcb"),
        *("wait d", "weight d", "t", *pack["d"]),
        *("all_gather a", "wait c", "weight c", "t", *pack["c"]),
        *("wait b", "weight b", "t", *pack["b"]),
        *("wait a", "weight a", "t", *pack["a"], "wait_grad b", "gradient b", "wait_grad a", "gradient a"),
    ]


def in_flight(gm: GraphModule) -> dict[str, set[str]]:
    """For each group, which others' reductions are under way while it is packed."""
    flying: set[str] = set()
    found = {}
    for kind, layer in (event.split() for event in events(gm, "pack", "reduce_scatter", "wait_grad")):
        if kind == "pack":
            found.setdefault(layer, set(flying))
        elif kind == "reduce_scatter":
            flying.add(layer)
        else:
            flying.remove(layer)
    assert not flying
    return found


def test_two_packed_gradients_are_in_flight_and_one_in_the_first_quarter() -> None:
    gm, ctx = mlp_backward(2, layers="abcdefgh", memory_budget=1 << 30)
    apply(gm, ctx, *up_to(prefetch))
    assert in_flight(gm) == {layer: set(other) for layer, other in zip("hgfedcba", ["", "", "", *"fedcb"], strict=True)}


def test_of_small_gradients_as_many_are_in_flight_as_twice_the_largest_has_bytes() -> None:
    s = Sketch("backward")
    dy = s.input("tangents_1", 8, 8)
    rows = {"large": 32, "a": 8, "b": 8, "c": 8, "d": 8, "e": 8, "f": 8}
    for name, n in rows.items():
        s.group(name, **{name: (n, 8)})
    grads = [s.call(aten.mm.default, s.call(aten.new_ones.default, dy, [n, 8]), dy) for n in rows.values()]
    gm, ctx = s.done(*grads, gradients=dict(enumerate(rows)))
    apply(gm, ctx, *up_to(prefetch))
    assert in_flight(gm) == {
        "large": set(),
        "a": {"large"},  # the first quarter: 256 bytes are no more than a quarter of 1024
        "b": {"large", "a"},
        "c": {"large", "a", "b"},
        "d": {"large", "a", "b", "c"},  # 2 x 1024 bytes
        "e": {"a", "b", "c", "d"},
        "f": {"a", "b", "c", "d", "e"},
    }


def test_reductions_without_gathers_are_waited_for_late_too() -> None:
    s = Sketch("backward")
    dy = s.input("tangents_1", 8, 8)
    for name in "ab":
        s.group(name, **{name: (8, 8)})
    grads = [s.call(aten.neg.default, dy), s.call(aten.abs.default, dy)]
    gm, ctx = s.done(*grads, s.call(aten.relu.default, dy), gradients={0: "a", 1: "b"})
    apply(gm, ctx, *up_to(prefetch))
    assert events(gm) == [
        *("neg", "pack a", "reduce_scatter a", "abs", "pack b", "reduce_scatter b", "relu"),
        *("wait_grad a", "gradient a", "wait_grad b", "gradient b"),
    ]


def test_a_graph_without_collectives_is_left_alone() -> None:
    assert_left_alone(*mlp_forward(2), prefetch)
    for graph in mlp_forward, mlp_backward:
        gm, ctx = graph(1)
        apply(gm, ctx, *up_to(group))
        assert_left_alone(gm, ctx, prefetch)


@pytest.mark.parametrize("graph", [mlp_forward, mlp_backward])
def test_a_schedule_that_is_good_already_is_left_alone(graph) -> None:
    gm, ctx = graph(2)
    apply(gm, ctx, *up_to(prefetch))
    assert_left_alone(gm, ctx, prefetch)


Event = tuple[str, str, int]
"""(start | wait | end, group, bytes of its buffer)"""


@dataclass
class Plan:
    """A random graph: groups by size in order of first use, later uses of some, and some that escape."""

    sizes: list[int]
    again: list[tuple[int, int]]
    escape: int | None

    def build(self, world_size: int) -> Callable[..., list[Event]]:
        """A function that takes a copy of the graph through some passes and returns its `timeline`."""
        s = Sketch(world_size=world_size)
        y = s.input("x")
        weights = [s.parameters(f"g{i}", **{f"w{i}": (size,)})[0] for i, size in enumerate(self.sizes)]
        for i in range(len(weights)):
            for j in (i, *(first for first, at in self.again if at == i and first < i)):
                y = s.call(aten.add.Tensor, s.call(aten.sum.default, weights[j]), y)
        out = () if self.escape is None else (weights[self.escape],)
        gm, ctx = s.done(y, *out)
        apply(gm, ctx, *up_to(group))

        def schedule(*passes: Pass, budget: int | None = None) -> list[Event]:
            copied = GraphModule(gm, copy.deepcopy(gm.graph))
            ctx.memory_budget = budget
            apply(copied, ctx, *passes)
            line = timeline(copied)
            assert prefetch not in passes or peak(line) == ctx.found.gathered_bytes
            return line

        return schedule


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    sizes = draw(st.lists(st.sampled_from([1, 100, 400, 1000, 5000]), min_size=1, max_size=7))
    place = st.integers(0, len(sizes) - 1)
    return Plan(sizes, draw(st.lists(st.tuples(place, place), max_size=3)), draw(st.none() | place))


def timeline(gm: GraphModule) -> list[Event]:
    """The events of gathered buffers in the order of the graph, after `discard`."""
    tagged = [(n.meta["zerofx"].kind, n.meta["zerofx"].group, n) for n in gm.graph.nodes if "zerofx" in n.meta]
    nbytes = {group: node.meta["val"].nbytes for kind, group, node in tagged if kind == "all_gather"}
    kinds = {"all_gather": "start", "wait": "wait", "discard": "end"}
    return [(kinds[kind], group, nbytes[group]) for kind, group, _ in tagged if kind in kinds]


def peak(line: list[Event]) -> int:
    """The most gathered bytes there are at any node: from the start of a gather to the discard."""
    live = most = 0
    for kind, _, nbytes in line:
        live += {"start": nbytes, "wait": 0, "end": -nbytes}[kind]
        most = max(most, live)
    return most


@settings(max_examples=40, deadline=None)
@given(plan=plans(), world_size=st.sampled_from([2, 7]), extra=st.floats(0, 1.2))
def test_live_bytes_never_exceed_the_budget_and_every_start_is_as_early_as_it_allows(
    plan: Plan, world_size: int, extra: float
) -> None:
    schedule = plan.build(world_size)
    line = schedule(discard)  # nothing prefetched
    least = peak(line)
    budget = least + int(extra * (sum(nbytes for kind, _, nbytes in line if kind == "start") - least))
    after = schedule(prefetch, discard, budget=budget)
    assert peak(after) <= budget

    starts = [e for e in line if e[0] == "start"]
    assert [e for e in after if e[0] == "start"] == starts
    assert [e for e in after if e[0] != "start"] == [e for e in line if e[0] != "start"]
    for previous, start in pairwise(starts):
        at = after.index(start)
        waits = [i for i in range(after.index(previous) + 1, at) if after[i][0] == "wait"]
        if waits:  # in front of one wait more there would be too much
            earlier = after[: waits[-1]] + [start] + after[waits[-1] : at] + after[at + 1 :]
            assert peak(earlier) > budget

    with pytest.raises(ValueError, match="too small"):
        schedule(prefetch, budget=least - 1)


@settings(max_examples=20, deadline=None)
@given(plan=plans(), world_size=st.sampled_from([2, 7]))
def test_the_default_budget_is_what_two_groups_ahead_take_and_a_quarter_of_the_largest(
    plan: Plan, world_size: int
) -> None:
    schedule = plan.build(world_size)
    line, after = schedule(discard), schedule(prefetch, discard)
    waits = [e for e in line if e[0] == "wait"]
    for i, wait in enumerate(waits):
        start, ahead = ("start", *wait[1:]), waits[max(0, i - 2)]
        assert after.index(start) < after.index(ahead)
        line.remove(start)
        line.insert(line.index(ahead), start)
    quarter = max(nbytes for _, _, nbytes in line) // 4
    assert peak(line) <= peak(after) <= peak(line) + quarter


def gathers_and_reductions(gm: GraphModule) -> list[str]:
    return events(gm, "all_gather", "wait", "reduce_scatter")


def backward_of_a_large_head(layers: int = 2, **options: Any) -> tuple[GraphModule, Context]:
    """A head of 64 rows, whose own gradient comes after that of what it read, and layers of 8."""
    s = Sketch("backward", **options)
    y, x = s.input("tangents_1", 8, 64), s.input("x", 8, 8)
    grads, sizes = [], {"head": 64} | dict.fromkeys("abcdef"[:layers], 8)
    for name, n in sizes.items():
        (w,) = s.parameters(name, **{name: (n, 8)})
        dy = s.call(aten.mm.default, y, w)
        grads.append(s.call(aten.mm.default, s.call(aten.t.default, y), x))
        y = dy
    return s.done(y, *grads, gradients=dict(enumerate(sizes, start=1)))


def test_small_gathers_go_ahead_of_the_reduction_of_a_large_group_that_dies() -> None:
    budget = 4 * 8 * (64 + 8)  # bytes: the head and one layer
    gm, ctx = backward_of_a_large_head(memory_budget=budget)
    apply(gm, ctx, *up_to(prefetch))
    assert gathers_and_reductions(gm) == [
        *("all_gather head", "all_gather a", "wait head"),
        *("all_gather b", "reduce_scatter head"),  # when the head is through, not in front of the wait for a
        *("wait a", "reduce_scatter a", "wait b", "reduce_scatter b"),
    ]
    assert ctx.found.gathered_bytes <= budget


@pytest.mark.parametrize("stage", [1, 2])
def test_the_wait_for_a_refresh_stays_where_it_is(stage: int) -> None:
    s = Sketch(stage=stage)
    x = s.call(aten.relu.default, s.input("x", 8, 8))
    for name in "ab":
        x = s.call(aten.mm.default, x, s.parameters(name, **{name: (8, 8)})[0])
    gm, ctx = s.done(x)
    apply(gm, ctx, *up_to(group))
    assert events(gm) == ["relu", "refresh a", "weight a", "mm", "refresh b", "weight b", "mm"]
    assert_left_alone(gm, ctx, prefetch)
    assert ctx.found.gathered_bytes == 0
    assert_left_alone(gm, ctx, discard)  # a replica stays


@pytest.mark.parametrize("stage", [1, 2])
def test_a_replica_takes_nothing_of_the_budget(stage: int) -> None:
    gm, ctx = mlp_forward(2, stage=stage, memory_budget=1)
    apply(gm, ctx, *up_to(group))
    assert_left_alone(gm, ctx, prefetch)


@pytest.mark.parametrize("stage", [1, 2])
def test_with_replicas_reductions_are_waited_for_late_all_the_same(stage: int) -> None:
    gm, ctx = mlp_backward(2, layers="ab", stage=stage)
    apply(gm, ctx, *up_to(prefetch))
    layer = {name: [f"refresh {name}", f"weight {name}", "t", "mm", "t", "mm", "sum"] for name in "ab"}
    pack = {name: [*[f"pack {name}"] * 4, f"reduce_scatter {name}"] for name in "ab"}
    assert events(gm) == [
        *(*layer["b"], *pack["b"]),
        *(*layer["a"], *pack["a"], "wait_grad b", "gradient b", "wait_grad a", "gradient a"),
    ]


def test_what_readies_gradients_for_packing_does_not_hold_up_the_reduction_before() -> None:
    gm, ctx = mlp_backward(2, sync="merge", reduce_dtype=torch.bfloat16)
    apply(gm, ctx, *up_to(prefetch))
    schedule = events(gm, "prepare", "pack", "reduce_scatter", "wait_grad", "gradient")
    grads = {name: [f"prepare {name}"] * 4 for name in "abc"}  # two casts, two kept gradients
    pack = {name: [*[f"pack {name}"] * 4, f"reduce_scatter {name}"] for name in "abc"}
    wait = {name: [f"wait_grad {name}", *[f"gradient {name}"] * 2] for name in "abc"}
    last = [*grads["a"], *wait["c"], *pack["a"], *wait["b"], *wait["a"]]
    assert schedule == [*grads["c"], *pack["c"], *grads["b"], *pack["b"], *last]
    assert [node.name for node in edit.tagged(gm.graph, "kept")] == [f"kept_{x}{y}" for x in "cba" for y in "wb"]
