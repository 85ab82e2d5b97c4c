"""State that lives elsewhere: the rules "reload", "offload" and "activation" of `zerofx.passes.verify`.

The last one's own part is in proof_of_activations.py.

::

    shard ── reload ── wait_reload    Away, Ticket, and from there on a `Flat` as any shard
    gradient ── offload ── wait       a Pack, Ticket, and an output of the graph
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch.fx import Node

from zerofx.features.offload import proof_of_activations as activations
from zerofx.features.offload.facts import offload_of
from zerofx.features.offload.operators import MAX_IN_FLIGHT, OFFLOAD, RELOAD, WAIT_OFFLOAD, WAIT_RELOAD
from zerofx.features.offload.proof_of_activations import Found, Handle
from zerofx.model.layout import GroupLayout
from zerofx.passes import edit
from zerofx.passes.proof.facts import Flat
from zerofx.passes.proof.known import Known
from zerofx.passes.proof.live import Buffer, loose_reader
from zerofx.passes.proof.meaning import Number, Op
from zerofx.passes.proof.rules import Rules

STARTS, WAITS = (RELOAD, OFFLOAD, *activations.STARTS), (WAIT_RELOAD, WAIT_OFFLOAD, *activations.WAITS)


@dataclass(frozen=True)
class Away:
    """A shard that lives elsewhere: what it would be, if it were here."""

    flat: Flat


@dataclass(frozen=True)
class Ticket:
    """What a start returns: ``of`` is the shard that it brings, or what it takes, or the handle of what it brings."""

    start: Node
    of: Node


def rule_of(op: Op) -> str:
    """The rule that an operation of `STARTS` or `WAITS` is under."""
    if op.target in (*activations.STARTS, *activations.WAITS):
        return "activation"
    return "reload" if op.target in (RELOAD, WAIT_RELOAD) else "offload"


def _read(known: Known, op: Op, fact: object) -> None:
    """Read a reload, an offload, or the wait for one."""
    found = known.record(Found)
    rule, (of, name, *_) = rule_of(op), op.args[1:] if op.target in WAITS else op.args
    if op.target in STARTS:
        _read_start(known, op, of, name)
        return
    ticket = known.facts.get(op.args[0])
    if not isinstance(ticket, Ticket) or rule_of(known.ops[ticket.start]) != rule:
        known.fail(rule, op.node, f"it waits for {op.args[0].name!r}, which is no start", "a start of its own kind")
    if found.waits[ticket.start]:
        known.fail(rule, op.node, f"{ticket.start.name!r} was waited for before", "exactly one wait")
    if (of, *op.args[2:]) != known.ops[ticket.start].args:
        what = f"it waits for {of.name!r}, {', '.join(map(str, op.args[2:]))}; {ticket.start.name!r} is about another"
        known.fail(rule, op.node, what, "one and the same")
    found.waits[ticket.start].append(op.node)
    found.under_way[rule] -= 1
    if op.target in activations.WAITS:
        activations.wait(known, op, of)
    elif op.target is WAIT_RELOAD:
        _read_arrived(known, op, known.facts[of].flat)
    else:
        found.leaving -= set(edit.aliases(of))
        known.numbers[op.node] = hash(("update", op.node.name))


def _read_start(known: Known, op: Op, of: Node, name: str) -> None:
    rule, found = rule_of(op), known.record(Found)
    found.under_way[rule] += 1
    if found.under_way[rule] > MAX_IN_FLIGHT:
        known.fail(rule, op.node, f"{found.under_way[rule]} are on their way", f"{MAX_IN_FLIGHT} at most")
    found.waits[op.node], known.facts[op.node] = [], Ticket(op.node, of)
    if op.target in activations.STARTS:
        activations.start(known, op)
        return
    if op.target is RELOAD:
        away = known.facts.get(of)
        if not isinstance(away, Away) or away.flat.layout.name != name:
            known.fail(rule, op.node, f"it brings {name!r}, and {of.name!r} is another", "a shard that is elsewhere")
        if of in found.reloaded:
            known.fail(rule, op.node, f"{name!r} is brought before", "once")
        found.reloaded.add(of)
        return
    if name not in offload_of(known.ctx).gradients or known.ctx.steps or known.ctx.sync == "keep":
        known.fail(rule, op.node, f"it takes away a gradient of {name!r}", "none: its gradients stay")
    found.leaving |= set(edit.aliases(of)) - {op.node}


def _read_arrived(known: Known, op: Op, flat: Flat) -> None:
    """What was reloaded is a shard from here on, in memory of its own."""
    value, start, node = op.value, op.args[0], op.node
    nbytes = value.numel() * value.dtype.itemsize
    known.facts[node] = flat
    known.owned[node] = Buffer(node, start, flat.layout.name, nbytes, last=known.order[node])
    known.memory[node] = [known.owned[node]]


def _read_away(known: Known, op: Op, away: Away) -> None:
    name = away.flat.layout.name
    known.fail("reload", op.node, f"it reads the shard of {name!r}, which is not on the device", "what was reloaded")


def _read_ticket(known: Known, op: Op, ticket: Ticket) -> None:
    rule = rule_of(known.ops[ticket.start])
    known.fail(rule, op.node, f"it reads the ticket {ticket.start.name!r}", "a wait, which alone may")


def _refuse_writing(known: Known, op: Op) -> None:
    """Nothing writes to what is being taken away."""
    leaving = known.record(Found).leaving
    writes = (x for x in op.written() if not leaving.isdisjoint((x, activations.owner(known, x))))
    if leaving and (written := next(writes, None)) is not None:
        rule = "offload" if known.ctx.phase == "backward" else "activation"
        known.fail(rule, op.node, f"it writes to {written.name!r}, which is being taken away", "a wait before it")


def _gradient(known: Known, value: Node, layout: GroupLayout, place: int) -> Node | None:
    """The gradient that the extra output ``value`` says has left; None: it stays."""
    if known.ctx.steps or layout.name not in offload_of(known.ctx).gradients:
        return None
    op = known.ops.get(value)
    if op is None or op.target is not WAIT_OFFLOAD or op.args[2:] != (layout.name, place):
        found = f"it says nothing of gradient {place}, of {layout.name!r}"
        known.fail("offload", value, found, "the gradient taken away, and the wait for that")
    return op.args[1]


def _check(known: Known) -> None:
    """What can be said once all is read: each start has a wait, what was reloaded is read, the order is pinned."""
    found = known.record(Found)
    for start, waits in found.waits.items():
        if not waits:
            known.fail(rule_of(known.ops[start]), start, "it is never waited for", "exactly one wait")
    for buffer in known.owned.values():
        if not buffer.readers and not buffer.escapes:
            known.fail("reload", buffer.start, "nothing reads what it brings", "no reload")
    outputs = set(known.gm.graph.output_node().all_input_nodes)
    for op in known.ops.values():
        if op.target is WAIT_OFFLOAD and op.node not in outputs:
            known.fail("offload", op.node, "its output is dropped, and it with it", "an output of the graph")
    activations.check_activations(known)
    for rule in ("reload", "offload", "activation"):
        _check_turns(known, rule)


def _check_turns(known: Known, rule: str) -> None:
    """First started, first waited for; and the executor keeps to the order in which they stand."""
    turns = [op for op in known.ops.values() if op.target in (*STARTS, *WAITS) and rule_of(op) == rule]
    starts, waits = [op.node for op in turns if op.target in STARTS], known.record(Found).waits
    for first, second in pairwise(starts):
        if known.order[waits[second][0]] < known.order[waits[first][0]]:
            found = f"it starts after {first.name!r}, which is waited for later"
            known.fail(rule, second, found, "first started, first waited for")
    if known.ctx.executor != "inductor":
        return
    for before, op in pairwise(turns):
        if before.node not in (*op.after, *op.inputs):
            known.fail(rule, op.node, f"nothing keeps it after {before.node.name!r}", "a dependence on it")
    gone = deque(sorted((b for b in known.owned.values() if not b.escapes), key=lambda b: b.last))
    followed: set[Node] = set()
    for op in turns:
        _follow(known, op, followed)
        while op.target is RELOAD and gone and gone[0].last < known.order[op.node]:
            buffer = gone.popleft()
            reader = loose_reader(buffer, known.ops, known.order[op.node], known.order, followed)
            if reader is not None:
                found = f"{reader.name!r} may read {buffer.node.name!r} after it started"
                known.fail(rule, op.node, found, "a dependence on all readers of what is gone")


def _follow(known: Known, op: Op, followed: set[Node]) -> None:
    """Add what ``op`` is told to follow, and what that is told to."""
    todo = list(op.after)
    while todo:
        node = todo.pop()
        if node not in followed:
            followed.add(node)
            todo += known.ops[node].after if node in known.ops else ()


def _shard(reader: Known, node: Node, flat: Flat) -> None:
    if reader.ctx.gathers and flat.layout.name in offload_of(reader.ctx).weights:
        reader.facts[node] = Away(flat)


def _check_output(known: Known, i: int, value: Any) -> None:
    activations.refuse_keeping(known, value)
    if isinstance(ticket := known.facts.get(value), Ticket):
        known.fail(rule_of(known.ops[ticket.start]), value, f"output {i} is a ticket", "what it is for")


def _check_saved(known: Known, i: int, name: str, value: Node, was: Number | None) -> bool:
    if known.ctx.phase != "forward" or not isinstance(handle := known.facts.get(value), Handle):
        return False
    activations.check_handle(known, value, name, handle)
    return True


RULES = Rules(
    operators=dict.fromkeys((*STARTS, *WAITS), _read),
    facts={Away: _read_away, Ticket: _read_ticket, Handle: activations.refuse_reading},
    inputs=activations.read_handles,
    shard=_shard,
    writes=_refuse_writing,
    outputs=_check_output,
    saved=_check_saved,
    gradients=_gradient,
    finished=_check,
)
