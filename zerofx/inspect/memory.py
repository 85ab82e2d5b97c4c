"""What a rank holds now, by what it is for: counted, not computed; `zerofx.plan` is the computed one.

::

    >>> print(zerofx.memory_summary(model, optimizer))
    rank 0 of 2 holds 118.0 MB, stage 3
    shards             14.7 MB    8 storages
    gradients          14.7 MB    8 storages
    optimizer state    29.5 MB   16 storages
    ...

Storages are counted, each once and whole, for the first kind in this table that it belongs to:

===============  =========================================================================================
kind             what
===============  =========================================================================================
replicas         stages 1 and 2, the whole weights that the model computes with; the shard too, where it is
                 a part of the replica. With ``one_copy`` this rank's 1/M of what all have in common. On a mesh
                 whose rows share the optimizer's state, what a row has
shards           this rank's part of the weights; with mixed precision the masters. In stage 0 the weights. In every
                 stage those that are ignored (``ignored=``), whole
kept gathered    stage 3, whole groups that a forward left for its backward (``memory_budget``), and those of
                 leaf modules that run, or whose weights autograd holds
gradients        ``.grad``
kept gradients   what `zerofx.no_sync` keeps back, whole
cut off          with ``Wire(error_feedback=True)``, what codes cut off of the last gradients
optimizer state  all tensors in ``optimizer.state``: moments, masters, counters; whole weights of an owner
buffers          the module's own buffers
activations      what forward has saved for backward, where there is an ``activation_budget``, or
                 ``partition_activations``
===============  =========================================================================================

What is there at rest is computed by `zerofx.runtime.state.account`, under these names. Without either budget
activations are autograd's, and are not counted; `zerofx.predict` says what a step takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerofx._torch import DisableTorchFunction, held, pytree
from zerofx.compiler.api import _groups
from zerofx.model.offload import STATE
from zerofx.model.units import format_bytes
from zerofx.runtime.eager.averages import is_ignored
from zerofx.runtime.eager.leaf import groups_of_leaves
from zerofx.runtime.optim.by_owner import wholes_of
from zerofx.runtime.state.group import Family, ShardGroup
from zerofx.runtime.state.parameter import ShardedTensor


@dataclass(frozen=True)
class MemorySummary:
    """Bytes that this rank holds; ``print`` it.

    Attributes:
        nbytes: kind -> bytes, in the order of the module's docstring; all kinds, also those with none.
        storages: kind -> how many storages they are in.
        replica: the number of this rank's replica of the module, and how many there are.
        on_host: bytes of optimizer state in the host's memory, of a module on another device (``offload="cpu"``); they
            are not in `total`.
        pinned: bytes of the host's memory through which gradients and weights pass to and from there, or where they
            and activations are (``gradients="cpu"`` and so on), as PyTorch rounds them up; not in `total`.
        pinned_of: which of these are there.
        on_disk: bytes in this rank's file (``offload=``); they are not in `total`.
        on_disk_of: what is in that file.
    """

    rank: int
    world_size: int
    stage: int
    nbytes: dict[str, int]
    storages: dict[str, int]
    replica: tuple[int, int] = (0, 1)
    on_disk: int = 0
    on_disk_of: tuple[str, ...] = ("optimizer state",)
    on_host: int = 0
    pinned: int = 0
    pinned_of: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.nbytes.values())

    def __str__(self) -> str:
        rank = f"rank {self.rank} of {self.world_size}"
        if self.replica[1] > 1:
            rank += " of replica {} of {}".format(*self.replica)
        title = f"{rank} holds {format_bytes(self.total)}, stage {self.stage}"
        width = max(map(len, self.nbytes))
        lines = []
        for kind, n in self.nbytes.items():
            if n:
                count = self.storages[kind]
                lines.append(f"{kind:<{width}}  {format_bytes(n):>10}  {count:>4} storage{'' if count == 1 else 's'}")
        if self.on_host:
            lines.append(f"{'on the host':<{width}}  {format_bytes(self.on_host):>10}  optimizer state")
        if self.pinned:
            of = ", ".join(self.pinned_of) or "between the host and the device"
            lines.append(f"{'pinned':<{width}}  {format_bytes(self.pinned):>10}  {of}")
        if self.on_disk:
            lines.append(f"{'on disk':<{width}}  {format_bytes(self.on_disk):>10}  {', '.join(self.on_disk_of)}")
        return "\n".join([title, *lines])


def memory_summary(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> MemorySummary:
    """What this rank holds of ``module`` and ``optimizer`` at this moment. No collective; linear in parameters.

    Raises:
        ValueError: the module is not sharded.
    """
    groups = list(dict.fromkeys([*_groups(module), *groups_of_leaves(module)]))
    ours = [p for group in groups for slot in group.layout.slots if (p := group.members.live(slot)) is not None]
    families = list(dict.fromkeys(group.family for group in groups))
    kinds: dict[str, Iterable[Any]] = {
        "replicas": [_given(group) for group in groups],
        "shards": [*(_weights(group) for group in groups), *filter(is_ignored, module.parameters())],
        "kept gathered": [group.gathered.now() for group in groups],
        "gradients": [p.grad for p in [*ours, *module.parameters()] if p.is_leaf],
        "kept gradients": [*(group.gradients.kept() for group in groups), *map(_kept_plain, families)],
        "cut off": [group.gradients.rest for group in groups],
        "optimizer state": [] if optimizer is None else [*optimizer.state.values(), *wholes_of(optimizer)],
        "buffers": list(module.buffers()),
        "activations": [family.footprint.saved_now() for family in families],
    }
    replicas = [(given, group) for group in groups if (given := _given(group)) is not None]
    holders = {given.untyped_storage().data_ptr(): group.weights.holders(given) for given, group in replicas}
    seen: set[tuple[torch.device, int]] = set()
    nbytes, storages, on_host = dict.fromkeys(kinds, 0), dict.fromkeys(kinds, 0), 0
    with DisableTorchFunction():
        for kind, things in kinds.items():
            for leaf in pytree.tree_leaves(list(things)):
                storage = _storage(leaf)
                key = None if storage is None else (storage.device, storage.data_ptr())
                if storage is not None and storage.nbytes() and key not in seen:
                    seen.add(key)  # type: ignore[arg-type]
                    if kind == "optimizer state" and _on_host(leaf):
                        on_host += storage.nbytes()
                        continue
                    nbytes[kind] += storage.nbytes() // holders.get(storage.data_ptr(), 1)
                    storages[kind] += 1
    first, outer = groups[0], groups[0].sharing.replicas
    replica = (0, 1) if outer is None else (outer.rank, outer.size)
    store = {group.family.activation_store for group in groups}
    homes = {group.home.file for group in groups} | {each.file for each in store if each is not None}
    files = [file for file in homes if file is not None]
    hosts = [each for each in dict.fromkeys(group.home.staging for group in groups) if each is not None]
    on_disk = sum(file.nbytes for file in files)
    names = STATE | {"activation": "activations"}
    of = tuple(name for kind, name in names.items() if any(kind in file.holds for file in files))
    return MemorySummary(
        first.rank,
        first.layout.world_size,
        first.family.stage,
        nbytes,
        storages,
        replica,
        on_disk,
        of or ("optimizer state",),
        on_host,
        sum(each.nbytes for each in hosts) + sum(each.nbytes for each in store if each is not None),
        tuple(name for kind, name in names.items() if any(kind in each.holds for each in hosts))
        + ("activations",) * any(each is not None and each.file is None for each in store),
    )


def _given(group: ShardGroup) -> torch.Tensor | None:
    """What graphs are given, where that is not the shard."""
    return group.weights.buffer if group.family.stage and group.weights.buffer is not group.shard else None


def _weights(group: ShardGroup) -> Any:
    if group.family.stage:
        return group.shard
    return [group.members.live(slot) for slot in group.layout.slots]


def _kept_plain(family: Family) -> list[torch.Tensor]:
    """Kept gradients of parameters that are ignored."""
    return [] if family.averages is None else family.averages.kept()


def _on_host(thing: Any) -> bool:
    """Whether it is optimizer state that lives in the host's memory."""
    return isinstance(thing, ShardedTensor) and thing._group.home.staging is not None


def _storage(thing: Any) -> torch.UntypedStorage | None:
    """Of a sharded tensor the slice's: it has no memory itself."""
    if isinstance(thing, torch.UntypedStorage):
        return thing
    if isinstance(thing, ShardedTensor):
        thing = thing._local
    dense = isinstance(thing, torch.Tensor) and thing.layout == torch.strided
    return held(thing).untyped_storage() if dense else None
