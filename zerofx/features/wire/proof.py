"""Codes on the wire (`zerofx.features.wire.quantize`): what such nodes are, and what they may do.

::

    shard ─ quantize ─ gather ─ wait ─ dequantize             a Flat, Quantized, and a gathered buffer
    pack  ─ quantize ─ exchange ─ wait ─ sum_quantized        a Pack, Quantized, its "parts", "shard of M"
        └──────────────────────────────────────┘
    sum   ─ quantize ─ gather ─ wait ─ sum_replicas_quantized  a Pack ``of`` a sum over a row, Quantized, its "rows"

What must hold: rows are written and read by one description, that of the option and the layout, and once; only what was
written in codes is read as codes; the sum is of float32 and of the pack that was sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from zerofx.features.wire.facts import wire_of
from zerofx.features.wire.operators import flattened
from zerofx.kernels.code import Code
from zerofx.model.layout import GroupLayout
from zerofx.model.wire import sent_whole
from zerofx.passes.proof.facts import Flat, Pack, Started
from zerofx.passes.proof.known import Known
from zerofx.passes.proof.meaning import Op
from zerofx.passes.proof.rules import Rules
from zerofx.passes.travel import EXCHANGES, GATHERS

_zerofx, _c10d = torch.ops.zerofx, torch.ops._c10d_functional
_WAIT = _c10d.wait_tensor.default


@dataclass(frozen=True)
class Quantized:
    """In codes: a shard or a pack of gradients, or what came of those of all ranks.

    ``came``: of gradients, "parts" (of this rank's part, by an exchange) or "rows" (of all of it, by a gather).
    """

    of: Flat | Pack
    came: str = ""


@dataclass
class _Found:
    """What was found out of a graph.

    Attributes:
        read: by what the codes that came were read, by their wait.
        rests: what adds the rest of a group's gradient, by group.
    """

    read: dict[Node, Node] = field(default_factory=dict)
    rests: dict[str, Node] = field(default_factory=dict)


def _encode(known: Known, op: Op, fact: Any) -> None:
    source, rows, *how, process_group = op.args[:5]
    if isinstance(fact, Flat):
        ctx, part = known.ctx, known.is_part(fact)
        wire = wire_of(ctx).between if part else wire_of(ctx).inside
        if fact.whole or fact.ranges != (range(fact.layout.shard_numel),):
            known.fail("wire", op.node, f"it writes {source.name!r} in codes", "a whole shard, once")
        _check(known, op, fact.layout, wire.weight_code if wire else None, (rows, *how), 1)
        over = (ctx.replica_group, ctx.process_group) if part else (ctx.process_group,)
        _check_over(known, op, (process_group, *op.args[5:]), over)
        known.facts[op.node] = Quantized(fact)
        return
    wire = wire_of(known.ctx).wire
    if wire is not None and wire.error_feedback:
        known.fail("wire", op.node, "what its code cuts off is lost", "the rest kept, for error_feedback=True")
    _encode_gradients(known, op, fact, op.args[5:])


def _quantize_with_rest(known: Known, op: Op, fact: Any) -> None:
    group, *within = op.args[5:]
    wire = wire_of(known.ctx).wire
    if wire is None or not wire.error_feedback:
        known.fail("wire", op.node, "it adds what was cut off before", "gradients as they are")
    _encode_gradients(known, op, fact, within)
    layout = known.layout_of(known.facts[op.node], op.node)
    if group != layout.name:
        known.fail("wire", op.node, f"it adds what was cut off of {group!r}", f"of {layout.name!r}")
    rests = known.record(_Found).rests
    if group in rests:
        known.fail("wire", op.node, f"{rests[group].name!r} has added the rest of {group!r}", "each rest once")
    rests[group] = op.node


def _encode_gradients(known: Known, op: Op, fact: Any, within: Sequence[str]) -> None:
    """A pack in codes; or, between replicas, a sum over a row."""
    source, rows, code, whole, process_group = op.args[:5]
    ctx, pack = known.ctx, _gradients(known, op, source, fact)
    layout, between = known.layout_of(pack, op.node), pack.state.startswith("shard")
    if pack.numel != layout.numel:
        known.fail("reduction", op.node, f"it is a pack of {pack.numel} elements", f"{layout.numel}")
    wire = wire_of(ctx).between if between else wire_of(ctx).inside
    ranks = layout.world_size if not between else ctx.replicas if wire_of(ctx).divides_between else 1
    _check(known, op, layout, wire.gradient_code if wire else None, (rows, code, whole), ranks)
    if not between:
        known.check_collective(op, layout, layout.world_size, process_group, ctx.reduce_group)
        known.facts[op.node] = Quantized(pack)
        return
    over = (ctx.replica_group, ctx.process_group) if wire_of(ctx).divides_between else (ctx.process_group,)
    _check_over(known, op, (process_group, *within), over)
    known.facts[op.node] = Quantized(Pack((), source.meta["val"].numel(), pack.dtype, of=pack))


def _gradients(known: Known, op: Op, source: Node, fact: Any) -> Pack:
    """What is written in codes: a pack, or a sum over a row that no replica has added to."""
    ctx = known.ctx
    if fact is None:
        pack = known.pack(source)
        alone = wire_of(ctx).between is not None and known.layout_of(pack, op.node).world_size == 1
        return replace(pack, state="shard") if alone else pack  # one rank's shard is the whole
    fresh = isinstance(fact, Pack) and fact.state.startswith("shard") and fact.replicas == 1 and not fact.narrowed
    if not fresh or wire_of(ctx).between is None or fact.scale != 1.0:
        known.fail("wire", op.node, f"it writes {source.name!r} in codes", "a shard, or a pack of gradients, once")
    return fact


def _check_over(known: Known, op: Op, found: Sequence[Any], wanted: Sequence[Any]) -> None:
    if found != wanted:
        known.fail("group", op.node, f"it is of ranks of {found}", f"of {wanted}")


def _check(
    known: Known, op: Op, layout: GroupLayout, code: Code | None, found: tuple[Any, ...], rows: int, *more: Any
) -> None:
    wanted = (rows, str(code), flattened(sent_whole(layout)), *more)
    found = tuple(list(x) if isinstance(x, (list, tuple)) else x for x in found)
    if code is None or found != wanted:
        known.fail("wire", op.node, f"rows, code and what is sent whole are {found}", f"{wanted}")


def _read_quantized(known: Known, op: Op, quantized: Quantized) -> None:
    """A gather or an exchange of codes; nothing else but what dequantizes reads them."""
    if isinstance(quantized.of, Pack):
        _start_exchange(known, op, quantized)
        return
    flat = quantized.of
    if op.target not in GATHERS or flat.whole:
        known.fail("wire", op.node, f"it reads codes of {flat.layout.name!r}", "a gather, or what reads codes")
    known.facts[op.node] = Started(op.node, Quantized(known.start_gather(op, flat)))


def _start_exchange(known: Known, op: Op, quantized: Quantized) -> None:
    """The exchange of rows in codes; or, where all replicas get all of a sum, their gather."""
    ctx, pack = known.ctx, quantized.of
    assert isinstance(pack, Pack)
    gathers = pack.of is not None and not wire_of(ctx).divides_between
    if quantized.came:
        known.fail("reduction", op.node, "it reads codes of gradients", "their sum")
    if op.target not in (GATHERS if gathers else EXCHANGES):
        known.fail("wire", op.node, "it does something else with codes", "their exchange")
    layout, (_, *sizes, process_group) = known.layout_of(pack, op.node), op.args
    over = layout.world_size if pack.of is None else ctx.replicas
    part = op.inputs[0].meta["val"].numel() // over
    ranks = sizes[0]
    if len(sizes) == 2:  # as `all_to_all_single` takes it
        even = list(sizes[0]) == list(sizes[1]) == [part] * len(sizes[0])
        ranks = len(sizes[0]) if even else -1
    if pack.of is None:
        known.check_collective(op, layout, ranks, process_group, ctx.reduce_group)
    else:
        _check_over(known, op, (ranks, process_group), (over, ctx.replica_group))
    known.facts[op.node] = Started(op.node, Quantized(pack, "rows" if gathers else "parts"))
    known.waits[op.node] = []


def _decode(known: Known, op: Op, fact: Any) -> None:
    arrived, rows, numel, code, whole, dtype, *over = op.args
    came = isinstance(fact, Quantized) and isinstance(fact.of, Flat) and known.ops[arrived].target is _WAIT
    if not came:
        known.fail("wire", op.node, f"it reads {arrived.name!r} as codes", "what ranks have sent in codes")
    read = known.record(_Found).read
    if arrived in read:
        known.fail("wire", op.node, f"{read[arrived].name!r} reads them too", "each gather read once")
    read[arrived] = op.node
    fact = fact.of
    ctx, layout = known.ctx, fact.layout
    was = fact.dtypes[-1] if fact.dtypes else layout.dtype
    right: tuple[str, ...] = ()
    wire, ranks, part = wire_of(ctx).inside, layout.world_size, layout.shard_numel
    if not fact.whole:  # of a column
        wire, ranks, part = wire_of(ctx).between, ctx.replicas, part // ctx.replicas
        right = (ctx.replica_group, ctx.process_group)
    wanted = (ranks, part, was)
    _check(known, op, layout, wire.weight_code if wire else None, (rows, code, whole, numel, dtype), *wanted)
    _check_over(known, op, tuple(over), right)
    if not fact.whole:
        known.facts[op.node] = fact
        return
    (start,) = known.ops[arrived].inputs
    known.new_buffer(op.node, start, fact, wait=arrived)


def _came(known: Known, node: Node, how: str) -> Pack | None:
    """The gradients that came to ``node`` in codes."""
    fact = known.facts.get(node)
    return fact.of if isinstance(fact, Quantized) and isinstance(fact.of, Pack) and fact.came == how else None


def _sum(known: Known, op: Op, fact: Any) -> None:
    pack, arrived, numel, code, whole, *over = op.args
    sent, ctx = _came(known, arrived, "parts"), known.ctx
    if sent is None:
        known.fail("wire", op.node, f"it sums {arrived.name!r} as codes", "what ranks have sent in codes")
    own = known.facts.get(pack)
    own = known.pack(pack) if own is None else own
    if own != (sent if sent.of is None else _as_packed(known, pack, sent.of)):
        known.fail("wire", op.node, f"its own part is of {pack.name!r}", "the pack that was sent")
    layout = known.layout_of(sent, op.node)
    wire, ranks, right = wire_of(ctx).inside, layout.world_size, [ctx.reduce_group]
    if sent.of is not None:
        wire, ranks, right = wire_of(ctx).between, ctx.replicas, [ctx.replica_group, ctx.process_group]
    wanted = ranks, sent.numel // ranks
    _check(known, op, layout, wire.gradient_code if wire else None, (ranks, code, whole, numel), *wanted)
    _check_over(known, op, over, right)
    if sent.of is not None:
        known.facts[op.node] = replace(sent.of, replicas=ranks, divided=True, dtype=torch.float32)
    else:
        known.facts[op.node] = replace(sent, state=f"shard of {ranks}", dtype=torch.float32)


def _as_packed(known: Known, node: Node, of: Pack) -> Pack:
    """A sum over a row as `Known` finds it: of one rank it is the pack itself."""
    return of if known.facts.get(node) is not None else replace(of, state="packed")


def _sum_replicas_quantized(known: Known, op: Op, fact: Any) -> None:
    arrived, rows, numel, code, whole, dtype, within = op.args
    sent, ctx = _came(known, arrived, "rows"), known.ctx
    if sent is None or sent.of is None:
        known.fail("wire", op.node, f"it sums {arrived.name!r} as codes", "what all replicas have sent in codes")
    layout, wire = known.layout_of(sent, op.node), wire_of(ctx).between
    wanted = (ctx.replicas, sent.numel, sent.dtype)
    _check(known, op, layout, wire.gradient_code if wire else None, (rows, code, whole, numel, dtype), *wanted)
    _check_over(known, op, (within,), (ctx.process_group,))
    known.facts[op.node] = replace(sent.of, replicas=ctx.replicas, dtype=torch.float32)


def _check_read(known: Known) -> None:
    """Whatever came in codes is read."""
    read = known.record(_Found).read
    for node, fact in known.facts.items():
        if (
            isinstance(fact, Quantized)
            and isinstance(fact.of, Flat)
            and known.ops[node].target is _WAIT
            and node not in read
        ):
            known.fail("wire", node, "nothing reads the codes that it brings", "a decode of them")


RULES = Rules(
    operators={
        _zerofx.quantize.default: _encode,
        _zerofx.quantize_with_rest.default: _quantize_with_rest,
        _zerofx.dequantize.default: _decode,
        _zerofx.sum_quantized.default: _sum,
        _zerofx.sum_replicas_quantized.default: _sum_replicas_quantized,
    },
    facts={Quantized: _read_quantized},
    finished=_check_read,
)
