"""Tensors that share a slice: ``old = parameter.data`` keeps its values after ``parameter.data = new``.

In PyTorch the assignment gives the parameter other memory, and ``old`` keeps what the parameter had. Here a slice
cannot leave its group's shard. So whoever shares it gets a copy of the old values, and then the slice is written::

    old = p.data        p ─▶ slice ◀─ old
    p.data = new        p ─▶ slice, written       old ─▶ a copy from before

An average that is swapped in and out again is written so.
"""

from __future__ import annotations

import weakref
from typing import Any


def share_slice(alias: Any, tensor: Any) -> None:
    """Give ``alias`` the slice of ``tensor``."""
    if tensor._aliases is None:
        tensor._aliases = weakref.WeakValueDictionary()
    alias._local, alias._aliases = tensor._local, tensor._aliases
    alias._aliases[id(alias)] = alias


def unshare_slice(tensor: Any) -> None:
    """Have ``tensor`` share its slice with nobody: it is about to get other values. The slice is resident."""
    aliases = tensor._aliases
    if not aliases:
        return
    moved = [tensor] if id(tensor) in aliases else list(aliases.values())
    copied = tensor._local.clone()
    for alias in moved:
        alias._local = copied
    aliases.pop(id(tensor), None)
    tensor._aliases = None
