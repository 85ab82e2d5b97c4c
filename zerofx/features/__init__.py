"""Optional features: each is one folder, and one line of `FEATURES`.

The core trains a model in stages 0 to 3 and imports none of them (tests/test_features.py deletes each). A folder's
``feature.py`` says what it adds to the core, in the words of `zerofx.features.interface`. Take a line out here, delete
the folder, and everything else works.

======================  ====================================================  ==========================================
folder                  what it is                                            option
======================  ====================================================  ==========================================
same_host               ranks of one host read each other's memory            ``ZEROFX_SAME_HOST``
gloo_threads            gloo's threads share a core with what computes        none: on CPUs
one_copy                the weights once for all ranks of a host              ``one_copy=``
lookups                 of embeddings, rows travel instead of tables          ``lookups=``
meshes                  shards within hosts, replicas between them            ``mesh=``, ``sharding=``
step_in_backward        groups are updated inside of backward                 `zerofx.step_in_backward`
offload                 weights, gradients, activations and optimizer state   ``offload=``
                        in host memory or in a file
partition_activations   tensor-parallel ranks each save a part                ``partition_activations=``
wire                    weights and gradients travel quantized                ``wire=``
======================  ====================================================  ==========================================
"""

from __future__ import annotations

import importlib
from typing import Any

FEATURES = (
    "same_host",
    "gloo_threads",
    "one_copy",
    "lookups",
    "meshes",
    "step_in_backward",
    "offload",
    "partition_activations",
    "wire",
)
"""In this order they are asked, and their passes stand where several have one place."""


def load() -> None:
    """Put what every feature adds into the tables of the core. Runs once, when zerofx is imported."""
    from zerofx.compiler.activations import AWAY
    from zerofx.compiler.compared import COMPARES
    from zerofx.compiler.options import OFFERED
    from zerofx.compiler.pair import FACTS
    from zerofx.compiler.runners import AROUND
    from zerofx.compiler.shard import PLACES
    from zerofx.features.interface import Feature
    from zerofx.passes import insert
    from zerofx.passes.kinds import NODE_KINDS, PICKING
    from zerofx.passes.pairwise import SHORTCUTS
    from zerofx.passes.proof.meaning import LAWS
    from zerofx.passes.proof.rules import RULES
    from zerofx.runtime.ranks.quantized import QUANTIZED
    from zerofx.runtime.ranks.sharing import SETTLED, SHARINGS
    from zerofx.runtime.state.carriage import CARRIAGES, STORES
    from zerofx.runtime.state.home import HOMES
    from zerofx.runtime.state.weights import WEIGHTS
    from zerofx.simulate.asked import SIMULATED

    one_each: dict[str, list[Any]] = {
        "facts": FACTS,
        "rules": RULES,
        "away": AWAY,
        "simulated": SIMULATED,
        "compares": COMPARES,
        "around": AROUND,
        "quantized": QUANTIZED,
        "carriage": CARRIAGES,
        "store": STORES,
        "place": PLACES,
    }
    for name in FEATURES:
        feature: Feature = importlib.import_module(f"zerofx.features.{name}.feature").FEATURE
        for each in feature.passes:
            insert(each.pass_, each.when, after=each.after, before=each.before, stages=each.stages)
        for field, table in one_each.items():
            table += [getattr(feature, field)] * (getattr(feature, field) is not None)
        OFFERED.update(feature.options)
        NODE_KINDS.update(feature.node_kinds)
        PICKING.update(feature.picks)
        LAWS.update(feature.laws)
        SHORTCUTS.extend(feature.shortcuts)
        SETTLED.extend(feature.settled)
        SHARINGS[:0] = feature.sharings
        WEIGHTS[:0] = feature.weights
        HOMES[:0] = feature.homes
