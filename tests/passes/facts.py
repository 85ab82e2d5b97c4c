"""A context's facts by flat names: ``changed(ctx, wire=INT8, replicas=2)``; those of features among them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from zerofx.features.lookups.facts import LookupFacts
from zerofx.features.meshes.facts import MeshFacts
from zerofx.features.offload.facts import OffloadFacts
from zerofx.features.partition_activations.facts import PartitionFacts
from zerofx.features.wire.facts import WireFacts
from zerofx.passes import Context
from zerofx.passes.context import Elsewhere

NAMES: dict[str, tuple[type, str]] = {
    "lookups": (LookupFacts, "on"),
    "two_hops": (MeshFacts, "two_hops"),
    "divides_between": (MeshFacts, "divides_between"),
    "secondary_group": (MeshFacts, "secondary_group"),
    "secondary_ranks": (MeshFacts, "secondary_ranks"),
    "weights_away": (OffloadFacts, "weights"),
    "gradients_away": (OffloadFacts, "gradients"),
    "activation_choice": (OffloadFacts, "activations"),
    "parts_group": (PartitionFacts, "group"),
    "parts_ranks": (PartitionFacts, "ranks"),
    "alike": (PartitionFacts, "alike"),
}
"""Of features' facts, but for `WireFacts`, which follow from ``wire``, ``crosses``, and what else is said."""

ELSEWHERE = {"held_elsewhere": "held", "largest_elsewhere": "largest"}
_CORE = {field.name for field in fields(Context)}


def changed(ctx: Context, **facts: Any) -> Context:
    """``ctx`` with other facts. What is shared with other contexts stays so."""
    own = {name: value for name, value in facts.items() if name in _CORE}
    features: dict[type, Any] = dict(own.get("features", ctx.features))
    for name, (kind, attribute) in NAMES.items():
        if name in facts:
            features[kind] = replace(features.get(kind, kind()), **{attribute: facts[name]})
    elsewhere = {ELSEWHERE[name]: facts[name] for name in ELSEWHERE if name in facts}
    left = facts.keys() - _CORE - NAMES.keys() - ELSEWHERE.keys() - {"wire", "crosses"}
    assert not left, f"no facts of a context: {left}"
    ctx = replace(ctx, **own | {"features": features, "elsewhere": ctx.elsewhere._replace(**elsewhere)})
    mesh = ctx.facts(MeshFacts)
    if "wire" in facts:
        how: Any = {"crosses": facts.get("crosses", False), "replicas": ctx.replicas}
        features[WireFacts] = WireFacts.by(facts["wire"], **how)
    if mesh.divides_between and WireFacts in features:
        features[WireFacts] = replace(features[WireFacts], divides_between=True)
    return ctx


def change(ctx: Context, **facts: Any) -> None:
    """The same in place."""
    vars(ctx).update(vars(changed(ctx, **facts)))


def made(**facts: Any) -> Context:
    """A context of such facts."""
    own = {name: facts[name] for name in ("phase", "process_group")}
    return changed(Context(**own, elsewhere=Elsewhere()), **facts)
