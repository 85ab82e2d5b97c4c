"""Each group is updated inside of backward, as soon as its gradient is there; its replicas may follow there, too.

::

    wait for C's reduction                    wait for C's reduction
    c = sum of its parts / M                  c = sum of its parts / M
    reduce B                                  reduce B
    use A                          ─────▶     zerofx.step(c, "C")              while B's gradient travels
    wait for B's reduction                    zerofx.refresh(…, "C")           stages 1 and 2
    b = sum of its parts / M                  use A
    return dx, None, …, c, b                  wait for B's reduction
                                              b = sum of its parts / M
                                              zerofx.step(b, "B")
                                              return dx, None, …, ∅, ∅

The update stands after the start of the next reduction, so that the link does not idle meanwhile, and after the last
reader of the weights that it changes: the group's gather in stage 3, whatever reads the replica (of which the rank's
shard is a part) in stages 1 and 2. Its output is empty: a gradient is gone when it has been used, and never all of
them are there at once.

**Which replicas are refreshed here.** The rest are when the next forward begins, in the order in which it needs them.
Arithmetic of a backward takes about twice the time of a forward's. The link is used best where both have the same
ratio of bytes to arithmetic: with W bytes of weights to gather and R bytes of gradients to reduce, backward is
to take x of the gathers such that ``(R + x) / 2 = W - x``, or ``x = (2 W - R) / 3``. A third, where both have one
dtype. Those go first that are updated first, which are those that forward needs last. It follows from bytes alone, so
it is the same on every rank.

Sound because the step of an elementwise optimizer on one group reads nothing of another, and because nothing after it
reads the weights that it writes. (Clipping by the norm of all gradients is no such step, and is refused by
`zerofx.step_in_backward`.) The idea is fused backward (Lv et al. 2023, "Full Parameter Fine-tuning for Large Language
Models with Limited Resources"), for shards.

Requires ``group``; runs after ``discard``. Backward graphs with ``ctx.steps`` only.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node

from zerofx.model.layout import GroupLayout
from zerofx.passes import edit
from zerofx.passes.context import Context, Tag
from zerofx.passes.kinds import NodeKind


def step(gm: GraphModule, ctx: Context) -> int:
    """Insert the updates of all groups whose gradients the graph returns; returns how many nodes were inserted."""
    if not ctx.steps or not ctx.found.reductions:
        return 0
    graph, outputs, edits = gm.graph, edit.output_values(gm.graph), 0
    first = len(outputs) - len(ctx.found.reductions)
    ahead = _refreshed_here(ctx, outputs[first:])
    order, last_reads = edit.positions(graph), _last_reads(graph)
    starts = sorted(edit.tagged(graph, "reduce_scatter"), key=order.__getitem__)
    for i, reduction in enumerate(ctx.found.reductions, start=first):
        gradient, name = outputs[i], reduction.layout.name
        following = next((s for s in starts if order[s] > order[gradient]), gradient)
        after = max(gradient, following, last_reads.get(name, gradient), key=order.__getitem__)
        with graph.inserting_after(after):
            args, tag = (gradient, name), Tag("step", name)
            node = edit.insert(graph, torch.ops.zerofx.step.default, args, tag=tag, near=gradient)
        edits += 1
        if reduction.layout in ahead:
            with graph.inserting_after(node):
                args, tag = (node, name), Tag("ahead", name)
                node = edit.insert(graph, torch.ops.zerofx.refresh.default, args, tag=tag, near=gradient)
            edits += 1
        outputs[i] = node
    edit.set_output_values(graph, outputs)
    return edit.finish(gm, edits)


def _refreshed_here(ctx: Context, gradients: list[Node]) -> set[GroupLayout]:
    """Those whose refresh starts in this backward: the first to be updated, up to the share of bytes above."""
    if ctx.stage == 3:
        return set()
    layouts = [reduction.layout for reduction in ctx.found.reductions if reduction.layout.world_size > 1]
    weights = {layout: layout.numel * layout.weight_dtype.itemsize for layout in layouts}
    reduced = sum(layout.numel * (layout.gradient_dtype or layout.dtype).itemsize for layout in layouts)
    left, chosen = (2 * sum(weights.values()) - reduced) / 3, set()
    for layout in layouts:
        left -= weights[layout]
        if left < 0:
            break
        chosen.add(layout)
    return chosen


def _last_reads(graph: Graph) -> dict[str, Node]:
    """Group -> the last node that reads the memory of its shard or replica, itself or through views."""
    order = edit.positions(graph)
    last: dict[str, Node] = {}
    for node in edit.tagged(graph, "shard", "replica", "refresh", "wait", "gathered"):
        readers = [user for alias in edit.aliases(node) for user in alias.users if user.op != "output"]
        latest = max([node, *readers], key=order.__getitem__)
        name = node.meta["zerofx"].group
        last[name] = max(latest, last.get(name, latest), key=order.__getitem__)
    return last


NODE_KINDS = {
    "step": NodeKind(
        "the update of a group in its backward",
        verb="update",
        stands="after the start of the next reduction, and after the last reader of the weights that it changes",
    ),
    "ahead": NodeKind(
        "the start of its replicas' refresh after that",
        verb="renew",
        stands="right after the group's update, which forward needs last: of the bytes that forward gathers, "
        "backward's reductions leave room for these (`step`)",
    ),
}
