"""What the nodes are that exchange rows of a table (`zerofx.features.lookups`), and what they may do.

::

    forward     ids ─ reshape ─ gather ─ wait ─┐                      Everyones
                shard ─────────────────── own_rows ─ cast             Rows "own"
                                               └─ scatter ─ wait ─ view       ... "shard", and the value: looked up

    backward    ids ─ reshape ─ gather ─ wait ─┐
                dy  ─ reshape ─ gather ─ wait ─ sum_rows              a Pack of one gradient, summed: "shard"
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from zerofx.features.lookups.facts import lookups_of
from zerofx.features.lookups.operators import OWN_ROWS, SUM_ROWS
from zerofx.model.layout import GroupLayout
from zerofx.passes.context import ParameterRef
from zerofx.passes.proof.facts import Flat, Pack, Part, Started
from zerofx.passes.proof.known import Known
from zerofx.passes.proof.meaning import Number, Numbered, Numbering, Op
from zerofx.passes.proof.rules import Rules
from zerofx.passes.travel import SCATTERS

_aten, _zerofx = torch.ops.aten, torch.ops.zerofx


@dataclass(frozen=True)
class Everyones:
    """What all ranks have for ``node``, flat and end to end, cast to ``dtypes`` one after the other."""

    node: Node
    dtypes: tuple[torch.dtype, ...] = ()


@dataclass(frozen=True)
class Rows:
    """What all ranks look up by ``indices`` in a table with the number ``table``, of ``dtype``, and ``width``.

    ``state``: "own" (what a rank has of it), and then as of a `Pack`.
    """

    layout: GroupLayout
    table: int
    dtype: torch.dtype
    width: int
    indices: Node
    numel: int
    state: str = "own"


def embedding(numbering: Numbering, op: Op, numbers: dict[Node, Number]) -> Number:
    """The number of an `embedding`: what else it is told besides table and indices is for its gradient."""
    table, indices = (numbers[x] for x in op.args[:2])
    return looked_up(table, indices)


def looked_up(table: Number, indices: Number) -> Number:
    """The number of a table's rows."""
    return hash(("rows", table, indices))


def start_telling(known: Known, op: Op) -> bool:
    """A gather of what is no shard: of values, flat, which only what picks or adds rows may read.

    Returns whether it is one.
    """
    ctx, (source, world_size, process_group) = known.ctx, op.args
    if not lookups_of(ctx).on or source.target is not _aten.reshape.default or source.args[1] != [-1]:
        return False
    layouts = [*ctx.found.shards, *(ref.layout for ref in ctx.gradients.values())]
    right = process_group if process_group == ctx.reduce_group else ctx.process_group
    known.check_collective(op, layouts[0], world_size, process_group, right)
    _start(known, op, Everyones(source.args[0]))
    return True


def _start(known: Known, op: Op, brings: Everyones | Rows) -> None:
    known.facts[op.node] = Started(op.node, brings)
    known.waits[op.node] = []
    known.apart.add(op.node)


def _read_own_rows(known: Known, op: Op, flat: Flat) -> bool:
    """What picks rows from a shard."""
    if op.target is not OWN_ROWS:
        return False
    _, told, offset, length, width, process_group = op.args
    slot, indices = known.slot(flat.layout, offset, (length, width)), known.facts.get(told)
    whole = not flat.whole and flat.ranges == (range(flat.layout.shard_numel),)
    if slot is None or not whole or not isinstance(indices, Everyones) or indices.dtypes:
        where = f"{length} rows of {width} elements from element {offset} on"
        known.fail("slice", op.node, f"it takes {where}, by {told.name!r}", "a table as laid out, and all indices")
    _check_group(known, op, process_group, known.ctx.process_group)
    table = known.numbering.stored(ParameterRef(flat.layout, slot))
    table = known.numbering.casts(table, flat.layout.dtype, flat.dtypes)
    dtype = flat.dtypes[-1] if flat.dtypes else flat.layout.dtype
    numel = indices.node.meta["val"].numel() * flat.layout.world_size * width
    known.facts[op.node] = Rows(flat.layout, table, dtype, width, indices.node, numel)
    return True


