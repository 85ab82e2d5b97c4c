"""What a rank has in its file (`zerofx.Offload`), and what the optimizer's step moves there: by the layouts.

::

    moments     at rest 2 m    read and written by the step
    weights             m      read and written by the step, beside what graphs read
    gradients           m      read by the step, beside what graphs write

``m`` is this rank's shard of what lives there. The optimizer is `zerofx.AdamW`, chunk by chunk. Beside 16-bit weights
it has float32 masters and moments, all of which are in the file. What it moves are whole pages.

Not in it: ``max_grad_norm``, which reads gradients once more; `zerofx.step_in_backward`; other optimizers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zerofx.model.layout import GroupLayout
from zerofx.model.units import format_bytes
from zerofx.passes.context import STATE, Context, OnDisk
from zerofx.runtime.optim.through_file import BUFFERS
from zerofx.runtime.state.raw_file import padded
from zerofx.runtime.state.state_file import BUFFER


@dataclass(frozen=True)
class Files:
    """Of one rank.

    Attributes:
        there: of which groups.
        at_rest: bytes by kind: "moment", "weights", "gradient".
        read, written: by a step of `zerofx.AdamW`.
        touched: bytes of memory that its arithmetic reads and writes, of all groups.
    """

    there: OnDisk
    at_rest: dict[str, int]
    read: int
    written: int
    touched: int

    @staticmethod
    def of_module(context: Context, layouts: Iterable[GroupLayout], rank: int = 0) -> Files | None:
        """Of a module with these groups, of whose graphs one has this ``context``; ``rank``: its place among them."""
        there = context.on_disk
        if there is None:
            return None
        at_rest, read, written, touched = {kind: 0 for kind in STATE if kind in there.kinds}, 0, 0, 0
        for layout in layouts:
            low, numel = layout.dtype.itemsize == 2, _updated(layout, rank)
            shard = layout.shard_numel * layout.dtype.itemsize
            moments = [4 * numel] * 3 if low else [layout.dtype.itemsize * numel] * 2
            touched += 7 * numel * (4 if low else layout.dtype.itemsize) * layout.requires_grad
            if layout.name not in there.groups:
                continue
            both = {"moment": moments, "weights": [shard]} if layout.requires_grad else {}
            both = {kind: sizes for kind, sizes in both.items() if kind in there.kinds}
            moved = sum(padded(nbytes) for sizes in both.values() for nbytes in sizes)
            read, written = read + moved, written + moved
            if "weights" in there.kinds:
                at_rest["weights"] += shard
            if not layout.requires_grad:
                continue
            if "moment" in there.kinds:
                at_rest["moment"] += sum(moments)
            if "gradient" in there.kinds:
                at_rest["gradient"] += shard
                read += padded(shard)
        return Files(there, at_rest, read, written, touched)

    def of(self, layout: GroupLayout) -> frozenset[str]:
        """The kinds of a group's state that are in the file."""
        return self.there.kinds if layout.name in self.there.groups else frozenset()

    @property
    def passing(self) -> int:
        """Bytes of memory through which state passes: buffers, a stage; `torch.optim` has as much in `KEPT`."""
        return (BUFFERS + 1) * min(BUFFER, self.read)

    def __str__(self) -> str:
        """In a line, without the bytes that the optimizer moves."""
        kinds = ", ".join(f"{format_bytes(n)} of {STATE[kind]}" for kind, n in self.at_rest.items())
        return f"{kinds}, of {self.there.which}, in {self.there.path}"


def _updated(layout: GroupLayout, rank: int) -> int:
    """Elements of a shard from its first parameter's to its last one's: what moments have. The rest is padding."""
    pieces = [piece for slot in layout.slots if (piece := layout.piece(slot, rank)).length]
    ends = [piece.in_shard + piece.length for piece in pieces]
    return max(ends) - min(piece.in_shard for piece in pieces) if pieces else 0
