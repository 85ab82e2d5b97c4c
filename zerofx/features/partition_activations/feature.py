"""What `zerofx.features.partition_activations` adds to the core."""

from __future__ import annotations

from zerofx.features.interface import ALL_STAGES, Feature, Insertion
from zerofx.features.partition_activations.alike import compare
from zerofx.features.partition_activations.facts import PartitionFacts, partition_of
from zerofx.features.partition_activations.partition_saved import NODE_KINDS, partition_saved
from zerofx.features.partition_activations.proof import RULES
from zerofx.features.partition_activations.simulated import SIMULATED

FEATURE = Feature(
    options=("partition_activations",),
    facts=PartitionFacts.of,
    simulated=SIMULATED,
    compares=compare,
    passes=(
        Insertion(partition_saved, after="prefetch", when=lambda ctx: partition_of(ctx).ranks > 1, stages=ALL_STAGES),
    ),
    node_kinds=NODE_KINDS,
    rules=RULES,
)
