"""What backward would recompute with weights whose turn has not come is saved instead.

::

    forward     x1 = x0 + tanh(h0 * g0)               forward     x1 = x0 + tanh(h0 * g0)
                x2 = x1 + tanh(h1 * g1)                           x2 = x1 + tanh(h1 * g1)
                x3 = x2 + tanh(h2 * g2)    ─────▶                 x3 = x2 + tanh(h2 * g2)
    saved       x0, h0, h1, h2                        saved       x0, h0, x2, h1, h2
    backward    gather g0, g1, g2                     backward    gather g2
                x2 = x0 + tanh(…g0) + tanh(…g1)                   block 2's gradients, from x2
                block 2's gradients, from x2                      gather g1; and so on

Groups take turns in backward: a group's turn begins where the first of its weights is read for a gradient. That follows
from the module. What a partitioner recomputes does not: it weighs bytes and kernels, and with a batch of one row it
recomputes through whole blocks, for a product of one row is no product to Inductor. Then a group is gathered ahead of
others whose turn is earlier, on the rank whose batch has one row and on no other, and stays until its own turn. So
ranks would gather in different orders.

A weight may be read for recomputation one turn ahead: after a normalisation a layer ends, and the next one's gradients
begin with its output. `prefetch` has that group on its way by then (`turns`). What reads further ahead is saved, where
a gradient reads of it.

Runs on the joint graph, when it is known what forward saves. Sound because it moves the cut between forward and
backward, and nothing else. Leaves alone what somebody has marked: who wraps layers in a checkpoint wants them
recomputed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import torch
from torch.fx import Graph, Node

from zerofx._torch import OpOverload, saving_is_decided
from zerofx.passes import edit
from zerofx.passes.context import ParameterRef


def save_ahead(
    graph: Graph, saved: Sequence[Node], parameters: Mapping[str, ParameterRef], ahead: int = 1
) -> list[Node]:
    """What must be saved beside ``saved``. ``parameters``: by the placeholder's name; ``ahead``: turns, see above."""
    order, late = edit.positions(graph), edit.behind_tangents(graph)
    group_of = _weights(graph, parameters)
    begins: dict[str, int] = {}
    for node in late:
        for name in {group_of[x] for x in node.all_input_nodes if x in group_of}:
            begins[name] = min(order[node], begins.get(name, order[node]))
    opens = sorted(begins.values())
    turn = {name: bisect_right(opens, place) for name, place in begins.items()}
    there, more = {*saved, *graph.find_nodes(op="placeholder"), *late}, []
    reach: dict[Node, int] = {}

    def reached(node: Node) -> int:
        """The last turn whose weights are read where ``node`` is recomputed; 0: of none."""
        todo = [node]
        while todo:
            missing = [x for x in todo[-1].all_input_nodes if x not in there and x not in group_of and x not in reach]
            if todo[-1] in reach:
                todo.pop()
            elif missing:
                todo += missing
            else:
                now = todo.pop()
                reads = [turn.get(group_of[x], 0) if x in group_of else reach.get(x, 0) for x in now.all_input_nodes]
                reach[now] = max(reads, default=0)
        return reach.get(node, 0)

    for node in sorted(late, key=order.__getitem__):
        allowed = bisect_right(opens, order[node]) + ahead
        for read in node.all_input_nodes:
            if read not in there and read not in group_of and reached(read) > allowed:
                value = _in_memory(read, there)
                if not saving_is_decided(value) and isinstance(value.meta.get("val"), torch.Tensor):
                    there.add(value)
                    more.append(value)
                    reach.clear()
    return more


def _weights(graph: Graph, parameters: Mapping[str, ParameterRef]) -> dict[Node, str]:
    """Each parameter, and each view or cast of one, and its group."""
    found: dict[Node, str] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in parameters:
            found[node] = parameters[node.name].layout.name
        elif edit.is_view_or_cast(node) and (source := edit.sources(node)[0]) in found:
            found[node] = found[source]
    return found


def _in_memory(node: Node, there: set[Node]) -> Node:
    """The value that ``node`` looks at: a view of it need not be saved."""
    while isinstance(node.target, OpOverload) and edit.may_alias(node) and len(edit.sources(node)) == 1:
        (source,) = edit.sources(node)
        if source in there:
            break
        node = source
    return node
