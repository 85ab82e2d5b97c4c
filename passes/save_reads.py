"""What reads an input that the graph writes to is not read once more by backward.

::

    forward     n = calls + 1                              forward     n = calls + 1
                y = x * n                                              y = x * n
                calls.copy_(n)                   ─────▶                calls.copy_(n)
    saved       calls                                      saved       n
    backward    n = calls + 1       2, not 1               backward    dx = dy * n
                dx = dy * n

    forward     y = z @ queue.t()                          forward     old = queue.clone()
                queue.copy_(z)                                         y = z @ old.t()
                                                 ─────▶                queue.copy_(z)
    saved       queue                                      saved       old
    backward    dz = dy @ queue      z, by then            backward    dz = dy @ old

Inductor's partitioner saves what takes the fewest bytes. An input is there anyway, so it saves that and computes again
what follows from it, as if what forward has written were not in it by then. The gradient is silently wrong: of a
counter, a running statistic, a routing bias, a queue of keys, wherever the loss depends on what was there before the
write (https://github.com/pytorch/pytorch/pull/197039). So the readers of such inputs are marked to be saved, if
anything after them is needed.

Where backward reads the input itself, nothing but a copy can be saved. The model had made one, or autograd would have
refused the write; Inductor drops copies before the graph comes here. So one is made again. Forward reads it too, for
the partitioner saves what forward's results are made of.

Runs on the joint graph, before it is cut into forward and backward. Sound because it moves that cut, and copies.
Leaves alone what somebody has marked already: what a checkpoint runs again reads what was written in eager PyTorch too.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import GraphModule, Node

from zerofx._torch import OpOverload, must_save, saving_is_decided, written_behind
from zerofx.passes import edit


def save_reads(gm: GraphModule) -> int:
    """Mark what is to be saved, and copy what has to be; returns how many nodes were marked."""
    graph = gm.graph
    in_backward = edit.behind_tangents(graph)
    writes = {
        node: edit.written_by(node)
        for node in graph.nodes
        if isinstance(node.target, OpOverload) and node not in in_backward
    }
    written = {*written_behind(graph), *(memory for memories in writes.values() for memory in memories)}
    results = [x for x in edit.output_values(graph) if isinstance(x, Node) and x not in in_backward]
    late = _made_of(in_backward) - _made_of(results) if written else set()
    marked = 0
    for placeholder in graph.find_nodes(op="placeholder"):
        views = edit.aliases(placeholder)
        if written.isdisjoint(views):
            continue
        readers = {user: None for view in views for user in view.users if user not in views}
        reads = [n for n in readers if n.op == "call_function" and not writes.get(n) and not saving_is_decided(n)]
        theirs = any(map(saving_is_decided, [*views, *readers]))
        if not theirs and written.isdisjoint(views[1:]) and not late.isdisjoint(reads):
            reads = [_copy(placeholder)]
        for node in reads:
            if node not in in_backward:
                must_save(node)
                marked += 1
    return marked


def _made_of(nodes: Iterable[Node]) -> set[Node]:
    """``nodes``, and what they are computed from."""
    todo, found = list(nodes), set()
    while todo:
        if (node := todo.pop()) not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found


def _copy(memory: Node) -> Node:
    """A copy of ``memory``, or of the one view that all its readers read, in its place."""
    while len(readers := _readers(memory)) == 1 and _is_part(readers[0], memory):
        (memory,) = readers
    with memory.graph.inserting_after(edit.after_inputs(memory)):
        copy = memory.graph.call_function(torch.ops.aten.clone.default, (memory,))
    copy.meta |= {key: memory.meta[key] for key in ("stack_trace", "nn_module_stack") if key in memory.meta}
    copy.meta["val"] = memory.meta["val"].clone()
    for reader in readers:
        reader.replace_input_with(memory, copy)
    return copy


def _readers(memory: Node) -> list[Node]:
    """Who reads it, but for who returns it or writes to it, and views that nobody reads."""
    return [
        user
        for user in memory.users
        if user.op == "call_function"
        and not (isinstance(user.target, OpOverload) and memory in edit.written_by(user))
        and (user.users or not edit.may_alias(user))
    ]


def _is_part(node: Node, of: Node) -> bool:
    """Whether it is a view, and not of more elements."""
    if not (isinstance(node.target, OpOverload) and edit.may_alias(node) and edit.is_view_or_cast(node)):
        return False
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and edit.hinted_nbytes(value) <= edit.hinted_nbytes(of.meta["val"])
