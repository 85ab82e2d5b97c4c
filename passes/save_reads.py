"""What reads an input that the graph writes to is not read once more by backward.

::

    forward     n = calls + 1                              forward     n = calls + 1
                y = x * n                                              y = x * n
                calls.copy_(n)                   ─────▶                calls.copy_(n)
    saved       calls                                      saved       n
    backward    n = calls + 1       2, not 1               backward    dx = dy * n
                dx = dy * n

Inductor's partitioner saves what takes the fewest bytes. An input is there anyway, so it saves that and computes again
what follows from it, as if what forward has written were not in it by then. The gradient is silently wrong: of a
counter, a running statistic, a routing bias, wherever the loss depends on what was there before the write
(https://github.com/pytorch/pytorch/pull/197039). So the readers of such inputs are marked to be saved, if anything
behind them is needed.

Runs on the joint graph, before it is cut into forward and backward. Sound because it moves that cut, and nothing else.
Leaves alone what somebody has marked already: what a checkpoint runs again reads what was written in eager PyTorch too.
And views, which would save the memory that is written to: autograd finds that out.
"""

from __future__ import annotations

from torch.fx import GraphModule

from zerofx._torch import OpOverload, must_save, saving_is_decided
from zerofx.passes import edit


def save_reads(gm: GraphModule) -> int:
    """Mark what is to be saved; returns how many nodes were marked."""
    in_backward = edit.behind_tangents(gm.graph)
    writes = {
        node: edit.written_by(node)
        for node in gm.graph.nodes
        if isinstance(node.target, OpOverload) and node not in in_backward
    }
    written = {memory for memories in writes.values() for memory in memories}
    marked = 0
    for placeholder in gm.graph.find_nodes(op="placeholder"):
        views = edit.aliases(placeholder)
        if written.isdisjoint(views):
            continue
        readers = {user: None for view in views for user in view.users if user not in views}
        for node in readers:
            if node in in_backward or node.op != "call_function" or writes.get(node) or saving_is_decided(node):
                continue
            must_save(node)
            marked += 1
    return marked
