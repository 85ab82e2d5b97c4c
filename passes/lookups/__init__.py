"""A corner: of tables that are only looked up, rows travel (``lookups=True``).

============  ==================================================================
lookup        the pass
ops           its two operators
proof         what `verify` knows of rows
============  ==================================================================

This file puts them where they are looked for::

    PIPELINE         the pass stands in front of `group`
    KINDS, PICKING   how its nodes travel, and what is said of them
    READERS, ...     what `verify` may meet
"""

from __future__ import annotations

import torch
from torch.fx import Graph

from zerofx.passes import PIPELINE, edit, group
from zerofx.passes.kinds import KINDS, PICKING, Kind
from zerofx.passes.lookups.lookup import lookup
from zerofx.passes.lookups.ops import OWN_ROWS
from zerofx.passes.lookups.proof import (
    Everyones,
    Rows,
    embedding,
    read_everyones,
    read_own_rows,
    read_rows,
    start_telling,
)
from zerofx.passes.proof.known import OTHER_GATHERS, READERS, SHARD_READERS
from zerofx.passes.proof.meaning import LAWS


def _why_asked(graph: Graph, group: str) -> str:
    asks = any(node.meta["zerofx"].group == group for node in edit.tagged(graph, "answer"))
    about = "which rows this rank looks up" if asks else "whose gradients it gives"
    return f"as soon as the indices are there: all ranks are told {about}"


PIPELINE.insert(PIPELINE.index(group), lookup)

KINDS |= {
    "ask": Kind(travels="gather", verb="ask", stands=_why_asked),
    "asked": Kind(verb="asked"),
    "answer": Kind(
        travels="scatter",
        first=True,
        verb="answer",
        total="exchanges of rows take",
        brings="weights",
        stands="behind what picks the rows, and ahead of other gathers: it is little, and needed first",
    ),
    "answered": Kind(verb="answered", stands="in front of the rows' first use"),
    "give": Kind(
        travels="gather",
        verb="give",
        total="gathers of their gradients bring",
        brings="gradients",
        stands="right behind the rows' gradients",
    ),
    "given": Kind(verb="given", stands="at the end: the table's gradient is in nobody's way until then"),
    "rows": Kind(),
}
PICKING.add("own_rows")

READERS |= {Everyones: read_everyones, Rows: read_rows}
SHARD_READERS[OWN_ROWS] = read_own_rows
OTHER_GATHERS.append(start_telling)
LAWS[torch.ops.aten.embedding.default] = embedding

__all__ = ["lookup"]
