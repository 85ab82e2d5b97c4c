"""verify: correct graphs pass, every way of breaking one is found, by the rule that says so."""

from __future__ import annotations

import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.fx import GraphModule
from torch.testing._internal.distributed.fake_pg import FakeStore

import zerofx
from tests.passes.graphs import Sketch, apply, aten
from tests.passes.mutants import (  # noqa: F401  # they add themselves to MUTANTS
    MUTANTS,
    Graph,
    Mutant,
    activations,
    another,
    buffers,
    carried,
    coded,
    collectives,
    gradients,
    inputs,
    record,
    replicated,
    rewritten,
    steps,
    tables,
    values,
)
from tests.slow import slow_if
from zerofx.compiler.rewriting import copy_graph
from zerofx.features.offload.facts import ActivationChoice
from zerofx.passes import VerificationError, edit, pipeline, verify
from zerofx.passes.schedule import groups_ahead

BF16 = zerofx.MixedPrecision(torch.bfloat16, torch.float32)
CODES = zerofx.Wire("int8", "int4", block=32)
FEEDBACK = zerofx.Wire("int8", "int4", block=32, error_feedback=True)
RECORDS: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 3": (2, {"stage": 3}),
    "stage 3, 16 bits": (3, {"stage": 3, "mixed_precision": BF16}),
    "stage 3, autocast": (2, {"stage": 3, "autocast": True}),
    "stage 3, lookups": (2, {"stage": 3, "lookups": True}),
    "stage 3, lookups, 16 bits": (3, {"stage": 3, "lookups": True, "mixed_precision": BF16}),
    "stage 3, codes": (2, {"stage": 3, "wire": CODES}),
    "stage 2": (2, {"stage": 2}),
    "stage 2, codes, 16 bits": (3, {"stage": 2, "wire": FEEDBACK, "mixed_precision": BF16}),
    "stage 1, 16 bits": (2, {"stage": 1, "mixed_precision": BF16}),
    "stage 0": (3, {"stage": 0}),
    "one rank": (1, {"stage": 3}),
}
EVERY = frozenset(["scale", "embedding", "table", *(f"blocks.{i}" for i in range(3))])
CARRIED = ["reload", "offload", "offload_activation", "reload_activation"]
CARRIED += [f"wait_{kind}" for kind in CARRIED]

AWAY: dict[str, Any] = {"weights_away": EVERY, "gradients_away": EVERY, "activation_choice": ActivationChoice(64)}
CONTEXTS: dict[str, dict[str, Any]] = {
    "gloo, eager": {"backend": "gloo", "executor": "eager"},
    "gloo, inductor": {"backend": "gloo", "executor": "inductor"},
    "nccl, inductor, all kept": {"backend": "nccl", "executor": "inductor", "memory_budget": float("inf")},
    "a small budget": {"backend": "gloo", "executor": "eager", "memory_budget": 20_000},
    "gradients kept": {"sync": "keep"},
    "gradients merged": {"sync": "merge", "backend": "gloo", "executor": "inductor"},
    "updated": {"steps": True, "executor": "eager"},
    "updated, inductor": {"steps": True, "executor": "inductor"},
}
ELSEWHERE: dict[str, dict[str, Any]] = {
    "elsewhere, eager": {"executor": "eager", "memory_budget": 20_000, **AWAY},
    "elsewhere, inductor": {"executor": "inductor", **AWAY},
}
MOVED = "stage 3", "stage 3, autocast", "stage 3, codes", "stage 2", "one rank"
"""The records of which there are graphs whose state lives elsewhere: for the rules of that alone."""
RULES = "inputs gather wait group slice discard budget saved reduction order".split()
RULES += "step reload offload activation wire write value".split()


@pytest.fixture(scope="module")
def graphs() -> Iterator[dict[str, Graph]]:
    """Correct graphs of all kinds, by name."""
    found: dict[str, Graph] = {}
    for name, (world_size, options) in RECORDS.items():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        try:
            compiled = record(**options)
        finally:
            dist.destroy_process_group()
        for context, changes in (CONTEXTS | (ELSEWHERE if name in MOVED else {})).items():
            if "memory_budget" in changes and "codes" in name:  # groups of four times the bytes
                changes = {**changes, "memory_budget": 4 * changes["memory_budget"]}
            for phase, graph in rewritten(compiled, **changes).items():
                found[f"{name}; {context}; {phase}"] = graph
    yield found


