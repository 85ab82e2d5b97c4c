"""What runs at every step: boxed functions that put shards where a compiled graph expects them.

A compiled forward is called with the module's parameters among its inputs and must return what autograd saves::

    called with      [x, weight, bias]         (weight and bias: ShardedParameter, no memory)
    graph gets       [x, shard]
    graph returns    [y, x, None]
    returned         [y, x, weight]            the parameter itself is saved: a write before backward is noticed

A hook of ``torch.autograd.graph.saved_tensors_hooks`` would read the memory that ``weight`` does not have, and autograd
compares no versions under one. There an element stands for the parameter, and `watch_backward` compares.

A compiled backward is called with what was saved; its extra outputs are shards of gradients, which go to ``.grad``.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from zerofx._torch import node_behind, saved_tensors_are_hooked
from zerofx.model.layout import Slot
from zerofx.passes.context import Sync
from zerofx.passes.ops import stepping
from zerofx.runtime.eager.ondemand import reduce_rest
from zerofx.runtime.ranks.turns import Shadow
from zerofx.runtime.ranks.used import UsedMap
from zerofx.runtime.ranks.watch import skip_collective
from zerofx.runtime.state.carriage import CARRIAGES, ActivationStore, carried, noting
from zerofx.runtime.state.gathered import raise_written
from zerofx.runtime.state.group import Family, ShardGroup
from zerofx.runtime.state.parameter import ShardedTensor

Publish = Callable[[dict[str, torch.Tensor]], None]
"""Takes what a user's passes publish, by name."""

AROUND: list[Callable[[BackwardCode], contextlib.AbstractContextManager[Any]]] = []
"""Of features: what each run of a backward is inside of."""


def forward_runner(
    compiled: Callable,
    kept: Sequence[int],
    groups: Sequence[ShardGroup],
    saved: dict[int, Any],
    gathered: dict[int, ShardGroup],
    uses: Sequence[ShardGroup],
    trained: bool,
    published: Sequence[str],
    publish: Publish,
    counted: Callable[[list[Any]], None] | None = None,
    carries: bool = False,
    store: ActivationStore | None = None,
    shadow: Shadow | None = None,
) -> Callable:
    """The boxed forward: ``kept`` are the inputs that are no parameters, ``saved`` the parameters to return.

    ``gathered``: the outputs that are whole groups, left gathered for backward. ``uses``: all groups that the graph, or
    its backward, needs. ``trained``: a backward is to come. ``published``: under what names its last outputs go to
    ``publish``. ``counted`` is told the outputs, to count what is saved. ``carries``: it fetches weights. ``store``:
    where what it saves goes.
    """
    live, used = [weakref.ref(group) for group in groups], [weakref.ref(group) for group in uses]
    left = {i: weakref.ref(group) for i, group in gathered.items()}
    saved_refs = {i: weakref.ref(parameter) for i, parameter in saved.items()}

    def forward(args: list[Any]) -> list[Any]:
        for group in used:
            group().use(trained=trained)  # type: ignore[union-attr]
        carriage = CARRIAGES[0](live, store) if carries or store is not None else None
        with _turn(used, shadow):
            for group in live:
                group().weights.refresh()  # type: ignore[union-attr]
            with carried(carriage), _reading(live, "forward", written=True):
                outputs = list(compiled(_inputs(args, kept, live)))
        if carriage is not None and not trained:
            carriage.agree()
        if published:
            publish(dict(zip(published, outputs[-len(published) :])))
            del outputs[-len(published) :]
        if counted is not None:
            counted(outputs)
        hooked = saved_tensors_are_hooked()
        for i, ref in saved_refs.items():
            outputs[i] = _stand_in(ref()) if hooked else ref()
        for i, group in left.items():
            group().gathered.leave(outputs[i])  # type: ignore[union-attr]
        return outputs

    forward._boxed_call = True  # type: ignore[attr-defined]
    return forward


def backward_runner(variant: Callable[[Sync, bool], BackwardCode], family: Family, n_outputs: int) -> Callable:
    """The boxed backward: returns the first ``n_outputs`` outputs, sees to the others as ``family`` says.

    ``variant`` gives the code for one way of treating gradients; each is compiled when it is first asked for.
    """

    def backward(args: list[Any]) -> list[Any]:
        sync: Sync = "keep"
        if family.sync:
            sync = "merge" if any(group.has_kept() for group in family.groups()) else "reduce"
            reduce_rest(family)
        return variant(sync, sync != "keep" and family.stepper is not None)(args, n_outputs)

    backward._boxed_call = True  # type: ignore[attr-defined]
    return backward


