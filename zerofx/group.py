"""A group at run time: the rank's shard, and the parameters that are slices of it.

Who holds whom (a double arrow owns, a single one does not)::

    module ══▶ ShardedParameter ══▶ ShardGroup ══▶ shard (flat, 1/M of the group)
                                        │
                                        └──▶ its parameters (weakly)
    compiled graph ──▶ ShardGroup

so a model's memory is free as soon as nothing holds the model.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zerofx._torch import resolve_process_group, will_accumulate
from zerofx.layout import GroupLayout, Slot

if TYPE_CHECKING:
    from zerofx.parameter import ShardedParameter, ShardedTensor


class Family:
    """The groups of one module, in registration order."""

    def __init__(self) -> None:
        self._groups: list[weakref.ref[ShardGroup]] = []
        self.norms: dict[Any, Any] = {}
        """Norms of gradients that were computed ahead, see `zerofx.norms`."""

    def add(self, group: ShardGroup) -> None:
        """``group`` is the next of the module's."""
        self._groups.append(weakref.ref(group))

    def gradients(self) -> list[ShardedTensor]:
        """The gradients that the module's parameters have now, in the same order on every rank."""
        groups = [group for ref in self._groups if (group := ref()) is not None]
        parameters = [group.live_parameter(slot) for group in groups for slot in group.layout.slots]
        return [p.grad for p in parameters if p is not None and p.grad is not None]  # type: ignore[misc]


class ShardGroup:
    """One group's shard on this rank.

    Attributes:
        layout: where each parameter lies.
        group_name: the name of the process group of the ranks that share it.
        rank: this rank's place among them.
        family: the groups of the same module.
        shard: 1-D, ``layout.shard_numel`` elements of ``layout.dtype``. The parameters' local parts are views of it.
    """

    def __init__(
        self, layout: GroupLayout, process_group: dist.ProcessGroup, device: torch.device, family: Family
    ) -> None:
        self.layout = layout
        self.family = family
        family.add(self)
        # By name: a process group that outlives destroy_process_group aborts the interpreter as it exits.
        self.group_name = process_group.group_name
        self.rank = process_group.rank()
        self.shard = torch.zeros(layout.shard_numel, dtype=layout.dtype, device=device)
        self._parameters: dict[Slot, weakref.ref[ShardedParameter]] = {}

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that share the group. Do not keep it."""
        return resolve_process_group(self.group_name)

    def add(self, slot: Slot, parameter: ShardedParameter) -> None:
        """Make ``parameter`` the one that ``slot`` describes."""
        self._parameters[slot] = weakref.ref(parameter)

    def live_parameter(self, slot: Slot) -> ShardedParameter | None:
        """The parameter of ``slot``; None where nothing holds it any more."""
        return self._parameters[slot]()

    def parameter(self, slot: Slot) -> ShardedParameter:
        """The parameter of ``slot``, which must be alive."""
        parameter = self.live_parameter(slot)
        if parameter is None:
            raise RuntimeError(f"the parameter {slot.name!r} was deleted while its group is in use")
        return parameter

    def local(self, slot: Slot, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``slot`` as a view of ``flat``, a tensor laid out as the shard is."""
        piece = self.layout.piece(slot, self.rank)
        return flat.narrow(0, piece.in_shard, piece.length)

    def accumulate(self, slots: tuple[Slot, ...], flat: torch.Tensor) -> None:
        """Add reduced gradients to the parameters' ``.grad``: ``flat`` is laid out as the shard is.

        A first gradient is not copied: ``.grad`` becomes a view of ``flat``. Runs inside a backward pass, and
        accumulates only where the engine would have. The engine runs the parameters' post-accumulate hooks by itself,
        once every graph that uses a parameter has been here.
        """
        held, new = [], []
        for slot in slots:
            parameter = self.parameter(slot)
            if not _is_accumulated(parameter):
                continue
            local = self.local(slot, flat)
            if parameter.grad is None:
                parameter.grad = parameter.like(local)
            else:
                held.append(parameter.grad.to_local())  # type: ignore[attr-defined]
                new.append(local)
        if held:
            torch._foreach_add_(held, new)


def _is_accumulated(parameter: ShardedParameter) -> bool:
    try:
        return will_accumulate(parameter)
    except RuntimeError as e:
        raise RuntimeError(
            f"torch.autograd.grad with respect to the sharded parameter {parameter._slot.name!r}: its gradient is a "
            "shard and goes to .grad. Call loss.backward() and read parameter.grad."
        ) from e
