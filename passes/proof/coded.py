"""Codes on the wire (`zerofx.passes.compress`): what such nodes are, and what they may do.

::

    shard ─ encode ─ gather ─ wait ─ decode               Flat, Flat in code, ... whole, and a gathered buffer
    pack  ─ encode ─ exchange ─ wait ─ sum_coded          a Pack: "packed", "coded", "coded parts", "shard of M"
        └────────────────────────────────┘

What must hold: rows are written and read by one description, that of the option and the layout, and once; only what was
written in codes is read as codes; the sum is of float32 and of the pack that was sent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from zerofx.kernels.code import Code
from zerofx.model.layout import GroupLayout
from zerofx.model.wire import sent_whole
from zerofx.passes.coded import flattened
from zerofx.passes.proof.facts import DECODE, ENCODE, ENCODE_REST, SUM_CODED, Flat, Pack, Started
from zerofx.passes.proof.known import Known
from zerofx.passes.proof.meaning import Op
from zerofx.passes.travel import EXCHANGES


def read_coded(known: Known, op: Op, fact: Any) -> None:
    """One of the three operators; ``fact`` is of what it reads."""
    {ENCODE: _encode, ENCODE_REST: _encode_rest, DECODE: _decode, SUM_CODED: _sum}[op.target](known, op, fact)


def _encode(known: Known, op: Op, fact: Any) -> None:
    source, rows, *how, process_group = op.args
    wire = known.ctx.wire
    if isinstance(fact, Flat):
        if fact.code or fact.whole or fact.ranges != (range(fact.layout.shard_numel),):
            known.fail("wire", op.node, f"it writes {source.name!r} in codes", "a whole shard, once")
        _check(known, op, fact.layout, wire.weight_code if wire else None, (rows, *how), 1)
        known.check_collective(op, fact.layout, fact.layout.world_size, process_group, known.ctx.process_group)
        known.facts[op.node] = replace(fact, code=how[0])
        return
    if fact is not None:
        known.fail("wire", op.node, f"it writes {source.name!r} in codes", "a shard, or a pack of gradients, once")
    if wire is not None and wire.error_feedback:
        known.fail("wire", op.node, "what its code cuts off is lost", "the rest kept, for error_feedback=True")
    _encode_pack(known, op)


def _encode_rest(known: Known, op: Op, fact: Any) -> None:
    source, *_, group = op.args
    wire = known.ctx.wire
    if fact is not None:
        known.fail("wire", op.node, f"it writes {source.name!r} in codes", "a pack of gradients, once")
    if wire is None or not wire.error_feedback:
        known.fail("wire", op.node, "it adds what was cut off before", "gradients as they are")
    layout = known.layout_of(known.pack(source), op.node)
    if group != layout.name:
        known.fail("wire", op.node, f"it adds what was cut off of {group!r}", f"of {layout.name!r}")
    if group in known.rests:
        known.fail("wire", op.node, f"{known.rests[group].name!r} has added the rest of {group!r}", "each rest once")
    known.rests[group] = op.node
    _encode_pack(known, op)


def _encode_pack(known: Known, op: Op) -> None:
    source, rows, code, whole, process_group = op.args[:5]
    how, wire = (code, whole), known.ctx.wire
    pack = known.pack(source)
    layout = known.layout_of(pack, op.node)
    if pack.numel != layout.numel:
        known.fail("reduction", op.node, f"it is a pack of {pack.numel} elements", f"{layout.numel}")
    _check(known, op, layout, wire.gradient_code if wire else None, (rows, *how), layout.world_size)
    known.check_collective(op, layout, layout.world_size, process_group, known.ctx.reduce_group)
    known.facts[op.node] = replace(pack, state="coded")


def _check(
    known: Known, op: Op, layout: GroupLayout, code: Code | None, found: tuple[Any, ...], rows: int, *more: Any
) -> None:
    wanted = (rows, str(code), flattened(sent_whole(layout)), *more)
    found = tuple(list(x) if isinstance(x, (list, tuple)) else x for x in found)
    if code is None or found != wanted:
        known.fail("wire", op.node, f"rows, code and what is sent whole are {found}", f"{wanted}")


def start_exchange(known: Known, op: Op, pack: Pack) -> None:
    """The exchange of rows in codes."""
    if op.target not in EXCHANGES:
        known.fail("wire", op.node, "it does something else with codes", "their exchange")
    layout, (_, *sizes, process_group) = known.layout_of(pack, op.node), op.args
    part = op.inputs[0].meta["val"].numel() // layout.world_size
    ranks = sizes[0]
    if len(sizes) == 2:  # as `all_to_all_single` takes it
        even = list(sizes[0]) == list(sizes[1]) == [part] * len(sizes[0])
        ranks = len(sizes[0]) if even else -1
    known.check_collective(op, layout, ranks, process_group, known.ctx.reduce_group)
    known.facts[op.node] = Started(op.node, replace(pack, state="coded parts"))
    known.waits[op.node] = []


def _decode(known: Known, op: Op, fact: Any) -> None:
    arrived, rows, numel, code, whole, dtype = op.args
    if not isinstance(fact, Flat) or not fact.code or not fact.whole:
        known.fail("wire", op.node, f"it reads {arrived.name!r} as codes", "what ranks have sent in codes")
    if arrived in known.decoded:
        known.fail("wire", op.node, f"{known.decoded[arrived].name!r} reads them too", "each gather read once")
    known.decoded[arrived] = op.node
    layout, wire = fact.layout, known.ctx.wire
    was = fact.dtypes[-1] if fact.dtypes else layout.dtype
    wanted = (layout.world_size, layout.shard_numel, was)
    _check(known, op, layout, wire.weight_code if wire else None, (rows, code, whole, numel, dtype), *wanted)
    known.new_buffer(op.node, known.arrived[arrived], replace(fact, code=""), wait=arrived)


def _sum(known: Known, op: Op, fact: Any) -> None:
    pack, arrived, numel, code, whole, process_group = op.args
    sent = known.facts.get(arrived)
    if not isinstance(sent, Pack) or sent.state != "coded parts":
        known.fail("wire", op.node, f"it sums {arrived.name!r} as codes", "what ranks have sent in codes")
    if known.facts.get(pack) is not None or known.pack(pack) != replace(sent, state="packed"):
        known.fail("wire", op.node, f"its own part is of {pack.name!r}", "the pack that was sent")
    layout, wire = known.layout_of(sent, op.node), known.ctx.wire
    ranks = layout.world_size
    _check(
        known, op, layout, wire.gradient_code if wire else None, (ranks, code, whole, numel), ranks, layout.shard_numel
    )
    known.check_collective(op, layout, ranks, process_group, known.ctx.reduce_group)
    known.facts[op.node] = replace(sent, state=f"shard of {ranks}", dtype=torch.float32)


def check_decoded(known: Known) -> None:
    """Whatever came in codes is read."""
    for wait in known.arrived:
        if wait not in known.decoded:
            known.fail("wire", wait, "nothing reads the codes that it brings", "a decode of them")
