"""place: every buffer made for collectives lies in one frame; `verify` and the reading of code find what does not fit.

What overlaps in time must not overlap in place. In time: by the order of the graph, or of the code made of it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import GraphModule
from torch.testing._internal.distributed.fake_pg import FakeStore

import zerofx
from tests.passes.code_mutants import Text
from tests.passes.generated import Generated, generated
from tests.passes.graphs import apply, assert_left_alone, mlp_backward, mlp_forward, up_to
from tests.passes.mutants import Graph, another, give, inner, record, rewritten, tagged, what_verify_misses
from zerofx._torch import pinned
from zerofx.passes import Context, VerificationError, edit, lower, place, verify
from zerofx.passes.colour import ALIGNED, Interval, colour
from zerofx.passes.place_in_code import place_in_code
from zerofx.passes.pool import Frame, Room
from zerofx.passes.proof.code import check_code

PACK = torch.ops.zerofx.pack.default


def at_once(one: Room, other: Room) -> bool:
    return one.first <= other.last and other.first <= one.last


def overlap(one: Room, other: Room) -> bool:
    return one.start < other.start + other.nbytes and other.start < one.start + one.nbytes


def fits(frame: Frame) -> bool:
    """Whether nothing that lives at once overlaps."""
    return not any(overlap(a, b) and at_once(a, b) for a, b in itertools.combinations(frame.rooms, 2))


def moved(frame: Frame, changes: dict[str, dict[str, Any]], **whole: Any) -> Frame:
    """The frame, with other facts of the rooms of these names."""
    rooms = tuple(replace(room, **changes.get(room.name, {})) for room in frame.rooms)
    lines = {number: next(r for r in rooms if r.name == room.name) for number, room in frame.lines.items()}
    return replace(frame, rooms=rooms, lines=lines, **whole)


def shuffled(frame: Frame, seed: int) -> Iterator[Frame]:
    """The frame; with the places of two of its buffers exchanged; with all places drawn anew."""
    draw = random.Random(seed)
    yield moved(frame, {}, nbytes=1 << 40)
    for one, other in itertools.combinations(frame.rooms, 2):
        yield moved(frame, {one.name: {"start": other.start}, other.name: {"start": one.start}}, nbytes=1 << 40)
    for _ in range(30):
        starts = {room.name: {"start": draw.choice(frame.rooms).start} for room in frame.rooms}
        yield moved(frame, starts, nbytes=1 << 40)


# ---- addresses -------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 15), st.integers(1, 5000)), max_size=40))
def test_what_lives_at_once_never_overlaps(drawn: list[tuple[int, int, int]]) -> None:
    intervals = [Interval(first, first + length, nbytes) for first, length, nbytes in drawn]
    starts, nbytes, least = colour(intervals)
    assert colour(intervals) == (starts, nbytes, least)
    for (a, here), (b, there) in itertools.combinations(zip(intervals, starts, strict=True), 2):
        if a.first <= b.last and b.first <= a.last:
            assert here + a.nbytes <= there or there + b.nbytes <= here
    live = [sum(x.room for x in intervals if x.first <= t <= x.last) for t in range(60)]
    assert least == max(live) <= nbytes <= sum(x.room for x in intervals)
    assert all(start % ALIGNED == 0 and start + x.nbytes <= nbytes for x, start in zip(intervals, starts, strict=True))


def test_a_place_is_used_again() -> None:
    one_after_the_other = [Interval(2 * i, 2 * i + 1, 100 * (i + 1)) for i in range(5)]
    starts, nbytes, least = colour(one_after_the_other)
    assert starts == [0] * 5 and nbytes == least == 512
    two_at_a_time = [Interval(i, i + 1, 64) for i in range(6)]
    assert colour(two_at_a_time)[1:] == (128, 128)


# ---- the graph -------------------------------------------------------------------------------------------------------


def backward(**options: Any) -> Graph:
    gm, ctx = mlp_backward(pool=True, **options)
    apply(gm, ctx, *up_to(place))
    return gm, ctx


def test_gathers_packs_and_exchanges_have_rooms_as_long_as_they_live() -> None:
    gm, ctx = backward()
    assert ctx.frame is not None
    order, nodes = edit.positions(gm.graph), {node.name: node for node in gm.graph.nodes}
    by_kind = {room.kind for room in ctx.frame.rooms}
    assert by_kind == {"all_gather", "pack", "reduce_scatter"} and len(ctx.frame.rooms) == 9
    for room in ctx.frame.rooms:
        node = nodes[room.name]
        assert node.kwargs == {"room": room.number} and room.first == order[node]
        assert room.nbytes == node.meta["val"].numel() * 4
        ends = {"all_gather": "discard", "pack": "gradient", "reduce_scatter": "gradient"}
        assert nodes[list(order)[room.last].name].meta["zerofx"].kind == ends[room.kind]
    assert ctx.frame.least <= ctx.frame.nbytes < sum(room.nbytes for room in ctx.frame.rooms)
    packs = tagged(gm, "pack")
    assert [node.target for node in packs if node.name in nodes and "room" in node.kwargs] == [PACK] * 3
    apply(gm, ctx, verify)


def test_without_the_pool_it_changes_nothing() -> None:
    for gm, ctx in (mlp_forward(), mlp_backward()):
        apply(gm, ctx, *up_to(lower))
        assert_left_alone(gm, ctx, place)
        assert ctx.frame is None


def test_inductor_packs_by_itself_and_pinned_nodes_have_rooms_too() -> None:
    gm, ctx = backward(executor="inductor")
    assert not [node for node in gm.graph.nodes if node.target is PACK]
    hidden = [node for node in tagged(gm, "all_gather") if pinned(node) is not None]
    assert hidden and all("room" in inner(gm, node).kwargs for node in tagged(gm, "all_gather", "reduce_scatter"))
    apply(gm, ctx, verify)


def test_what_leaves_the_graph_has_no_room() -> None:
    gm, ctx = mlp_forward(pool=True, layers="ab")
    weight = next(node for node in gm.graph.nodes if node.name == "aw")
    give(gm, 0, weight)  # the model returns a weight
    gm.recompile()
    apply(gm, ctx, *up_to(place))
    assert [room.group for room in ctx.frame.rooms] == ["b"]  # type: ignore[union-attr]
    apply(gm, ctx, verify)


def test_a_gradient_that_an_update_keeps_has_no_room() -> None:
    gm, ctx = mlp_backward(pool=True, world_size=1, steps=True)
    apply(gm, ctx, *up_to(place))
    assert tagged(gm, "step") and not ctx.frame.rooms  # type: ignore[union-attr]  # it is the pack


OPTIONS: list[dict[str, Any]] = [
    {"stage": 3},
    {"stage": 3, "wire": zerofx.Wire("int8", "int8")},
    {"stage": 3, "lookups": True, "mixed_precision": zerofx.MixedPrecision(torch.bfloat16)},
    {"stage": 2},
    {"stage": 1, "wire": zerofx.Wire(gradients="int8", error_feedback=True)},
    {"stage": 0},
]


def all_in_files(tmp_path_factory: pytest.TempPathFactory) -> zerofx.Offload:
    where = str(tmp_path_factory.mktemp("state"))
    return zerofx.Offload(where, gradients=where, weights=where, activations=where, smallest=1024)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Graph]]:
    """For each of the options, and both executors: forward and backward, as `place` leaves them."""
    elsewhere = {"stage": 3, "offload": all_in_files(tmp_path_factory)}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        return [
            rewritten(each, executor=executor, backend="gloo", pool=True)
            for each in [record(blocks=2, **options) for options in [*OPTIONS, elsewhere]]
            for executor in ("eager", "inductor")
        ]
    finally:
        dist.destroy_process_group()


def all_of(made: list[dict[str, Graph]]) -> list[Graph]:
    return [graph for graphs in made for graph in graphs.values()]


def test_collectives_of_all_options_have_rooms(made: list[dict[str, Graph]]) -> None:
    for gm, ctx in all_of(made):
        assert ctx.frame is not None and fits(ctx.frame)
        kept = ctx.kept_gathered if ctx.phase == "forward" else ()
        starts = tagged(gm, "all_gather", "encode", *["reduce_scatter"] * (ctx.stage > 0))
        wanted = {node.name for node in starts if node.meta["zerofx"].group not in kept}
        assert wanted <= ctx.frame.named.keys(), (ctx.stage, ctx.phase)
    assert {room.kind for _, ctx in all_of(made) for room in ctx.frame.rooms} >= {
        "decode",
        "encode",
        "pack",
        "fetch",
        "unstow",
    }  # type: ignore[union-attr]


def test_what_other_backends_bring_has_no_room() -> None:
    gm, ctx = mlp_backward(pool=True, backend="nccl")
    apply(gm, ctx, *up_to(place))
    assert {room.kind for room in ctx.frame.rooms} == {"pack"}  # type: ignore[union-attr]
    apply(gm, ctx, verify)


def refused(graph: Graph, frame: Frame) -> str:
    gm, ctx = another(graph)
    ctx.frame = frame
    try:
        verify(gm, ctx)
    except VerificationError as error:
        return error.rule
    return ""


def test_verify_finds_every_overlap_and_nothing_else(made: list[dict[str, Graph]]) -> None:
    """Places exchanged or drawn by chance: refused where two buffers that live at once overlap, and only there."""
    seen = {True: 0, False: 0}
    for i, (gm, ctx) in enumerate(all_of(made)):
        assert ctx.frame is not None
        for frame in itertools.islice(shuffled(ctx.frame, i), 0, None, 29):
            assert refused((gm, ctx), frame) == ("" if fits(frame) else "place")
            seen[fits(frame)] += 1
    assert min(seen.values()) > 20, seen


def a_frame_that_is_too_small(gm: GraphModule, ctx: Context) -> None:
    ctx.frame = replace(ctx.frame, nbytes=ctx.frame.nbytes - 64)  # type: ignore[arg-type, union-attr]


def a_room_that_is_too_small(gm: GraphModule, ctx: Context) -> None:
    room = ctx.frame.rooms[-1]  # type: ignore[union-attr]
    ctx.frame = moved(ctx.frame, {room.name: {"nbytes": room.nbytes - 4}})  # type: ignore[arg-type]


def a_room_in_front_of_the_frame(gm: GraphModule, ctx: Context) -> None:
    ctx.frame = moved(ctx.frame, {ctx.frame.rooms[0].name: {"start": -64}})  # type: ignore[arg-type, union-attr]


def a_node_that_asks_for_another_room(gm: GraphModule, ctx: Context) -> None:
    node = next(n for n in tagged(gm, "all_gather", "reduce_scatter") if "room" in inner(gm, n).kwargs)
    inner(gm, node).kwargs = {"room": 0 if ctx.frame.rooms[0].name != node.name else 1}  # type: ignore[union-attr]


def a_node_that_asks_for_none(gm: GraphModule, ctx: Context) -> None:
    node = next(n for n in tagged(gm, "all_gather", "reduce_scatter") if "room" in inner(gm, n).kwargs)
    inner(gm, node).kwargs = {}


def a_room_that_nobody_has(gm: GraphModule, ctx: Context) -> None:
    more = replace(ctx.frame.rooms[0], name="nobody", number=99)  # type: ignore[union-attr]
    ctx.frame = replace(ctx.frame, rooms=(*ctx.frame.rooms, more))  # type: ignore[arg-type, union-attr]


def a_pack_that_is_read_when_another_lies_there(gm: GraphModule, ctx: Context) -> None:
    """This rank's own part is added at the end."""
    parts = {node.args[0].name: node for node in gm.graph.nodes if node.target is torch.ops.zerofx.own_part.default}
    rooms = ctx.frame.rooms  # type: ignore[union-attr]
    part = next(parts[a.name] for a in rooms if a.name in parts for b in rooms if overlap(a, b) and a.last < b.first)
    output, todo = gm.graph.output_node(), [part]
    while todo:
        node = todo.pop(0)
        output.prepend(node)
        todo += [user for user in node.users if user is not output]


