"""Plain data parallelism: gradients are averaged over all ranks, bucket by bucket, as soon as a bucket is complete.

::

    dw = mm(dy_t, x)                      dw = mm(dy_t, x)
    db = sum(dy, [0])                     db = sum(dy, [0])
    return dx, dw, db          ─────▶     pack = cat([(dw * (1 / M)).view(-1), (db * (1 / M)).view(-1)])
                                          mean = wait_tensor(all_reduce(pack, "sum", pg))
                                          gw, gb = views of mean
                                          return dx, None, None, gw, gb

``ctx.buckets`` says what one all-reduce takes: the gradients of a ``"group"`` (so that the next group's backward runs
meanwhile, and messages are neither small nor late), of one ``"parameter"`` (early, but many), or of ``"all"`` (one,
with nothing left to hide it behind). `zerofx.no_sync` is seen to as in `reduce`.

A bucket's place for each parameter follows from its groups alone. Another rank's graph may have a gradient where this
one has none (``ctx.trained``), so zeros stand there, and what comes of them is returned as well::

    return dx, dw              ─────▶     pack = cat([(dw * (1 / M)).view(-1), zeros])

The division fuses with the copying that packs, as in DistributedDataParallel; where gradients are cast to a wider dtype
after they are reduced, with that.

Sound because the sum over ranks of a concatenation is the concatenation of the sums.

Stage 0 only, in the place of `gather`, `reduce` and `group`. Provides ``reductions`` and ``kept`` of ``ctx.found``.
Idea: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training (VLDB 2020).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

from zerofx.model.layout import contiguous_stride
from zerofx.passes import edit
from zerofx.passes.context import Context, ParameterRef, Reduction, Tag
from zerofx.passes.reduce import give_gradients, take_gradients

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional

_Member = tuple[ParameterRef, Node | None]
"""A parameter, and its gradient; None: this rank's graph has none."""


def all_reduce(gm: GraphModule, ctx: Context) -> int:
    """Average all gradients over the ranks; returns how many gradients were seen to."""
    gradients: list[_Member] = list(take_gradients(gm, ctx))
    if ctx.sync != "keep":
        gradients += _unused(ctx, gradients)
    ctx.found.reductions += [Reduction(ref.layout, (ref.slot,)) for ref, _ in gradients]
    values, order = [grad for _, grad in gradients], edit.positions(gm.graph)
    if ctx.sync != "keep":
        for name, members in _buckets(ctx, gradients).items():
            averaged = _average(gm.graph, ctx, name, [gradients[i] for i in members], order)
            for i, value in zip(members, averaged, strict=True):
                values[i] = value
    return give_gradients(gm, ctx, cast(list[Node], values))


def _unused(ctx: Context, gradients: list[_Member]) -> list[_Member]:
    """The parameters of which another rank alone may have a gradient, and whose bucket has one of this rank's."""
    used = {(ref.layout.name, ref.slot.name) for ref, _ in gradients}
    return [
        (ref, None)
        for ref in ctx.trained
        if (ref.layout.name, ref.slot.name) not in used and ctx.buckets != "parameter"
    ]


def _buckets(ctx: Context, gradients: list[_Member]) -> dict[str, list[int]]:
    """Name -> which gradients go together. One collective takes gradients of one dtype, for parameters of one dtype.

    Sorted by group and place there: ranks whose graphs differ have every parameter at the same place of a bucket.
    """
    buckets: dict[str, list[int]] = {}
    kinds: dict[str, tuple[torch.dtype, torch.dtype]] = {}
    for i, (ref, grad) in enumerate(gradients):
        everything = f"all {str(ref.layout.dtype).removeprefix('torch.')}"
        name = {"group": ref.layout.name, "parameter": ref.slot.name, "all": everything}[ctx.buckets]
        if grad is not None:  # what is unused goes with the first of its name: those that are used come first
            kind = grad.meta["val"].dtype, ref.layout.dtype
            while kinds.setdefault(name, kind) != kind:
                name += "'"
        buckets.setdefault(name, []).append(i)
    for members in buckets.values():
        members.sort(key=lambda i: (gradients[i][0].layout.name, gradients[i][0].slot.offset))
    return buckets


def _average(graph: Graph, ctx: Context, name: str, bucket: list[_Member], order: dict[Node, int]) -> list[Node]:
    """Each gradient of the bucket, averaged over the ranks, in its parameter's dtype."""
    near = max((grad for _, grad in bucket if grad is not None), key=order.__getitem__)
    end = edit.after_inputs(near)

    def add(kind: str, target: Callable, *args: Any, **kwargs: Any) -> Node:
        nonlocal end
        with graph.inserting_after(end):
            end = edit.insert(graph, target, args, tag=Tag(kind, name), near=near, **kwargs)
        return end

    world_size, dtype = bucket[0][0].layout.world_size, bucket[0][0].layout.dtype
    like = near.meta["val"]
    divided, made = like.dtype == dtype, {"dtype": like.dtype, "device": like.device, "pin_memory": False}
    grads = [grad for _, grad in bucket]
    if divided and world_size > 1:
        grads = [grad and add("pack", _aten.mul.Tensor, grad, 1.0 / world_size) for grad in grads]
    parts = [
        add("pack", _aten.full.default, [ref.slot.numel], 0.0, **made)
        if grad is None
        else add("pack", _aten.reshape.default, grad, [-1])
        for (ref, _), grad in zip(bucket, grads, strict=True)
    ]
    sums = add("pack", _aten.cat.default, parts) if len(parts) > 1 else parts[0]
    if world_size == 1:
        sums = add("pack", _aten.clone.default, sums)  # .grad must not share memory with what backward holds
    else:
        sums = add("all_reduce", _c10d.all_reduce.default, sums, "sum", ctx.reduce_group)
        sums = add("wait_grad", _c10d.wait_tensor.default, sums)
    if sums.meta["val"].dtype.itemsize < dtype.itemsize:
        sums = add("gradient", edit.CAST, sums, dtype)
    if world_size > 1 and not divided:  # in the wider of both dtypes: the sum is up to M times the average
        sums = add("gradient", _aten.mul.Tensor, sums, 1.0 / world_size)
    if sums.meta["val"].dtype != dtype:
        sums = add("gradient", edit.CAST, sums, dtype)
    averaged, offset = [], 0
    for ref, _ in bucket:
        shape = ref.slot.shape
        args = (sums, list(shape), list(contiguous_stride(shape)), offset)
        averaged.append(add("gradient", _aten.as_strided.default, *args))
        offset += ref.slot.numel
    return averaged