def test_correct_graphs_pass(graphs: dict[str, Graph]) -> None:
    assert len(graphs) == 2 * (len(RECORDS) * len(CONTEXTS) + len(MOVED) * len(ELSEWHERE))
    for name, (gm, ctx) in graphs.items():
        code = gm.code
        assert verify(gm, ctx) == 0, name
        assert gm.code == code


def test_the_graphs_have_what_can_go_wrong(graphs: dict[str, Graph]) -> None:
    """Else the mutants below would prove little."""
    kinds = Counter(n.meta["zerofx"].kind for gm, _ in graphs.values() for n in gm.graph.nodes if "zerofx" in n.meta)
    wanted = "shard replica kept gathered narrow rebuild all_gather wait refresh weight prepare pack reduce_scatter"
    assert all(kinds[kind] for kind in [*wanted.split(), *"all_reduce wait_grad gradient discard".split()])
    assert all(kinds[kind] for kind in CARRIED)
    assert kinds["quantize"] and kinds["dequantize"]
    assert all(kinds[kind] for kind in "ask asked answer answered give given rows".split())
    assert sum(len(edit.tagged(gm.graph, "all_gather")) > len(ctx.found.shards) for gm, ctx in graphs.values()), (
        "two parts"
    )


def verdict(mutant: Mutant, graph: Graph, place: int) -> str:
    """The rule that finds ``mutant`` at that place of ``graph``, and what it says."""
    gm, ctx = another(graph)
    mutant.break_(gm, ctx, mutant.places(gm, ctx)[place])
    try:
        verify(gm, ctx)
    except VerificationError as error:
        return f"{error.rule}: {error}"
    return "not found"


def test_every_rule_has_ten_mutants_with_a_graph_to_break(graphs: dict[str, Graph]) -> None:
    assert set(MUTANTS) == set(RULES)
    assert all(len({mutant.name for mutant in MUTANTS[rule]}) == len(MUTANTS[rule]) >= 10 for rule in RULES)
    for mutant in (mutant for rule in RULES for mutant in MUTANTS[rule]):
        assert any(mutant.places(*graph) for graph in graphs.values()), mutant.name
    counted = f"breaks {len(graphs)} correct graphs in {sum(map(len, MUTANTS.values()))} ways"
    assert counted in (Path(__file__).parents[2] / "docs" / "passes.md").read_text()


_ALSO = {
    # Codes that are read in front of their wait, or as a weight: the reader is wrong.
    "wait": ("wire", "reduction"),
    "slice": ("wire",),
    "write": ("wire",),
    # It is another value than the output was.
    "a_whole_group_is_saved": ("value",),
    # A pack that is sent as it is, not in codes, is no reduction by itself.
    "a_buffer_that_travels_as_it_is_and_is_read_as_codes": ("reduction",),
}
"""In graphs whose collectives carry codes: what finds a mutant before its own rule does, by its name or its rule."""


def found_by_another(mutant: Mutant, graphs: dict[str, Graph], most: int) -> list[str]:
    """Where ``mutant`` was not found, or by another rule than its own; at most ``most`` graphs are broken.

    Where it leaves a reader in front of what it reads, that alone is found, and the graph does not count.
    """
    wrong, tried = [], set[str]()
    names = sorted(graphs, key=lambda name: zlib.crc32(f"{mutant.name} {name}".encode()))  # a mixed bag for each
    for name in names:
        if "elsewhere" in name and mutant.rule not in ("reload", "offload", "activation"):
            continue
        places = mutant.places(*graphs[name])
        if not places:
            continue
        for place in {len(tried) % len(places)} if most < len(names) else {0, len(places) // 2, len(places) - 1}:
            found = verdict(mutant, graphs[name], place)
            if "which is computed after it" in found:
                continue
            tried.add(name)
            # A graph that updates its groups hands gradients to updates, not to its caller: those are looked at first.
            also = _ALSO.get(mutant.name, _ALSO.get(mutant.rule, ())) if "codes" in name else ()
            right = [mutant.rule] + ["step"] * bool(graphs[name][1].steps) + [*also]
            if not found.startswith(tuple(f"{rule}: " for rule in right)):
                wrong.append(f"{mutant.name} {place} in {name}: {found}")
        if len(tried) == most:
            break
    return wrong if tried else [f"{mutant.name}: no graph was broken in another way than by its order"]


@slow_if(lambda rule: rule == "value")
@pytest.mark.parametrize("rule", RULES)
def test_what_breaks_a_rule_is_found_by_it(rule: str, graphs: dict[str, Graph]) -> None:
    wrong = [line for mutant in MUTANTS[rule] for line in found_by_another(mutant, graphs, most=2)]
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_what_breaks_a_rule_is_found_by_it_in_every_graph(rule: str, graphs: dict[str, Graph]) -> None:
    wrong = [line for mutant in MUTANTS[rule] for line in found_by_another(mutant, graphs, most=len(graphs))]
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong[:20])


