"""A group at run time: what a rank holds of it, and the parameters that are parts of it.

============  ===========================  ======================  ===========================
stage         shard (flat, 1/M)            replica (flat, whole)   gradients
============  ===========================  ======================  ===========================
0             --                           -- (the parameters)     whole, averaged
1, 2          a view of the replica; with  what the model          slices laid out as the
              mixed precision a tensor of  computes with           shard is
              its own, the master
3             the weights                  --                      the same
============  ===========================  ======================  ===========================

Who holds whom (a double arrow owns, a single one does not)::

    module ══▶ ShardedParameter ══▶ ShardGroup ══▶ shard, replica
                                        │
                                        └──▶ its parameters (weakly)
    compiled graph ──▶ ShardGroup

so a model's memory is free as soon as nothing holds the model.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from zerofx._torch import StorageWeakRef, backend_name, resolve_process_group, storage_of, will_accumulate
from zerofx.layout import GroupLayout, Slot
from zerofx.passes.context import Buckets
from zerofx.passes.ops import all_gather_pairwise_
from zerofx.precision import Casts, MixedPrecision
from zerofx.watch import alone

if TYPE_CHECKING:
    from zerofx.parameter import ShardedParameter, ShardedTensor

_c10d = torch.ops._c10d_functional


class Family:
    """The groups of one module, in registration order, and what holds for all of them.

    Attributes:
        stage: what is sharded (see `zerofx.options.Options`).
        precision: the dtypes of weights and gradients.
        buckets: what one all-reduce of stage 0 takes.
        sync: whether backward reduces gradients; False inside of `zerofx.no_sync`.
        number: of the module among those of its process group, the same on every rank.
        reduce_group: the name of the process group of reductions, where that is another (`Options.reduce_group`).
        norms: norms of gradients that were computed ahead, see `zerofx.norms`.
        casts: the module's hooks under mixed precision.
        rewritable: whether an operation that needs the whole of a parameter may write it (`zerofx.initialize`).
    """

    def __init__(self, stage: int = 3, precision: MixedPrecision | None = None, buckets: Buckets = "group") -> None:
        self.stage = stage
        self.precision = precision or MixedPrecision()
        self.buckets: Buckets = buckets
        self.sync = True
        self.number = 0
        self.reduce_group: str | None = None
        self.norms: dict[Any, Any] = {}
        self._gathered: dict[frozenset[str], int] = {}
        self._elsewhere: dict[tuple[frozenset[str], str], int] = {}
        self.casts: Casts | None = None
        self.rewritable = False
        self._groups: list[weakref.ref[ShardGroup]] = []

    def keeps(self, names: frozenset[str], nbytes: int) -> None:
        """The graph of the groups ``names`` leaves so much gathered between forward and backward."""
        self._gathered[names] = nbytes

    def held_elsewhere(self, names: frozenset[str], phase: str) -> int:
        """Bytes that graphs of other groups than ``names`` leave gathered.

        As it was when this was first asked for these groups: a rank that compiles a graph anew, for a shape that it
        alone has met, must come to the schedule that the others go on with.
        """
        others = sum(nbytes for other, nbytes in self._gathered.items() if other != names)
        return self._elsewhere.setdefault((names, phase), others)

    def add(self, group: ShardGroup) -> None:
        """``group`` is the next of the module's."""
        self._groups.append(weakref.ref(group))

    def groups(self) -> list[ShardGroup]:
        """Those that are alive."""
        return [group for ref in self._groups if (group := ref()) is not None]

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

    def gradients(self) -> list[ShardedTensor]:
        """The gradients that the module's parameters have now, in the same order on every rank."""
        parameters = [group.live_parameter(slot) for group in self.groups() for slot in group.layout.slots]
        return [p.grad for p in parameters if p is not None and p.grad is not None]  # type: ignore[misc]


