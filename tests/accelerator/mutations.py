"""What puts an order into a step, taken out piece by piece: numbers must tell.

Each mutation is a context: what is trained inside trains without that order.
"""

from __future__ import annotations

import contextlib
import time
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from tests.accelerator import cases
from zerofx import _torch
from zerofx.features.offload.on_host import OnHost
from zerofx.passes import edit
from zerofx.passes.ops import discard
from zerofx.runtime.state.copies import AcceleratorCopies

Change = Callable[[GraphModule], None]
Without = Callable[[], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def graphs_with(change: Change) -> Iterator[None]:
    """Every graph is changed behind all passes and all rules, right before it runs."""
    boxed = _torch.boxed

    def changed(gm: GraphModule) -> Any:
        change(gm)
        gm.graph.lint()
        gm.recompile()
        return boxed(gm)

    with unittest.mock.patch.object(_torch, "boxed", changed):
        yield


def without_waits(kind: str) -> Without:
    """Nodes of a kind that wait are taken out of every graph."""

    def change(gm: GraphModule) -> None:
        for wait in edit.tagged(gm.graph, kind):
            wait.replace_all_uses_with(wait.args[0])  # type: ignore[arg-type]
            gm.graph.erase_node(wait)

    return lambda: graphs_with(change)


class OneWait:
    """The ``which``-th node of a kind alone is taken out, counted over all graphs; ``passed``: how many there are."""

    def __init__(self, kind: str, which: int) -> None:
        self.kind, self.which, self.passed = kind, which, 0

    def __call__(self, gm: GraphModule) -> None:
        for wait in edit.tagged(gm.graph, self.kind):
            if self.passed == self.which:
                wait.replace_all_uses_with(wait.args[0])  # type: ignore[arg-type]
                gm.graph.erase_node(wait)
            self.passed += 1


def discard_at_once(gm: GraphModule) -> None:
    """A gathered buffer is given back as soon as it is there, in front of its readers."""
    for wait in edit.tagged(gm.graph, "wait"):
        with gm.graph.inserting_after(wait):
            gm.graph.call_function(discard, (wait,))


def write_to_packs(gm: GraphModule) -> None:
    """A pack of gradients is written while it is reduced."""
    for node in edit.tagged(gm.graph, "reduce_scatter"):
        with gm.graph.inserting_after(node):
            gm.graph.call_function(torch.ops.aten.zero_.default, (node.args[0],))


def group_without(rule: str) -> Without:
    """PyTorch's promise of a collective, broken: zerofx relies on it."""

    def breaking() -> contextlib.AbstractContextManager[None]:
        from tests.accelerator import group  # it has the device: not for the process of the tests

        return group.breaking(rule)

    return breaking


@contextlib.contextmanager
def slow_way_back() -> Iterator[None]:
    """Copies to the device take ten times as long as those to the host."""
    from tests.accelerator import device

    back = AcceleratorCopies.back

    def late(self: Any, into: torch.Tensor, source: torch.Tensor) -> None:
        device.push(self._back.stream_id, lambda: time.sleep(1e-2))
        back(self, into, source)

    with unittest.mock.patch.object(AcceleratorCopies, "back", late):
        yield


def copies_without(order: str) -> Without:
    return lambda: unittest.mock.patch.object(AcceleratorCopies, order, lambda self, *mark: None)


def slow_copies_without(order: str) -> Without:
    @contextlib.contextmanager
    def both() -> Iterator[None]:
        with slow_way_back(), copies_without(order)():
            yield

    return both


class Nowhere:
    """A mark that the host does not wait for."""

    def synchronize(self) -> None:
        pass


def copies_unmarked() -> contextlib.AbstractContextManager[Any]:
    return unittest.mock.patch.object(AcceleratorCopies, "mark_out", lambda self: Nowhere())


def host_waits_for_nothing() -> contextlib.AbstractContextManager[Any]:
    return unittest.mock.patch.object(OnHost, "settle", lambda self, *state: None)


def streams_apart() -> contextlib.AbstractContextManager[Any]:
    return unittest.mock.patch.object(cases, "join", lambda stream, other: None)


@dataclass(frozen=True)
class Mutation:
    """``case``: of `cases.CASES`, in which it shows. ``schedule``: under which. ``slow``: so are its tests."""

    without: Without
    case: str
    stages: Sequence[int]
    schedule: str = "slow link"
    slow: bool = False


MUTATIONS = {
    "R1: a collective starts without what came before": Mutation(
        group_without("start"), "plain", (0, 1, 2, 3), "slow compute"
    ),
    "R2: a wait for a collective waits for nothing": Mutation(group_without("wait"), "plain", (0, 1, 2, 3)),
    "R3: a collective does not hold its tensors": Mutation(group_without("hold"), "plain", (1, 2, 3)),
    "the wait for a gathered buffer": Mutation(without_waits("wait"), "plain", (3,)),
    "the wait for a replica": Mutation(without_waits("refresh"), "plain", (1, 2)),
    "the wait for a replica refreshed ahead": Mutation(without_waits("refresh"), "step_in_backward", (1, 2)),
    "the wait for a gradient": Mutation(without_waits("wait_grad"), "plain", (0, 1, 2, 3)),
    "the wait for a gradient, in backward": Mutation(without_waits("wait_grad"), "step_in_backward", (0, 1, 2, 3)),
    "readers in front of a discard": Mutation(lambda: graphs_with(discard_at_once), "plain", (3,)),
    "a pack that nobody writes": Mutation(lambda: graphs_with(write_to_packs), "plain", (1, 2, 3)),
    "copies: begin": Mutation(copies_without("begin"), "state on the host", (1, 2, 3), "slow compute"),
    "copies: the host waits": Mutation(copies_unmarked, "state on the host", (1, 2, 3)),
    "copies: out_behind": Mutation(slow_copies_without("out_behind"), "state on the host", (1, 2, 3)),
    "copies: end": Mutation(slow_copies_without("end"), "state on the host", (1, 2, 3)),
    "copies: end, in backward": Mutation(slow_copies_without("end"), "state on the host, step_in_backward", (1, 2, 3)),
    "activations leave: begin": Mutation(copies_without("begin"), "activations on the host", (0, 3), "slow compute"),
    "activations come: begin_back": Mutation(
        copies_without("begin_back"), "activations on the host", (0, 3), "slow compute"
    ),
    "activations: the wait for a copy": Mutation(
        copies_without("go_on_behind"), "activations on the host", (0, 3), "slow copies"
    ),
    "gradients leave: begin": Mutation(
        copies_without("begin"), "gradients on the host", (1, 2, 3), "slow compute", slow=True
    ),
    "gradients: the wait for a copy": Mutation(
        copies_without("go_on_behind"), "gradients on the host", (1, 2, 3), "slow copies", slow=True
    ),
    "gradients: the host waits": Mutation(host_waits_for_nothing, "all on the host", (3,), "slow copies"),
    "gradients that are added: begin_back": Mutation(
        copies_without("begin_back"), "gradients on the host, summed", (1, 2, 3), "slow compute", slow=True
    ),
    "weights come: begin_back": Mutation(
        copies_without("begin_back"), "weights on the host", (3,), "slow compute", slow=True
    ),
    "weights: the wait for a copy": Mutation(
        copies_without("go_on_behind"), "weights on the host", (3,), "slow copies"
    ),
    "weights: the host waits": Mutation(
        host_waits_for_nothing, "all on the host, evaluated", (3,), "slow copies", slow=True
    ),
    "the wait for a stream of the user's": Mutation(
        streams_apart, "a stream of the user's", (0, 1, 2, 3), "slow copies"
    ),
}


def mutated(name: str, stage: int) -> list[float] | str:
    """Losses without the order; or the error that it ends in."""
    mutation = MUTATIONS[name]
    with cases.simulated(mutation.schedule), mutation.without():
        try:
            return cases.losses(cases.CASES[mutation.case], stage, "sim")
        except RuntimeError as error:
            return str(error)
        finally:
            with contextlib.suppress(RuntimeError):
                torch.accelerator.synchronize()


def one_by_one(kind: str, stage: int) -> list[list[float]]:
    """Losses without the first wait of a kind, without the second, and so on."""
    found: list[list[float]] = []
    while True:
        change = OneWait(kind, len(found))
        with cases.simulated("slow link", us=3000), graphs_with(change):
            losses = cases.losses(cases.CASES["plain"], stage, "sim")
        if change.passed <= change.which:
            return found
        found.append(losses)


def with_a_slow_way_back(case: str, stage: int) -> list[float]:
    with cases.simulated("slow link"), slow_way_back():
        return cases.losses(cases.CASES[case], stage, "sim")
