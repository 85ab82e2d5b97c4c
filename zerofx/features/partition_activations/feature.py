"""What `zerofx.features.partition_activations` adds to the core."""

from __future__ import annotations

from zerofx.features.interface import ALL_STAGES, Feature, Insertion
from zerofx.features.partition_activations.partition_saved import NODE_KINDS, partition_saved
from zerofx.features.partition_activations.proof import RULES

FEATURE = Feature(
    passes=(Insertion(partition_saved, after="prefetch", when=lambda ctx: ctx.parts_ranks > 1, stages=ALL_STAGES),),
    node_kinds=NODE_KINDS,
    rules=RULES,
)