MUTANTS: list[tuple[Callable[[GraphModule, Context], None], set[str]]] = [
    (a_frame_that_is_too_small, {"place"}),
    (a_room_that_is_too_small, {"place"}),
    (a_room_in_front_of_the_frame, {"place"}),
    (a_node_that_asks_for_another_room, {"place"}),
    (a_node_that_asks_for_none, {"place"}),
    (a_room_that_nobody_has, {"place"}),
    (a_pack_that_is_read_when_another_lies_there, {"place"}),
]


def test_what_breaks_the_rule_of_places_is_found() -> None:
    graphs = [backward(executor=executor, layers="abcdef") for executor in ("eager", "inductor")]
    missed = what_verify_misses((graph, mutant, rules) for graph in graphs for mutant, rules in MUTANTS)
    assert not missed, "\n".join(missed)


def test_a_buffer_in_the_frame_must_not_leave() -> None:
    gm, ctx = mlp_forward(pool=True, layers="ab")
    give(gm, 0, next(node for node in gm.graph.nodes if node.name == "aw"))
    apply(gm, ctx, *up_to(place))
    start = next(node for node in tagged(gm, "all_gather") if "room" not in node.kwargs)
    start.kwargs = {"room": 7}
    room = Room(7, start.name, "all_gather", "a", start.meta["val"].numel() * 4, 0, 0, ctx.frame.nbytes)  # type: ignore[union-attr]
    ctx.frame = replace(ctx.frame, rooms=(*ctx.frame.rooms, room), nbytes=1 << 30)  # type: ignore[arg-type, union-attr]
    with pytest.raises(VerificationError, match="lies in the frame, leaves the graph"):
        apply(gm, ctx, verify)


