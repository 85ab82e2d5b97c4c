"""Codes on the wire (`compress`) that are written, read, sent or added wrongly: the rule "wire", and others."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.fx import GraphModule, Node

from tests.passes.mutants import Places, breaks, bypass, inner, instead, like, set_arg, tagged
from zerofx import _torch
from zerofx.features.wire.facts import wire_of
from zerofx.passes import Context

_zerofx = torch.ops.zerofx


def _calls(name: str, pinned: bool | None = None) -> Places:
    target = getattr(_zerofx, name).default
    return lambda gm, ctx: [
        n
        for n in tagged(gm, "quantize", "dequantize")
        if inner(gm, n).target is target and pinned in (None, _torch.pinned(n) is not None)
    ]


def _pairs(name: str) -> Places:
    """Two of them, neither pinned, of one size."""

    def places(gm: GraphModule, ctx: Context) -> list[tuple[Node, Node]]:
        found = _calls(name, pinned=False)(gm, ctx)
        return [(a, b) for a, b in pairwise(found) if a.meta["val"].shape == b.meta["val"].shape]

    return places


def _packs(gm: GraphModule, ctx: Context) -> list[Node]:
    """Packs in codes, without error feedback."""
    found = [n for n in tagged(gm, "quantize") if n.target is _zerofx.quantize.default and n.args[1] != 1]
    wire = wire_of(ctx).wire
    return [] if wire is not None and wire.error_feedback else found


def _made_for_it(gm: GraphModule, ctx: Context) -> list[Node]:
    """What writes codes of a buffer that nobody else has; a pack of one gradient is that gradient."""
    return [n for n in _calls("quantize", pinned=False)(gm, ctx) if "reshape" not in str(n.args[0].target)]  # type: ignore[union-attr]


def _other(code: str) -> str:
    return {"int8": "int4", "int4": "int8"}[code[:4]] + code[4:]


@breaks("wire", _calls("quantize"))
def codes_of_other_bits(gm: GraphModule, ctx: Context, node: Node) -> None:
    call = inner(gm, node)
    set_arg(call, 2, _other(call.args[2]))  # type: ignore[arg-type]


@breaks("wire", _calls("quantize"))
def a_range_that_is_not_sent_whole(gm: GraphModule, ctx: Context, node: Node) -> None:
    call = inner(gm, node)
    set_arg(call, 3, [*call.args[3], 1, 2])  # type: ignore[misc]


@breaks("wire", _calls("quantize"))
def rows_of_another_number_of_ranks(gm: GraphModule, ctx: Context, node: Node) -> None:
    call = inner(gm, node)
    set_arg(call, 1, call.args[1] + 1)  # type: ignore[operator]


@breaks("wire", _calls("quantize", pinned=False))
def codes_of_codes(gm: GraphModule, ctx: Context, node: Node) -> None:
    instead(node, _zerofx.quantize.default, *node.args[1:])


@breaks("wire", _calls("quantize_with_rest"))
def the_rest_of_another_group(gm: GraphModule, ctx: Context, node: Node) -> None:
    set_arg(inner(gm, node), 5, "another")


@breaks("wire", _calls("quantize_with_rest"))
def a_rest_in_other_bits(gm: GraphModule, ctx: Context, node: Node) -> None:
    call = inner(gm, node)
    set_arg(call, 2, _other(call.args[2]))  # type: ignore[arg-type]


@breaks("wire", _calls("quantize_with_rest", pinned=False))
def a_rest_that_is_lost(gm: GraphModule, ctx: Context, node: Node) -> None:
    node.target, node.args = _zerofx.quantize.default, node.args[:5]


@breaks("wire", _packs)
def a_rest_that_nobody_asked_for(gm: GraphModule, ctx: Context, node: Node) -> None:
    node.target, node.args = _zerofx.quantize_with_rest.default, (*node.args, node.meta["zerofx"].group)


@breaks("wire", _calls("quantize_with_rest", pinned=False))
def a_rest_that_is_added_twice(gm: GraphModule, ctx: Context, node: Node) -> None:
    like(node, node.target, *node.args, tag=node.meta["zerofx"])  # type: ignore[arg-type]


@breaks("wire", _calls("dequantize", pinned=False))
def codes_that_are_read_as_weights(gm: GraphModule, ctx: Context, node: Node) -> None:
    bypass(node)


@breaks("wire", _calls("dequantize"))
def codes_that_are_read_as_another(gm: GraphModule, ctx: Context, node: Node) -> None:
    call = inner(gm, node)
    set_arg(call, 3, _other(call.args[3]))  # type: ignore[arg-type]


@breaks("wire", _calls("dequantize"))
def rows_that_are_read_shorter(gm: GraphModule, ctx: Context, node: Node) -> None:
    call = inner(gm, node)
    set_arg(call, 2, call.args[2] - 32)  # type: ignore[operator]


@breaks("wire", _calls("dequantize"))
def ranges_that_are_read_elsewhere(gm: GraphModule, ctx: Context, node: Node) -> None:
    call = inner(gm, node)
    set_arg(call, 4, [*call.args[4], 1, 2])  # type: ignore[misc]


@breaks("wire", _calls("dequantize"))
def codes_that_are_read_in_another_dtype(gm: GraphModule, ctx: Context, node: Node) -> None:
    set_arg(inner(gm, node), 5, torch.float16)


@breaks("wire", _calls("dequantize", pinned=False))
def codes_that_are_read_twice(gm: GraphModule, ctx: Context, node: Node) -> None:
    like(node.args[0], node.target, *node.args, tag=node.meta["zerofx"])  # type: ignore[arg-type]


@breaks("wire", _made_for_it)
def a_buffer_that_travels_as_it_is_and_is_read_as_codes(gm: GraphModule, ctx: Context, node: Node) -> None:
    bypass(node)


@breaks("wire", _calls("sum_quantized"))
def sums_of_codes_of_other_bits(gm: GraphModule, ctx: Context, node: Node) -> None:
    call = inner(gm, node)
    set_arg(call, 3, _other(call.args[3]))  # type: ignore[arg-type]


@breaks("wire", _pairs("sum_quantized"))
def a_sum_with_the_own_part_of_another_pack(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    set_arg(pair[1], 0, pair[0].args[0])


@breaks("wire", _pairs("sum_quantized"))
def a_sum_of_what_came_for_another_group(gm: GraphModule, ctx: Context, pair: tuple[Node, Node]) -> None:
    set_arg(pair[1], 1, pair[0].args[1])


@breaks("reduction", _calls("sum_quantized", pinned=False))
def a_part_in_codes_that_is_taken_for_the_sum(gm: GraphModule, ctx: Context, node: Node) -> None:
    bypass(node, node.args[1])  # type: ignore[arg-type]


@breaks("group", _calls("sum_quantized"))
def sums_in_the_order_of_another_group(gm: GraphModule, ctx: Context, node: Node) -> None:
    set_arg(inner(gm, node), 5, "another")


@breaks("group", _calls("quantize"))
def codes_of_the_rank_in_another_group(gm: GraphModule, ctx: Context, node: Node) -> None:
    set_arg(inner(gm, node), 4, "another")


@breaks("group", lambda gm, ctx: [n for n in tagged(gm, "reduce_scatter") if "all_to_all_single" in str(n.target)])
def rows_that_are_cut_elsewhere(gm: GraphModule, ctx: Context, start: Node) -> None:
    first, *others = start.args[1]  # type: ignore[misc]
    set_arg(start, 1, [first + 16, *others[:-1], others[-1] - 16])