@dataclass
class BackwardCode:
    """One compiled way of a backward graph.

    Attributes:
        compiled: the boxed function.
        inputs: which arguments it takes.
        groups: whose buffers it reads.
        uses: all that its forward said it uses.
        kept: the parameters whose kept gradients come after these, with fake tensors of what it expects.
        gathered: which arguments are whole groups that forward left gathered, and which groups; its last inputs.
        reductions: what its extra outputs are: of which group, whose gradients it computes, and whose other ranks may.
        keeps: whether these are to be kept (`zerofx.no_sync`), not accumulated.
        steps: whether the graph updates the groups, and there is nothing left to do with its extra outputs.
        carries: whether the graph fetches weights, or takes gradients away.
        store: where what forward saved went.
        published: under what names the outputs before these go to
        publish.
        check: raises where the arguments are not what was taken for granted of them.
        marks: of which parameters it computes a gradient, as ranks tell each other.
        used: while it runs, of which parameters ranks have a gradient.
        shadow: what ranks do that do not run it.
    """

    compiled: Callable
    inputs: Sequence[int]
    groups: Sequence[weakref.ref[ShardGroup]]
    uses: Sequence[weakref.ref[ShardGroup]]
    kept: Sequence[tuple[weakref.ref[ShardGroup], Slot, torch.Tensor]]
    gathered: Sequence[tuple[int, weakref.ref[ShardGroup]]]
    reductions: Sequence[tuple[weakref.ref[ShardGroup], tuple[Slot, ...], tuple[Slot, ...]]]
    keeps: bool
    steps: bool
    carries: bool
    store: ActivationStore | None
    published: Sequence[str]
    publish: Publish
    check: Callable[[list[Any]], None] | None = None
    marks: torch.Tensor | None = None
    used: UsedMap | None = None
    shadow: Shadow | None = None

    def __call__(self, args: list[Any], n_outputs: int) -> list[Any]:
        if self.shadow is not None and not self.keeps:
            for ref, slots, _ in self.reductions:
                ref().gradients.check_all_accumulate(slots)  # type: ignore[union-attr]
        with _turn(self.uses, self.shadow, backward=True):
            return self._run(args, n_outputs)

    def _run(self, args: list[Any], n_outputs: int) -> list[Any]:
        if self.check is not None:
            self.check(args)
        self.used = self._tell_used()
        gathered = self._take_gathered(args)
        inputs = _inputs(args, self.inputs, self.groups)
        inputs += self._take_kept()
        inputs += gathered
        gathered.clear()
        for ref in self.uses:
            ref().pending -= 1  # type: ignore[union-attr]
        reading = _reading(self.groups, "backward", written=False)
        carries = self.carries or self.store is not None
        moved = [*self.groups, *(ref for ref, *_ in self.reductions)]
        carriage = CARRIAGES[0](moved, self.store) if carries else None
        with carried(carriage), stepping(self if self.steps else None), _inside(self), reading:
            outputs = list(self.compiled(inputs))
        behind = n_outputs + len(self.published)
        if self.published:
            self.publish(dict(zip(self.published, outputs[n_outputs:behind])))
        for i, ((ref, slots, lacking), gradient) in enumerate(zip(self.reductions, outputs[behind:], strict=True)):
            live = ref()
            assert live is not None
            if self.steps:
                continue
            if self.keeps:
                live.gradients.keep(slots[0], gradient)
            else:
                away = carriage.gradients.pop(i, None) if carriage is not None else None
                with noting(carriage):
                    others = self._used_elsewhere(live, lacking)
                    gradient = gradient if away is None else away
                    live.accumulate(slots, gradient, others=others, away=away is not None)
        if self.used is not None:
            self.used.wait()
            self.used = None
        return outputs[:n_outputs]

    def _tell_used(self) -> UsedMap | None:
        """Tell the other ranks of which parameters there will be a gradient."""
        if self.keeps or not self.reductions:
            return None
        family = self.reductions[0][0]().family  # type: ignore[union-attr]
        if self.marks is None:  # the same at every step
            groups = [(ref(), slots) for ref, slots, _ in self.reductions]
            self.marks = family.marked((g.layout.name, slot) for g, slots in groups for slot in slots)  # type: ignore[union-attr]
        return family.send_used(self.marks)

    def _used_elsewhere(self, group: ShardGroup, lacking: tuple[Slot, ...]) -> tuple[Slot, ...]:
        """Those of the ``lacking`` parameters of which other ranks have a gradient."""
        if self.used is None or not lacking:
            return ()
        return group.family.used_anywhere(self.used, group, lacking)

    def step(self, group: str, gradient: torch.Tensor) -> None:
        """`zerofx.passes.ops.Stepper`"""
        live, slots, lacking = self._reduced(group)
        stepper = live.family.stepper
        taken = stepper.takes(live)
        # What is used up at once needs no place in a file.
        others = self._used_elsewhere(live, lacking)
        live.accumulate(slots, gradient, others=others, away=taken and live.home.file is not None)
        if taken:
            stepper.step(live)

    def refresh(self, group: str) -> None:
        """`zerofx.passes.ops.Stepper`"""
        live, *_ = self._reduced(group)
        if live.stepped:
            live.weights.refresh(inside=True)
        else:
            skip_collective(live.sharing.weights.name)

    def rest(self, group: str, rows: int, numel: int) -> torch.Tensor:
        """What quantizing has cut off of the gradient of ``group``: float32, [rows, numel], zeros at first."""
        return self._reduced(group)[0].gradients.rest_of(rows, numel)

    def _reduced(self, name: str) -> tuple[ShardGroup, tuple[Slot, ...], tuple[Slot, ...]]:
        for ref, slots, lacking in self.reductions:
            if (live := ref()) is not None and live.layout.name == name:
                return live, slots, lacking
        raise AssertionError(f"no group {name!r} is reduced here")

    # Functions of their own, so that no local variable holds a buffer while the graph runs.

    def _take_kept(self) -> list[torch.Tensor]:
        taken = []
        for group, slot, like in self.kept:
            kept = group().gradients.take_kept(slot)  # type: ignore[union-attr]
            if kept is None:
                kept = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
            # Outside of graphs a gradient is kept in the parameter's dtype; graphs have that of reductions.
            taken.append(kept.to(like.dtype))
        return taken

    def _take_gathered(self, args: list[Any]) -> list[Any]:
        for i, group in self.gathered:
            group().gathered.check(args[i])  # type: ignore[union-attr]
        return [args[i] for i, _ in self.gathered]


