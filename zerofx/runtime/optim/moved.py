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
from zerofx.model.offload import OnDisk
from zerofx.runtime.state.account import adamw, touched, updated
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
        shard, state = padded(layout.shard_numel * itemsize), 0
        if "moment" in kinds:
            state += sum(map(padded, moments(layout, rank)))
        if "weights" in kinds:
            state += shard
        return Moved(state, shard if "gradient" in kinds else 0, touched(itemsize) * updated(layout, rank))


def moments(layout: GroupLayout, rank: int) -> list[int]:
    """Bytes of each flat buffer that `zerofx.AdamW` keeps for a group."""
    return [nbytes * updated(layout, rank) for nbytes in adamw(layout.dtype.itemsize)]
