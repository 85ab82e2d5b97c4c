"""Weights that backward itself updates: the rule "step" of `zerofx.passes.verify`."""

from __future__ import annotations

from itertools import pairwise

from torch.fx import Node

from zerofx.model.layout import GroupLayout
from zerofx.passes.proof.facts import REFRESH, STEP
from zerofx.passes.proof.known import Known
from zerofx.passes.proof.live import Buffer, loose_reader
from zerofx.passes.proof.meaning import Op
from zerofx.passes.proof.rules import Rules
from zerofx.passes.travel import EXCHANGES, SCATTERS


def _read_update(known: Known, op: Op, fact: object) -> None:
    known.updates.append(op)
    known.numbers[op.node] = hash(("update", op.node.name))


def _gradient(reader: Known, value: Node, layout: GroupLayout, place: int) -> Node | None:
    """What the extra output ``value`` of a graph that updates its groups updates this one with."""
    if not reader.ctx.steps:
        return None
    op = reader.ops.get(value)
    if op is not None and op.target is REFRESH:
        op = reader.ops.get(op.args[0])
    if op is None or op.target is not STEP or op.args[1] != layout.name:
        reader.fail("step", value, f"it is no update of {layout.name!r}", "the gradient used up, and nothing returned")
    return op.args[0]


def _check(reader: Known) -> None:
    """The rule "step": who is updated, how often, and after what."""
    ctx, updates = reader.ctx, reader.updates
    if updates and not ctx.steps:
        reader.fail("step", updates[0].node, "it updates weights", "gradients, which the caller updates with")
    seen: set[tuple[object, str]] = set()
    for op in updates:
        name = op.args[1]
        if (op.target, name) in seen:
            reader.fail("step", op.node, f"{name!r} is updated, or refreshed, before", "once")
        seen.add((op.target, name))
    outputs = set(reader.gm.graph.output_node().all_input_nodes)
    for op in updates:
        name, node = op.args[1], op.node
        if op.target is REFRESH:
            source = reader.ops.get(op.args[0])
            if source is None or source.target is not STEP or source.args[1] != name:
                reader.fail("step", node, f"it refreshes {name!r} after something else", "after its update")
            if ctx.stage == 3 or (ctx.found.shards and _world_size(reader) == 1):
                reader.fail("step", node, f"{name!r} has no replicas", "no refresh")
        following = reader.ops[next(iter(node.users))].target if len(node.users) == 1 and node not in outputs else None
        if node not in outputs and following is not REFRESH:
            reader.fail("step", node, "its output is dropped, and it with it", "an output of the graph")
    for op in updates:
        if op.target is STEP:
            _check_behind(reader, op)
    if ctx.executor == "inductor":
        _check_turns(reader)


def _world_size(reader: Known) -> int:
    return reader.ctx.found.shards[0].world_size


def _check_behind(reader: Known, op: Op) -> None:
    """Nothing reads what the update writes, at its place in the graph or later."""
    name, place = op.args[1], reader.order[op.node]
    for root in reader.homes.get(name, ()):
        memory = Buffer(root, root, name, 0, last=reader.order[root])
        views, todo = {root}, [root]
        while todo:
            view = todo.pop()
            for user in view.users:
                if user not in reader.ops or view not in reader.ops[user].inputs:
                    continue
                memory.readers.append(user)
                if (user in reader.waits.get(root, ()) or reader.ops[user].shares_memory()) and user not in views:
                    views.add(user)
                    todo.append(user)
        ends = [wait for start in memory.readers for wait in reader.waits.get(start, ())]
        late = next((n for n in [*memory.readers, *ends] if reader.order[n] > place), None)
        if late is not None:
            reader.fail("step", op.node, f"{late.name!r} reads the weights that it has changed", "all readers first")
        if reader.ctx.executor == "inductor":
            loose = loose_reader(memory, reader.ops, place, reader.order, {*op.after, *op.inputs})
            if loose is not None:
                reader.fail("step", op.node, f"nothing keeps it after {loose.name!r}", "a dependence on all readers")


def _check_turns(reader: Known) -> None:
    """Updates, refreshes and reductions take turns as the graph reads, so that collectives do on every rank."""
    if not reader.updates:
        return
    turns = [op for op in reader.ops.values() if op.target in (STEP, REFRESH) or _is_reduction(reader, op)]
    for before, op in pairwise(turns):
        if before.node not in (*op.after, *op.inputs):
            reader.fail("step", op.node, f"nothing keeps it after {before.node.name!r}", "a dependence on it")


def _is_reduction(reader: Known, op: Op) -> bool:
    return op.target in (*SCATTERS, *EXCHANGES) and op.node in reader.waits and op.node not in reader.apart


RULES = Rules(operators={STEP: _read_update, REFRESH: _read_update}, gradients=_gradient, finished=_check)
