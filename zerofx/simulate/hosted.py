"""What the step of `zerofx.AdamW` copies where its state is in the host's memory (``offload="cpu"``): by the layouts.

::

    device to host    gradients that are on the device; weights, too, unless a float32 master is with the moments
    host to device    new weights that live on the device

Both ways go on at once, and beside the arithmetic (`zerofx.runtime.optim.through_host`). How fast the host computes is
in no rate: its arithmetic counts as if memory were the device's.

Not in it: other optimizers, ``max_grad_norm``, ``master="split"``, `zerofx.step_in_backward`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from zerofx.model.layout import GroupLayout
from zerofx.model.units import format_bytes
from zerofx.passes.context import Context
from zerofx.runtime.state.account import AtRest, Elements, Terms, adamw, touched


class Hosted(NamedTuple):
    """Bytes of one rank's step: copied to the host, copied back, and of memory that the arithmetic reads and writes."""

    to_host: int
    to_device: int
    touched: int

    @staticmethod
    def of_module(context: Context, layouts: Iterable[GroupLayout], rank: int | None = None) -> Hosted | None:
        """Of a module with these groups, of whose graphs one has this ``context``; None: no state is on the host.

        ``rank``: its place among them, where padding is not to count.
        """
        facts = context.facts(AtRest)
        if not facts.on_host:
            return None
        to_host = to_device = in_memory = 0
        for layout in (layout for layout in layouts if layout.requires_grad):
            itemsize = layout.dtype.itemsize
            numel = int(Elements.of(layout, Terms.of_graphs(context, layout), rank).updated)
            in_memory += touched(itemsize) * numel
            if layout.name not in facts.on_host:
                continue
            has_masters = len(adamw(itemsize)) > 2
            weights_here = "weights" not in facts.kinds_on_host
            to_host += itemsize * numel * (("gradient" not in facts.kinds_on_host) + (weights_here and not has_masters))
            to_device += itemsize * numel * weights_here
        return Hosted(to_host, to_device, in_memory)

    def seconds(self, link: float, memory: float) -> float:
        """Of the step, by bytes per second one way and of memory: the busier way, or the arithmetic."""
        return max(max(self.to_host, self.to_device) / link, self.touched / memory)

    def moving(self, took: str = "") -> list[str]:
        """What it copies, in lines; ``took``: how long that takes, in words."""
        if not self.to_host and not self.to_device:
            return [f"zerofx.AdamW steps on the host, and copies nothing{took}"]
        out, back = format_bytes(self.to_host), format_bytes(self.to_device)
        return [f"zerofx.AdamW steps on the host: it copies {out} there and {back} back{took}"]
