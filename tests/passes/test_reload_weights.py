"""reload_weights: shards that live elsewhere are brought ahead of their gather, two at a time."""

from __future__ import annotations

import pytest
import torch
from torch.fx import GraphModule

from tests.passes.elsewhere import Elsewhere
from tests.passes.graphs import (
    Numbers,
    Sketch,
    apply,
    assert_documented,
    assert_left_alone,
    aten,
    events,
    mlp_backward,
    mlp_forward,
    run,
    up_to,
)
from zerofx.features.meshes.replicate import replicate
from zerofx.features.offload.operators import RELOAD, WAIT_RELOAD, carrying
from zerofx.features.offload.reload_weights import reload_weights
from zerofx.features.wire.quantize import quantize
from zerofx.passes import Context, discard, lower, verify
from zerofx.passes.ops import release
from zerofx.passes.proof.meaning import Op

KINDS = "reload", "wait_reload", "all_gather", "wait"
GRAPHS = {"forward": mlp_forward, "backward": mlp_backward}


def reloaded(phase: str = "forward", *, away: str = "abc", **context: object) -> tuple[GraphModule, Context]:
    gm, ctx = GRAPHS[phase](weights_away=frozenset(away), **context)
    apply(gm, ctx, *up_to(reload_weights))
    return gm, ctx


def test_a_shard_is_reloaded_in_front_of_the_wait_for_the_one_before_it() -> None:
    gm, _ = reloaded()
    assert events(gm, *KINDS) == [
        *("reload a", "reload b", "wait_reload a", "all_gather a"),
        *("reload c", "wait_reload b", "all_gather b"),
        *("wait_reload c", "all_gather c", "wait a", "wait b", "wait c"),
    ]


def test_a_gather_that_starts_later_is_reloaded_for_later() -> None:
    gm, _ = reloaded(memory_budget=2 * 4 * 128)
    assert events(gm, *KINDS) == [
        *(
            "reload a",
            "reload b",
            "wait_reload a",
            "all_gather a",
            "reload c",
            "wait_reload b",
            "all_gather b",
            "wait a",
        ),
        *("wait_reload c", "all_gather c", "wait b", "wait c"),
    ]


def test_backward_reloads_in_the_order_of_its_own_use() -> None:
    gm, _ = reloaded("backward")
    assert [e for e in events(gm, "reload")] == ["reload c", "reload b", "reload a"]


@pytest.mark.parametrize("phase", GRAPHS)
@pytest.mark.parametrize("letters", ["abcdef", "abcdefghijkl"])
def test_two_are_on_their_way_at_most_however_many_groups_there_are(phase: str, letters: str) -> None:
    gm, ctx = reloaded(phase, away=letters, layers=letters, world_size=1)
    numbers = Numbers.random(GRAPHS[phase](world_size=1, layers=letters)[0], ctx)
    numbers.flats |= {n: torch.randn(n.numel) for n in ctx.found.shards}
    here = Elsewhere.of(ctx, numbers)
    with carrying(here):
        run(gm, ctx, numbers)
    assert here.most["weights"] == 2 and not here.flying["weights"]


@pytest.mark.parametrize("phase", GRAPHS)
def test_the_numbers_stay_after_every_pass(phase: str) -> None:
    """The shard's placeholder brings numbers that nobody may read."""
    plain, known = GRAPHS[phase](world_size=1)
    numbers = Numbers.random(plain, known)
    wanted = run(plain, known, numbers)
    for last in (reload_weights, discard, lower, verify):
        gm, ctx = GRAPHS[phase](world_size=1, weights_away=frozenset("abc"))
        apply(gm, ctx, *up_to(last))
        with carrying(Elsewhere.of(ctx, numbers)):
            nothing = Numbers(numbers.inputs, {n: torch.full_like(x, torch.nan) for n, x in numbers.flats.items()})
            found = run(gm, ctx, nothing)
        mine = [x for x in found[: len(wanted)] if x is not None]
        assert mine and all(any(x.equal(y) for y in wanted) for x in mine)


def test_what_was_reloaded_is_released_behind_its_gather() -> None:
    gm, ctx = reloaded()
    apply(gm, ctx, discard)
    names = events(gm, *KINDS, "discard")
    assert names[names.index("all_gather a") + 1] == "discard a"
    mark = next(n for n in gm.graph.nodes if n.target is release)
    assert mark.args[0].target is WAIT_RELOAD


def test_casts_and_parts_read_what_was_reloaded() -> None:
    s = Sketch(weights_away=frozenset("a"), param_dtype=torch.bfloat16)
    x = s.input("x", 4, 64, dtype=torch.bfloat16)
    w, b = s.parameters("a", aw=(64, 64), ab=(64,))
    w16 = s.call(torch.ops.prims.convert_element_type.default, w, torch.bfloat16)
    y = s.call(aten.mm.default, x, w16)
    gm, ctx = s.done(s.call(aten.add.Tensor, y, b))
    apply(gm, ctx, *up_to(reload_weights))
    (shard,) = (n for n in gm.graph.nodes if n.name.startswith("shard_"))
    assert {user.target for user in shard.users} == {RELOAD, WAIT_RELOAD}
    assert len(events(gm, "reload")) == 1 and len(events(gm, "all_gather")) == 2
    apply(gm, ctx, discard, lower)
    verify(gm, ctx)


def test_a_group_whose_weights_are_here_is_not_reloaded() -> None:
    gm, ctx = reloaded(away="b")
    assert events(gm, "reload", "wait_reload") == ["reload b", "wait_reload b"]
    apply(gm, ctx, discard, lower)
    verify(gm, ctx)


@pytest.mark.parametrize("changes", [{}, {"stage": 2, "weights_away": frozenset("abc")}])
def test_it_leaves_other_graphs_alone(changes: dict) -> None:
    gm, ctx = mlp_forward(**changes)
    apply(gm, ctx, *up_to(replicate))
    assert_left_alone(gm, ctx, reload_weights)


def test_new_nodes_say_what_they_are_for() -> None:
    gm, ctx = mlp_forward(weights_away=frozenset("abc"))
    apply(gm, ctx, *up_to(replicate))
    assert_documented(apply(gm, ctx, reload_weights).inserted, {"reload": {1, 3, 5}, "wait_reload": {1, 3, 5}})


def test_inductor_is_told_the_order() -> None:
    gm, ctx = reloaded(executor="inductor", away="abcdef", layers="abcdef", memory_budget=3 * 4 * 128)
    apply(gm, ctx, discard, quantize, lower)
    verify(gm, ctx)
    ops = {
        f"{n.meta['zerofx'].kind} {n.meta['zerofx'].group}": Op.of(n)
        for n in gm.graph.nodes
        if "zerofx" in n.meta and n.op == "call_function"
    }
    names = {op.node: name for name, op in ops.items()}
    assert "reload d" in {names.get(n) for n in ops["wait_reload c"].after}
    assert "all_gather b" in {names.get(n) for n in ops["reload d"].after}


def test_without_a_carrier_nobody_knows_where_weights_live() -> None:
    gm, ctx = reloaded(world_size=1)
    numbers = Numbers({"x": torch.ones(4, 8)}, {layout: torch.zeros(layout.numel) for layout in ctx.found.shards})
    with pytest.raises(RuntimeError, match="nobody said where its state lives"):
        run(gm, ctx, numbers)
