"""Rows of tables (`lookup`) that are picked, told, exchanged or added up wrongly: rules of the other files."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from tests.passes.mutants import aten, breaks, like, set_arg, tagged, tags
from zerofx.passes import Context, edit

_zerofx = torch.ops.zerofx


def _calls(name: str) -> object:
    """Nodes of that operator whose order is not pinned: their arguments are their own."""
    target = getattr(_zerofx, name).default
    return lambda gm, ctx: [n for n in tagged(gm, "rows") if n.target is target]


def _more(node: Node, i: int, by: int) -> None:
    set_arg(node, i, node.args[i] + by)  # type: ignore[operator]


@breaks("slice", _calls("own_rows"))
def rows_of_a_table_that_lies_elsewhere(gm: GraphModule, ctx: Context, rows: Node) -> None:
    _more(rows, 2, 32)


@breaks("slice", _calls("own_rows"))
def rows_of_a_table_with_fewer(gm: GraphModule, ctx: Context, rows: Node) -> None:
    _more(rows, 3, -1)


@breaks("slice", _calls("own_rows"))
def rows_by_what_one_rank_asks(gm: GraphModule, ctx: Context, rows: Node) -> None:
    (asked,) = (n for n in tagged(gm, "asked") if n is rows.args[1])
    set_arg(rows, 1, edit.sources(asked)[0].all_input_nodes[0])


@breaks("group", _calls("own_rows"))
def rows_of_another_groups_rank(gm: GraphModule, ctx: Context, rows: Node) -> None:
    set_arg(rows, 5, "another")


@breaks("group", _calls("sum_rows"))
def sums_of_another_groups_rank(gm: GraphModule, ctx: Context, sums: Node) -> None:
    set_arg(sums, 7, "another")


@breaks("group", tags("ask", "answer", "give", pinned=False))
def rows_that_another_group_is_told(gm: GraphModule, ctx: Context, start: Node) -> None:
    set_arg(start, len(start.args) - 1, "another")


@breaks("wait", tags("asked", "answered", "given", pinned=False))
def rows_that_are_not_waited_for(gm: GraphModule, ctx: Context, wait: Node) -> None:
    wait.replace_all_uses_with(wait.args[0])  # type: ignore[arg-type]
    gm.graph.erase_node(wait)


@breaks("gather", tags("ask", pinned=False))
def indices_that_are_not_told_flat(gm: GraphModule, ctx: Context, start: Node) -> None:
    flat = start.args[0]
    set_arg(start, 0, like(flat, aten.add.Tensor, flat, 0))  # type: ignore[arg-type]


@breaks("value", _calls("sum_rows"))
def gradients_of_the_paddings_row(gm: GraphModule, ctx: Context, sums: Node) -> None:
    _more(sums, 5, 1)


@breaks("value", tags("ask", pinned=False))
def other_indices_than_the_models(gm: GraphModule, ctx: Context, start: Node) -> None:
    flat = start.args[0]
    indices = flat.args[0]  # type: ignore[union-attr]
    set_arg(flat, 0, like(indices, aten.sub.Tensor, indices, 1))  # type: ignore[arg-type]


@breaks("value", tags("give", pinned=False))
def other_gradients_than_the_rows(gm: GraphModule, ctx: Context, start: Node) -> None:
    flat = start.args[0]
    given = flat.args[0]  # type: ignore[union-attr]
    set_arg(flat, 0, like(given, aten.neg.default, given))  # type: ignore[arg-type]


@breaks("value", tags("asked", pinned=False))
def indices_that_are_read_by_others(gm: GraphModule, ctx: Context, wait: Node) -> None:
    like(wait, aten.sub.Tensor, wait, 1)


def _found(gm: GraphModule, ctx: Context) -> list[Node]:
    return [n for n in tagged(gm, "rows") if n.target is aten.view.default and n.meta["val"].dim() == 3]


@breaks("value", _found)
def rows_in_another_shape(gm: GraphModule, ctx: Context, rows: Node) -> None:
    b, length, width = rows.args[1]  # type: ignore[misc]
    set_arg(rows, 1, [length, b, width])
    rows.meta["val"] = rows.meta["val"].transpose(0, 1).contiguous()


@breaks("value", _found)
def rows_that_are_scaled(gm: GraphModule, ctx: Context, rows: Node) -> None:
    (sums, _) = rows.args
    set_arg(rows, 0, like(sums, aten.mul.Tensor, sums, 0.5))  # type: ignore[arg-type]


@breaks("reduction", _calls("sum_rows"))
def sums_of_a_table_that_lies_elsewhere(gm: GraphModule, ctx: Context, sums: Node) -> None:
    _more(sums, 2, 32)


@breaks("reduction", _calls("sum_rows"))
def sums_that_are_not_averaged(gm: GraphModule, ctx: Context, sums: Node) -> None:
    (scaled,) = (n for n in sums.users if n.target is aten.mul.Tensor)
    set_arg(scaled, 1, 1.0)