def read_rows(known: Known, op: Op, rows: Rows) -> None:
    """What reads picked rows: a cast, the exchange, and what brings them into shape."""
    to, ctx = op.cast_to(), known.ctx
    if rows.state == "own" and to is not None:
        table = known.numbering.cast(rows.table, rows.dtype, to)
        known.facts[op.node] = replace(rows, table=table, dtype=to)
    elif rows.state == "own" and op.target in SCATTERS:
        pairwise = op.target is _zerofx.all_to_all_pairwise.default
        *_, world_size, process_group = op.args
        operation = "sum" if pairwise else op.args[1]
        known.check_collective(op, rows.layout, world_size, process_group, ctx.process_group, operation)
        _start(known, op, replace(rows, state="parts" if pairwise else f"shard of {world_size}"))
    elif rows.state == "own" and op.target is _zerofx.own_part.default:
        *_, world_size, process_group = op.args
        known.check_collective(op, rows.layout, world_size, process_group, ctx.process_group)
        known.facts[op.node] = replace(rows, state=f"own of {world_size}")
    elif known.read_exchange(op, rows):
        summed = known.facts[op.node]
        if summed.state.startswith("shard"):
            table = known.numbering.cast(rows.table, rows.dtype, summed.dtype)
            known.facts[op.node] = replace(summed, table=table)
    elif rows.state == f"shard of {rows.layout.world_size}" and op.target is _aten.view.default:
        shape = (*rows.indices.meta["val"].shape, rows.width)
        if tuple(op.args[1]) != shape:
            known.fail("value", op.node, f"rows have the shape {tuple(op.args[1])}", f"{shape}")
        known.numbers[op.node] = looked_up(rows.table, known.numbers[rows.indices])
    else:
        known.fail("value", op.node, "it does something else with rows of a table", "their sum over ranks")


def read_everyones(known: Known, op: Op, told: Everyones) -> None:
    """What reads all ranks' values: a cast, or what adds them up for the rows of this rank's shard."""
    to = op.cast_to()
    if to is not None:
        known.facts[op.node] = replace(told, dtypes=(*told.dtypes, to))
        return
    if op.target is not SUM_ROWS:
        known.fail("value", op.node, "it reads what all ranks told", f"{OWN_ROWS} or {SUM_ROWS} alone")
    _, indices, offset, length, width, padding_idx, shard_numel, process_group = op.args
    given, asked = (known.facts.get(x) for x in op.args[:2])
    layouts = {ref.layout.name: ref.layout for ref in known.ctx.gradients.values()}
    layout = layouts.get(op.node.meta["zerofx"].group if "zerofx" in op.node.meta else "", next(iter(layouts.values())))
    slot = known.slot(layout, offset, (length, width))
    told_all = isinstance(given, Everyones) and isinstance(asked, Everyones) and not asked.dtypes
    if slot is None or shard_numel != layout.shard_numel or not told_all:
        where = f"{length} rows of {width} elements at {offset} in {shard_numel}"
        known.fail("reduction", op.node, f"it adds up {where}, by {indices.name!r}", "a table as laid out")
    assert isinstance(given, Everyones) and isinstance(asked, Everyones)
    _check_group(known, op, process_group, known.ctx.reduce_group)
    numbers = [Numbered(known.numbers[x.node]) for x in (given, asked)]
    gradient = known.numbering.call(_aten.embedding_dense_backward.default, *numbers, length, padding_idx, False)
    dtype = given.node.meta["val"].dtype
    known.numbers[op.node] = known.numbering.casts(gradient, dtype, given.dtypes)
    part, dtype = Part(slot.offset, slot.numel, op.node), given.dtypes[-1] if given.dtypes else dtype
    known.facts[op.node] = Pack((part,), layout.numel, dtype, state="shard")


def _check_group(known: Known, op: Op, found: str, right: str) -> None:
    if found != right:
        known.fail("group", op.node, f"it takes its rank from {found!r}", f"{right!r}")


RULES = Rules(facts={Everyones: read_everyones, Rows: read_rows}, flats=_read_own_rows, other_gathers=start_telling)