def test_a_gather_three_groups_ahead_is_refused(fake_world) -> None:
    fake_world(2)
    gm, ctx = rewritten(record(stage=3, blocks=8), backend="gloo", executor="eager")["backward"]
    ahead = groups_ahead(gm.graph)
    starts = list(ahead)
    assert max(ahead.values()) == 2 == ahead[starts[5]]
    starts[4].append(starts[5])
    assert groups_ahead(gm.graph)[starts[5]] == 3
    with pytest.raises(VerificationError) as caught:
        verify(gm, ctx)
    assert caught.value.rule == "budget"


def test_a_value_that_is_read_before_it_is_computed_is_refused() -> None:
    s = Sketch(stage=0)
    first = s.call(aten.neg.default, s.input("x", 4))
    second = s.call(aten.abs.default, first)
    gm, ctx = s.done(second)
    assert verify(gm, ctx) == 0
    second.append(first)
    with pytest.raises(VerificationError, match=r"at node 'abs.*it reads 'neg.*computed after it") as caught:
        verify(gm, ctx)
    assert caught.value.rule == "order"


def test_a_write_that_moves_past_a_reader_is_found() -> None:
    s = Sketch(stage=0)
    x, y = s.input("x", 4), s.input("y", 4)
    seen = s.call(aten.neg.default, x)
    s.call(aten.copy_.default, x, y)
    gm, ctx = s.done(seen)
    ctx.before = copy_graph(gm)
    assert verify(gm, ctx) == 0
    reader, writer = (n for n in gm.graph.nodes if n.op == "call_function")
    reader.prepend(writer)
    with pytest.raises(VerificationError) as caught:
        verify(gm, ctx)
    assert caught.value.rule == "value"


def test_a_dropped_write_and_two_that_change_places_are_found() -> None:
    def sketch(*order: int) -> tuple[GraphModule, Any]:
        s = Sketch(stage=0)
        x, y, z = (s.input(name, 4) for name in "xyz")
        for i in order:
            s.call(aten.add_.Tensor if i else aten.mul_.Tensor, x, (y, z)[i])
        return s.done(z)

    right, _ = sketch(0, 1)
    for order in ((0,), (1,), (1, 0), (0, 1, 1)):
        gm, ctx = sketch(*order)
        ctx.before = right
        with pytest.raises(VerificationError) as caught:
            verify(gm, ctx)
        assert caught.value.rule == "write", order


def test_a_cast_is_what_its_argument_says_not_what_its_node_says() -> None:
    s = Sketch(stage=0)
    gm, ctx = s.done(s.call(edit.CAST, s.input("x", 4), torch.float64))
    ctx.before = copy_graph(gm)
    (cast,) = edit.output_values(gm.graph)
    cast.args = (cast.args[0], torch.float16)
    with pytest.raises(VerificationError) as caught:
        verify(gm, ctx)
    assert caught.value.rule == "value"


def test_two_draws_from_one_generator_must_not_change_places() -> None:
    s = Sketch(stage=0)
    x = s.input("x", 4)
    gm, ctx = s.done(s.call(aten.rand_like.default, x), s.call(aten.randn_like.default, x))
    ctx.before = copy_graph(gm)
    assert verify(gm, ctx) == 0
    first, second = edit.output_values(gm.graph)
    first.prepend(second)
    with pytest.raises(VerificationError) as caught:
        verify(gm, ctx)
    assert caught.value.rule == "value"