class ShardGroup:
    """One group on this rank.

    Attributes:
        layout: where each parameter lies.
        group_name: the name of the process group of the ranks that share it.
        backend: the communication backend that it uses for tensors on the group's device.
        rank: this rank's place among them.
        family: the groups of the same module.
        shard: 1-D, ``layout.shard_numel`` elements of ``layout.dtype``. The parameters' local parts are views of it.
            None in stage 0.
        replica: 1-D, ``layout.numel`` elements in what the model computes in. None in stages 0 and 3.
    """

    def __init__(
        self, layout: GroupLayout, process_group: dist.ProcessGroup, device: torch.device, family: Family
    ) -> None:
        self.layout = layout
        self.family = family
        family.add(self)
        # By name: a process group that outlives destroy_process_group aborts the interpreter as it exits.
        self.group_name = process_group.group_name
        self.backend = backend_name(process_group, device)
        self.rank = process_group.rank()
        self.device = device
        self.replica: torch.Tensor | None = None
        self._parameters: dict[Slot, weakref.ref[ShardedParameter]] = {}
        self._kept: dict[Slot, torch.Tensor] = {}
        self._refreshed = -1
        self._gathered_at: dict[int, tuple[int, StorageWeakRef]] = {}  # address -> the shard's version then; the buffer
        if family.stage in (1, 2):
            dtype = family.precision.param_dtype or layout.dtype
            self.replica = torch.zeros(layout.numel, dtype=dtype, device=device)
        if family.stage == 0:
            return
        if self.replica is not None and self.replica.dtype == layout.dtype:
            # .data: with a version counter of its own, which counts the optimizer's writes and not the refresh's.
            self.shard = self.replica.data.narrow(0, self.rank * layout.shard_numel, layout.shard_numel)
        else:
            self.shard = torch.zeros(layout.shard_numel, dtype=layout.dtype, device=device)

    def __deepcopy__(self, memo: dict) -> ShardGroup:
        """The group itself: a copy of a sharded tensor is one more tensor of the same group."""
        return self

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that share the group. Do not keep it."""
        return resolve_process_group(self.group_name)

    @property
    def buffer(self) -> torch.Tensor:
        """What compiled graphs read weights from: the replica where there is one, else the shard."""
        return self.shard if self.replica is None else self.replica

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of the whole flat buffer in what the model computes in."""
        return self.layout.numel * (self.family.precision.param_dtype or self.layout.dtype).itemsize

    def mark_fresh(self) -> None:
        """The replica holds what the shards hold."""
        if self.replica is not None:
            self._refreshed = self.shard._version

    def holds(self, local: torch.Tensor) -> bool:
        """Whether ``local`` is a slice of the shard: a parameter's, not a gradient's or a moment's."""
        return local.untyped_storage().data_ptr() == self.shard.untyped_storage().data_ptr()

    def refresh(self) -> None:
        """Start to bring the replica up to date, if the shard was written since; ``wait_tensor(replica)`` waits for it.

        A collective, and the same decision on every rank: optimizers step on all ranks or on none.
        """
        if self.replica is None or self.shard._version == self._refreshed:
            return
        with record_function(f"zerofx: refresh {self.layout.name}"):
            self._start_refresh()

    def _start_refresh(self) -> None:
        assert self.replica is not None
        shard = self.shard
        if shard.dtype != self.replica.dtype:
            shard = shard.to(self.replica.dtype)
        if self.layout.world_size > 1:
            with alone(self.group_name, "refresh", "all-gather", self.layout.name, self.gathered_nbytes, shard.dtype):
                if self.backend == "gloo":
                    all_gather_pairwise_(self.replica, shard, self.group_name)  # why: passes/lower.py
                else:
                    args = (shard, self.layout.world_size, self.group_name)
                    _c10d.all_gather_into_tensor_out(*args, out=self.replica)
        elif shard is not self.shard:
            self.replica.copy_(shard)
        self.mark_fresh()

    def leave_gathered(self, buffer: torch.Tensor) -> None:
        """``buffer``, gathered in this forward, waits for its backward."""
        self._gathered_at[buffer.data_ptr()] = self.shard._version, StorageWeakRef(buffer.untyped_storage())

    def check_gathered(self, buffer: torch.Tensor) -> None:
        """What autograd checks of a saved parameter: that none was written since ``buffer`` was gathered. Once."""
        version, _ = self._gathered_at.pop(buffer.data_ptr(), (self.shard._version, None))
        if version != self.shard._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"parameter of the group {self.layout.name!r}, between forward and backward. Run backward before the "
                "optimizer's step, and update weights by hand only between steps."
            )

    def left_gathered(self) -> list[torch.UntypedStorage]:
        """The buffers that wait for a backward now; what was let go without one is not among them."""
        refs = [ref for _, ref in self._gathered_at.values()]
        return [storage for ref in refs if (storage := storage_of(ref)) is not None]

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

    def accumulate(self, slots: tuple[Slot, ...], gradient: torch.Tensor, *, checked: bool = False) -> None:
        """Add averaged gradients to the parameters' ``.grad``.

        ``gradient`` is laid out as the shard is; in stage 0 it is the whole gradient of the one slot. A first gradient
        is not copied: ``.grad`` becomes a view of it. Runs inside a backward pass, and accumulates only where the
        engine would have, unless that was ``checked``. The engine runs the parameters' post-accumulate hooks by itself,
        once every graph that uses a parameter has been here.
        """
        held, new = [], []
        for slot in slots:
            parameter = self.parameter(slot)
            if not checked and not _is_accumulated(parameter):
                continue
            local = gradient if self.family.stage == 0 else self.local(slot, gradient)
            if parameter.grad is None:
                parameter.grad = local if self.family.stage == 0 else parameter.like(local)
            else:
                held.append(parameter.grad if self.family.stage == 0 else parameter.grad.to_local())  # type: ignore
                new.append(local)
        if held:
            torch._foreach_add_(held, new)

    def keep(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Add a whole gradient of this rank's own to what `zerofx.no_sync` keeps back."""
        if not _is_accumulated(self.parameter(slot)):
            return
        # Not in place: a gradient that leaves a graph may share memory with another (`y = x + b`: db is dy).
        self._kept[slot] = self._kept[slot] + gradient if slot in self._kept else gradient

    def kept_slots(self) -> list[Slot]:
        """Of which parameters a gradient is kept, in the layout's order."""
        return [slot for slot in self.layout.slots if slot in self._kept]

    def kept_gradients(self) -> list[torch.Tensor]:
        """What is kept, whole."""
        return list(self._kept.values())

    def has_kept(self) -> bool:
        """Whether there is a gradient that was not reduced yet."""
        return bool(self._kept)

    def drop_kept(self) -> None:
        """Forget what was kept."""
        self._kept.clear()

    def take_kept(self, slot: Slot) -> torch.Tensor | None:
        """Hand out what was kept of ``slot``, once."""
        return self._kept.pop(slot, None)


def _is_accumulated(parameter: ShardedParameter) -> bool:
    if not parameter.requires_grad:  # frozen since its graph was compiled; PyTorch 2.11 does not compile it anew
        return False
    try:
        return will_accumulate(parameter)
    except RuntimeError as e:
        raise RuntimeError(
            f"torch.autograd.grad with respect to the sharded parameter {parameter._slot.name!r}: its gradient is a "
            "shard and goes to .grad. Call loss.backward() and read parameter.grad."
        ) from e
