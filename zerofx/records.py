"""What was compiled: graphs before, after each pass, and final, for people to read.

A `Trace` keeps one copy of the graph as AOTAutograd made it; the graph after any pass is made anew by running the
passes up to there, which are deterministic. So records cost one copy of each graph until someone looks.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch.fx import GraphModule

from zerofx import _torch
from zerofx.group import ShardGroup
from zerofx.passes import PIPELINE
from zerofx.passes.context import Context
from zerofx.printing import format_trace


class Trace:
    """One graph of a pair (forward or backward), and its way through the passes.

    Attributes:
        before: the graph that AOTAutograd handed over.
        edits: pass name -> number of edits it made.
        context: what the passes knew and found out.
    """

    def __init__(self, gm: GraphModule, ctx: Context) -> None:
        self.before = _copy(gm)
        self._initial = _copy_context(ctx)
        self.context = ctx
        self.edits: dict[str, int] = {}

    def run(self, gm: GraphModule) -> None:
        """Run all passes on ``gm`` with ``self.context``."""
        for pass_ in PIPELINE:
            self.edits[pass_.__name__] = pass_(gm, self.context)

    def after(self, name: str) -> GraphModule:
        """The graph after the pass ``name``."""
        names = [pass_.__name__ for pass_ in PIPELINE]
        if name not in names:
            raise KeyError(f"no pass {name!r}: the passes are {', '.join(names)}.")
        gm, ctx = _copy(self.before), _copy_context(self._initial)
        values = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
        with _torch.fake_mode_of(values):
            for pass_ in PIPELINE[: names.index(name) + 1]:
                pass_(gm, ctx)
        return gm

    @property
    def final(self) -> GraphModule:
        """The graph that the executor got."""
        return self.after(PIPELINE[-1].__name__)

    def __str__(self) -> str:
        return format_trace(self)


@dataclass
class GraphRecord:
    """One graph that Dynamo captured: its forward and backward, or its inference graph."""

    forward: Trace | None = None
    backward: Trace | None = None
    inference: Trace | None = None

    def traces(self) -> Iterable[Trace]:
        """Those that have been compiled so far (the backward is compiled when it first runs)."""
        return [t for t in (self.forward, self.backward, self.inference) if t is not None]

    def __str__(self) -> str:
        return "\n".join(map(str, self.traces()))


_records: weakref.WeakKeyDictionary[ShardGroup, list[GraphRecord]] = weakref.WeakKeyDictionary()


def remember(groups: Iterable[ShardGroup], record: GraphRecord) -> None:
    """File ``record`` under each of ``groups``, for as long as they live."""
    for group in groups:
        _records.setdefault(group, []).append(record)


def records_of(groups: Iterable[ShardGroup]) -> list[GraphRecord]:
    """Every record of any of ``groups``, in the order they were compiled."""
    found = {id(r): r for group in groups for r in _records.get(group, ())}
    return list(found.values())


def _copy(gm: GraphModule) -> GraphModule:
    return GraphModule(gm, copy.deepcopy(gm.graph))


def _copy_context(ctx: Context) -> Context:
    return replace(
        ctx,
        parameters=dict(ctx.parameters),
        recipes=dict(ctx.recipes),
        shards=list(ctx.shards),
        saved_parameters=dict(ctx.saved_parameters),
        reductions=list(ctx.reductions),
    )
