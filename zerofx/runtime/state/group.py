"""A group at run time: what a rank holds of it, and the parameters that are parts of it.

============  ===========================  ======================  ===========================
stage         shard (flat, 1/M)            replica (flat, whole)   gradients
============  ===========================  ======================  ===========================
0             --                           -- (the parameters)     whole, averaged
1, 2          a view of the replica; with  what the model          slices laid out as the
              mixed precision a tensor of  computes with           shard is
              its own, the master
3             the weights                  --                      the same
3, one copy   a view of the replica, as    one that all ranks of   the same
              in stages 1 and 2            the host have in common
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

from zerofx._torch import (
    DisableTorchFunction,
    StorageWeakRef,
    backend_name,
    inside_backward,
    resolve_process_group,
    storage_of,
    will_accumulate,
)
from zerofx.model.layout import GroupLayout, Slot
from zerofx.model.precision import Casts, MixedPrecision
from zerofx.passes.context import Buckets
from zerofx.passes.ops import all_gather_pairwise_, under_way
from zerofx.runtime.ranks.watch import alone

if TYPE_CHECKING:
    from zerofx.runtime.state.parameter import ShardedParameter, ShardedTensor

_c10d = torch.ops._c10d_functional


class Family:
    """The groups of one module, in registration order, and what holds for all of them.

    Attributes:
        stage: what is sharded (see `zerofx.compiler.options.Options`).
        precision: the dtypes of weights and gradients.
        buckets: what one all-reduce of stage 0 takes.
        one_copy: whether the ranks have replicas in common (`zerofx.runtime.ranks.one_copy`).
        sync: whether backward reduces gradients; False inside of `zerofx.no_sync`.
        stepper: what updates groups while backward runs (`zerofx.step_in_backward`); None outside of that.
        number: of the module among those of its process group, the same on every rank.
        reduce_group: the name of the process group of reductions, where that is another (`Options.reduce_group`).
        norms: norms of gradients that were computed ahead, see `zerofx.runtime.eager.norms`.
        casts: the module's hooks under mixed precision.
        rewritable: whether an operation that needs the whole of a parameter may write it
            (`zerofx.compiler.initialize`).
    """

    def __init__(
        self,
        stage: int = 3,
        precision: MixedPrecision | None = None,
        buckets: Buckets = "group",
        one_copy: bool = False,
    ) -> None:
        self.stage = stage
        self.precision = precision or MixedPrecision()
        self.buckets: Buckets = buckets
        self.one_copy = one_copy
        self.sync = True
        self.stepper: Any = None
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
        replica: 1-D, ``layout.numel`` elements in what the model computes in. None in stages 0 and 3; with
            ``one_copy`` a part of what the ranks have in common.
        common: whether other ranks are there to write to the replica. Not so for one rank, and in a dry run.
        leaf: the call of a leaf module that has the group whole while its backward runs (`zerofx.runtime.eager.leaf`).
        pending: uses whose gradient is still to come: forwards of graphs less their backwards, and all uses outside of
            graphs. Those that never get a backward are forgotten as `zerofx.step_in_backward` ends.
        stepped: this backward has updated it (`zerofx.step_in_backward`).
        kept_unevenly: inside of `zerofx.no_sync` ranks may have kept gradients of different parameters (a leaf module).
    """

    def __init__(
        self,
        layout: GroupLayout,
        process_group: dist.ProcessGroup,
        device: torch.device,
        family: Family,
        common: torch.Tensor | None = None,
    ) -> None:
        """``common``: bytes for the replica, where the ranks have it in common."""
        self.layout = layout
        self.family = family
        family.add(self)
        # By name: a process group that outlives destroy_process_group aborts the interpreter as it exits.
        self.group_name = process_group.group_name
        self.backend = backend_name(process_group, device)
        self.rank = process_group.rank()
        self.device = device
        dtype = family.precision.param_dtype or layout.dtype
        self.common = common is not None
        self.replica: torch.Tensor | None = None if common is None else common.view(dtype)
        self._parameters: dict[Slot, weakref.ref[ShardedParameter]] = {}
        self._kept: dict[Slot, torch.Tensor] = {}
        self.leaf: Any = None
        self.kept_unevenly = False
        self.pending = 0
        self.stepped = False
        self._ahead: list[dist.Work] = []  # of a refresh that nobody waits for yet
        self._refreshed = -1
        self._gathered_at: dict[int, tuple[int, StorageWeakRef]] = {}  # address -> the shard's version then; the buffer
        self._gathered_alone: list[StorageWeakRef] = []  # outside of graphs: a leaf module's
        if common is None and (family.stage in (1, 2) or family.one_copy):
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
    def own_replica(self) -> torch.Tensor | None:
        """The replica, where nobody else writes to it: what may be read outside of graphs."""
        return None if self.family.one_copy else self.replica

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
        return _share_memory(local, self.shard)

    def refresh(self, *, inside: bool = False) -> None:
        """Start to bring the replica up to date, if the shard was written since; ``wait_tensor(replica)`` waits for it.

        A collective, and the same decision on every rank: optimizers step on all ranks or on none. ``inside``: it is
        one of those of the graph that runs, and is to be waited for after the next call of this, if there is any.
        """
        if self.replica is None:
            return
        if self.family.one_copy:
            self._write_own_part()
            return
        if self.shard._version != self._refreshed:
            with record_function(f"zerofx: refresh {self.layout.name}"):
                self._ahead += self._start_all_gather(self.replica, "" if inside else "refresh")
                self.mark_fresh()
        if not inside:
            under_way(self.replica, self._ahead)
            self._ahead = []

    def _write_own_part(self) -> None:
        """What this rank has to say of a replica that all have in common, where the shard is not a part of it."""
        assert self.replica is not None
        if self.shard._version != self._refreshed and not _share_memory(self.shard, self.replica):
            self.replica.narrow(0, self.rank * self.layout.shard_numel, self.layout.shard_numel).copy_(self.shard)
        self.mark_fresh()

    def land(self) -> None:
        """Wait for the refresh that is on its way, if there is one."""
        for work in self._ahead:
            work.wait()
        self._ahead = []

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

    def start_gather(self) -> torch.Tensor:
        """Start to bring the whole flat buffer, in what the model computes in; ``wait_tensor`` of it waits.

        The replica, where this rank has one: to be read, not written. A collective, outside of any graph.
        """
        if self.own_replica is not None:
            self.refresh()
            return self.own_replica
        dtype = self.family.precision.param_dtype or self.layout.dtype
        buffer = torch.empty(self.layout.numel, dtype=dtype, device=self.device)
        with record_function(f"zerofx: gather {self.layout.name}"):
            under_way(buffer, self._start_all_gather(buffer, "leaf module"))
        alive = [ref for ref in self._gathered_alone if not ref.expired()]
        self._gathered_alone = [*alive, StorageWeakRef(buffer.untyped_storage())]
        return buffer

    def _start_all_gather(self, out: torch.Tensor, where: str) -> list[dist.Work]:
        """Returns what to wait for. ``where``: in whose name the watchdog is told; "" where it expects it."""
        shard = self.shard.to(out.dtype)
        if self.layout.world_size == 1:
            if shard.data_ptr() != out.data_ptr():
                out.copy_(shard)
            return []
        facts = "all-gather", self.layout.name, self.gathered_nbytes, shard.dtype
        with alone(self.group_name, where, *facts) if where else contextlib.nullcontext():
            if self.backend == "gloo":
                return all_gather_pairwise_(out, shard, self.group_name)  # why: passes/lower.py
            return [dist.all_gather_into_tensor(out, shard, group=self.process_group, async_op=True)]

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

    def gathered_now(self) -> list[torch.UntypedStorage]:
        """The buffers that wait for a backward now, and a leaf module's; what was let go is not among them."""
        refs = [*(ref for _, ref in self._gathered_at.values()), *self._gathered_alone]
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
        if self.stepped:
            raise RuntimeError(
                f"group {self.layout.name!r} gets a gradient in a backward that has updated it already: of a second "
                "backward in zerofx.step_in_backward, of a graph kept with retain_graph=True, or of a custom autograd "
                "function. It is updated now, without that one; take such a step without zerofx.step_in_backward."
            )
        held, new = [], []
        with DisableTorchFunction():  # for speed: hundreds of parameters, and four questions to each
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

    def reduce(self, gradients: dict[Slot, torch.Tensor], *, checked: bool = False) -> None:
        """Average whole gradients over the ranks, in one collective, and add them to the parameters' ``.grad``.

        Each rank may bring those of other parameters, or none: a rank that has none counts as zeros. Beside the
        gradients goes who has one, so that a parameter of which no rank has any gets none::

            pack    | gradients for rank 0 | who has one | gradients for rank 1 | who has one | ...

        A collective, outside of any graph. ``checked`` as in `accumulate`. Inside of `zerofx.no_sync` all is kept.
        """
        if not self.family.sync:
            for slot, gradient in gradients.items():
                self.keep(slot, gradient)
            self.kept_unevenly = True
            return
        self.kept_unevenly = False
        gradients = dict(gradients)
        for slot in self.kept_slots():
            kept = self._kept.pop(slot)
            gradients[slot] = gradients[slot] + kept if slot in gradients else kept
        with record_function(f"zerofx: reduce {self.layout.name}"):
            sums = self._sum_over_ranks(self._pack(gradients))
        average = averaged(sums[: -len(self.layout.slots)], self.layout.dtype, self.layout.world_size)
        has_one = (sums[-len(self.layout.slots) :] > 0).tolist()
        slots = [slot for slot, has in zip(self.layout.slots, has_one, strict=True) if has]
        if self.family.stage:
            self.accumulate(tuple(slots), average, checked=checked)
            return
        for slot in slots:
            self.accumulate((slot,), self.layout.view(average, slot), checked=checked)

    def _pack(self, gradients: dict[Slot, torch.Tensor]) -> torch.Tensor:
        """See `reduce`: a row for each rank; in stage 0 one row."""
        layout, precision = self.layout, self.family.precision
        dtype = precision.reduce_dtype or precision.param_dtype or layout.dtype
        rows, part = (layout.world_size, layout.shard_numel) if self.family.stage else (1, layout.numel)
        pack = torch.zeros(rows, part + len(layout.slots), dtype=dtype, device=self.device)
        for i, slot in enumerate(layout.slots):
            if slot not in gradients:
                continue
            flat = gradients[slot].reshape(-1)
            at = slot.offset
            while at < slot.end:
                row, start = divmod(at, part)
                length = min(slot.end - at, part - start)
                pack[row, start : start + length] = flat.narrow(0, at - slot.offset, length)
                at += length
            pack[:, part + i] = 1
        return pack

    def _sum_over_ranks(self, pack: torch.Tensor) -> torch.Tensor:
        """The sum of this rank's row of every rank's ``pack``."""
        ranks, name = self.layout.world_size, self.layout.name
        if ranks == 1:
            return pack[0]
        wait, flat = torch.ops._c10d_functional.wait_tensor, pack.view(-1)
        kind = "reduce-scatter" if self.family.stage else "all-reduce"
        with alone(self.group_name, "leaf module", kind, name, pack.nbytes, pack.dtype):
            if self.family.stage == 0:
                dist.all_reduce(flat, group=self.process_group)
                return flat
            if self.backend != "gloo":
                return wait(_c10d.reduce_scatter_tensor(flat, "sum", ranks, self.group_name))
            others = wait(torch.ops.zerofx.all_to_all_pairwise(flat, ranks, self.group_name))  # why: passes/lower.py
            wider = max(self.layout.dtype, pack.dtype, key=lambda dtype: dtype.itemsize)
            own = torch.ops.zerofx.own_part(flat, ranks, self.group_name)
            return own + others.view(ranks - 1, -1).sum(0, dtype=wider)

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
        return bool(self._kept) or self.kept_unevenly

    def drop_kept(self) -> None:
        """Forget what was kept."""
        self._kept.clear()
        self.kept_unevenly = False

    def take_kept(self, slot: Slot) -> torch.Tensor | None:
        """Hand out what was kept of ``slot``, once."""
        return self._kept.pop(slot, None)


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def averaged(sums: torch.Tensor, dtype: torch.dtype, ranks: int) -> torch.Tensor:
    """The average, in ``dtype``, of which ``sums`` is the sum over ``ranks``.

    Scaled in the wider of both dtypes: a sum is up to M times its average, and may be too large for the narrower.
    """
    wider = max(sums.dtype, dtype, key=lambda dtype: dtype.itemsize)
    return (sums.to(wider) / ranks).to(dtype)


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
