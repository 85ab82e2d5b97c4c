"""What a rank has in its file (`zerofx.Offload`), and what the optimizer moves there: by the layouts.

::

    moments     at rest 2 m    read and written by an update
    weights             m      read and written by an update, beside what graphs read
    gradients           m      read by the step, beside what graphs write

``m`` is this rank's shard of what lives there. The optimizer is `zerofx.AdamW`, chunk by chunk. Beside 16-bit weights
it has float32 masters and moments, all of which are in the file. What it moves are whole pages
(`zerofx.runtime.optim.moved`). With `zerofx.step_in_backward` a graph moves them, and gradients stay where they arrive.

Not in it: other optimizers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zerofx.model.layout import GroupLayout
from zerofx.model.offload import STATE, OnDisk
from zerofx.model.units import format_bytes
from zerofx.passes.context import Context
from zerofx.runtime.optim.moved import Moved
from zerofx.runtime.optim.through_file import BUFFERS
from zerofx.runtime.state.account import Account, AtRest, Elements, Terms, as_updated, at_rest, state_of
from zerofx.runtime.state.state_file import BUFFER


@dataclass(frozen=True)
class Files:
    """Of one rank.

    Attributes:
        there: of which groups.
        at_rest: bytes by kind: "moment", "weights", "gradient".
        updates: what an update of each group moves, by its name; of all groups.
        inside: the groups that a graph updates (`zerofx.step_in_backward`): what these move is the graph's.
    """

    there: OnDisk
    at_rest: dict[str, int]
    updates: dict[str, Moved]
    inside: frozenset[str] = frozenset()

    @staticmethod
    def of_module(context: Context, layouts: Iterable[GroupLayout], rank: int = 0) -> Files | None:
        """Of a module with these groups, of whose graphs one has this ``context``; ``rank``: its place among them."""
        there = context.facts(AtRest).on_disk
        if there is None:
            return None
        found, updates = Account(), {}
        for layout in layouts:
            terms = Terms.of_graphs(context, layout, state_of(layout.dtype.itemsize))
            held = at_rest(Elements.of(layout, terms, rank), terms, trained=layout.requires_grad)
            found += held.elsewhere(there.kinds if layout.name in there.groups else ())
            updates[layout.name] = Moved.of(as_updated(layout, terms), there, rank)
        sizes = {"moment": found.masters + found.moments, "weights": found.shards, "gradient": found.gradients}
        by_kind = {kind: sizes[kind] for kind in STATE if kind in there.kinds}
        return Files(there, by_kind, updates)

    @property
    def read(self) -> int:
        """Bytes that a step of `zerofx.AdamW` reads after the graphs."""
        return sum(moved.state + moved.gradients for moved in self._behind())

    @property
    def written(self) -> int:
        """Bytes that it writes."""
        return sum(moved.state for moved in self._behind())

    @property
    def clipping(self) -> int:
        """Bytes that it reads besides, with ``max_grad_norm``: gradients, for their norm."""
        return sum(moved.gradients for moved in self._behind())

    @property
    def touched(self) -> int:
        """Bytes of memory that its arithmetic reads and writes, of all groups."""
        return sum(moved.touched for moved in self._behind())

    def _behind(self) -> list[Moved]:
        return [moved for name, moved in self.updates.items() if name not in self.inside]

    def of(self, layout: GroupLayout) -> frozenset[str]:
        """The kinds of a group's state that are in the file."""
        return self.there.kinds if layout.name in self.there.groups else frozenset()

    @property
    def passing(self) -> int:
        """Bytes of memory through which state passes: buffers, a stage; `torch.optim` has as much in `KEPT`."""
        return (BUFFERS + 1) * min(BUFFER, sum(moved.state + moved.gradients for moved in self.updates.values()))

    def moving(self, took: str = "") -> list[str]:
        """What the optimizer moves, in lines; ``took``: how long that takes, in words."""
        lines = []
        if any(moved.state for name, moved in self.updates.items() if name in self.inside):
            lines.append(f"of that, zerofx.AdamW's updates of {len(self.inside)} groups (zerofx.step_in_backward)")
        if self.read:
            read, written = format_bytes(self.read), format_bytes(self.written)
            lines.append(f"zerofx.AdamW reads {read} and writes {written}{took}")
        if self.clipping:
            lines.append(f"with max_grad_norm it reads {format_bytes(self.clipping)} more")
        return lines

    def __str__(self) -> str:
        """In a line, without the bytes that the optimizer moves."""
        kinds = ", ".join(f"{format_bytes(n)} of {STATE[kind]}" for kind, n in self.at_rest.items())
        return f"{kinds}, of {self.there.which}, in {self.there.path}"
