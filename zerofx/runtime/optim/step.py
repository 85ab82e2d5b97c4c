"""`step_in_backward`: the optimizer's step inside of backward, group by group.

::

    loss.backward(); optimizer.step()          with zerofx.step_in_backward(optimizer):
                                                   loss.backward()

    backward  C B A                            backward  C B   A
    link      . C B A     gathers A B C        link      . C B c A  gathers a b
    step            A B C                      step          C B A

A backward graph compiled for this has an update after each reduction. So the step of one group runs while
the gradients of others travel, and the link does not idle in the step. No more than three groups' gradients are there
at once. What such a graph cannot know is told here, when it asks for the update of a group: only what has its whole
gradient by then is updated there, the rest as the block ends.

=====================================================  =====================
a group                                                updated
=====================================================  =====================
of one graph, in stages 1, 2 and 3                     in that graph
of several graphs, or several forwards                 as the block ends
used outside of graphs, too, or in leaf modules        as the block ends
with hooks of the user's on its gradients              as the block ends
of stage 0; parameters that are not sharded            as the block ends
of one copy, which others still read                   as the block ends
of an optimizer that works by owners                   as the block ends
=====================================================  =====================
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from zerofx._torch import DisableTorchFunction, post_accumulate_hooks, profiler_is_on, step_of
from zerofx.runtime.optim.adamw import AdamW
from zerofx.runtime.optim.hooks import check_home, way_of
from zerofx.runtime.state.group import Family, ShardGroup
from zerofx.runtime.state.parameter import ShardedParameter


@contextlib.contextmanager
def step_in_backward(optimizer: Optimizer) -> Iterator[None]:
    """A backward inside also does the optimizer's step: each group's as soon as its gradient is averaged.

    ::

        loss = loss_of(model, batch)
        with zerofx.step_in_backward(optimizer):
            loss.backward()

    It replaces ``backward``, ``step`` and ``zero_grad``, with the same numbers. Gradients that were there before are
    added, and are None afterwards. So accumulation works: earlier backwards run as ever, or in `zerofx.no_sync`. It
    takes a backward graph of its own, which is compiled when it is first needed. Every rank must do it at the same
    backwards.

    Args:
        optimizer: `zerofx.AdamW`, or an elementwise one of ``torch.optim``, over parameters of modules that zerofx
            compiled; others may be among them.

    Raises:
        ValueError: clipping (``max_grad_norm=``) needs all gradients before the first step.
        TypeError: an optimizer of ``torch.optim`` where state is in the host's memory (``offload="cpu"``).
        RuntimeError: a group that was updated gets another gradient in the same block, or its weights are needed
            once more in the same backward. The step is done in part then.

    Gradients are taken as they are. A ``GradScaler`` or ``clip_grad_norm_`` cannot be used with it.
    """
    if getattr(optimizer, "max_grad_norm", None) is not None:
        raise ValueError(
            f"zerofx.step_in_backward with max_grad_norm={optimizer.max_grad_norm!r}: the norm of all gradients is "  # type: ignore[attr-defined]
            "known after the last of them only. Take max_grad_norm=None, or call optimizer.step() after backward."
        )
    check_home(optimizer)
    stepper = Stepper(optimizer)
    for family in stepper.families:
        if family.turns is not None:
            raise ValueError(
                "zerofx.step_in_backward with uneven=True: a group gets a gradient of each graph that some rank runs. "
                "Call optimizer.step() after backward."
            )
        if family.stepper is not None:
            raise RuntimeError("zerofx.step_in_backward inside of another for the same module: one at a time.")
    for family in stepper.families:
        family.stepper = stepper
        if family.file is not None:
            family.file.begin()
    try:
        yield
        for group in stepper.groups:
            group.stepped = False
        stepper.finish()
        if profiler_is_on():
            # A collective that starts under PyTorch's profiler and is waited for after it has stopped was seen to
            # corrupt the heap (torch 2.13, gloo).
            for group in stepper.groups:
                group.weights.land()
    finally:
        for family in stepper.families:
            family.stepper = None
        for group in stepper.groups:
            group.stepped, group.pending = False, 0


class Stepper:
    """What updates which group when, during one `step_in_backward`.

    Attributes:
        groups: all of the modules that the optimizer has parameters of.
        families: of these groups.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._by_group = way_of(optimizer).kind == "slices"
        self._members: dict[ShardGroup, dict[int, list[Any]]] = {}
        for i, param_group in enumerate(optimizer.param_groups):
            for p in param_group["params"]:
                if isinstance(p, ShardedParameter):
                    self._members.setdefault(p._group, {}).setdefault(i, []).append(p)
        self.families: list[Family] = list(dict.fromkeys(group.family for group in self._members))
        self.groups: list[ShardGroup] = [group for family in self.families for group in family.groups()]

    def takes(self, group: ShardGroup) -> bool:
        """Whether `step` is to update ``group`` now: it has all of its gradient."""
        if not self._by_group or group not in self._members or group.pending > 0 or group.gradients.hooks.any():
            return False
        # One hook is ours (`zerofx.runtime.eager.ondemand.reduce_by_hook`).
        return all(post_accumulate_hooks(p) <= 1 for p in self._parameters(group))

    def step(self, group: ShardGroup) -> None:
        """Update ``group``, which it `takes`; a gradient that is used up is None."""
        members = self._members[group]
        group.weights.before_step()
        if isinstance(self.optimizer, AdamW):
            self.optimizer.step_group(group)
        else:
            self._step_alone(members)
        group.weights.note_write()
        group.stepped = True
        _clear(self._parameters(group))

    def _parameters(self, group: ShardGroup) -> list[Any]:
        return list(itertools.chain.from_iterable(self._members[group].values()))

    def finish(self) -> None:
        """Update what is left."""
        self.optimizer.step()
        _clear(p for param_group in self.optimizer.param_groups for p in param_group["params"])

    def _step_alone(self, members: dict[int, list[Any]]) -> None:
        """The step of an optimizer that knows no groups, as if it had no other parameters."""
        param_groups = self.optimizer.param_groups
        everything = [param_group["params"] for param_group in param_groups]
        try:
            for i, param_group in enumerate(param_groups):
                param_group["params"] = members.get(i, [])
            step_of(self.optimizer)(self.optimizer)  # hooks of the step run once, as the block ends
        finally:
            for param_group, params in zip(param_groups, everything, strict=True):
                param_group["params"] = params


def _clear(parameters: Any) -> None:
    with torch.no_grad(), DisableTorchFunction():
        for p in parameters:
            p.grad = None
