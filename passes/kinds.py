"""Kinds of nodes that passes insert: what they are, how they travel, and what is said of them.

A node's kind stands in its tag (`zerofx.passes.context.Tag`). `NODE_KINDS` has them all: those of the core are below,
`zerofx.features` adds those of features, from each folder's ``feature.py``. Passes, listings, explanations and
predictions look there::

    "answer": NodeKind("the exchange of rows", travels="scatter", verb="answer", counts_as="weights", ...)

    lower           spells it like a reduction
    a listing       answer   words       7.7 kB
    a prediction    counts its bytes as weights
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch.fx import Node


@dataclass(frozen=True)
class NodeKind:
    """One kind of node.

    Attributes:
        what: what such a node is.
        travels: "gather" or "scatter" where a feature's node starts a collective that `lower` spells like that.
        first: gathers of weights that could start earlier start after it.
        verb: its word in ``print(record)`` (`zerofx.compiler.printing`); "" leaves it out.
        sized: whether that says its bytes, too.
        of: the argument whose bytes it is about; None: its own.
        total: in the head of that, the words between the number of such nodes and their bytes.
        about: in an explanation, the word before bytes and parameters; "" leaves them out.
        counts_as: what a prediction counts its bytes as.
        stands: why it stands where it stands; or a function of the node and its context that says so.
        transfer: whether it is the start of a transfer, or the wait for one: its kind and "wait_" before it.
    """

    what: str
    travels: Literal["", "gather", "scatter"] = ""
    first: bool = False
    verb: str = ""
    sized: bool = False
    of: int | None = None
    total: str = ""
    about: str = ""
    counts_as: Literal["weights", "gradients", "activations", "temporary"] = "temporary"
    stands: str | Callable[[Node, Any], str] = ""
    transfer: bool = False


NODE_KINDS: dict[str, NodeKind] = {
    "rebuild": NodeKind("a view or cast that backward makes anew"),
    "shard": NodeKind("the placeholder of a group's shard (stage 3)"),
    "replica": NodeKind("the placeholder of a group's full copy (stages 1 and 2; one_copy)"),
    "refresh": NodeKind("the wait for that copy to be up to date", verb="refresh", about="brings", sized=True),
    "kept": NodeKind("the placeholder of a gradient that was kept back"),
    "gathered": NodeKind("the placeholder of a whole group that forward left gathered", about="brings"),
    "narrow": NodeKind("a cast or a part of a shard that is gathered"),
    "widen": NodeKind("a cast of a weight back to its parameter's dtype"),
    "unshard": NodeKind("a parameter, gathered: the symbolic node of `gather`"),
    "reduce_grad": NodeKind("a gradient, reduced: the symbolic node of `reduce`"),
    "all_gather": NodeKind("the start of the group's gather", verb="start", about="brings", sized=True),
    "wait": NodeKind("the wait for it", verb="wait", about="brings"),
    "weight": NodeKind("a parameter as a view of the gathered buffer"),
    "prepare": NodeKind("what adds a kept gradient, or casts, before packing"),
    "pack": NodeKind("what lays a group's gradients into one flat buffer"),
    "reduce_scatter": NodeKind(
        "the start of its reduction",
        verb="reduce",
        sized=True,
        of=0,
        total="reduce-scatters:",
        about="takes",
        counts_as="gradients",
    ),
    "all_reduce": NodeKind(
        "the start of its reduction in stage 0",
        verb="reduce",
        sized=True,
        total="all-reduces:",
        about="takes",
        counts_as="gradients",
    ),
    "wait_grad": NodeKind("the wait for the reduction", verb="reduced"),
    "gradient": NodeKind("what makes the averaged gradient of it"),
    "discard": NodeKind("the end of a gathered buffer", verb="discard", about="frees"),
}
"""Every kind, by the name in its tag. A node that a user's pass inserted has the pass's name there."""

PICKING: set[str] = set()
"""Operators of features that read of a large input no more bytes than they write, by name."""


def kind_of(node: Node) -> NodeKind | None:
    """The kind of a node that one of zerofx's passes inserted; None: none of them did."""
    tag = node.meta.get("zerofx")
    return NODE_KINDS.get(tag.kind) if tag is not None else None


def travelling(how: Literal["", "gather", "scatter"] = "") -> list[str]:
    """The kinds that start a collective of that sort; without a sort, of either."""
    return [name for name, kind in NODE_KINDS.items() if kind.travels and how in ("", kind.travels)]


def ahead_of_gathers() -> list[str]:
    """The kinds that gathers of weights start after."""
    return [name for name, kind in NODE_KINDS.items() if kind.first]
