"""Optional features: each is one folder, and one line of `FEATURES`.

The core trains a model in stages 0 to 3 and knows none of them. A folder's ``feature.py`` says what it adds to the
core, in the words of `zerofx.features.interface`. Take a line out here, delete the folder, and everything else works.

======================  ====================================================  ==========================================
folder                  what it is                                            option
======================  ====================================================  ==========================================
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

FEATURES = ("lookups", "meshes", "step_in_backward", "offload", "partition_activations", "wire")
"""In this order they are asked, and their passes stand where several have one place."""


def load() -> None:
    """Tell the core of every feature. Runs once, when zerofx is imported."""
    from zerofx.features.interface import Feature
    from zerofx.passes import insert
    from zerofx.passes.kinds import NODE_KINDS, PICKING
    from zerofx.passes.proof.meaning import LAWS
    from zerofx.passes.proof.rules import RULES

    for name in FEATURES:
        feature: Feature = importlib.import_module(f"zerofx.features.{name}.feature").FEATURE
        for each in feature.passes:
            insert(each.pass_, each.when, after=each.after, before=each.before, stages=each.stages)
        NODE_KINDS.update(feature.node_kinds)
        PICKING.update(feature.picks)
        LAWS.update(feature.laws)
        RULES.extend([feature.rules] if feature.rules is not None else [])
