"""Each gradient is reduced right after its producer; the graph returns shards of gradients instead of gradients.

::

    dw = mm(dy_t, x)                              dw = mm(dy_t, x)
    db = sum(dy, [0])                             rw = zerofx.reduce_grad(dw, 0, S, M, pg)
    return dx, dw, db                     ─────▶  db = sum(dy, [0])
                                                  rb = zerofx.reduce_grad(db, 128, S, M, pg)
                                                  return dx, None, None, rw, rb

The gradient outputs become None because autograd would accumulate them into the parameters' full-size ``.grad``;
the caller adds the extra outputs to sharded gradients instead. Each is a flat shard of its group (``S`` elements),
zero outside of its parameter, so that the sum of a group's extra outputs is the group's gradient shard.

Sound because reduction is linear and a gradient is final where it is produced: AOTAutograd's backward has already
summed over a parameter's uses.

Provides ``ctx.reductions``. Backward graphs only.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from zerofx.passes import edit
from zerofx.passes.context import Context, Reduction, Tag


def reduce(gm: GraphModule, ctx: Context) -> int:
    """Insert one reduce_grad node per parameter gradient; returns how many."""
    graph = gm.graph
    outputs, extra = edit.output_values(graph), []
    for i, ref in sorted(ctx.gradients.items()):
        grad, layout = outputs[i], ref.layout
        if not isinstance(grad, Node):
            continue
        after = grad if grad.op != "placeholder" else edit.last_placeholder(graph)
        with graph.inserting_after(after):
            args = (grad, ref.slot.offset, layout.shard_numel, layout.world_size, ctx.process_group)
            tag = Tag("reduce_grad", layout.name)
            extra.append(edit.insert(graph, torch.ops.zerofx.reduce_grad.default, args, tag=tag, near=grad))
        outputs[i] = None
        ctx.reductions.append(Reduction(layout, (ref.slot,)))
    edit.set_output_values(graph, outputs + extra)
    return edit.finish(gm, len(extra))
