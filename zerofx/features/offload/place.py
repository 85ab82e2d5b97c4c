"""Where a module's state is to be, before its groups are made: a file of this rank's, or pinned memory of the host."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from zerofx.features.offload.activation_store import ActivationStore
from zerofx.features.offload.activations_on_host import ActivationsOnHost
from zerofx.model.layout import GroupLayout
from zerofx.model.offload import Offload
from zerofx.runtime.ranks.sharing import Sharing
from zerofx.runtime.state.copies import Copies, copies_of
from zerofx.runtime.state.group import Family
from zerofx.runtime.state.staging import Staging
from zerofx.runtime.state.state_file import opened


def place(family: Family, sharing: Sharing, device: torch.device, layouts: Sequence[GroupLayout]) -> Any:
    """See `zerofx.features.interface.Feature`. The file, which the module's groups will hold; None: there is none.

    Raises:
        OffloadError: on every rank, where one of them cannot make its file.
        RuntimeError: so, where one of them cannot pin its buffers.
    """
    offload = family.offload
    if offload is None or not offload.moves:
        return None
    if offload.folder is None:
        _on_host(offload, family, sharing, device, layouts)
        return None
    file = family.file = opened(offload.folder, sharing.everyone, uuid.uuid4().hex)
    file.holds = offload.kinds
    if offload.optimizer is not None:
        family.in_file = offload.chosen(list(layouts))
    if offload.activations is not None:
        family.activation_store = ActivationStore(file, offload.smallest)
    return file


def pretended_store(file: Any, smallest: int) -> ActivationStore | ActivationsOnHost:
    """Of a dry run, where nothing is moved: for ``file``, which is none, or for the host's memory."""
    return (
        ActivationsOnHost(Copies(torch.device("meta")), smallest) if file is None else ActivationStore(file, smallest)
    )


def _on_host(
    offload: Offload, family: Family, sharing: Sharing, device: torch.device, layouts: Sequence[GroupLayout]
) -> None:
    """State is to be in the host's memory, or activations, or both."""
    copies, ranks = copies_of(device), sharing.everyone
    if copies is not None:
        if offload.on_host:
            names, holds = offload.chosen(list(layouts)), offload.kinds_on_host - {"moment"}
            there = [(kind, each) for kind in holds for each in layouts if each.name in names]
            sizes = [
                each.shard_numel * each.dtype.itemsize
                for kind, each in there
                if kind == "weights" or each.requires_grad
            ]
            family.staging = ranks.all_or_none("offload=", lambda: Staging(copies, holds, sizes), RuntimeError)
            family.on_host = names
        if offload.activations is not None:
            family.activation_store = ActivationsOnHost(copies, offload.smallest)
    elif ranks.rank == 0:
        warnings.warn(
            'offload="cpu" with parameters on the CPU: the host\'s memory is where their state is already, and nothing '
            "moves. Give the path of a folder on a disk, or leave it out.",
            UserWarning,
            stacklevel=2,
        )
