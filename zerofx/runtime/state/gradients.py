"""The gradients of one group: added to ``.grad``, reduced outside of graphs, or kept back.

============  ==================================================
stage         ``.grad`` of a parameter
============  ==================================================
0             whole, averaged
1, 2, 3       a slice of a flat tensor laid out as the shard is
============  ==================================================

What `zerofx.no_sync` keeps back is whole and this rank's own. It is not in ``.grad``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from zerofx._torch import DisableTorchFunction, run_post_accumulate_hooks, will_accumulate
from zerofx.model.layout import GroupLayout, Slot
from zerofx.passes.travel import run
from zerofx.runtime.ranks.sharing import Sharing
from zerofx.runtime.ranks.watch import alone
from zerofx.runtime.state.account import rest_rows
from zerofx.runtime.state.gradient_hooks import GradientHooks
from zerofx.runtime.state.home import Home
from zerofx.runtime.state.weights import Weights

_wait = torch.ops._c10d_functional.wait_tensor


class Members:
    """The parameters of one group, by slot, held weakly: a model is free as soon as nothing else holds it."""

    def __init__(self) -> None:
        self._parameters: dict[Slot, weakref.ref[Any]] = {}

    def add(self, slot: Slot, parameter: torch.nn.Parameter) -> None:
        """Make ``parameter`` the one that ``slot`` describes."""
        self._parameters[slot] = weakref.ref(parameter)

    def live(self, slot: Slot) -> Any:
        """The parameter of ``slot``; None where nothing holds it, a copy has left it out, or ``slot`` is of a view."""
        reference = self._parameters.get(slot)
        return None if reference is None else reference()

    def get(self, slot: Slot) -> Any:
        """The parameter of ``slot``, which must be alive."""
        parameter = self.live(slot)
        if parameter is None:
            raise RuntimeError(f"the parameter {slot.name!r} was deleted while its group is in use")
        return parameter


class Gradients:
    """The gradients of one group on this rank.

    Attributes:
        kept_unevenly: inside of `zerofx.no_sync` ranks may have kept gradients of different parameters (a leaf module).
        rest: what codes cut off of this rank's last gradient, a row for each that travels
            (`zerofx.features.wire.error_feedback`); None: no gradient was written with error feedback yet.
        hooks: the user's, on gradients of this backward.
    """

    def __init__(
        self,
        layout: GroupLayout,
        stage: int,
        sharing: Sharing,
        weights: Weights,
        members: Members,
        home: Home,
    ) -> None:
        self.layout = layout
        self.stage = stage
        self.sharing = sharing
        self.weights = weights
        self.members = members
        self.home = home
        self.kept_unevenly: bool = False
        self.rest: torch.Tensor | None = None
        self.hooks: GradientHooks = GradientHooks()
        self._kept: dict[Slot, torch.Tensor] = {}

    # ---- what leaves a backward -------------------------------------------------------------------------------------

    def accumulate(
        self,
        slots: tuple[Slot, ...],
        gradient: torch.Tensor,
        *,
        others: tuple[Slot, ...] = (),
        checked: bool = False,
        away: bool = False,
    ) -> None:
        """Add averaged gradients to the parameters' ``.grad``.

        ``gradient`` is laid out as the shard is; in stage 0 it is the whole gradient of the one slot. A first gradient
        is not copied: ``.grad`` becomes a view of it. Runs inside a backward pass, and accumulates only where the
        engine would have, unless that was ``checked``. ``away``: it stays where it is, for it is where the home keeps
        gradients already, or is used up at once. The engine runs the parameters' post-accumulate hooks by itself, once
        every graph that uses a parameter has been here. A parameter with hooks on its gradient waits for that, too
        (`settle`).

        ``others``: parameters of which other ranks alone have a gradient (`zerofx.runtime.ranks.used`). The engine does
        not come to those on this rank, so their hooks run here.
        """
        held, first, hooked = [], [], []
        with DisableTorchFunction():  # for speed: hundreds of parameters, and four questions to each
            unvisited: dict[Slot, Any] = {}
            for slot in (*slots, *others):
                parameter = self.members.get(slot)
                if slot in others:
                    if not parameter.requires_grad:
                        continue
                    if not will_accumulate(parameter):
                        unvisited[slot] = parameter
                elif not checked and not _is_accumulated(parameter):
                    continue
                if slot in self.hooks:
                    hooked.append(slot)
                elif parameter.grad is None:
                    first.append((slot, parameter))
                else:
                    held.append((slot, parameter.grad if self.stage == 0 else parameter.grad._local))
            if held:
                with self.home.only(gradient, *(old for _, old in held)):
                    new = [self._local(slot, gradient) for slot, _ in held]
                    torch._foreach_add_([old for _, old in held], new)
            if first:
                gradient = self.home.keep("gradient", gradient) if self.stage and not away else gradient
                with self.home.shaping(gradient):
                    for slot, parameter in first:
                        local = self._local(slot, gradient)
                        parameter.grad = local if self.stage == 0 else parameter.like(local)
        for slot in hooked:
            self._wait(slot, gradient)
            if slot in unvisited:
                with self.hooks.unused_here(slot):
                    self.settle(slot)
            elif checked:
                self.settle(slot)
        for parameter in unvisited.values():
            run_post_accumulate_hooks(parameter)

    def _wait(self, slot: Slot, gradient: torch.Tensor) -> None:
        with self.home.only(gradient):
            local = self._local(slot, gradient)
            # Of what is elsewhere a copy is here until the hooks have seen it.
            self.hooks.wait(slot, local.clone() if self.stage and self.home.moves("gradient") else local)

    def settle(self, slot: Slot, average: torch.Tensor | None = None) -> torch.Tensor | None:
        """The engine has come to a parameter in this backward: its hooks run, and what waited is added to ``.grad``.

        ``average``: in stage 0, what code outside of graphs adds to that, whole. Then the sum is returned, and the
        engine adds it to ``.grad``.
        """
        local = self.hooks.take(slot)
        if local is None and average is None:
            return None
        parameter = self.members.get(slot)
        if self.stage == 0:
            total = average if local is None else local if average is None else local + average
            total = self.hooks.run(slot, total)
            if average is not None:
                return total
            with DisableTorchFunction():
                parameter.grad = total if parameter.grad is None else parameter.grad.add_(total)
            return None
        gradient = self.hooks.run(slot, parameter.like(local))
        with DisableTorchFunction():
            if (before := parameter.grad) is None:
                parameter.grad = parameter.like(self.home.keep("gradient", gradient._local))
                return None
        with self.home.only(before._local):
            before._local.add_(gradient._local)
        return None

    def _local(self, slot: Slot, gradient: torch.Tensor) -> torch.Tensor:
        """What this rank holds of the gradient of ``slot``."""
        if self.stage == 0:
            return gradient
        piece = self.layout.piece(slot, self.sharing.optimizer.rank)
        return gradient.narrow(0, piece.in_shard, piece.length)

    def check_all_accumulate(self, slots: tuple[Slot, ...]) -> None:
        """Raise where this backward leaves out one of ``slots``: others will add its gradient (``uneven=True``)."""
        for slot in slots:
            parameter = self.members.get(slot)
            if parameter.requires_grad and not _is_accumulated(parameter):
                raise RuntimeError(
                    f"backward(inputs=...) without {slot.name!r}, with uneven=True: ranks that take part in this "
                    "backward do not know its inputs. Leave inputs= out; requires_grad_(False) freezes a parameter."
                )

    # ---- outside of graphs ------------------------------------------------------------------------------------------

    def reduce(self, gradients: dict[Slot, torch.Tensor], add: Callable[..., None], *, checked: bool = False) -> None:
        """Average whole gradients over the ranks, in one collective, and ``add(slots, average, checked=...)`` them.

        Each rank may bring those of other parameters, or none: a rank that has none counts as zeros. Beside the
        gradients goes who has one, so that a parameter of which no rank has any gets none::

            pack    | gradients for rank 0 | who has one | gradients for rank 1 | who has one | ...

        What was kept is added. A collective.
        """
        self.kept_unevenly = False
        gradients, slots = dict(gradients), self.layout.slots
        for slot in self.kept_slots():
            kept = self._kept.pop(slot)
            gradients[slot] = gradients[slot] + kept if slot in gradients else kept
        with record_function(f"zerofx: reduce {self.layout.name}"):
            sums = self._sum_over_ranks(self._pack(gradients))
            self.sharing.sum_over_replicas_(sums, "leaf module", self.layout.name)
        average = averaged(sums[: -len(slots)], self.layout.dtype, self.sharing.averaged_over)
        found = [slot for slot, has in zip(slots, (sums[-len(slots) :] > 0).tolist(), strict=True) if has]
        if self.stage:
            add(tuple(found), average, checked=checked)
            return
        for slot in found:
            add((slot,), self.layout.view(average, slot), checked=checked)

    def _pack(self, gradients: dict[Slot, torch.Tensor]) -> torch.Tensor:
        """See `reduce`: a row for each rank; in stage 0 one row."""
        layout = self.layout
        dtype = layout.gradient_dtype or layout.dtype
        rows, part = (layout.world_size, layout.shard_numel) if self.stage else (1, layout.numel)
        pack = torch.zeros(rows, part + len(layout.slots), dtype=dtype, device=self.weights.device)
        for i, slot in enumerate(layout.slots):
            if slot not in gradients:
                continue
            flat = gradients[slot].reshape(-1)
            at = slot.offset
            while at < slot.end:
                row, start = divmod(at, part)
                length = min(slot.end - at, part - start)
                pack[self.sharing.optimizer.rank_at(row), start : start + length] = flat.narrow(
                    0, at - slot.offset, length
                )
                at += length
            pack[:, part + i] = 1
        return pack

    def _sum_over_ranks(self, pack: torch.Tensor) -> torch.Tensor:
        """The sum of this rank's row of every rank's ``pack``."""
        ranks, flat = self.sharing.optimizer, pack.view(-1)
        if ranks.size == 1:
            return pack[0]
        kind = "reduce-scatter" if self.stage else "all-reduce"
        with alone(ranks.name, "leaf module", kind, self.layout.name, pack.nbytes, pack.dtype):
            if self.stage == 0:
                dist.all_reduce(flat, group=ranks.process_group)
                return flat
            travel = self.weights.travel
            arrived = _wait(travel.scatter(run, flat, ranks.size, ranks.name))
            wider = max(self.layout.dtype, pack.dtype, key=lambda dtype: dtype.itemsize)
            return travel.summed(run, flat, arrived, pack.shape[1], ranks.size, ranks.name, wider)

    @property
    def rest_shape(self) -> tuple[int, int]:
        """Of `rest`: rows of a pack for other ranks; or this rank's shard, which goes to all replicas alike."""
        layout, sharing = self.layout, self.sharing
        return rest_rows(layout.world_size, sharing.copies, sharing.divides_between), layout.shard_numel

    def rest_of(self, rows: int, numel: int) -> torch.Tensor:
        """`rest`, made where there is none yet."""
        if self.rest is None:
            assert self.rest_shape == (rows, numel)
            self.rest = torch.zeros(rows, numel, dtype=torch.float32, device=self.weights.device)
        return self.rest

    # ---- kept back --------------------------------------------------------------------------------------------------

    def keep(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Add a whole gradient of this rank's own to what `zerofx.no_sync` keeps back."""
        if not _is_accumulated(self.members.get(slot)):
            return
        # Not in place: a gradient that leaves a graph may share memory with another (`y = x + b`: db is dy).
        self._kept[slot] = self._kept[slot] + gradient if slot in self._kept else gradient

    def kept_slots(self) -> list[Slot]:
        """Of which parameters a gradient is kept, in the layout's order."""
        return [slot for slot in self.layout.slots if slot in self._kept]

    def kept(self) -> list[torch.Tensor]:
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


def averaged(sums: torch.Tensor, dtype: torch.dtype, ranks: int) -> torch.Tensor:
    """The average, in ``dtype``, of which ``sums`` is the sum over ``ranks``.

    Scaled in the wider of both dtypes: a sum is up to M times its average, and may be too large for the narrower.
    """
    wider = max(sums.dtype, dtype, key=lambda dtype: dtype.itemsize)
    return (sums.to(wider) / ranks).to(dtype)


def _is_accumulated(parameter: Any) -> bool:
    if not parameter.requires_grad:  # frozen since its graph was compiled; PyTorch 2.11 does not compile it anew
        return False
    try:
        return will_accumulate(parameter)
    except RuntimeError as e:
        raise RuntimeError(
            f"torch.autograd.grad with respect to the sharded parameter {parameter._slot.name!r}: its gradient is a "
            "shard and goes to .grad. Call loss.backward() and read parameter.grad."
        ) from e
