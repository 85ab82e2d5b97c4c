"""What an update of one group moves, where its state lives in a file: by its layout, in whole pages.

::

                read                     written
    moments     m                        m           of 16-bit weights, with float32 masters
    weights     m                        m           if they live there
    gradients   m, as the step begins                inside of backward none: there they are used where they arrive

``m`` is this rank's shard. It is what `zerofx.runtime.optim.through_file` reads and writes for `zerofx.AdamW`.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerofx.model.layout import GroupLayout
from zerofx.passes.context import OnDisk
from zerofx.runtime.state.raw_file import padded


@dataclass(frozen=True)
class Moved:
    """Of one group and one rank.

    Attributes:
        state: bytes of moments, masters and weights that are read, and written back.
        gradients: bytes of gradients that are read.
        touched: bytes of memory that the arithmetic reads and writes.
    """

    state: int = 0
    gradients: int = 0
    touched: int = 0

    @staticmethod
    def of(layout: GroupLayout, there: OnDisk, rank: int = 0) -> Moved:
        """By an update of a group with this ``layout``; ``rank``: its place among those of the layout."""
        if not layout.requires_grad:
            return Moved()
        itemsize, kinds = layout.dtype.itemsize, there.kinds if layout.name in there.groups else frozenset()
        touched = 7 * updated(layout, rank) * (4 if itemsize == 2 else itemsize)
        shard, state = padded(layout.shard_numel * itemsize), 0
        if "moment" in kinds:
            state += sum(map(padded, moments(layout, rank)))
        if "weights" in kinds:
            state += shard
        return Moved(state, shard if "gradient" in kinds else 0, touched)


def moments(layout: GroupLayout, rank: int) -> list[int]:
    """Bytes of each flat buffer that `zerofx.AdamW` keeps for a group."""
    numel, itemsize = updated(layout, rank), layout.dtype.itemsize
    return [4 * numel] * 3 if itemsize == 2 else [itemsize * numel] * 2


def updated(layout: GroupLayout, rank: int) -> int:
    """Elements of a shard from its first parameter's to its last one's: what moments have. The rest is padding."""
    pieces = [piece for slot in layout.slots if (piece := layout.piece(slot, rank)).length]
    ends = [piece.in_shard + piece.length for piece in pieces]
    return max(ends) - min(piece.in_shard for piece in pieces) if pieces else 0