# ---- the code --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Generated, Frame]]:
    """Code for the CPU, with the frame that its lines have."""
    cases = [
        ("gpt", {"stage": 3, "world_size": 3, "memory_budget": 120_000}),
        ("gpt", {"stage": 2, "steps": True}),
        ("convolutions", {"stage": 3}),
        ("experts", {"stage": 3}),
        ("gpt", {"stage": 3, "offload": all_in_files(tmp_path_factory)}),
    ]
    found = [each for model, options in cases for each in generated(model, pool=True, **options)]  # type: ignore[arg-type]
    return [(each, place_in_code(each.code, each.context.frame)) for each in found]  # type: ignore[arg-type, misc]


def test_code_has_a_frame_of_its_own_order(texts: list[tuple[Generated, Frame]]) -> None:
    for each, frame in texts:
        assert check_code(each.code, each.promise, frame=frame) is not None and fits(frame)
        graph = each.context.frame
        assert graph is not None and frame.order == "code"
        operators = {room.name for room in graph.rooms if room.kind != "pack"}
        assert {room.name for room in frame.rooms if room.number >= 0} <= operators
        lines = each.code.splitlines()
        packs = [room for room in frame.rooms if room.kind == "sent"]
        assert len(packs) >= sum(room.kind == "pack" for room in graph.rooms)
        assert all("empty_strided_cpu" in lines[-room.number - 1] for room in packs)
    assert sum(len(frame.rooms) for _, frame in texts) > 25


