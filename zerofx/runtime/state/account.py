"""Bytes that a rank holds at rest, by its layouts."""

from __future__ import annotations

from collections.abc import Iterable

from zerofx.model.layout import GroupLayout
from zerofx.passes.context import Context


def held_by_layouts(context: Context, layouts: Iterable[GroupLayout]) -> int:
    """Bytes at rest of parameters, shards and replicas of ``layouts``, as graphs with ``context`` see them."""
    held = 0
    for layout in layouts:
        whole, shard = layout.numel * (context.param_dtype or layout.dtype).itemsize, layout.nbytes // layout.world_size
        inside, between = context.wire_inside, context.wire_between
        if context.stage == 0:
            held += sum(slot.numel for slot in layout.slots) * layout.dtype.itemsize
        elif context.gathers:
            held += shard
        else:  # the shard is a part of the replica, where that holds the parameters exactly
            dtype = context.param_dtype or layout.dtype
            code = inside.weight_code if inside and layout.world_size > 1 and not context.one_copy else None
            held += whole // (layout.world_size if context.one_copy else 1)
            held += shard if dtype != layout.dtype or (code and code.shortens(dtype)) else 0
        if inside is not None and inside.error_feedback and layout.world_size > 1:
            held += 4 * (layout.numel - layout.shard_numel)
        elif between is not None and between.error_feedback:
            held += 4 * layout.shard_numel
    return held
