"""One process that believes to be one of two, and a log of what its graphs, its optimizer and its collectives touch."""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule, Interpreter, Node

from tests.nccl.events import Event, Log, spans, storage_span
from tests.nccl.stand_in import AT_LAST, NAME, Alone, making
from zerofx import _torch
from zerofx._torch import OpOverload, pytree
from zerofx.passes import edit
from zerofx.passes.ops import discard, release
from zerofx.runtime.optim.adamw import AdamW
from zerofx.runtime.ranks import watch
from zerofx.runtime.state.gradients import Gradients

Change = Callable[[GraphModule], None]
"""What a test does to a finished graph, to see that it is found out."""


@contextlib.contextmanager
def alone_with(change: Change | None = None) -> Iterator[Log]:
    """The process group of two of which this process is one, and what is done inside, by the eager executor."""
    assert not dist.is_initialized(), "a process group is left over from an earlier test"
    with making(Alone, AT_LAST) as log, contextlib.ExitStack() as stack:
        dist.init_process_group(NAME, store=dist.HashStore(), rank=0, world_size=2)
        stack.callback(_leave)
        for owner, name, new in (
            (_torch, "boxed", lambda gm: _boxed(gm, log, change)),
            (AdamW, "_update", _recorded_update(log)),
            (Gradients, "accumulate", _recorded_accumulate(log)),
        ):
            stack.enter_context(unittest.mock.patch.object(owner, name, new))
        yield log


def _leave() -> None:
    for one in watch._watches.values():
        one.stop()
    watch._watches.clear()
    dist.destroy_process_group()


def _boxed(gm: GraphModule, log: Log, change: Change | None) -> Callable:
    if change is not None:
        change(gm)
        gm.graph.lint()
        gm.recompile()

    def run(args: list[Any]) -> Any:
        return _Recorder(gm, log).boxed_run(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class _Recorder(Interpreter):
    """Runs a graph node by node, as `zerofx._torch.boxed` does, and tells the log."""

    def __init__(self, gm: GraphModule, log: Log) -> None:
        super().__init__(gm)
        self.log = log

    def run_node(self, n: Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        group = n.meta["zerofx"].group if "zerofx" in n.meta else ""
        if n.target is discard:
            self.log.add(Event("free", n.name, None, "", (), storage_span(args[0]), group))
        value = super().run_node(n)
        if n.op == "call_function" and n.target not in (discard, release):
            self._note(n, args, kwargs, value, group)
        for last in self.user_to_last_uses.get(n, ()):
            if last.op == "call_function" and not _lives_on(last) and isinstance(self.env[last], torch.Tensor):
                self.log.add(Event("drop", last.name, None, "", (), storage_span(self.env[last]), group))
        return value

    def _note(self, n: Node, args: Any, kwargs: Any, value: Any, group: str) -> None:
        """A kernel. Collectives tell the log themselves, views touch nothing, and so do zerofx's statements."""
        name = n.target._schema.name if isinstance(n.target, OpOverload) else ""
        if name.startswith(("_c10d_functional", "zerofx::step", "zerofx::refresh")):
            return
        if name and edit.may_alias(n) and not edit.written_by(n):
            return
        read = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        made = [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]
        self.log.add(Event("compute", name or n.name, None, "", spans(read), spans(made), group))


def _lives_on(node: Node) -> bool:
    """Whether the node's memory is another's too: what it is a view of, or what waits for it."""
    tag = node.meta.get("zerofx")
    return edit.may_alias(node) or (tag is not None and tag.kind in ("all_gather", "reduce_scatter", "all_reduce"))


def _recorded_update(log: Log) -> Callable:
    theirs = AdamW._update

    def update(self: AdamW, groups: Any, scale: Any, found_inf: Any) -> None:
        members = [member for span in groups for member in span.members if member.parameter.grad is not None]
        gradients = [member.parameter.grad for member in members]
        reads = [getattr(gradient, "_local", gradient) for gradient in gradients]
        written = [span.weights() for span in groups if any(m.parameter.grad is not None for m in span.members)]
        theirs(self, groups, scale, found_inf)
        for span, weights in zip(groups, written):
            name = "" if span.group is None else span.group.layout.name
            log.add(Event("compute", "adamw", None, "", spans(reads), spans([weights]), name))

    return update


def _recorded_accumulate(log: Log) -> Callable:
    theirs = Gradients.accumulate

    def accumulate(self: Gradients, slots: Any, gradient: torch.Tensor, **kwargs: Any) -> None:
        log.add(Event("compute", "accumulate", None, "", spans([gradient]), (), self.layout.name))
        theirs(self, slots, gradient, **kwargs)

    return accumulate