def found_in(each: Generated, code: str, frame: Frame) -> str:
    try:
        check_code(code, each.promise, frame=frame)
    except VerificationError as error:
        return error.rule
    return ""


def test_every_overlap_in_code_is_found_and_nothing_else(texts: list[tuple[Generated, Frame]]) -> None:
    seen = {True: 0, False: 0}
    for i, (each, frame) in enumerate(texts):
        for other in itertools.islice(shuffled(frame, i), 0, None, 17):
            assert found_in(each, each.code, other) == ("" if fits(other) else "place")
            seen[fits(other)] += 1
    assert min(seen.values()) >= len(texts), seen


def test_a_line_outside_of_the_frame_is_found(texts: list[tuple[Generated, Frame]]) -> None:
    for each, frame in texts:
        if frame.rooms:
            assert found_in(each, each.code, replace(frame, nbytes=frame.nbytes - 64)) == "place"
            assert found_in(each, each.code, moved(frame, {frame.rooms[0].name: {"start": -64}})) == "place"


def test_code_that_returns_a_buffer_of_the_frame_is_refused(texts: list[tuple[Generated, Frame]]) -> None:
    tried = 0
    for each, frame in texts:
        for sent in {each.sent for each in Text(each.code).collectives()}:
            text = Text(each.code)
            if not text.find(rf"\b{sent} = empty_strided_cpu"):
                continue
            for i in text.dels(sent):
                text.lines[i] = text.lines[i].replace(f"del {sent}", "pass")
            text.lines[text.end] = text.lines[text.end].rstrip()[:-1] + f"{sent}, )"
            assert found_in(each, text.code, replace(frame, lines={})) == ""
            assert found_in(each, text.code, frame) == "place"
            tried += 1
    assert tried > 3


# ---- to be read ------------------------------------------------------------------------------------------------------


def test_a_record_says_how_large_a_frame_is_and_where_a_buffer_lies(fake_world: Any) -> None:
    fake_world(2)
    made = record(stage=2, pool=True)
    assert made.backward is not None
    frame, text = made.backward.context.frame, str(made.backward)
    assert frame is not None and f" for {len(frame.rooms)} buffers, " in text and "in the order of the graph" in text
    room = frame.rooms[1]
    lies = f"  lies     at bytes {room.start:,} to {room.start + room.nbytes:,} of the graph's frame, {frame.nbytes:,}"
    assert lies in made.explain(f"{room.kind} {room.group}").splitlines()
    without = record(stage=2)
    assert "  frame    " not in str(without)
    assert "of the graph's frame" not in without.explain(f"{room.kind} {room.group}")
