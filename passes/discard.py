"""A discard node after the last use of each gathered buffer: where its memory is given back.

::

    full = wait_tensor(start)               full = wait_tensor(start)
    w = as_strided(full, …)                 w = as_strided(full, …)
    t = permute(w, [1, 0])        ─────▶    t = permute(w, [1, 0])
    y = mm(x, t)                            y = mm(x, t)
    z = relu(y)                             zerofx.discard(full)
                                            z = relu(y)

The last use is that of the buffer or of any view of it, by the operators' schemas. A buffer of which a view leaves
the graph (the model returns a weight) is not discarded: who holds the view holds the memory.

A buffer that came from forward (`keep`) belongs to what autograd saved: it is marked by ``zerofx.release``, which
frees nothing by itself; the memory is free once nobody holds it. So is a shard that was fetched (`reload`): what sends
it may hold it a little longer.

In the eager executor the node frees the storage. Inductor frees a buffer after its last reader by itself; `lower`
takes the marks out and the generated code has ``del`` in their place.

Requires ``group``; runs after ``prefetch``, which moves nodes.
"""

from __future__ import annotations

from torch.fx import GraphModule

from zerofx.passes import edit
from zerofx.passes.context import Context, Tag
from zerofx.passes.ops import discard as discard_storage
from zerofx.passes.ops import release


def discard(gm: GraphModule, ctx: Context) -> int:
    """Insert the discard nodes; returns how many."""
    graph, order, edits = gm.graph, edit.positions(gm.graph), 0
    for buffer in edit.tagged(graph, "wait", "gathered", "wait_reload"):
        last = edit.last_use(buffer, order)
        if last is None or last.op == "placeholder":
            continue
        with graph.inserting_after(last):
            end = discard_storage if buffer.meta["zerofx"].kind == "wait" else release
            node = graph.call_function(end, (buffer,))
        node.meta["zerofx"] = Tag("discard", buffer.meta["zerofx"].group)
        node.meta["val"] = None
        if "stack_trace" in last.meta:
            node.meta["stack_trace"] = last.meta["stack_trace"]
        edits += 1
    return edit.finish(gm, edits)
