"""two_hop_gather: a shard crosses the rows of a mesh in front of its gather; verify finds what does otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._C import FileCheck
from torch.fx import GraphModule

import zerofx
from tests.models import GPT
from tests.passes.graphs import apply, events, up_to
from tests.passes.mutants import bypass, set_arg, tagged, what_verify_misses
from tests.passes.test_secondary_shard import pair
from zerofx.compiler.rewriting import copy_graph
from zerofx.features.meshes.two_hop_gather import two_hop_gather
from zerofx.passes import PIPELINE, Context

HOPS: dict[str, Any] = {
    "secondary_group": "",
    "secondary_ranks": 1,
    "width": 16,
    "world_size": 2,
    "memory_budget": 1200,
    "two_hops": True,
    "divides_between": True,
    "second_group": "column",
    "replicas": 2,
}
NEAR: dict[str, Any] = {**HOPS, "secondary_group": "pg", "secondary_ranks": 2}


def finished(**options: Any) -> tuple[tuple[GraphModule, Context], tuple[GraphModule, Context]]:
    graphs = pair(**options)
    for gm, ctx in graphs:
        ctx.before = copy_graph(gm)
    for gm, ctx in graphs:
        apply(gm, ctx, *PIPELINE)
    return graphs


def test_each_shard_crosses_the_rows_one_group_ahead_of_its_gather() -> None:
    (forward, ctx), (backward, back) = pair(**{**HOPS, "memory_budget": 5000})
    assert apply(forward, ctx, *up_to(two_hop_gather)).edits == 2
    order = ["hop a", "hop b", "wait_hop a", "all_gather a", "wait_hop b", "all_gather b", "wait a", "wait b"]
    assert events(forward, "hop", "wait_hop", "all_gather", "wait") == order
    FileCheck().check("placeholder[target=shard_a]").check("all_gather_into_tensor").check_same("column").run(
        str(forward.graph)
    )
    apply(backward, back, *up_to(two_hop_gather))
    for gm in (forward, backward):
        for start, row in zip(tagged(gm, "hop"), tagged(gm, "all_gather"), strict=True):
            assert start.args[1:] == (2, "column") and row.args[0].args == (start,)
            sizes = [node.meta["val"].numel() for node in (start.args[0], start, row)]
            assert sizes == [sizes[0], 2 * sizes[0], 4 * sizes[0]]


def test_a_cast_is_in_front_of_the_first_hop() -> None:
    x = torch.zeros(2, 8, dtype=torch.long)
    record = zerofx.dry_run(
        GPT(1, 32, 2, 50, 8),
        x,
        x,
        world_size=(2, 2),
        sharding=zerofx.Sharding("all", "all", "all", "all"),
        executor="eager",
        mixed_precision=zerofx.MixedPrecision(torch.bfloat16),
    )
    starts = tagged(record.forward.after("two_hop_gather"), "hop")
    assert starts
    for start in starts:
        assert start.meta["val"].dtype == torch.bfloat16 and start.args[0].meta["zerofx"].kind == "narrow"


def test_what_forward_leaves_for_a_row_is_the_shard_that_came() -> None:
    (forward, ctx), (backward, back) = pair(**NEAR)
    apply(forward, ctx, *up_to(two_hop_gather))
    left = [node for node in forward.graph.output_node().args[0] if node in tagged(forward, "wait_hop")]
    assert len(left) == 2 and not tagged(forward, "secondary")
    assert apply(backward, back, *up_to(two_hop_gather)).edits == 0
    assert [start.args[1:] for start in tagged(backward, "all_gather")] == [(2, "pg")] * 2


def test_without_two_hops_it_changes_nothing() -> None:
    for gm, ctx in pair(secondary_group="", secondary_ranks=1):
        assert apply(gm, ctx, *up_to(two_hop_gather)).edits == 0


def along_the_row(gm: GraphModule, ctx: Context) -> None:
    set_arg(tagged(gm, "hop")[0], 2, ctx.process_group)


def over_all_ranks(gm: GraphModule, ctx: Context) -> None:
    set_arg(tagged(gm, "hop")[0], 1, 8)


def without_a_wait(gm: GraphModule, ctx: Context) -> None:
    bypass(tagged(gm, "wait_hop")[0])


def without_the_first_hop(gm: GraphModule, ctx: Context) -> None:
    wait = tagged(gm, "wait_hop")[0]
    (start,) = wait.all_input_nodes
    wait.replace_all_uses_with(start.args[0])  # type: ignore[arg-type]
    gm.graph.erase_node(wait)
    gm.graph.erase_node(start)


def without_the_second_hop(gm: GraphModule, ctx: Context) -> None:
    bypass(tagged(gm, "wait")[0])
    bypass(tagged(gm, "all_gather")[0])


def of_another_group(gm: GraphModule, ctx: Context) -> None:
    first, second = tagged(gm, "hop")
    a, b = first.args[0], second.args[0]
    set_arg(first, 0, b)
    set_arg(second, 0, a)


def of_a_piece(gm: GraphModule, ctx: Context) -> None:
    start = tagged(gm, "hop")[0]
    with gm.graph.inserting_before(start):
        part = start.args[0]
        piece = gm.graph.call_function(torch.ops.aten.slice.Tensor, (part, 0, 0, 4))
        piece.meta["val"] = part.meta["val"][:4]  # type: ignore[union-attr]
    set_arg(start, 0, piece)


MUTANTS: list[tuple[Callable[[GraphModule, Context], None], set[str]]] = [
    (along_the_row, {"group"}),
    (over_all_ranks, {"group"}),
    (without_a_wait, {"wait"}),
    (without_the_first_hop, {"group"}),
    (without_the_second_hop, {"gather", "wait", "slice"}),
    (of_another_group, {"value", "slice", "gather"}),
    (of_a_piece, {"slice"}),
]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_what_breaks_a_rule_of_two_hops_is_found(backend: str) -> None:
    graphs = finished(**HOPS, backend=backend)
    assert all(len(tagged(gm, "hop")) == 2 for gm, _ in graphs)
    missed = what_verify_misses((graph, mutant, rules) for graph in graphs for mutant, rules in MUTANTS)
    assert not missed, "\n".join(missed)


def codes_of_the_row(gm: GraphModule, ctx: Context) -> None:
    set_arg(tagged(gm, "quantize")[0], 4, ctx.process_group)


def read_as_of_another_column(gm: GraphModule, ctx: Context) -> None:
    set_arg(tagged(gm, "dequantize")[0], 7, "another")


def never_read(gm: GraphModule, ctx: Context) -> None:
    bypass(tagged(gm, "dequantize")[0])


def test_in_codes_the_first_hop_is_written_and_read_by_the_column() -> None:
    wire = zerofx.Wire("int8", None, between="nodes")
    graphs = finished(**HOPS, wire=wire)
    for gm, _ in graphs:
        order = events(gm, "quantize", "hop", "wait_hop", "dequantize", "all_gather")
        assert order[:2] == [f"{kind} {order[0].split()[1]}" for kind in ("quantize", "hop")]
        for row in tagged(gm, "all_gather"):
            assert row.args[0].meta["zerofx"].kind == "dequantize"
    mutants = (codes_of_the_row, read_as_of_another_column, never_read)
    rules = {"group", "wire", "gather"}
    missed = what_verify_misses((graph, mutant, rules) for graph in graphs for mutant in mutants)
    assert not missed, "\n".join(missed)
