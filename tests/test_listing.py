"""record.diff and record.code: what a pass changed, and graphs as Python that runs."""

from __future__ import annotations

import copy
import functools
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

import zerofx
from tests.models import GPT
from tests.slow import quick_if, slow
from zerofx.compiler.listing import difference, python_of
from zerofx.passes import edit
from zerofx.runtime.state.group import groups_of


def chain(*targets: Any) -> Graph:
    graph = Graph()
    node = graph.placeholder("x")
    for i, target in enumerate(targets):
        node = graph.create_node("call_function", target, (node,), name=f"n{i}")
    graph.output(node)
    return graph


def test_a_difference_marks_what_is_new_gone_changed_and_moved() -> None:
    before, after = chain(torch.sin, torch.cos, torch.tan), chain(torch.sin, torch.cos, torch.tan)
    assert difference(before, after) == []
    n0 = after.find_nodes(op="call_function", target=torch.sin)[0]
    with after.inserting_after(n0):
        n1 = after.call_function(torch.exp, (n0,))
    after.find_nodes(op="call_function", target=torch.cos)[0].args = (n1,)
    assert difference(before, after) == [
        "  ...",
        "  n0 = sin(x)",
        "- n1 = cos(n0)",
        "+ exp = exp(n0)",
        "~ n1 = cos(exp)",
        "  n2 = tan(n1)",
        "  ...",
    ]


def test_a_node_that_stands_elsewhere_is_marked_at_both_places() -> None:
    before = chain(torch.sin, torch.cos)
    free = before.create_node("call_function", torch.ones, (2,), name="free")
    free.append(before.find_nodes(op="output")[0])
    after = copy.deepcopy(before)
    next(iter(after.nodes)).append(next(node for node in after.nodes if node.name == "free"))
    assert difference(before, after) == [
        "  x = input",
        "> free = ones(2)",
        "  n0 = sin(x)",
        "  n1 = cos(n0)",
        "< free = ones(2)",
        "  return n1",
    ]


@functools.cache
def record_of(stage: int = 3, executor: str = "eager", layers: int = 2) -> Any:
    with torch.device("meta"):
        model, x = GPT(layers, 32, 2, 64, 16), torch.zeros(2, 16, dtype=torch.long)
    groups = zerofx.Grouping(min_bytes=0)
    return zerofx.dry_run(model, x, x, world_size=4, stage=stage, executor=executor, groups=groups)


@quick_if(lambda stage: stage == 0)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_pass_has_changed_something_exactly_where_it_counted_edits(stage: int) -> None:
    record = record_of(stage)
    for trace in record.traces():
        for pass_ in trace.passes:
            title, *lines = trace.diff(pass_.__name__).splitlines()
            assert title == f"{trace.context.phase}: {pass_.__name__} changed"
            assert (lines != ["  nothing"]) == bool(trace.edits[pass_.__name__]), pass_.__name__
    with pytest.raises(KeyError, match="no pass 'fuse'"):
        record.diff("fuse")


def test_prefetch_moves_each_gather_up_and_changes_nothing_else() -> None:
    record = record_of()
    forward, backward = (trace.diff("prefetch").splitlines() for trace in record.traces())
    assert record.diff("prefetch").splitlines() == forward + backward
    moved = [line for line in forward if line.endswith("# all_gather blocks.1")]
    assert [line[0] for line in moved] == [">", "<"], "it came to an earlier place and went from a later one"
    assert not any(line[0] in "+-~" for line in forward + backward)
    assert any(line.startswith("> ") and "wait_grad" in line for line in backward)


def test_a_gather_is_new_in_the_diff_of_the_pass_that_placed_it_and_names_its_group() -> None:
    record = record_of()
    new = [line for line in record.forward.diff("group").splitlines() if line[0] == "+" and "# all_gather" in line]
    assert [line.rpartition(" ")[2] for line in new] == ["tokens", "blocks.0", "blocks.1", "norm"]
    assert new[1].startswith("+ all_gather_into_tensor_default_1: f32[")


