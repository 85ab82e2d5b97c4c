"""How an optimizer steps on sharded parameters, in words: `explain_optimizer`."""

from __future__ import annotations

from typing import Any

import torch

from zerofx.runtime.optim.hooks import way_of
from zerofx.runtime.optim.muon import Muon
from zerofx.runtime.optim.owners import Owners, by_ranks
from zerofx.runtime.state.parameter import ShardedParameter

_SHOWN = 3
_LARGE = 1.25
"""From so many times a rank's share on a parameter is named, and a rank that owns more."""


def explain_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """How ``optimizer`` steps on sharded parameters, and who owns what. A collective, ahead of the first step.

    ::

        >>> print(zerofx.explain_optimizer(optimizer))
        Adafactor steps each parameter whole, on its owner: it uses 'new_zeros'.
        32 of 49,216 elements travel to an owner, as gradients, and back, as new weights.
        rank 0      2 parameters,        24,576 elements (50 %): 0.up.weight, 0.down.weight
        rank 1      3 parameters,        24,640 elements (50 %): 1.up.weight, 1.down.weight, norm.weight

    Ranks are places among those that the parameters are divided over. A parameter is not divided between owners: one
    that is much more than a rank's share is named, for its owner has that much more to keep and to compute. So is the
    rank that owns most, where they are too few to be divided evenly.
    """
    name = type(optimizer).__name__
    groups = [group for group in optimizer.param_groups if not isinstance(optimizer, Muon) or group["use_muon"]]
    sharded: list[Any] = [p for group in groups for p in group["params"] if isinstance(p, ShardedParameter)]
    if isinstance(optimizer, Muon):
        owners: Owners = optimizer.owners()
        head = f"{name} orthogonalizes each matrix whole, on its owner; all else is on flat slices."
    else:
        way = way_of(optimizer)
        if way.kind is None:
            return f"{name} is refused: it uses {way.operation} {way.why}."
        if way.kind == "slices":
            return f"{name} steps on flat slices: element by element, or by numbers of whole parameters."
        sharded = [p for p in sharded if p.requires_grad]
        owners = Owners(sharded)
        head = f"{name} steps each parameter whole, on its owner: it uses {way.operation}."
    moved, all_of_them = sum(map(owners.elsewhere, sharded)), sum(p.numel() for p in sharded)
    what = (
        "as momenta, and back, as updates" if isinstance(optimizer, Muon) else "as gradients, and back, as new weights"
    )
    lines = [head, f"{moved:,} of {all_of_them:,} elements travel to an owner, {what}."]
    for members in by_ranks(sharded):
        total, owned = sum(p.numel() for p in members), []
        for rank in range(members[0]._group.layout.world_size):
            mine = [p for p in members if owners.owner_of(p) == rank]
            elements = sum(p.numel() for p in mine)
            owned.append(elements)
            names = [p._slot.name for p in mine[:_SHOWN]] + ["..."] * (len(mine) > _SHOWN)
            share = 100 * elements / max(1, total)
            count = f"{len(mine):4} parameter{'s' if len(mine) != 1 else ' '}"
            lines.append(f"rank {rank:<3} {count}, {elements:13,} elements ({share:.0f} %): {', '.join(names)}")
        lines += _too_large(members, total) or _uneven(members, owned)
    return "\n".join(lines)


def _too_large(members: list[Any], total: int) -> list[str]:
    """The parameters that alone are much more than a rank's share of ``total`` elements, in words."""
    fair = total / members[0]._group.layout.world_size
    return [
        f"{p._slot.name!r} alone is {p.numel() / fair:.1f} times a rank's share: no owner has less of it."
        for p in members
        if p.numel() > _LARGE * fair
    ]


def _uneven(members: list[Any], owned: list[int]) -> list[str]:
    """The rank that owns most, in words, where that is much more than its share."""
    most, fair = max(owned), sum(owned) / len(owned)
    if most <= _LARGE * fair:
        return []
    rank, few = owned.index(most), f"{len(members)} parameters divide no better over {len(owned)} ranks"
    return [f"rank {rank} owns {most / fair:.1f} times its share: {few}."]