@pytest.mark.parametrize("stage", [2, 3])
def test_a_cast_that_the_model_returns_must_not_become_a_view_of_weights(stage: int) -> None:
    """`narrow` leaves such casts where they are: who gets them may write to them."""
    s = Sketch(stage=stage, param_dtype=torch.bfloat16)
    (w,) = s.parameters("h.0", w=(8, 8))
    gm, ctx = s.done(s.call(edit.CAST, w, torch.bfloat16))
    ctx.before = copy_graph(gm)
    apply(gm, ctx, *pipeline(stage)[:-1])
    assert verify(gm, ctx) == 0
    (cast,) = edit.output_values(gm.graph)
    (weight,) = edit.tagged(gm.graph, "weight")
    if stage == 3:  # as if the shard had been cast
        (shard,), (start,) = edit.tagged(gm.graph, "shard"), edit.tagged(gm.graph, "all_gather")
        with gm.graph.inserting_before(start):
            low = gm.graph.call_function(edit.CAST, (shard, torch.bfloat16))
        low.meta["val"] = shard.meta["val"].to(torch.bfloat16)
        start.args = (low, *start.args[1:])
        for mark in edit.tagged(gm.graph, "discard"):
            gm.graph.erase_node(mark)
    edit.set_output_values(gm.graph, [weight])
    gm.graph.erase_node(cast)
    with pytest.raises(VerificationError, match="a view of weights") as caught:
        verify(gm, ctx)
    assert caught.value.rule == "write"


@pytest.mark.parametrize("complex_numbers", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_as_strided_that_reads_a_weight_from_another_place_is_found(stage: int, complex_numbers: bool) -> None:
    s = Sketch(stage=stage)
    _, w = s.parameters("h.0", v=(5,), w=(8, 8))
    source = s.call(aten.view_as_complex.default, s.call(aten.view.default, w, [8, 4, 2])) if complex_numbers else w
    strided = s.call(aten.as_strided.default, source, [2, 3], [4, 1], 3)
    gm, ctx = s.done(s.call(aten.mul.Tensor, strided, 2.0))
    ctx.before = copy_graph(gm)
    apply(gm, ctx, *pipeline(stage)[:-1])
    assert verify(gm, ctx) == 0
    (view,) = (n for n in gm.graph.nodes if n.target is edit.AS_STRIDED and "zerofx" not in n.meta)
    *rest, start = view.args
    assert start == (16 if complex_numbers else 32) + 3
    for wrong in (3, start - 1, start + 1):
        view.args = (*rest, wrong)
        with pytest.raises(VerificationError) as caught:
            verify(gm, ctx)
        assert caught.value.rule == "value"


def test_the_error_names_rule_node_group_and_line() -> None:
    s = Sketch()
    w, b = s.parameters("h.0", w=(8, 8), b=(8,))
    gm, ctx = s.done(s.call(aten.addmm.default, b, s.input("x", 4, 8), w))
    apply(gm, ctx, *pipeline(3)[:-1])
    weight = edit.tagged(gm.graph, "weight")[0]
    weight.args = (*weight.args[:3], weight.args[3] + 32)
    with pytest.raises(VerificationError, match=r"'slice'.*'as_strided.*'h.0'.*addmm.*debugging.md") as caught:
        verify(gm, ctx)
    assert (caught.value.rule, caught.value.group) == ("slice", "h.0")


def test_a_refused_compilation_saves_its_graphs_in_a_file_that_the_error_names(fake_world, monkeypatch) -> None:
    fake_world(2)
    broken = (*pipeline(3)[:-1], _shift_a_weight, verify)
    monkeypatch.setattr("zerofx.compiler.rewriting.pipeline", lambda stage, own=(), ctx=None: broken)
    with pytest.raises(Exception, match=r"breaks the rule 'slice'.*saved in") as caught:
        record(stage=3)
    path = re.search(r"saved in (\S+\.txt)", str(caught.value))
    assert path is not None
    text = Path(path[1]).read_text()
    os.unlink(path[1])
    assert "before:" in text and "after:" in text and "all_gather_pairwise" in text.replace("_into_tensor", "_pairwise")


def _shift_a_weight(gm: GraphModule, ctx: Any) -> int:
    weight = edit.tagged(gm.graph, "weight")[0]
    weight.args = (*weight.args[:3], weight.args[3] + 32)
    return 1


def test_a_record_can_be_verified_by_hand(fake_world) -> None:
    fake_world(2)
    compiled = record(stage=3)
    zerofx.verify(compiled)
    gm, ctx = rewritten(compiled)["forward"]
    ctx.process_group = "yet another"
    with pytest.raises(VerificationError, match="'group'"):
        zerofx.passes.verify(gm, ctx)
