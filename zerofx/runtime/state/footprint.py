"""Footprint: what the graphs of one module leave in memory between forward and backward.

::

    graph of groups {a, b}   gathered 4 kB   saved 10 kB  ┐
    graph of groups {c}      gathered 0 kB   saved  6 kB  ├──▶ a graph of {d} asks: what do the others hold?
                                                          ┘     4 kB gathered, 16 kB saved

Each graph of a module is compiled alone, and budgets are the module's. So each tells here what it holds, and asks what
the others do. A graph is known by the names of the groups that it uses. An answer never changes: a rank that compiles a
graph anew, for a shape that it alone has met, must come to the schedule that the others go on with.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from zerofx._torch import StorageWeakRef, storage_of

Names = frozenset[str]


class Demand(NamedTuple):
    """What one graph of a module takes within `memory=`, in bytes.

    ``at_rest`` is there before a step and after it; ``peak`` comes on top at this graph's worst moment; ``waits`` of it
    may be there while other graphs run.
    """

    at_rest: int
    peak: int
    waits: int


class Footprint:
    """What the graphs of one module hold, in bytes, and what of it is there now.

    Attributes:
        limit: the bytes that `memory=` gives them; None: it was not given.
        apart: no graph asks what others leave gathered: each rank may have compiled others so far (``uneven=True``).
    """

    def __init__(self) -> None:
        self.limit: int | None = None
        self.apart: bool = False
        self._warned = False
        self._gathered: dict[Names, int] = {}
        self._saved: dict[Names, int] = {}
        self._budgets: dict[Names, tuple[float | None]] = {}
        self._taken: dict[Names, Demand] = {}
        self._answers: dict[tuple[Names, str], Any] = {}
        self._activations: dict[Names, list[StorageWeakRef]] = {}
        self._inputs: dict[Names, dict[StorageWeakRef, int]] = {}

    def misses(self, parameter: str) -> None:
        """``parameter`` got its gradient outside of any graph: `memory=` does not count that, and says so once."""
        if self.limit is None or self._warned:
            return
        self._warned = True
        warnings.warn(
            f"memory={self.limit:,}: {parameter!r} is read outside of any compiled graph. memory= counts nothing of "
            "what runs there, so a step may hold more. Leave room for it, or mend the graph break: "
            "TORCH_LOGS=graph_breaks names it.",
            UserWarning,
            stacklevel=2,
        )

    def keeps(self, names: Names, nbytes: int) -> None:
        """The graph of the groups ``names`` leaves so much gathered between forward and backward."""
        self._gathered[names] = nbytes

    def saves(self, names: Names, nbytes: int) -> None:
        """The graph of the groups ``names`` saves so many bytes of activations."""
        self._saved[names] = nbytes

    def gathers_within(self, names: Names, memory_budget: float | None) -> None:
        """The graph of the groups ``names`` gathers within ``memory_budget``, which was chosen for it."""
        self._budgets[names] = (memory_budget,)

    def memory_budget_of(self, names: Names) -> tuple[float | None] | None:
        """What a graph of the groups ``names`` gathers within since it was first compiled; None: it was not yet."""
        return self._budgets.get(names)

    def takes(self, names: Names, taken: Demand) -> None:
        """A step of the graph of the groups ``names`` takes so much."""
        self._taken[names] = taken

    def taken_elsewhere(self, names: Names) -> list[Demand]:
        """What graphs of other groups than ``names`` take, in the order in which they were first compiled.

        While one of them runs, the inputs of all others are at rest, too.
        """
        return [
            taken._replace(at_rest=taken.at_rest + self.given_elsewhere(other))
            for other, taken in self._taken.items()
            if other != names
        ]

    def is_given(self, names: Names, inputs: Iterable[Any]) -> None:
        """The graph of the groups ``names`` gets ``inputs``. Those without a ``grad_fn`` are the batch, and buffers."""
        self._inputs[names] = {
            StorageWeakRef(x.untyped_storage()): x.untyped_storage().nbytes()
            for x in inputs
            if type(x) is torch.Tensor and x.layout is torch.strided and x.grad_fn is None
        }

    def given_elsewhere(self, names: Names) -> int:
        """Bytes of what other graphs than that of the groups ``names`` are given, and it is not."""
        others = {ref: nbytes for inputs in self._inputs.values() for ref, nbytes in inputs.items()}
        own = self._inputs.get(names, {})
        return sum(nbytes for ref, nbytes in others.items() if ref not in own and not ref.expired())

    def gathered_elsewhere(self, names: Names, phase: str) -> int:
        """Bytes that graphs of other groups than ``names`` leave gathered, as ``phase`` of these was to know it."""
        return 0 if self.apart else self._answers.setdefault((names, phase), _others(self._gathered, names))

    def saved_elsewhere(self, names: Names) -> int:
        """Bytes of activations that graphs of other groups than ``names`` save."""
        return self._answers.setdefault((names, "saved"), _others(self._saved, names))

    def unread_elsewhere(self, names: Names, groups: Names) -> Names:
        """Those of ``groups`` that no graph with a budget for activations reads, but for ``names``."""
        return self._answers.setdefault((names, "unread"), groups.difference(names, *self._saved))

    def others(self, names: Names, groups: Names) -> tuple[Any, ...]:
        """All of this that a graph of the groups ``names`` asks where a budget is divided, as it would be answered."""
        return (
            self.taken_elsewhere(names),
            self.given_elsewhere(names),
            self.saved_elsewhere(names),
            sorted(self.unread_elsewhere(names, groups)),
            self.memory_budget_of(names),
        )

    def note_saved(self, names: Names, values: Iterable[Any]) -> None:
        """A forward of this graph saves ``values`` now."""
        refs = [StorageWeakRef(x.untyped_storage()) for x in values if isinstance(x, torch.Tensor)]
        self._activations[names] = [ref for ref in self._activations.get(names, ()) if not ref.expired()] + refs

    def saved_now(self, names: Names | None = None) -> list[torch.UntypedStorage]:
        """What forwards with a budget have saved and is still there, of the graph of the groups ``names`` or of all."""
        refs = [ref for key, refs in self._activations.items() for ref in refs if names in (None, key)]
        return [storage for ref in refs if (storage := storage_of(ref)) is not None]


def _others(nbytes: dict[Names, int], names: Names) -> int:
    return sum(n for other, n in nbytes.items() if other != names)
