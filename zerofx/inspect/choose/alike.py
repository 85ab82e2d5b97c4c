"""A choice for a module that is about to be sharded, the same on every rank.

::

    each rank      chooses, for its own batch, by rank 0's rates          a refusal, or a choice
    all ranks      tell each other                                        one refuses: all raise; else rank 0's counts

All ranks compile alike meanwhile, so that Dynamo has seen the same on each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zerofx.compiler import auto
from zerofx.compiler.api import _groups
from zerofx.compiler.copies import Recipe
from zerofx.compiler.shard import device_of
from zerofx.inspect.choose.choice import Choice
from zerofx.inspect.choose.choose import choose, rates_for
from zerofx.model.memory import Memory
from zerofx.runtime.ranks.sharing import sharing_of


def choose_alike(module: nn.Module, options: dict[str, Any], batch: Any) -> Choice:
    """`choose` for the ranks that ``options`` say, on each of them. A collective.

    Raises:
        ValueError: nothing fits here, or options do not go together.
        RuntimeError: so it is on another rank.
    """
    sharing = sharing_of(options.get("mesh"), options.get("reduce_group"))
    device = torch.device(device_of(module, options.get("device"), sharing.weights).type)
    ranks = sharing.everyone.size
    mesh: int | tuple[int, int] = ranks
    if sharing.replicas is not None:
        mesh = sharing.replicas.size, ranks // sharing.replicas.size
    asked = Memory.of(options["memory"])
    assert asked is not None
    rates, rates_of = sharing.whole.all_gathered(rates_for(asked, device, ranks))[0]
    args, call = _as_called(batch)
    mine: Choice | None = None
    refused: ValueError | None = None
    try:
        where: Any = {"world_size": mesh, "backend": sharing.weights.backend(device), "device": device}
        mine = choose(module, *args, call=call, rates=rates, **where, **options)
    except ValueError as e:
        refused = e
    told = (None if mine is None else replace(mine, given={}), str(refused or ""))
    everyone = sharing.whole.all_gathered(told)
    if refused is not None:
        raise refused
    for rank, (_, error) in enumerate(everyone):
        if error:
            raise RuntimeError(f"rank {rank} cannot choose for this {type(module).__name__}: {error}")
    assert mine is not None
    return replace(everyone[0][0], given=mine.given, rates_of=rates_of)


def explain(module: nn.Module) -> Choice:
    """What was chosen for ``module`` when it was compiled with ``batch=``, and why: ``print`` it.

    Raises:
        ValueError: nothing was chosen for it; or it is not sharded.
    """
    recipe: Recipe = _groups(module)[0].family.recipe
    if not isinstance(recipe.choice, Choice):
        raise ValueError(
            f"nothing was chosen for this {type(module).__name__}: all its options were given. zerofx.compile chooses "
            "with memory= and batch=; print(zerofx.graphs(model)[0]) has what a step takes."
        )
    return recipe.choice


def _as_called(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by position and by name."""
    if hasattr(batch, "keys"):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


auto.CHOOSERS.append(choose_alike)
