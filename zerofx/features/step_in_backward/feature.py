"""What `zerofx.features.step_in_backward` adds to the core."""

from __future__ import annotations

from zerofx.features.interface import Feature, Insertion
from zerofx.features.step_in_backward.proof import RULES
from zerofx.features.step_in_backward.step import NODE_KINDS, step

FEATURE = Feature(
    passes=(Insertion(step, before="lower", when=lambda ctx: ctx.steps),), node_kinds=NODE_KINDS, rules=RULES
)
