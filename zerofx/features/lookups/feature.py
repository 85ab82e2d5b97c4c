"""What `zerofx.features.lookups` adds to the core."""

from __future__ import annotations

import torch
from torch.fx import Node

from zerofx.features.interface import Feature, Insertion
from zerofx.features.lookups.facts import LookupFacts, lookups_of
from zerofx.features.lookups.lookup import lookup
from zerofx.features.lookups.proof import RULES, embedding
from zerofx.passes import edit
from zerofx.passes.context import Context
from zerofx.passes.kinds import NodeKind


def _why_asked(node: Node, ctx: Context) -> str:
    group = node.meta["zerofx"].group
    asks = any(other.meta["zerofx"].group == group for other in edit.tagged(node.graph, "answer"))
    about = "which rows this rank looks up" if asks else "whose gradients it gives"
    return f"as soon as the indices are there: all ranks need to know {about}"


NODE_KINDS = {
    "ask": NodeKind(
        "the start of the gather of all ranks' indices",
        travels="gather",
        sized=True,
        about="brings",
        verb="ask",
        stands=_why_asked,
    ),
    "asked": NodeKind("the wait for it", verb="asked"),
    "answer": NodeKind(
        "the start of the exchange of rows",
        sized=True,
        about="takes",
        travels="scatter",
        first=True,
        verb="answer",
        total="exchanges of rows:",
        counts_as="weights",
        stands="after what picks the rows, and ahead of other gathers: it is little, and needed first",
    ),
    "answered": NodeKind("the wait for it", verb="answered", stands="before the rows' first use"),
    "give": NodeKind(
        "the start of the gather of rows' gradients",
        sized=True,
        about="brings",
        travels="gather",
        verb="give",
        total="gathers of their gradients:",
        counts_as="gradients",
        stands="right after the rows' gradients",
    ),
    "given": NodeKind(
        "the wait for it", verb="given", stands="at the end: the table's gradient is in nobody's way until then"
    ),
    "rows": NodeKind("rows of a table"),
}

FEATURE = Feature(
    options=("lookups",),
    facts=LookupFacts.of,
    passes=(Insertion(lookup, before="group", when=lambda ctx: lookups_of(ctx).on and ctx.gathers),),
    node_kinds=NODE_KINDS,
    picks=frozenset({"own_rows"}),
    rules=RULES,
    laws={torch.ops.aten.embedding.default: embedding},
)
