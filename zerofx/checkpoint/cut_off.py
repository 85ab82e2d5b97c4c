"""What codes cut off of gradients (``Wire(error_feedback=True)``), as a part of a rank's own file.

Each rank has its own, for each other rank. So it is loaded by as many ranks as saved it, and their run goes on with the
same bits. With another number of ranks, another mesh, or other groups, it is zero again: that is a first step's.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from zerofx.runtime.state.group import ShardGroup, groups_of

NAME = "zerofx.cut_off"
"""Among what is saved by name; no argument of `zerofx.save` can be called so."""


def cut_off(module: nn.Module) -> dict[str, Any]:
    """What to save beside a user's things: nothing, where no gradient was written with error feedback."""
    groups = [group for group in groups_of(module) if group.gradients.rest is not None]
    found = {group.layout.name: {"of": _of(group), "rest": group.gradients.rest} for group in groups}
    return {NAME: found} if found else {}


def restore(module: nn.Module, loaded: dict[str, Any]) -> dict[str, Any]:
    """Take it out of what was loaded; returns the user's things."""
    found = loaded.pop(NAME, {})
    for group in groups_of(module):
        saved = found.get(group.layout.name)
        group.gradients.rest = None
        if saved is not None and saved["of"] == _of(group) and saved["rest"].shape == group.gradients.rest_shape:
            group.gradients.rest = saved["rest"].to(group.device)
    return loaded


def _of(group: ShardGroup) -> list[str]:
    """What it was cut off of: the parameters, and the replicas where there are some."""
    replicas = group.sharing.replicas
    return [slot.name for slot in group.layout.slots] + ([f"{replicas.size} replicas"] if replicas else [])
