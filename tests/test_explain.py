"""record.explain: which pass placed a node, and why it stands where it stands."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch

import zerofx
from tests.models import GPT
from zerofx.compiler.explain import Reasons
from zerofx.compiler.records import GraphRecord, Trace
from zerofx.model.units import format_bytes
from zerofx.passes import edit
from zerofx.passes.context import Tag

TOKENS = torch.zeros(2, 8, dtype=torch.long)


@functools.cache
def record_of(layers: int = 3, **options: Any) -> GraphRecord:
    model = GPT(layers=layers, dim=16, heads=2, vocab=32, length=8)
    options = {"stage": 3, "executor": "eager", "groups": zerofx.Grouping(min_bytes=0), **options}
    return zerofx.dry_run(model, TOKENS, TOKENS, world_size=4, **options)


def said(trace: Trace, words: str) -> dict[str, str]:
    """The answers about the one node that ``words`` name."""
    head, *lines = trace.explain(words).splitlines()
    assert not any(line[:2] != "  " for line in lines), f"{head}: more than one node"
    return {line[2:11].strip(): line[11:] for line in lines}


def test_a_gather_tells_what_it_brings_who_made_it_who_moved_it_and_for_which_line() -> None:
    forward = record_of().forward
    assert forward is not None
    answers = said(forward, "all_gather blocks.1")
    (node,) = (
        n for n in edit.tagged(forward.before_lower().graph, "all_gather") if "blocks.1" in str(n.meta["zerofx"])
    )
    names = [ref.slot.name for ref in forward.context.parameters.values() if ref.layout.name == "blocks.1"]
    assert (
        answers["brings"] == f"{format_bytes(node.meta['val'].nbytes)}: {', '.join(names[:4])}, {len(names) - 4} more"
    )
    assert answers["made by"].startswith("group: One collective per group")
    assert answers["moved by"].startswith("prefetch: Gathers start ahead of their use")
    assert "2 groups ahead of its use, before the wait for tokens" in answers["stands"]
    assert re.fullmatch(r"models.py:\d+  for part in self\.qkv\(self\.norm1.*", answers["for"])


@pytest.mark.slow
def test_why_a_gather_does_not_start_earlier_follows_from_the_budget() -> None:
    default = record_of(layers=6).forward
    assert default is not None
    sizes = {
        n.meta["zerofx"].group: n.meta["val"].nbytes for n in edit.tagged(default.before_lower().graph, "all_gather")
    }
    budget = format_bytes(3 * sizes["blocks.2"] + sizes["blocks.2"] // 4)
    two_ahead = f"the budget is {budget}, without memory_budget what two groups ahead take and a quarter of the largest"
    assert two_ahead in said(default, "all_gather blocks.4")["earlier"]
    first = edit.tagged(default.before_lower().graph, "all_gather")[0].meta["zerofx"].group
    assert "nothing of the model's comes before it" in said(default, f"all_gather {first}")["earlier"]

    tight = record_of(memory_budget=max(sizes.values())).forward
    assert tight is not None
    answers = said(tight, "all_gather blocks.1")
    both = format_bytes(sizes["blocks.0"] + sizes["blocks.1"])
    assert answers["stands"] == "right before its own wait: nothing computes meanwhile"
    assert answers["earlier"].startswith(f"would be too much: {both} gathered at once")
    assert answers["earlier"].endswith(f"{format_bytes(max(sizes.values()))}, memory_budget")

    roomy = record_of(memory_budget=2 * sizes["blocks.0"] + sizes["norm"]).forward
    assert roomy is not None
    assert "the gather of blocks.2: they start in the order of their use" in said(roomy, "all_gather norm")["earlier"]
    ample = record_of(layers=5, memory_budget=1e12).forward
    assert ample is not None
    assert said(ample, "all_gather blocks.3")["stands"].startswith("4 groups ahead of its use, before the wait for")


def test_in_backward_the_budget_is_two_groups_ahead_from_the_start() -> None:
    backward = record_of(layers=6).backward
    assert backward is not None
    first = edit.tagged(backward.before_lower().graph, "all_gather")[0].meta["zerofx"].group
    assert said(backward, f"all_gather {first}")["stands"].startswith("where the graph begins: it travels while")
    assert "nothing of the model's comes before it" in said(backward, "all_gather blocks.4")["earlier"]
    assert said(backward, "all_gather blocks.3")["earlier"].endswith("in backward two groups ahead are the most")
    assert said(backward, "all_gather blocks.0")["earlier"].endswith(
        "what two groups ahead take and a quarter of the largest"
    )


def test_in_backward_two_groups_ahead_are_the_most_that_any_budget_allows() -> None:
    small = record_of().forward
    assert small is not None
    block = next(ref.layout.nbytes for ref in small.context.parameters.values() if "blocks" in ref.slot.name)
    record = record_of(layers=8, memory_budget=5 * block)
    assert record.backward is not None and record.forward is not None and record.forward.context.handover.kept_gathered
    answers = said(record.backward, "all_gather blocks.0")
    assert answers["stands"].startswith("2 groups ahead of its use")
    assert answers["earlier"].endswith("in backward two groups ahead are the most")


def test_what_the_budget_keeps_from_forward_to_backward_is_told_on_both_sides() -> None:
    record = record_of()
    assert record.forward is not None and record.backward is not None
    (kept,) = record.backward.context.found.gathered
    assert "it stays gathered" in said(record.forward, f"wait {kept}")["then"]
    answers = said(record.backward, f"gathered {kept}")
    assert answers["made by"].startswith("keep: ") and "forward left the group gathered" in answers["stands"]


def test_a_reduction_stands_behind_its_gradients_and_is_waited_for_in_front_of_the_one_after_the_next() -> None:
    backward = record_of().backward
    assert backward is not None
    assert "right after the last of these gradients" in said(backward, "reduce_scatter blocks.2")["stands"]
    waits = edit.tagged(backward.before_lower().graph, "wait_grad")
    groups = [node.meta["zerofx"].group for node in waits]
    reasons = Reasons(backward)
    places = [dict(reasons.why(node))["stands"] for node in edit.tagged(reasons.graph, "wait_grad")]
    assert len(groups) == 5  # norm, which is small, then the blocks, two at a time
    largest = max(node.args[0].args[0].meta["val"].nbytes for node in waits)
    much = f"with it, more than {format_bytes(2 * largest)} would be in flight"
    for place, following in zip(places[:-2], groups[2:], strict=True):
        assert place == f"before the packing of {following}: {much}"
    assert all(place.startswith("at the end") for place in places[-2:])


@pytest.mark.parametrize("stage", [0, 3])
def test_every_node_of_zerofxs_was_made_by_a_pass_that_made_it(stage: int) -> None:
    record = record_of(layers=1, stage=stage)
    for trace in record.traces():
        reasons = Reasons(trace)
        graphs = {"": {n.name for n in trace.before.graph.nodes}}
        graphs |= {p.__name__: {n.name for n in gm.graph.nodes} for p, gm in trace.steps()}
        passes = ["", *(pass_.__name__ for pass_ in trace.passes)]
        for node in reasons.graph.nodes:
            answers = dict(reasons.why(node))
            if "zerofx" not in node.meta:
                assert "made by" not in answers
                continue
            name = answers["made by"].partition(":")[0]
            before = passes[passes.index(name) - 1]
            assert node.name in graphs[name] - graphs[before], node
            assert answers.get("moved by", "prefetch: ").startswith("prefetch: "), "the one pass that moves nodes"


def test_a_name_will_do_and_a_node_of_the_models_own_is_said_to_be_that() -> None:
    forward = record_of().forward
    assert forward is not None
    assert said(forward, "all_gather_into_tensor_default_2") == said(forward, "all_gather blocks.1")
    assert said(forward, "embedding")["is"] == "the model's own, or AOTAutograd's"


def test_a_record_explains_in_each_graph_that_has_the_node_and_refuses_what_none_has() -> None:
    record = record_of()
    heads = [line for line in record.explain("all_gather blocks.0").splitlines() if line[0] != " "]
    assert [line.partition(":")[0] for line in heads] == ["forward", "backward"]
    assert record.explain("reduce_scatter blocks.0").startswith("backward: ")
    with pytest.raises(ValueError, match=r"no line of the \w+ graph has 'all_gather blocks.9' in it: .*'all_gather "):
        record.explain("all_gather blocks.9")


def test_neighbours_of_which_the_same_is_said_are_said_together_and_what_a_pass_is_for_is_said_once() -> None:
    forward = record_of().forward
    assert forward is not None
    lines = forward.explain("blocks.1").splitlines()
    heads = [line for line in lines if line[0] != " "]
    weights = [line for line in heads if line.endswith("# weight blocks.1")]
    views = [n for n in forward.final.graph.nodes if n.meta.get("zerofx") == Tag("weight", "blocks.1")]
    assert len(weights) < len(views) and any(re.search(r" to \w+, \d+ alike ", line) for line in weights)
    made = [line.strip() for line in lines if line.startswith("  made by  group")]
    assert len(made[0]) > len("made by  group") and set(made[1:]) == {"made by  group"}


@pytest.mark.slow
def test_a_small_gather_behind_a_large_group_says_so_and_one_where_the_graph_begins_does_not() -> None:
    model = GPT(layers=8, dim=16, heads=2, vocab=4000, length=8)  # a head of some twenty blocks
    groups = zerofx.Grouping(min_bytes=0)
    record = zerofx.dry_run(model, TOKENS, TOKENS, world_size=4, stage=3, executor="eager", groups=groups)
    backward = record.backward
    assert backward is not None
    words = "right after the last use of what is large beside it"
    assert words in said(backward, "all_gather blocks.0")["stands"]
    assert said(backward, "all_gather blocks.7")["stands"].startswith("where the graph begins")
