"""A group at run time: the parameters that travel together, and what this rank holds of them.

::

    module ══▶ ShardedParameter ══▶ ShardGroup ══▶ weights      shard, replica        weights.py
                                        │      ══▶ gradients    .grad, kept ones      gradients.py
                                        │      ══▶ gathered     whole buffers         gathered.py
                                        └────▶ its parameters (weakly)
    compiled graph ────▶ ShardGroup

A double arrow owns, a single one does not. So a model's memory is free as soon as nothing holds the model.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerofx._torch import DTensorLayout, inside_backward
from zerofx.model.layout import GroupLayout, Slot
from zerofx.model.offload import Offload, OnDisk
from zerofx.model.policies import Casts
from zerofx.model.wire import Wire
from zerofx.passes.context import Buckets
from zerofx.runtime.ranks.sharing import Sharing
from zerofx.runtime.ranks.turns import Turns
from zerofx.runtime.ranks.used import UsedMap
from zerofx.runtime.state.account import Account, Elements, Terms, at_rest
from zerofx.runtime.state.carriage import ActivationStore
from zerofx.runtime.state.footprint import Footprint
from zerofx.runtime.state.gathered import Gathered
from zerofx.runtime.state.gradients import Gradients, Members
from zerofx.runtime.state.home import Home, Place, home_of
from zerofx.runtime.state.staging import Staging
from zerofx.runtime.state.state_file import StateFile
from zerofx.runtime.state.weights import Weights, weights_of


class Family:
    """The groups of one module, in registration order, and what holds for all of them.

    Attributes:
        stage: what is sharded (see `zerofx.compiler.options.Options`).
        buckets: what one all-reduce of stage 0 takes.
        one_copy: whether the ranks of the host have the weights once.
        wire: what travels in codes.
        offload: what the user wants elsewhere.
        in_file: the names of the groups whose optimizer state is in `file`.
        on_host: the names of those whose optimizer state is in the host's memory.
        staging: between that and the device.
        activation_store: where activations go; None: they stay on the device.
        unreduced: whether backward did not reduce for a while, and none has run since that does.
        stepper: what updates groups while backward runs (`zerofx.step_in_backward`); None outside of that.
        number: of the module among those of its process group, the same on every rank.
        norms: norms of gradients that were computed ahead, see `zerofx.runtime.eager.norms`.
        casts: of the hooks of the module's parts under mixed precision; None: it has none.
        turns: how ranks take part in each other's graphs (``uneven=True``); None: all run the same.
        rewritable: whether an operation that needs the whole of a parameter may write it
            (`zerofx.compiler.initialize`).
        published: what a user's passes published when their graphs ran last, by name.
        footprint: what the module's graphs leave in memory between forward and backward.
        averages: of the gradients of its parameters that are ignored (`zerofx.runtime.eager.averages`); None: of none.
        recipe: how the module was sharded and compiled (`zerofx.compiler.copies`).
    """

    def __init__(
        self,
        stage: int = 3,
        buckets: Buckets = "group",
        one_copy: bool = False,
        wire: Wire | None = None,
        offload: Offload | None = None,
    ) -> None:
        self.stage = stage
        self.offload: Offload | None = offload
        self.in_file: set[str] = set()
        self.on_host: set[str] = set()
        self.staging: Staging | None = None
        self._file: Any = lambda: None
        self.activation_store: ActivationStore | None = None
        self.wire: Wire | None = wire
        self.buckets: Buckets = buckets
        self.one_copy = one_copy
        self._sync = True
        self.unreduced: bool = False
        self.stepper: Any = None
        self.turns: Turns | None = None
        self.number = 0
        self.norms: dict[Any, Any] = {}
        self.casts: Casts | None = None
        self.rewritable: bool = False
        self.published: dict[str, torch.Tensor] = {}
        self.footprint: Footprint = Footprint()
        self.averages: Any = None
        self.recipe: Any = None
        self._groups: list[weakref.ref[ShardGroup]] = []
        self._numbered: tuple[int, dict[tuple[str, Slot], int]] = 0, {}

    @property
    def sync(self) -> bool:
        """Whether backward reduces gradients; False inside of `zerofx.no_sync`."""
        return self._sync

    @sync.setter
    def sync(self, sync: bool) -> None:
        self._sync = sync
        self.unreduced |= not sync

    @property
    def file(self) -> StateFile | None:
        """Where this rank has the optimizer's state of some groups. It ends with them."""
        found: StateFile | None = self._file()
        return found

    @file.setter
    def file(self, file: StateFile) -> None:
        self._file = weakref.ref(file)

    def place_of(self, group: str) -> Place:
        """Where the optimizer's state of a group is to be."""
        if group in self.on_host:
            return self.staging
        return self.file if group in self.in_file else None

    @property
    def on_disk(self) -> OnDisk | None:
        """What of its groups lives in `file`, in words."""
        file, offload = self.file, self.offload
        if file is None or offload is None or not self.in_file:
            return None
        return OnDisk(
            str(file.path), file.holds - {"activation"}, frozenset(self.in_file), len(self._groups), offload.choice
        )

    def alike(self) -> Family:
        """The family of a copy of the module: the same options, and nothing of what has happened."""
        copy = Family(self.stage, self.buckets, self.one_copy, self.wire, self.offload)
        copy.on_host, copy.staging = set(self.on_host), self.staging  # the host steps one module at a time
        copy.footprint.limit, copy.footprint.apart = self.footprint.limit, self.footprint.apart
        copy.recipe = self.recipe
        return copy

    def add(self, group: ShardGroup) -> None:
        """``group`` is the next of the module's."""
        self._groups.append(weakref.ref(group))

    def groups(self) -> list[ShardGroup]:
        """Those that are alive."""
        return [group for ref in self._groups if (group := ref()) is not None]

    def marked(self, used: Iterable[tuple[str, Slot]]) -> torch.Tensor:
        """One byte for each of the module's parameters, ``uint8``: 1 for those in ``used``, by group and slot."""
        positions = self._positions()
        marks = bytearray(len(positions))
        for key in used:
            marks[positions[key]] = 1
        return torch.frombuffer(marks, dtype=torch.uint8)

    def send_used(self, mine: torch.Tensor) -> UsedMap | None:
        """Start to tell the other ranks of which parameters this one has a gradient, as `marked` says it.

        Every rank does it in the same backward. None: there are no other ranks.
        """
        group = self.groups()[0]
        ranks = group.sharing.everyone
        return None if ranks.size == 1 else UsedMap(mine, ranks, group.device)

    def used_anywhere(self, used: UsedMap, group: ShardGroup, slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
        """Those of the ``slots`` of ``group`` of which some rank has a gradient. The host waits for ``used``."""
        anywhere, positions = used.anywhere, self._positions()
        return tuple(slot for slot in slots if anywhere[positions[group.layout.name, slot]])

    def _positions(self) -> dict[tuple[str, Slot], int]:
        """Of each parameter, by group and slot, its number: the same on every rank."""
        if self._numbered[0] != len(self._groups):
            keys = [(g.layout.name, slot) for ref in self._groups if (g := ref()) for slot in g.layout.slots]
            self._numbered = len(self._groups), {key: i for i, key in enumerate(keys)}
        return self._numbered[1]

    @contextlib.contextmanager
    def casts_off(self) -> Iterator[None]:
        """Inputs and outputs of the module stay as they are."""
        if self.casts is None:
            yield
            return
        before, self.casts.on = self.casts.on, False
        try:
            yield
        finally:
            self.casts.on = before

    @contextlib.contextmanager
    def rewriting(self) -> Iterator[None]:
        """All ranks write to parameters in place, the same operations in the same order."""
        self.rewritable = True
        try:
            yield
        finally:
            self.rewritable = False

    def gradients(self) -> list[Any]:
        """The gradients that the module's parameters have now, in the same order on every rank."""
        parameters = [group.members.live(slot) for group in self.groups() for slot in group.layout.slots]
        return [p.grad for p in parameters if p is not None and p.grad is not None]


class ShardGroup:
    """One group on this rank.

    Attributes:
        layout: where each parameter lies, and how it is divided over the ranks that update it.
        sharing: which ranks share it.
        family: the groups of the same module.
        home: where its state lives.
        weights, gradients, gathered: what this rank holds.
        members: its parameters.
        dtensors: those that stand for DTensors on dimensions that are not ours, and of which part.
        leaf: the call of a leaf module that has the group whole while its backward runs (`zerofx.runtime.eager.leaf`).
        pending: uses whose gradient is still to come: forwards of graphs less their backwards, and all uses outside of
            graphs. Those that never get a backward are forgotten as `zerofx.step_in_backward` ends.
        stepped: this backward has updated it (`zerofx.step_in_backward`).
        steps: how often an optimizer that has a parameter of it stepped; the same on every rank.
    """

    def __init__(
        self,
        layout: GroupLayout,
        sharing: Sharing,
        device: torch.device,
        family: Family,
        memory: torch.Tensor | None = None,
    ) -> None:
        """``memory``: see `zerofx.runtime.state.weights.Weights.allocate`."""
        self.layout = layout
        self.sharing = sharing
        self.family = family
        self.device = device
        family.add(self)
        stage = family.stage
        self.home: Home = home_of(stage, device, family.place_of(layout.name))
        case = weights_of(stage, family.one_copy, sharing)
        wire = family.wire
        coded = wire is not None and (wire.between == "all" or sharing.weights_cross)
        code = wire.weight_code if wire is not None and coded else None
        self.weights: Weights = case(layout, sharing, device, layout.weight_dtype, self.home, memory, code)
        self.members: Members = Members()
        self.gradients: Gradients = Gradients(layout, stage, sharing, self.weights, self.members, self.home)
        self.gathered: Gathered = Gathered(self.weights)
        self.dtensors: dict[Slot, DTensorLayout] = {}
        self.leaf: Any = None
        self.pending: int = 0
        self.stepped: bool = False
        self.steps: int = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardGroup:
        """The group itself: a copy of a sharded tensor is one more tensor of the same group.

        Where the module is copied, ``memo`` has the copy of the group.
        """
        return self

    def alike(self, family: Family) -> ShardGroup:
        """The group of a copy of the module: this rank's shard is a copy of its shard. Nothing is sent."""
        copy = ShardGroup(self.layout, self.sharing, self.device, family)
        copy.dtensors, copy.steps = dict(self.dtensors), self.steps
        if family.stage:
            copy.weights.take(self.weights)
        return copy

    @property
    def group_name(self) -> str:
        """The name of the process group of the ranks that it is divided over."""
        return self.sharing.optimizer.name

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that it is divided over. Do not keep it; a place among them is a rank by `rank_at`."""
        return self.sharing.optimizer.process_group

    def rank_at(self, place: int) -> int:
        """The rank in `process_group` whose `rank`, its place in the layout, is ``place``."""
        return self.sharing.optimizer.rank_at(place)

    @property
    def rank(self) -> int:
        """This rank's place among those that it is divided over."""
        return self.sharing.optimizer.rank

    @property
    def graph_layout(self) -> GroupLayout:
        """The layout as graphs see it: divided over the ranks that they gather from."""
        ranks = self.sharing.weights.size
        return self.layout if ranks == self.layout.world_size else replace(self.layout, world_size=ranks)

    @property
    def backend(self) -> str:
        """The communication backend of these ranks, for tensors on the group's device."""
        return self.sharing.weights.backend(self.device)

    @property
    def shard(self) -> torch.Tensor:
        """`Weights.shard`"""
        return self.weights.shard

    @property
    def replica(self) -> torch.Tensor | None:
        """`Weights.replica`"""
        return self.weights.replica

    @property
    def gathered_nbytes(self) -> int:
        """`Weights.nbytes`"""
        return self.weights.nbytes

    def at_rest(self, *, accumulating: bool = False) -> Account:
        """Bytes that it takes of this rank, wherever they are, without the optimizer's; see `account`."""
        layout, family = self.graph_layout, self.family
        how = family.wire, self.sharing, layout.world_size, self.sharing.copies, family.one_copy
        terms = Terms.of(family.stage, layout, *how)
        return at_rest(Elements.of(layout, terms), terms, trained=layout.requires_grad, accumulating=accumulating)

    def parameter(self, slot: Slot) -> Any:
        """The parameter of ``slot``, which must be alive."""
        return self.members.get(slot)

    def local(self, slot: Slot, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``slot`` as a view of ``flat``, a tensor laid out as the shard is."""
        piece = self.layout.piece(slot, self.rank)
        return flat.narrow(0, piece.in_shard, piece.length)

    def use(self, *, trained: bool) -> None:
        """The group's weights are about to be read; ``trained``: and a gradient is to come of it.

        Raises:
            RuntimeError: they are not what this backward began with.
        """
        if self.stepped and inside_backward():
            raise RuntimeError(
                f"the weights of group {self.layout.name!r} are needed in a backward that has updated them already: of "
                "a layer that several reentrant checkpoints run again? They are updated now, with a part of their "
                "gradient; train such a model without zerofx.step_in_backward."
            )
        self.pending += trained

    def accumulate(
        self,
        slots: tuple[Slot, ...],
        gradient: torch.Tensor,
        *,
        others: tuple[Slot, ...] = (),
        checked: bool = False,
        away: bool = False,
    ) -> None:
        """Add averaged gradients to the parameters' ``.grad``: `Gradients.accumulate`.

        Raises:
            RuntimeError: this backward has updated the group already.
        """
        if self.stepped:
            raise RuntimeError(
                f"group {self.layout.name!r} gets a gradient in a backward that has updated it already: of a second "
                "backward in zerofx.step_in_backward, of a graph kept with retain_graph=True, or of a custom autograd "
                "function. It is updated now, without that one; take such a step without zerofx.step_in_backward."
            )
        self.gradients.accumulate(slots, gradient, others=others, checked=checked, away=away)

    def reduce(self, gradients: dict[Slot, torch.Tensor], *, checked: bool = False) -> None:
        """Average whole gradients over the ranks and add them to ``.grad``; in `zerofx.no_sync` keep them.

        See `Gradients.reduce`. A collective, outside of any graph; ``checked`` as in `Gradients.accumulate`.
        """
        if self.family.sync:
            self.gradients.reduce(gradients, self.accumulate, checked=checked)
            return
        for slot, gradient in gradients.items():
            self.gradients.keep(slot, gradient)
        self.gradients.kept_unevenly = True

    def has_kept(self) -> bool:
        """Whether there is a gradient that was not reduced yet."""
        return self.gradients.has_kept()


def groups_of(module: nn.Module) -> list[ShardGroup]:
    """The groups of a sharded module, in registration order."""
    groups = {group: None for p in module.parameters() if (group := getattr(p, "_group", None)) is not None}
    return [group for group in groups if isinstance(group, ShardGroup)]
