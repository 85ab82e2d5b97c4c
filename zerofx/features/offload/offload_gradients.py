"""Gradients that live elsewhere leave the device as soon as they are reduced; their memory is free when they have left.

::

    wait for C's reduction                        wait for C's reduction
    c = sum of its parts / M                      c = sum of its parts / M
    use B                                         offload c                while B computes
    wait for B's reduction                        use B
    b = sum of its parts / M      ─────▶          wait for B's reduction
    use A                                         b = sum of its parts / M
    wait for A's reduction                        offload b
    a = sum of its parts / M                      use A
    return dx, None, …, c, b, a                   wait for A's reduction
                                                  a = sum of its parts / M
                                                  wait_offload(c)
                                                  offload a
                                                  wait_offload(b)
                                                  wait_offload(a)
                                                  return dx, None, …, ∅, ∅, ∅

Two are on their way at most: the one before the last is waited for before the next. The wait reads the gradient,
so nobody is given its memory before. The graph returns nothing in its place: who runs the graph has been handed the
gradient where it lives.

What `zerofx.no_sync` keeps back is not reduced, whole, and stays on the device. In `zerofx.step_in_backward` a gradient
leaves inside of the update, and there is nothing to do here.

Sound because a copy changes nothing: what left is what the graph returned.

Groups of `OffloadFacts.gradients`; backward graphs only. Requires ``group``; runs after what makes gradients.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from zerofx.features.offload.facts import offload_of
from zerofx.features.offload.operators import MAX_IN_FLIGHT, OFFLOAD, WAIT_OFFLOAD
from zerofx.passes import edit
from zerofx.passes.context import Context, Tag
from zerofx.passes.kinds import NodeKind


def offload_gradients(gm: GraphModule, ctx: Context) -> int:
    """Insert an offload and a wait for each gradient that is to leave; returns how many nodes were inserted."""
    if ctx.sync == "keep" or ctx.steps or not ctx.found.reductions:
        return 0
    graph, order, outputs = gm.graph, edit.positions(gm.graph), edit.output_values(gm.graph)
    first = len(outputs) - len(ctx.found.reductions)
    leaving = [i for i, r in enumerate(ctx.found.reductions) if r.layout.name in offload_of(ctx).gradients]
    leaving.sort(key=lambda i: order[outputs[first + i]])
    starts: list[tuple[Node, int]] = []

    def wait(before: Node, start: Node, i: int) -> None:
        gradient, tag = start.args[0], Tag("wait_offload", start.meta["zerofx"].group)
        with graph.inserting_before(before):
            args = (start, gradient, tag.group, i)
            outputs[first + i] = edit.insert(graph, WAIT_OFFLOAD, args, tag=tag, near=start)

    for i in leaving:
        gradient, name = outputs[first + i], ctx.found.reductions[i].layout.name
        with graph.inserting_after(edit.after_inputs(gradient)):
            start = edit.insert(graph, OFFLOAD, (gradient, name, i), tag=Tag("offload", name), near=gradient)
        starts.append((start, i))
        if len(starts) > MAX_IN_FLIGHT:
            wait(start, *starts[-1 - MAX_IN_FLIGHT])
    for start, i in starts[-MAX_IN_FLIGHT:]:
        wait(graph.output_node(), start, i)
    edit.set_output_values(graph, outputs)
    return edit.finish(gm, 2 * len(starts))


NODE_KINDS = {
    "offload": NodeKind(
        "the start of the copy of a gradient away from the device",
        sized=True,
        about="takes",
        transfer=True,
        verb="offload",
        of=0,
        total="gradients leave the device:",
        counts_as="gradients",
        stands="right after the gradient: two are on their way at most",
    ),
    "wait_offload": NodeKind(
        "the wait until it has left",
        about="takes",
        transfer=True,
        verb="left",
        counts_as="gradients",
        stands="before the offload after the next, or at the end",
    ),
}
