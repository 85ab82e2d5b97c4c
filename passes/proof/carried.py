"""State that lives elsewhere: the rules "fetch", "put" and, with stowed.py, "stow" of `zerofx.passes.verify`.

::

    shard ── fetch ── wait_fetch      Away, Ticket, and from there on a `Flat` as any shard
    gradient ── put ── wait_put       a Pack, Ticket, and an output of the graph
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from torch.fx import Node

from zerofx.model.layout import GroupLayout
from zerofx.passes import edit
from zerofx.passes.carry import FETCH, PUT, ROOM, WAIT_FETCH, WAIT_PUT
from zerofx.passes.proof import stowed
from zerofx.passes.proof.facts import Flat
from zerofx.passes.proof.known import READERS, Known
from zerofx.passes.proof.live import Buffer, loose_reader
from zerofx.passes.proof.meaning import Op

STARTS, WAITS = (FETCH, PUT, *stowed.STARTS), (WAIT_FETCH, WAIT_PUT, *stowed.WAITS)


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
    if op.target in (*stowed.STARTS, *stowed.WAITS):
        return "stow"
    return "fetch" if op.target in (FETCH, WAIT_FETCH) else "put"


def read_carried(known: Known, op: Op) -> None:
    """Read a fetch, a put, or the wait for one."""
    rule, (of, name, *_) = rule_of(op), op.args[1:] if op.target in WAITS else op.args
    if op.target in STARTS:
        _read_start(known, op, of, name)
        return
    ticket = known.facts.get(op.args[0])
    if not isinstance(ticket, Ticket) or rule_of(known.ops[ticket.start]) != rule:
        known.fail(rule, op.node, f"it waits for {op.args[0].name!r}, which is no start", "a start of its own kind")
    if known.carried[ticket.start]:
        known.fail(rule, op.node, f"{ticket.start.name!r} was waited for before", "exactly one wait")
    if (of, *op.args[2:]) != known.ops[ticket.start].args:
        found = f"it waits for {of.name!r}, {', '.join(map(str, op.args[2:]))}; {ticket.start.name!r} is about another"
        known.fail(rule, op.node, found, "one and the same")
    known.carried[ticket.start].append(op.node)
    known.under_way[rule] -= 1
    if op.target in stowed.WAITS:
        stowed.wait(known, op, of)
    elif op.target is WAIT_FETCH:
        _read_arrived(known, op, known.facts[of].flat)
    else:
        known.leaving -= set(edit.aliases(of))
        known.numbers[op.node] = hash(("update", op.node.name))


def _read_start(known: Known, op: Op, of: Node, name: str) -> None:
    rule = rule_of(op)
    known.under_way[rule] += 1
    if known.under_way[rule] > ROOM:
        known.fail(rule, op.node, f"{known.under_way[rule]} are on their way", f"{ROOM} at most")
    known.carried[op.node], known.facts[op.node] = [], Ticket(op.node, of)
    if op.target in stowed.STARTS:
        stowed.start(known, op)
        return
    if op.target is FETCH:
        away = known.facts.get(of)
        if not isinstance(away, Away) or away.flat.layout.name != name:
            known.fail(rule, op.node, f"it brings {name!r}, and {of.name!r} is another", "a shard that is elsewhere")
        if of in known.brought:
            known.fail(rule, op.node, f"{name!r} is brought before", "once")
        known.brought.add(of)
        return
    if name not in known.ctx.gradients_away or known.ctx.steps or known.ctx.sync == "keep":
        known.fail(rule, op.node, f"it takes away a gradient of {name!r}", "none: its gradients stay")
    known.leaving |= set(edit.aliases(of)) - {op.node}


def _read_arrived(known: Known, op: Op, flat: Flat) -> None:
    """What was fetched is a shard from here on, in memory of its own."""
    value, start, node = op.value, op.args[0], op.node
    nbytes = value.numel() * value.dtype.itemsize
    known.facts[node] = flat
    known.fetched[node] = Buffer(node, start, flat.layout.name, nbytes, last=known.order[node])
    known.memory[node] = [known.fetched[node]]


def _read_away(known: Known, op: Op, away: Away) -> None:
    name = away.flat.layout.name
    known.fail("fetch", op.node, f"it reads the shard of {name!r}, which is not on the device", "what was fetched")


def _read_ticket(known: Known, op: Op, ticket: Ticket) -> None:
    rule = rule_of(known.ops[ticket.start])
    known.fail(rule, op.node, f"it reads the ticket {ticket.start.name!r}", "a wait, which alone may")


READERS |= {Away: _read_away, Ticket: _read_ticket}


def refuse_writing(known: Known, op: Op) -> None:
    """Nothing writes to what is being taken away."""
    found = (x for x in op.written() if not known.leaving.isdisjoint((x, stowed.owner(known, x))))
    if known.leaving and (written := next(found, None)) is not None:
        rule = "put" if known.ctx.phase == "backward" else "stow"
        known.fail(rule, op.node, f"it writes to {written.name!r}, which is being taken away", "a wait before it")


def gradient_away(known: Known, value: Node, layout: GroupLayout, place: int) -> Node:
    """The gradient that the extra output ``value`` says has left."""
    op = known.ops.get(value)
    if op is None or op.target is not WAIT_PUT or op.args[2:] != (layout.name, place):
        found = f"it says nothing of gradient {place}, of {layout.name!r}"
        known.fail("put", value, found, "the gradient taken away, and the wait for that")
    return op.args[1]


def check_carried(known: Known) -> None:
    """What can be said once all is read: each start has a wait, what was fetched is read, the order is pinned."""
    for start, waits in known.carried.items():
        if not waits:
            known.fail(rule_of(known.ops[start]), start, "it is never waited for", "exactly one wait")
    for buffer in known.fetched.values():
        if not buffer.readers and not buffer.escapes:
            known.fail("fetch", buffer.start, "nothing reads what it brings", "no fetch")
    outputs = set(known.gm.graph.output_node().all_input_nodes)
    for op in known.ops.values():
        if op.target is WAIT_PUT and op.node not in outputs:
            known.fail("put", op.node, "its output is dropped, and it with it", "an output of the graph")
    stowed.check_stowed(known)
    for rule in ("fetch", "put", "stow"):
        _check_turns(known, rule)


def _check_turns(known: Known, rule: str) -> None:
    """First started, first waited for; and the executor keeps to the order in which they stand."""
    turns = [op for op in known.ops.values() if op.target in (*STARTS, *WAITS) and rule_of(op) == rule]
    starts = [op.node for op in turns if op.target in STARTS]
    for first, second in pairwise(starts):
        if known.order[known.carried[second][0]] < known.order[known.carried[first][0]]:
            found = f"it starts after {first.name!r}, which is waited for later"
            known.fail(rule, second, found, "first started, first waited for")
    if known.ctx.executor != "inductor":
        return
    for before, op in pairwise(turns):
        if before.node not in (*op.after, *op.inputs):
            known.fail(rule, op.node, f"nothing keeps it behind {before.node.name!r}", "a dependence on it")
    gone = deque(sorted((b for b in known.fetched.values() if not b.escapes), key=lambda b: b.last))
    followed: set[Node] = set()
    for op in turns:
        _follow(known, op, followed)
        while op.target is FETCH and gone and gone[0].last < known.order[op.node]:
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
