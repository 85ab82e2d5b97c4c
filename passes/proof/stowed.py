"""What forward saves, elsewhere until backward: the rule "stow" of `zerofx.passes.verify`.

::

    forward     value ── stow ── wait_stow       a value, Ticket, Handle, which is what is saved
    backward    input ── unstow ── wait_unstow   Handle, Ticket, and the value
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

from torch.fx import Node

from zerofx.passes.carry import STOW, UNSTOW, WAIT_STOW, WAIT_UNSTOW
from zerofx.passes.proof.known import READERS, Known
from zerofx.passes.proof.meaning import Op

STARTS, WAITS = (STOW, UNSTOW), (WAIT_STOW, WAIT_UNSTOW)


@dataclass(frozen=True)
class Handle:
    """What stands for a saved value: number ``place`` of those that left; ``of``: in forward, the value."""

    place: int
    of: Node | None = None


def _refuse_reading(known: Known, op: Op, handle: Handle) -> None:
    known.fail("stow", op.node, f"it reads the handle of saved tensor {handle.place}", "what has come back")


READERS[Handle] = _refuse_reading


def read_handles(known: Known, inputs: Iterable[Node]) -> None:
    """Of the inputs of a backward graph, those that are handles."""
    for node in inputs:
        if (left := known.ctx.stowed.get(node.name)) is not None and known.ctx.phase == "backward":
            known.facts[node] = Handle(left.place)
            known.numbers.pop(node, None)


def start(known: Known, op: Op) -> None:
    """Read a stow or an unstow."""
    of, order, place = op.args
    ctx, fact = known.ctx, known.facts.get(of)
    if op.target is STOW:
        if ctx.stows is None or ctx.phase != "forward":
            known.fail("stow", op.node, f"it takes {of.name!r} away", "none: what is saved stays")
        if fact is not None or of not in known.numbers or of in known.memory or of in known.derived:
            known.fail("stow", op.node, f"it takes {of.name!r} away, which is no value of the model's", "one")
        if of != owner(known, of):
            known.fail("stow", op.node, f"{of.name!r} is a view of {owner(known, of).name!r}", "that, all of it")
        if of in known.stowed:
            known.fail("stow", op.node, f"{of.name!r} is taken away before", "once")
        known.stowed[of] = place
        known.leaving.add(of)
        return
    if not isinstance(fact, Handle) or fact.place != place:
        known.fail("stow", op.node, f"{of.name!r} is not the handle of saved tensor {place}", "that")
    if place in known.stowed.values():
        known.fail("stow", op.node, f"saved tensor {place} is brought before", "once")
    known.stowed[of] = place
    wanted = list(ctx.stowed[of.name].order)
    if list(order) != wanted:
        known.fail("stow", op.node, f"its dimensions lie in the order {list(order)}", f"{wanted}, as they left")


def owner(known: Known, node: Node) -> Node:
    """What has made the memory that ``node`` looks at: itself, if it is no view."""
    while (op := known.ops.get(node)) is not None and op.shares_memory() and op.inputs:
        source = op.inputs[0]
        if op.target is operator.getitem and source in known.ops and not known.ops[source].shares_memory():
            break  # one of several results
        node = source
    return node


def wait(known: Known, op: Op, of: Node) -> None:
    """Read the wait for a stow, which yields a handle, or for an unstow, which yields the value."""
    place = op.args[3]
    if op.target is WAIT_STOW:
        known.leaving.discard(of)
        known.facts[op.node] = Handle(place, of)
        return
    known.numbers[op.node] = known.meanings.stowed.get(place, hash(("stowed", place)))


def check_handle(known: Known, value: Node, name: str, handle: Handle) -> None:
    """``value``, a handle, is saved under ``name``."""
    left = known.ctx.stowed.get(name)
    if left is None or handle.of is None or (left.place, left.source) != (handle.place, handle.of.name):
        promised = "nothing that left" if left is None else f"number {left.place}, {left.source!r}"
        known.fail("stow", value, f"it stands for saved tensor {handle.place}", f"what backward looks for: {promised}")
    known.meanings.stowed[handle.place] = known.numbers[handle.of]
    known.saved_handles.add(value)


def refuse_keeping(known: Known, value: object) -> None:
    """What was taken away stays in nobody's hands: ``value`` is an output."""
    if known.ctx.phase == "forward" and isinstance(value, Node) and owner(known, value) in known.stowed:
        known.fail("stow", value, "it leaves the graph with its memory, which was taken away before", "the handle")


def check_stowed(known: Known) -> None:
    """What can be said once all is read: what left is found by backward, and what comes back is read."""
    for op in known.ops.values():
        if op.target is WAIT_STOW and op.node not in known.saved_handles:
            known.fail("stow", op.node, "backward is not given its handle", "an output that is saved")
        if op.target is WAIT_UNSTOW and not op.node.users:
            known.fail("stow", op.node, "nothing reads what it brings", "no unstow")
