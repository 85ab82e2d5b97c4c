"""What `zerofx.features.wire` adds to the core."""

from __future__ import annotations

from zerofx.features.interface import Feature, Insertion
from zerofx.features.wire.error_feedback import feeding
from zerofx.features.wire.facts import WireFacts, wire_of
from zerofx.features.wire.proof import RULES
from zerofx.features.wire.quantize import NODE_KINDS, quantize
from zerofx.features.wire.quantized import QuantizedWeights
from zerofx.features.wire.simulated import SIMULATED

FEATURE = Feature(
    options=("wire",),
    facts=WireFacts.of,
    simulated=SIMULATED,
    around=feeding,
    quantized=QuantizedWeights,
    passes=(Insertion(quantize, before="lower", when=lambda ctx: wire_of(ctx).wire is not None),),
    node_kinds=NODE_KINDS,
    rules=RULES,
)
