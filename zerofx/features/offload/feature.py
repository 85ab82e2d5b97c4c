"""What `zerofx.features.offload` adds to the core."""

from __future__ import annotations

from zerofx.features.interface import ALL_STAGES, Feature, Insertion
from zerofx.features.offload import offload_activations as activations
from zerofx.features.offload import offload_gradients as gradients
from zerofx.features.offload import reload_weights as weights
from zerofx.features.offload.away import away
from zerofx.features.offload.carriage import Carriage
from zerofx.features.offload.facts import OffloadFacts, offload_of, offloaded
from zerofx.features.offload.in_file import InFile
from zerofx.features.offload.on_host import OnHost
from zerofx.features.offload.place import place, pretended_store
from zerofx.features.offload.proof import RULES
from zerofx.features.offload.simulated import SIMULATED
from zerofx.passes.context import Context


def _moves_activations(ctx: Context) -> bool:
    return bool(offload_of(ctx).activations if ctx.phase == "forward" else offloaded(ctx))


FEATURE = Feature(
    options=("offload",),
    facts=OffloadFacts.of,
    away=away,
    simulated=SIMULATED,
    carriage=Carriage,
    store=pretended_store,
    place=place,
    passes=(
        Insertion(weights.reload_weights, after="prefetch", when=lambda ctx: bool(offload_of(ctx).weights)),
        Insertion(gradients.offload_gradients, before="lower", when=lambda ctx: bool(offload_of(ctx).gradients)),
        Insertion(activations.offload_activations, before="lower", when=_moves_activations, stages=ALL_STAGES),
    ),
    node_kinds={**weights.NODE_KINDS, **gradients.NODE_KINDS, **activations.NODE_KINDS},
    rules=RULES,
    homes=(InFile, OnHost),
)
