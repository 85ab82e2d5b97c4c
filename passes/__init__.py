"""Graph passes: FX graph in, FX graph out. See `PIPELINE` for what runs in which order, and each file for one pass.

A pass is a function ``pass_(gm, ctx) -> number of edits``. It changes ``gm`` in place, tags what it inserts
(``node.meta["zerofx"]``), leaves a graph alone in which there is nothing for it to do, and knows layouts, never
a process group or a module.
"""

from zerofx.passes.context import Context, ParameterRef, Recipe, Reduction, Tag
from zerofx.passes.discard import discard
from zerofx.passes.gather import gather
from zerofx.passes.group import group
from zerofx.passes.lower import lower
from zerofx.passes.prefetch import prefetch
from zerofx.passes.reduce import reduce
from zerofx.passes.rematerialize import rematerialize

PIPELINE = (rematerialize, gather, reduce, group, prefetch, discard, lower)
"""The passes of stage 3, in order."""

__all__ = [
    "PIPELINE",
    "Context",
    "ParameterRef",
    "Recipe",
    "Reduction",
    "Tag",
    "discard",
    "gather",
    "group",
    "lower",
    "prefetch",
    "reduce",
    "rematerialize",
]
