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

The gradient is reduced in its layout's ``gradient_dtype``, if there is one; where backward computed it in that dtype
and widened it afterwards, the cast is left out. The other ways of `zerofx.no_sync` (``ctx.sync``)::

    "keep"     return dx, None, None, dw, db            gradients leave whole; the caller adds them up
    "merge"    dw = add(dw, kept_dw)                    what was kept comes back as inputs, and is reduced with
               rw = zerofx.reduce_grad(dw, …)           the last one

A gradient whose sizes are symbols is copied into its parameter's shape first: the columns of a `Linear` after
``flatten`` were compared with ``16 * h * w``.

Sound because reduction is linear and a gradient is final where it is produced: AOTAutograd's backward has already
summed over a parameter's uses.

Provides ``ctx.found.reductions`` and ``ctx.found.kept``. Backward graphs only.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node

from zerofx._torch import symbols_of
from zerofx.model.layout import contiguous_stride
from zerofx.passes import edit
from zerofx.passes.context import Context, ParameterRef, Reduction, Tag

_aten = torch.ops.aten


def check_dense(name: str, layout: torch.layout) -> None:
    """Refuse a sparse gradient of the parameter ``name``: it has no place in a flat buffer.

    Raises:
        RuntimeError: it is sparse.
    """
    if layout != torch.strided:
        raise RuntimeError(
            f"the gradient of {name!r} has the layout {layout}: expected a dense (strided) one, for ranks reduce flat "
            "buffers. Leave sparse=True out of the lookup; lookups=True keeps what is sent small."
        )


def reduce(gm: GraphModule, ctx: Context) -> int:
    """Insert one reduce_grad node per parameter gradient; returns how many gradients were seen to."""
    gradients = take_gradients(gm, ctx)
    extra = []
    for ref, grad in gradients:
        if ctx.sync != "keep":
            layout, tag = ref.layout, Tag("reduce_grad", ref.layout.name)
            args = (grad, ref.slot.offset, layout.shard_numel, layout.world_size, ctx.reduce_group)
            with gm.graph.inserting_after(edit.after_inputs(grad)):
                grad = edit.insert(gm.graph, torch.ops.zerofx.reduce_grad.default, args, tag=tag, near=grad)
        extra.append(grad)
        ctx.found.reductions.append(Reduction(ref.layout, (ref.slot,)))
    return give_gradients(gm, ctx, extra)


def take_gradients(gm: GraphModule, ctx: Context) -> list[tuple[ParameterRef, Node]]:
    """The parameters' gradients in the dtype they are reduced in, kept ones added; their outputs become None."""
    outputs, found = edit.output_values(gm.graph), []
    for i, ref in sorted(ctx.gradients.items()):
        grad = outputs[i]
        if isinstance(grad, Node):
            check_dense(ref.slot.name, grad.meta["val"].layout)
            found.append((ref, _in_reduce_dtype(gm.graph, _in_numbers(gm.graph, grad, ref), ref)))
            outputs[i] = None
    edit.set_output_values(gm.graph, outputs)
    if ctx.sync == "merge":
        last = edit.last_placeholder(gm.graph)
        for i, (ref, grad) in enumerate(found):
            last = _kept(gm.graph, ctx, grad, ref, last)
            found[i] = ref, _add(gm.graph, grad, last, ref)
    return found


def give_gradients(gm: GraphModule, ctx: Context, values: list[Node]) -> int:
    """Return ``values`` besides what the graph returns; what ``take_gradients`` left out goes away."""
    edit.set_output_values(gm.graph, edit.output_values(gm.graph) + values)
    if values and any(ref.layout.gradient_dtype is not None for ref in ctx.gradients.values()):
        gm.graph.eliminate_dead_code()
    return edit.finish(gm, len(values))


def _in_numbers(graph: Graph, grad: Node, ref: ParameterRef) -> Node:
    """``grad`` in its parameter's shape, which is of numbers."""
    if not symbols_of(grad.meta["val"]):
        return grad
    tag, shape = Tag("prepare", ref.layout.name), list(ref.slot.shape)
    with graph.inserting_after(edit.after_inputs(grad)):  # a buffer of its own: as_strided counts from its beginning
        memory = {"memory_format": torch.contiguous_format}
        copy = edit.insert(graph, _aten.clone.default, (grad,), tag=tag, near=grad, **memory)
    with graph.inserting_after(copy):
        args = (copy, shape, list(contiguous_stride(shape)), 0)
        return edit.insert(graph, _aten.as_strided.default, args, tag=tag, near=grad)


def _in_reduce_dtype(graph: Graph, grad: Node, ref: ParameterRef) -> Node:
    dtype = ref.layout.gradient_dtype
    if dtype is None or grad.meta["val"].dtype == dtype:
        return grad
    source = grad
    while source.meta["val"].dtype != dtype and _is_widening(source):
        source = source.all_input_nodes[0]
    if source.meta["val"].dtype == dtype:
        return source
    with graph.inserting_after(edit.after_inputs(grad)):
        tag = Tag("prepare", ref.layout.name)
        return edit.insert(graph, edit.CAST, (grad, dtype), tag=tag, near=grad)


def _is_widening(node: Node) -> bool:
    """Whether the node is a cast that loses nothing, so that what is cast back is what was cast."""
    return edit.is_cast(node) and node.all_input_nodes[0].meta["val"].dtype.itemsize < node.meta["val"].dtype.itemsize


def _kept(graph: Graph, ctx: Context, grad: Node, ref: ParameterRef, last: Node | None) -> Node:
    ctx.found.kept.append(ref)
    value, tag = torch.empty_like(grad.meta["val"]), Tag("kept", ref.layout.name)
    return edit.placeholder(graph, f"kept_{ref.slot.name}", value, tag, last)


def _add(graph: Graph, grad: Node, kept: Node, ref: ParameterRef) -> Node:
    with graph.inserting_after(edit.after_inputs(grad)):
        return edit.insert(graph, _aten.add.Tensor, (grad, kept), tag=Tag("prepare", ref.layout.name), near=grad)
