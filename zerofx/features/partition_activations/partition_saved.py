"""What all tensor-parallel ranks have alike is saved in parts, and gathered in backward ahead of its first use.

::

    forward      h = add(x, s)                              h = add(x, s)
                 y = mul(h, …)                              y = mul(h, …)
                                                            part = zerofx.part(h, T, tp)       h is free from here on
                 return y, h                                return y, part

    backward     h: placeholder                             h: placeholder, of a part
                                                            start = all_gather(h, T, tp)
                 dy = …                          ─────▶     dy = …
                                                            flat = wait(start)
                                                            whole = as_strided(flat, …)
                 dx = mul(dy, h)                            dx = mul(dy, whole)

Layers that are split over T ranks leave the hidden state whole on each: T copies of one thing, from forward to
backward. Here each keeps its part of it, and T ranks together one copy. That is the paper's Pa (ZeRO-R, section 6.1).

A part is a copy, 1/T of the elements in the order of the tensor's memory; the last one is filled up with zeros. What
forward saves of one memory several times, as views, is one part. Each gather starts before the wait for the one
before it, so one that is under way comes on top of those in use. It travels in the tensor-parallel group.

Sound because the parts of a tensor, end to end, are the tensor, on whichever rank each was cut (`PartitionFacts.alike`:
ranks have told each other). Leaves alone what is the caller's, or returned to it, and so is there anyway; what is small
(`LEAST_BYTES`); memory with gaps; sizes that are known only when the graph runs.

Requires a forward graph and then its backward graph, with the same `SavedParts`, and ``ctx.found.saved_names``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from zerofx.features.partition_activations.facts import SavedPart, partition_of, saved_parts
from zerofx.passes import edit
from zerofx.passes.context import Context, Tag
from zerofx.passes.kinds import NodeKind

_aten, _c10d, _zerofx = torch.ops.aten, torch.ops._c10d_functional, torch.ops.zerofx

_WAIT = _c10d.wait_tensor.default

LEAST_BYTES = 1 << 14
"""What is smaller is not worth a message."""

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
)
"""What every backend can move."""

NODE_KINDS = {
    "part": NodeKind(
        "this rank's part of what all tensor-parallel ranks have alike, which forward saves",
        verb="part",
        sized=True,
        of=0,
        about="cuts",
        stands="after the last reader in forward: then only a part is needed",
    ),
    "gather_saved": NodeKind(
        "the start of the gather of all parts",
        travels="gather",
        sized=True,
        about="brings",
        verb="gather_saved",
        total="gathers of what tensor-parallel ranks saved in parts:",
        counts_as="activations",
        stands="before the wait for the one before it, which is in use while this one travels",
    ),
    "wait_saved": NodeKind("the wait for it", verb="have", about="brings", stands="before the first use"),
    "saved": NodeKind("a view of that, or of what is cut"),
}


def partition_saved(gm: GraphModule, ctx: Context) -> int:
    """Save parts (forward), or gather them (backward); returns of how many values."""
    if partition_of(ctx).ranks == 1:
        return 0
    if ctx.phase == "forward":
        return edit.finish(gm, _cut(gm.graph, ctx))
    return edit.finish(gm, _collect(gm.graph, ctx)) if ctx.phase == "backward" else 0


def _cut(graph: Graph, ctx: Context) -> int:
    outputs, order, found = edit.output_values(graph), edit.positions(graph), 0
    by_memory: dict[Node, list[int]] = {}
    for i, value in enumerate(outputs):
        if isinstance(value, Node):
            by_memory.setdefault(maker_of(value), []).append(i)
    for maker, places in by_memory.items():
        views = {i: outputs[i].meta["val"] for i in places}
        dims = (
            memory_of(maker)
            if maker.name in partition_of(ctx).alike and ctx.found.saved_names.keys() >= views.keys()
            else None
        )
        if dims is None or not all(_looks_at(view, maker.meta["val"]) for view in views.values()):
            continue
        aliases = edit.aliases(maker)
        readers = [n for alias in aliases for n in [alias, *alias.users] if n.op != "output"]
        part = _cut_behind(max(readers, key=order.__getitem__), ctx, maker, dims)
        value = maker.meta["val"]
        seen = {ctx.found.saved_names[i]: _as_seen(view) for i, view in views.items()}
        saved_parts(ctx)[next(iter(seen))] = SavedPart(
            maker.name, value.numel(), value.dtype, partition_of(ctx).ranks, tuple(places), seen
        )
        for i in places:
            outputs[i] = part
        found += 1
    edit.set_output_values(graph, outputs)
    return found


def _cut_behind(last: Node, ctx: Context, maker: Node, dims: tuple[int, ...]) -> Node:
    """Insert the part of ``maker``, whose dimensions lie in the order ``dims``, after its last reader."""
    graph, flat = maker.graph, maker
    with graph.inserting_before(last.next):
        if dims != tuple(range(len(dims))):
            tag = Tag("saved", maker.name)
            flat = edit.insert(graph, _aten.permute.default, (maker, list(dims)), tag=tag, near=maker)
        args = (flat, partition_of(ctx).ranks, partition_of(ctx).group)
        return edit.insert(graph, _zerofx.part.default, args, tag=Tag("part", maker.name), near=maker)


def _collect(graph: Graph, ctx: Context) -> int:
    inputs = {node.name: node for node in graph.find_nodes(op="placeholder")}
    order, nodes = edit.positions(graph), list(graph.nodes)
    firsts: dict[str, int] = {}  # by the name of a part: the place of the first reader of any view
    for lead, part in saved_parts(ctx).items():
        of_one = inputs[lead].meta["val"].new_empty(part.numel_of_one, dtype=part.dtype)
        for name in part.views:
            inputs[name].meta = {**inputs[name].meta, "val": of_one}
        if places := [order[user] for name in part.views for user in inputs[name].users]:
            firsts[lead] = min(places)
    last = edit.last_placeholder(graph)
    ahead = nodes[0] if last is None else last.next  # the next start stands before it
    for lead in sorted(firsts, key=firsts.__getitem__):
        part, first = saved_parts(ctx)[lead], nodes[firsts[lead]]
        readers = {name: list(inputs[name].users) for name in part.views}
        with graph.inserting_before(ahead):
            gather, args = (
                _c10d.all_gather_into_tensor.default,
                (inputs[lead], part.ranks, partition_of(ctx).group),
            )
            start = edit.insert(graph, gather, args, tag=Tag("gather_saved", part.name), near=first)
        with graph.inserting_before(first):
            ahead = edit.insert(graph, _WAIT, (start,), tag=Tag("wait_saved", part.name), near=first)
            for name, (size, stride, offset) in part.views.items():
                if readers[name]:
                    seen = (ahead, list(size), list(stride), offset)
                    whole = edit.insert(graph, edit.AS_STRIDED, seen, tag=Tag("saved", part.name), near=first)
                    for reader in readers[name]:
                        reader.replace_input_with(inputs[name], whole)
    return len(saved_parts(ctx))


def maker_of(node: Node) -> Node:
    """What computes the memory that ``node`` looks at."""
    while node.op == "call_function":
        memory = _memory(node)
        source = next((x for x in node.all_input_nodes if memory is not None and _memory(x) == memory), None)
        if source is None:
            break
        node = source
    return node


def _memory(node: Node) -> int | None:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def memory_of(node: Node) -> tuple[int, ...] | None:
    """The dimensions of ``node`` as they lie in memory, the widest stride first; None where it is not to be cut."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or value.dtype not in DTYPES:
        return None
    shape, stride = tuple(value.shape), tuple(value.stride())
    if not all(type(n) is int for n in (*shape, *stride, value.storage_offset())) or value.storage_offset():
        return None
    dims = sorted(range(len(shape)), key=lambda d: (-stride[d], shape[d] == 1))
    step = 1
    for d in reversed(dims):
        if shape[d] != 1 and stride[d] != step:
            return None
        step *= shape[d]
    dense = step * value.dtype.itemsize == value.untyped_storage().nbytes()
    return tuple(dims) if dense and math.prod(shape) * value.dtype.itemsize >= LEAST_BYTES else None


def _looks_at(view: Any, whole: torch.Tensor) -> bool:
    """Whether ``view`` is the memory of ``whole``, seen another way."""
    seen = isinstance(view, torch.Tensor) and view.dtype == whole.dtype
    return seen and view.untyped_storage()._cdata == whole.untyped_storage()._cdata and type(view.numel()) is int


def _as_seen(value: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return tuple(value.shape), tuple(value.stride()), int(value.storage_offset())
