"""Of which parameters a backward graph has a gradient, and of which the graphs of other ranks may (docs/models.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.fx import GraphModule, Node

from zerofx.model.layout import GroupLayout, Slot
from zerofx.passes import edit
from zerofx.passes.context import Context, ParameterRef
from zerofx.runtime.state.group import ShardGroup

Slots = tuple[Slot, ...]


def by_rank(before: GraphModule, ctx: Context) -> Iterator[tuple[GroupLayout, Slots, Slots]]:
    """Of each reduction: its layout, the parameters of which this rank has a gradient, and those of which others may.

    ``before``: the graph before all passes, which returns this rank's gradients. What is reduced is a shard of the
    whole group, in stage 0 one parameter.
    """
    outputs = edit.output_values(before.graph)
    used = {(ref.layout.name, ref.slot) for i, ref in ctx.gradients.items() if isinstance(outputs[i], Node)}
    for reduction in ctx.found.reductions:
        slots = reduction.layout.slots if ctx.stage else reduction.slots
        mine = tuple(s for s in slots if s in reduction.slots and (reduction.layout.name, s) in used)
        yield reduction.layout, mine, tuple(slot for slot in slots if slot not in mine)


def trained_beside(
    gm: GraphModule, gradients: Mapping[int, ParameterRef], groups: Mapping[GroupLayout, ShardGroup], buckets: str
) -> tuple[ParameterRef, ...]:
    """`Context.trained` of a backward that returns ``gradients``, or None in their places.

    Of a bucket of which it has none it sends nothing.
    """

    def bucket(layout: GroupLayout) -> Any:
        return layout.dtype if buckets == "all" else layout.name

    outputs = edit.output_values(gm.graph)
    sent = {bucket(ref.layout) for i, ref in gradients.items() if isinstance(outputs[i], Node)}
    found = []
    for layout in dict.fromkeys(ref.layout for ref in gradients.values()):
        if bucket(layout) not in sent:
            continue
        group = groups[layout]
        if group.family.stage or group.sharing.everyone.size == 1:
            return ()
        live = ((slot, group.members.live(slot)) for slot in layout.slots)
        found += [ParameterRef(layout, slot) for slot, p in live if p is not None and p.requires_grad]
    return tuple(found)
