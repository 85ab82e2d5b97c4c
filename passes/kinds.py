"""Kinds of nodes that corners, `fetch` and `put` insert: how they travel, and what is said of them.

A corner puts its kinds into `KINDS`. Passes, listings, explanations and predictions look there, so none of them knows
the corner::

    KINDS["answer"] = Kind(travels="scatter", verb="answer", brings="weights", ...)

    lower           spells it like a reduction
    a listing       answer   words       7.7 kB
    a prediction    counts its bytes as weights

The kinds that zerofx always has are in the table of `zerofx.passes.context.Tag`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch.fx import Graph


@dataclass(frozen=True)
class Kind:
    """One kind of node.

    Attributes:
        travels: "gather" or "scatter" where the node starts a collective that `lower` spells like that; else "".
        first: gathers of weights that could start earlier start behind it.
        verb: its word in a listing; "" leaves it out.
        total: in the head of a listing, the words between the number of such nodes and their bytes.
        of: the argument whose bytes it is about; None: its own.
        brings: what a prediction counts its bytes as.
        stands: why it stands where it stands; or a function of the graph and the node's group that says so.
    """

    travels: Literal["", "gather", "scatter"] = ""
    first: bool = False
    verb: str = ""
    total: str = ""
    of: int | None = None
    brings: Literal["weights", "gradients", "activations", "temporary"] = "temporary"
    stands: str | Callable[[Graph, str], str] = ""


KINDS: dict[str, Kind] = {}
"""Every such kind, by the name in its tag."""

PICKING: set[str] = set()
"""Operators of corners that read of a large input no more bytes than they write, by name."""


def travelling(how: Literal["", "gather", "scatter"] = "") -> list[str]:
    """The kinds that start a collective of that sort; without a sort, of either."""
    return [name for name, kind in KINDS.items() if kind.travels and how in ("", kind.travels)]


def ahead_of_gathers() -> list[str]:
    """The kinds that gathers of weights start behind."""
    return [name for name, kind in KINDS.items() if kind.first]
