"""Random recipes, for hypothesis to draw and to cut down. Simple values stand first: that is where cutting ends."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import strategies as st

from tests.fuzz.recipe import CALLS, CONTAINERS, COUNTERS, LEAVES, RELOADS, WRITES, Layer, Recipe, kinds

leaves = st.builds(
    Layer,
    kind=st.sampled_from(LEAVES),
    width=st.integers(1, 9),
    bias=st.booleans(),
    frozen=st.sampled_from([False, False, False, True]),
    of=st.integers(0, 3),
)


def containers(children: st.SearchStrategy[Layer]) -> st.SearchStrategy[Layer]:
    return st.builds(
        Layer,
        kind=st.sampled_from(CONTAINERS),
        frozen=st.sampled_from([False, False, False, False, False, True]),
        children=st.lists(children, min_size=1, max_size=3).map(tuple),
    )


# Where one of these is, Dynamo skips the loop over layers, and no graph has what is in a checkpoint.
BREAKS = {"break", "eager", "reentrant", "peek", "gru", "lstm", "rnn"}


def tuples(of: st.SearchStrategy, largest: int) -> st.SearchStrategy[tuple]:
    return st.lists(of, min_size=1, max_size=largest).map(tuple)


# Before 2.12 torch.compile does not notice that a weight is trained again (docs/models.md).
THAWS = [False, False, True] if torch.__version__ >= "2.12" else [False]


@st.composite
def recipes(
    draw: st.DrawFn, executor: str = "eager", largest_world: int = 4, size: int = 4, meshes: bool = False
) -> Recipe:
    """Any recipe that means the same on ranks as in one process.

    ``size``: how many layers, and leaves in each. ``meshes``: on meshes of two dimensions alone, 2 x 2 in most cases.
    """
    layers = st.recursive(leaves, containers, max_leaves=size)
    calls = tuples(st.sampled_from(CALLS), max(1, size - 1))
    recipe = Recipe(
        layers=draw(tuples(layers, size)),
        steps=draw(tuples(calls, 2)),
        stage=draw(st.sampled_from([3, 3, 2, 1, 0])),
        world=min(draw(st.sampled_from([4, 4, 2] if meshes else [2, 2, 2, 1, 3, 4])), largest_world),
        executor=executor,
        rows=2 if meshes else draw(st.sampled_from([1, 1, 2, 4])),
        scheme=draw(st.sampled_from(["shard", "between", "near", "all"])),
        grouping=draw(st.sampled_from(["each", "merged", "split", "linear", "rule"])),
        lookups=draw(st.booleans()),
        one_copy=draw(st.booleans()),
        wire=draw(st.sampled_from(["none", "none", "none", "small", "bf16", "fp8", "int8", "int4", "feedback"])),
        budget=draw(st.sampled_from(["none", "some", "inf"])),
        precision=draw(st.sampled_from(["full", "full", "low", "reduce"])),
        buckets=draw(st.sampled_from(["group", "parameter", "all"])),
        optimizer=draw(st.sampled_from(["sgd", "adamw", "before"])),
        inside=draw(st.booleans()),
        clip=draw(st.sampled_from([False, False, True])),
        penalty=draw(st.sampled_from([False, False, True])),
        output=draw(st.sampled_from(["loss", "tuple", "dict", "shared"])),
        writes=draw(st.sampled_from(["none", "none", "none", *WRITES])),
        reload=draw(st.sampled_from(["none", "none", "none", *RELOADS])),
        thaw=draw(st.sampled_from(THAWS)),
        zero=draw(st.booleans()),
        seed=draw(st.integers(0, 9)),
    )
    if draw(st.sampled_from([False, False, False, True])):
        alone = {"lookups": False, "one_copy": False, "inside": False, "wire": "none", "rows": 1}
        recipe = replace(recipe, turns=True, **alone)
    broken = {"broken"} if BREAKS & kinds(recipe.layers) else set()
    return replace(recipe, layers=allowed(recipe.layers, without(recipe), frozenset(broken)))


def allowed(
    layers: tuple[Layer, ...], without: frozenset[str], inside: frozenset[str] = frozenset()
) -> tuple[Layer, ...]:
    """``layers`` without what does not mean the same on ranks, or compiled, as in one process; see docs/models.md.

    A normalisation stands for the kinds ``without``, for what counts its calls in a checkpoint, which would count them
    twice, and for attention in one without gradients, which torch.compile refuses. In a reentrant one ``no_grad`` cuts
    gradients off: PyTorch has zeros where torch.compile has none. One under ``no_grad`` that returns its input cuts
    them off in PyTorch, and not in torch.compile. A layer that is called again under ``no_grad`` gets a gradient from
    torch.compile, too, where the call is behind a graph break. ``torch.vmap`` over weights and ``torch.cond`` are
    refused outside of any graph; and a checkpoint runs outside of any where a graph breaks. ``inside``: kinds of
    containers around; "frozen" if one is, "broken" if a graph breaks, "outside" if no graph has what is in it.
    """
    kept = []
    for layer in layers:
        around = inside | {layer.kind} | ({"frozen"} if layer.frozen else set())
        outside = {"eager", "reentrant"} | ({"checkpoint"} if "broken" in inside else set())
        around |= {"outside"} if layer.kind in outside else set()
        checkpointed = bool(around & {"checkpoint", "reentrant"})
        attention = layer.kind == "attention" and bool(around & {"frozen", "no_grad"})
        again = layer.kind == "again" and "no_grad" in around
        compiled = layer.kind == "cond" or (layer.kind == "vmap" and layer.of % 2 == 1)
        refused = layer.kind in without or again or (compiled and "outside" in around)
        if refused or (checkpointed and (layer.kind in COUNTERS or attention)):
            layer = replace(layer, kind="norm")
        if {"no_grad", "reentrant"} <= around and layer.kind in ("no_grad", "reentrant"):
            layer = replace(layer, kind="sequence")
        kept.append(replace(layer, children=allowed(layer.children, without, around)))
    return tuple(kept)


def without(recipe: Recipe) -> frozenset[str]:
    """What does not go with the rest of a recipe.

    Where ranks run other numbers of calls: what counts them.

    With two forwards before a backward, a batch normalisation that runs in a graph and outside of one (called again
    there, or checkpointed): the graph writes its statistics, which the other has saved for backward, and PyTorch
    refuses, under plain ``torch.compile`` too.

    With weights that compute in another dtype than the module's: buffers, which stay in float64; a recurrence, which
    outside of any graph refuses its input by ``weight.dtype``, and that is the master's; in stage 0 arithmetic of
    a weight and a number, which is in the master's dtype; weight norm, for Dynamo shows nobody its operator, so its
    weights are not cast.
    """
    left_out = {*COUNTERS} if recipe.by_turns and any("fewer" in calls for calls in recipe.steps) else set()
    two_forwards = any({"two_forwards", "crossed"} & set(calls) for calls in recipe.steps)
    if two_forwards and {"again", "reentrant"} & kinds(recipe.layers):
        left_out |= {"batch_norm"}
    if recipe.precision == "low":
        left_out |= {"batch_norm", "gru", "lstm", "rnn", "weight_norm", *COUNTERS}
        left_out |= {"scalar", "scale"} if recipe.stage == 0 else set()
    return frozenset(left_out)