def test_the_history_of_a_gather_names_the_passes_that_placed_and_moved_it_and_what_they_are_for() -> None:
    text = record_of().forward.history("all_gather blocks.1")
    titles = [line for line in text.splitlines() if line[1] != " "]
    assert [title.partition(":")[0] for title in titles] == ["group", "prefetch", "lower"]
    group, prefetch = (sys.modules[f"zerofx.passes.{name}"].__doc__.splitlines()[0] for name in ("group", "prefetch"))
    assert titles[:2] == [f"group: {group}", f"prefetch: {prefetch}"]
    marks = [line[0] for line in text.splitlines() if line[1] == " "]
    assert marks == ["+", ">", "<", "-", "~"]
    assert "no pass has touched" in record_of().forward.history("all_gather blocks.7")


def run_code(executor: str) -> tuple[list[float], list[float]]:
    """The loss and the reduced gradients of a step; then of the code of its record, given the same inputs."""
    torch.manual_seed(0)
    model = GPT(2, 32, 2, 64, 16)
    zerofx.compile(model, executor=executor, groups=zerofx.Grouping(min_bytes=0))
    batch = torch.randint(64, (2, 2, 16))
    loss = model(*batch)
    loss.backward()
    (record,) = zerofx.graphs(model)
    shards = {group.layout.name: group.shard for group in groups_of(model)}
    namespace: dict[str, Any] = {}
    exec(compile(record.code, "record.py", "exec"), namespace)

    def inputs(trace: Any, known: dict[str, Any]) -> list[Any]:
        found = []
        for node in trace.final.graph.find_nodes(op="placeholder"):
            tag = node.meta.get("zerofx")
            if tag is not None and tag.kind == "gathered":
                found.append(known[record.forward.context.handover.kept_gathered[tag.group].saved])
            else:
                found.append(shards[tag.group] if tag is not None else known[node.name])
        return found

    plain = [n.name for n in record.forward.final.graph.find_nodes(op="placeholder") if "zerofx" not in n.meta]
    outputs = namespace["forward"](*inputs(record.forward, dict(zip(plain, batch, strict=True))))
    names = [getattr(value, "name", None) for value in edit.output_values(record.forward.before.graph)]
    known = dict(zip(names, outputs, strict=True)) | {"tangents_1": torch.ones(())}
    gradients = namespace["backward"](*inputs(record.backward, known))
    reduced = {
        reduction.layout.name: gradient
        for reduction, gradient in zip(
            record.backward.context.found.reductions,
            gradients[len(gradients) - len(record.backward.context.found.reductions) :],
            strict=True,
        )
    }
    expected, got = [float(loss)], [float(outputs[0])]
    for group in groups_of(model):
        for slot in group.layout.slots:
            expected.append(float(group.parameter(slot).grad.to_local().double().sum()))
            got.append(float(group.local(slot, reduced[group.layout.name]).double().sum()))
    return expected, got


@pytest.mark.parametrize("executor", ["eager", slow("inductor")])
def test_the_code_of_a_record_computes_what_the_step_did(workers2, executor: str) -> None:
    for expected, got in workers2.run(run_code, executor, timeout=200):
        assert len(got) > 20 and any(expected[1:])
        assert got == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_code_names_its_inputs_and_has_a_function_per_graph() -> None:
    code = record_of().code
    assert "\ndef forward(primals_2, shard_tokens, shard_blocks_0" in code and "\ndef backward(" in code
    assert "    # shard_blocks_0: f32[" in code and "# shard blocks.0" in code


class Constants(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.table = torch.arange(float(n))


def test_small_constants_are_written_out_and_large_ones_refused() -> None:
    for n in (3, 100_000):
        graph = Graph()
        graph.output(graph.call_function(torch.neg, (graph.get_attr("table"),)))
        gm = GraphModule(Constants(n), graph)
        if n > 1000:
            with pytest.raises(RuntimeError, match=r"constant 'table', a tensor of 100000 elements.*record\.forward"):
                python_of(gm, "forward")
            continue
        imports, source = python_of(gm, "forward")
        namespace: dict[str, Any] = {}
        exec("\n".join([*imports.values(), "import torch", source]), namespace)
        assert torch.equal(namespace["forward"](), torch.tensor([0.0, -1.0, -2.0]))
