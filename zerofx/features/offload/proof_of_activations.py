"""What forward saves, elsewhere until backward: the rule "activation" of `zerofx.passes.verify`.

::

    forward     value ── offload_activation ── wait      a value, Ticket, Handle, which is what is saved
    backward    input ── reload_activation ── wait       Handle, Ticket, and the value
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch.fx import Node

from zerofx.features.offload.facts import offload_of, offloaded
from zerofx.features.offload.operators import (
    OFFLOAD_ACTIVATION,
    RELOAD_ACTIVATION,
    WAIT_OFFLOAD_ACTIVATION,
    WAIT_RELOAD_ACTIVATION,
)
from zerofx.passes.proof.known import Known
from zerofx.passes.proof.meaning import Op

STARTS, WAITS = (OFFLOAD_ACTIVATION, RELOAD_ACTIVATION), (WAIT_OFFLOAD_ACTIVATION, WAIT_RELOAD_ACTIVATION)


@dataclass
class Found:
    """What was found out of a graph.

    Attributes:
        waits: of each start, the waits for it.
        under_way: how many starts are not waited for yet, by rule.
        reloaded: the shards that come to the device.
        leaving: what is leaving the device, and what shares its memory.
        handles: what leaves for backward, or the handles of what has come back, and their places.
        saved: the handles that backward is given.
    """

    waits: dict[Node, list[Node]] = field(default_factory=dict)
    under_way: Counter[str] = field(default_factory=Counter)
    reloaded: set[Node] = field(default_factory=set)
    leaving: set[Node] = field(default_factory=set)
    handles: dict[Node, int] = field(default_factory=dict)
    saved: set[Node] = field(default_factory=set)


@dataclass(frozen=True)
class Handle:
    """What stands for a saved value: number ``place`` of those that left; ``of``: in forward, the value."""

    place: int
    of: Node | None = None


def refuse_reading(known: Known, op: Op, handle: Handle) -> None:
    known.fail("activation", op.node, f"it reads the handle of saved tensor {handle.place}", "what has come back")


def read_handles(known: Known, inputs: Iterable[Node]) -> None:
    """Of the inputs of a backward graph, those that are handles."""
    for node in inputs:
        if (left := offloaded(known.ctx).get(node.name)) is not None and known.ctx.phase == "backward":
            known.facts[node] = Handle(left.place)
            known.numbers.pop(node, None)


def start(known: Known, op: Op) -> None:
    """Read the start of an offload or of a reload."""
    of, order, place = op.args
    found = known.record(Found)
    ctx, fact = known.ctx, known.facts.get(of)
    if op.target is OFFLOAD_ACTIVATION:
        if offload_of(ctx).activations is None or ctx.phase != "forward":
            known.fail("activation", op.node, f"it takes {of.name!r} away", "none: what is saved stays")
        if fact is not None or of not in known.numbers or of in known.memory or of in known.derived:
            known.fail("activation", op.node, f"it takes {of.name!r} away, which is no value of the model's", "one")
        if of != owner(known, of):
            known.fail("activation", op.node, f"{of.name!r} is a view of {owner(known, of).name!r}", "that, all of it")
        if of in found.handles:
            known.fail("activation", op.node, f"{of.name!r} is taken away before", "once")
        found.handles[of] = place
        found.leaving.add(of)
        return
    if not isinstance(fact, Handle) or fact.place != place:
        known.fail("activation", op.node, f"{of.name!r} is not the handle of saved tensor {place}", "that")
    if place in found.handles.values():
        known.fail("activation", op.node, f"saved tensor {place} is brought before", "once")
    found.handles[of] = place
    wanted = list(offloaded(ctx)[of.name].order)
    if list(order) != wanted:
        known.fail("activation", op.node, f"its dimensions lie in the order {list(order)}", f"{wanted}, as they left")


def owner(known: Known, node: Node) -> Node:
    """What has made the memory that ``node`` looks at: itself, if it is no view."""
    while (op := known.ops.get(node)) is not None and op.shares_memory() and op.inputs:
        source = op.inputs[0]
        if op.target is operator.getitem and source in known.ops and not known.ops[source].shares_memory():
            break  # one of several results
        node = source
    return node


def wait(known: Known, op: Op, of: Node) -> None:
    """Read the wait for an offload, which yields a handle, or for a reload, which yields the value."""
    place = op.args[3]
    if op.target is WAIT_OFFLOAD_ACTIVATION:
        known.record(Found).leaving.discard(of)
        known.facts[op.node] = Handle(place, of)
        return
    known.numbers[op.node] = known.meanings.offloaded.get(place, hash(("offloaded", place)))


def check_handle(known: Known, value: Node, name: str, handle: Handle) -> None:
    """``value``, a handle, is saved under ``name``."""
    left = offloaded(known.ctx).get(name)
    if left is None or handle.of is None or (left.place, left.source) != (handle.place, handle.of.name):
        promised = "nothing that left" if left is None else f"number {left.place}, {left.source!r}"
        known.fail(
            "activation", value, f"it stands for saved tensor {handle.place}", f"what backward looks for: {promised}"
        )
    known.meanings.offloaded[handle.place] = known.numbers[handle.of]
    known.record(Found).saved.add(value)


def refuse_keeping(known: Known, value: object) -> None:
    """What was taken away stays in nobody's hands: ``value`` is an output."""
    if known.ctx.phase == "forward" and isinstance(value, Node) and owner(known, value) in known.record(Found).handles:
        known.fail(
            "activation", value, "it leaves the graph with its memory, which was taken away before", "the handle"
        )


def check_activations(known: Known) -> None:
    """What can be said once all is read: what left is found by backward, and what comes back is read."""
    for op in known.ops.values():
        if op.target is WAIT_OFFLOAD_ACTIVATION and op.node not in known.record(Found).saved:
            known.fail("activation", op.node, "backward is not given its handle", "an output that is saved")
        if op.target is WAIT_RELOAD_ACTIVATION and not op.node.users:
            known.fail("activation", op.node, "nothing reads what it brings", "no reload")
