"""What `zerofx.features.meshes` adds to the core."""

from __future__ import annotations

from zerofx.features.interface import Feature, Insertion
from zerofx.features.meshes import replicate, secondary_shard, two_hop_gather
from zerofx.features.meshes.facts import MeshFacts, mesh_of
from zerofx.features.meshes.part import Part
from zerofx.features.meshes.proof import RULES
from zerofx.features.meshes.row_copy import RowCopy
from zerofx.features.meshes.simulated import SIMULATED
from zerofx.features.meshes.two_levels import rows_and_columns

FEATURE = Feature(
    options=("sharding",),
    facts=MeshFacts.of,
    simulated=SIMULATED,
    passes=(
        Insertion(secondary_shard.secondary_shard, after="keep", when=lambda ctx: bool(mesh_of(ctx).secondary_group)),
        Insertion(two_hop_gather.two_hop_gather, after="prefetch", when=lambda ctx: mesh_of(ctx).two_hops),
        Insertion(replicate.replicate, after="prefetch", when=lambda ctx: ctx.replicas > 1),
    ),
    node_kinds={**secondary_shard.NODE_KINDS, **two_hop_gather.NODE_KINDS, **replicate.NODE_KINDS},
    rules=RULES,
    sharings=(rows_and_columns,),
    weights=(Part, RowCopy),
)
