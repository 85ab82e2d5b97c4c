"""What a user's passes inserted after ours: the rule "own" of `zerofx.passes.verify`.

Their nodes are told by their tags, and no tag is trusted: nothing else may read such a node. So what the model and
zerofx compute is checked as if they were not there, and a node of ours under a false tag is missed by the other rules.
"""

from __future__ import annotations

from typing import Any

from torch import ops
from torch.fx import Node

from zerofx.passes.proof.facts import REFRESH, STEP, Started
from zerofx.passes.proof.known import Known
from zerofx.passes.proof.meaning import Op
from zerofx.passes.travel import communicates

_WAIT = ops._c10d_functional.wait_tensor.default


def read_own(known: Known, op: Op) -> None:
    """Read a node of a user's pass: it may read what is there, and write to what such passes made."""
    node, inputs = op.node, op.inputs
    known.ops[node] = op
    known.own.add(node)
    for x in inputs:
        if isinstance(known.facts.get(x), Started) or (known.waits.get(x) == [] and op.target is not _WAIT):
            known.fail("wait", node, f"it reads {x.name!r}, which may be under way", "a wait before it")
        if x in known.travelling:
            known.fail("write", node, f"it reads {x.name!r}, which is being sent", "a copy, made before it is sent")
        for buffer in known.memory.get(x, ()):
            buffer.read(node, known.order[node])
    for target in op.written():
        if target not in known.fresh:
            known.fail("own", node, f"it writes to {target.name!r}, which is not its own", "a copy: aten.clone")
    if op.target is _WAIT:
        _read_wait(known, op)
    elif communicates(op.target):
        _read_start(known, op)
    elif op.target in (STEP, REFRESH):
        known.fail("own", node, "it updates weights", "no update: that is for the optimizer")
    _note_memory(known, op, inputs)


def _note_memory(known: Known, op: Op, inputs: list[Node]) -> None:
    node = op.node
    if not op.shares_memory() or (inputs and all(x in known.fresh for x in inputs)):
        known.fresh.add(node)
        return
    if memory := [b for x in inputs for b in known.memory.get(x, ())]:
        known.memory[node] = memory
    if start := next((known.weights[x] for x in inputs if x in known.weights), None):
        known.weights[node] = start


def _read_wait(known: Known, op: Op) -> None:
    (start,) = op.inputs
    if start not in known.own or start not in known.waits:
        known.fail("wait", op.node, f"it waits for {start.name!r}, which its passes did not start", "one of theirs")
    if known.waits[start]:
        known.fail("wait", op.node, f"{start.name!r} was waited for before", "exactly one wait")
    known.waits[start].append(op.node)


def _read_start(known: Known, op: Op) -> None:
    ctx, node = known.ctx, op.node
    known.waits[node] = []
    names = [x for x in op.args if isinstance(x, str)]
    groups = {ctx.process_group, ctx.reduce_group}
    if not names or names[-1] not in groups:
        found = f"it runs in {names[-1]!r}" if names else "it does not say in which process group it runs"
        known.fail("group", node, found, "ctx.process_group or ctx.reduce_group, as its last text")
    if op.target.namespace == "_c10d_functional":
        sizes = [x for argument, x in zip(op.target._schema.arguments, op.args) if argument.name == "group_size"]
        if sizes and sizes != [ctx.world_size]:
            known.fail("group", node, f"it runs over {sizes[0]} ranks", f"ctx.world_size, {ctx.world_size}")
    for x in op.inputs:
        if type(x.meta["val"].numel()) is not int:
            known.fail("order", node, f"it moves {x.meta['val'].numel()} elements, which depends on data", "a number")
        if x not in known.fresh and x.op != "placeholder":
            found = f"it sends {x.name!r}, which may be gone before it was sent"
            known.fail("own", node, found, "an input of the graph, or a copy: aten.clone")


def check_own(known: Known, published: list[Any]) -> None:
    """What can be said once all is read: what is published, what is dropped, and the order of collectives."""
    for name, value in zip(known.ctx.found.published, published):
        if not isinstance(value, Node) or value not in known.fresh or known.waits.get(value) == []:
            node = value if isinstance(value, Node) else known.gm.graph.output_node()
            known.fail("own", node, f"it is published as {name!r}, and belongs to others", "a copy: aten.clone")
    needed, todo = set[Node](), [x for x in published if isinstance(x, Node)]
    while todo:
        node = todo.pop()
        if node not in needed:
            needed.add(node)
            todo += known.ops[node].inputs if node in known.own and node in known.ops else []
    for node in known.own:
        if node in known.ops and communicates(known.ops[node].target) and node not in needed:
            known.fail("own", node, "nothing that is published depends on it: it may be dropped", "edit.publish")
    if known.ctx.executor == "inductor":
        _check_turns(known)
    _check_gradients(known)


def _check_turns(known: Known) -> None:
    """A collective of a user's pass starts where it stands among all others: so it does on every rank."""
    previous: Node | None = None
    for node, op in known.ops.items():
        if not communicates(op.target) and op.target is not REFRESH:
            continue
        mine = previous is not None and (node in known.own or previous in known.own)
        if mine and previous not in (*op.after, *op.inputs):
            known.fail("order", node, f"nothing keeps it after {previous.name!r}", "a dependence on it")  # type: ignore[union-attr]
        previous = node


def _check_gradients(known: Known) -> None:
    """What reads a gradient runs before the group is updated by it: an optimizer may write to it."""
    for op in known.updates:
        for reader in op.args[0].users if op.target is STEP else ():
            if reader not in known.own:
                continue
            late = known.order[reader] > known.order[op.node]
            if late or (known.ctx.executor == "inductor" and reader not in op.after):
                known.fail("step", op.node, f"{reader.name!r} may read the gradient after it", "all readers first")


def is_own(known: Known, node: Node) -> bool:
    """Whether a node's tag is that of a user's pass."""
    return "zerofx" in node.meta and node.meta["zerofx"].kind in known.ctx.own_kinds


def refuse_reading_own(known: Known, op: Op) -> None:
    """Nothing but a user's pass may read what one made."""
    if known.own and (read := next((x for x in op.inputs if x in known.own), None)) is not None:
        found = f"it reads {read.name!r}, which the pass {read.meta['zerofx'].kind!r} inserted"
        known.fail("own", op.node, found, "no change of what the model computes, but by a pass before all of ours")