@contextlib.contextmanager
def _inside(code: BackwardCode) -> Iterator[None]:
    """A backward runs inside, and features know of it."""
    with contextlib.ExitStack() as stack:
        for around in AROUND:
            stack.enter_context(around(code))
        yield


def _turn(
    uses: Sequence[weakref.ref[ShardGroup]], shadow: Shadow | None, *, backward: bool = False
) -> contextlib.AbstractContextManager[Any]:
    """A graph runs inside: by turns, where ranks take them (``uneven=True``)."""
    family = uses[0]().family if uses else None  # type: ignore[union-attr]
    if family is None or family.turns is None:
        return contextlib.nullcontext()
    if backward:
        family.turns.end_backward(family)
    return contextlib.nullcontext() if shadow is None else family.turns.graph(shadow)


def _stand_in(parameter: Any) -> torch.Tensor:
    """What a hook for saved tensors may read in the place of a sharded ``parameter``."""
    if not isinstance(parameter, ShardedTensor):
        return parameter
    return torch.zeros(1, dtype=parameter.dtype, device=parameter.device)


def _inputs(args: list[Any], kept: Sequence[int], groups: Sequence[weakref.ref[ShardGroup]]) -> list[Any]:
    inputs = [args[i] for i in kept]
    args.clear()  # boxed: what is not an input any more may be freed while the graph runs
    for x in inputs:
        if isinstance(x, ShardedTensor):
            raise RuntimeError(f"{x!r} reaches compiled code that did not expect it: please report this.")
    return inputs + [group().weights.buffer for group in groups]  # type: ignore[union-attr]


def _reading(
    groups: Sequence[weakref.ref[ShardGroup]], phase: str, *, written: bool
) -> contextlib.AbstractContextManager[Any]:
    """A graph reads the weights of ``groups`` inside: `zerofx.runtime.state.weights.Weights.reading`."""
    if not groups:
        return contextlib.nullcontext()
    weights = [group().weights for group in groups]  # type: ignore[union-attr]
    return weights[0].reading(weights, phase, written=written)


def watch_backward(compiled: Callable, saved: Callable[[], Sequence[ShardedTensor]]) -> Callable:
    """Wrap a compiled function: ``create_graph=True`` is refused when its backward starts.

    So is a write, since forward, to one of the parameters ``saved()``, where hooks for saved tensors keep autograd from
    looking.
    """

    def run(*args: Any) -> Any:
        outputs = compiled(*args)
        node = node_behind(x for x in outputs if isinstance(x, torch.Tensor))
        if node is not None:
            node.register_prehook(_check_single_backward)
            if saved_tensors_are_hooked():
                versions = [(weakref.ref(x), x._version) for x in saved()]
                node.register_prehook(partial(_check_unwritten, versions))
        return outputs

    return run


def _check_single_backward(grad_outputs: Any) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "double backward (create_graph=True) through a module that zerofx compiled: what its graphs compute is "
            "differentiated once. Call torch.autograd.grad inside of forward, after what it differentiates and in one "
            "graph with it, where it becomes a part of the graph (PyTorch 2.13); or leave the module uncompiled, by "
            "leaf_modules= or by zerofx.shard in the place of zerofx.compile."
        )


def _check_unwritten(versions: Sequence[tuple[weakref.ref, int]], grad_outputs: Any) -> None:
    for ref, version in versions:
        parameter = ref()
        if parameter is not None and parameter._version != version:
            raise_written(f"the parameter {parameter._slot.name!r}")
