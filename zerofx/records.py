"""What was compiled: graphs before, after each pass, and final, for people to read.

A `Trace` keeps one copy of the graph as AOTAutograd made it; the graph after any pass is made anew by running the
passes up to there, which are deterministic. So records cost one copy of each graph until someone looks.
"""

from __future__ import annotations

import copy
import tempfile
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import torch
from torch.fx import GraphModule

from zerofx import _torch
from zerofx.group import ShardGroup
from zerofx.passes import VerificationError, pipeline
from zerofx.passes.context import Context
from zerofx.printing import format_trace


class Trace:
    """One graph of a pair (forward or backward), and its way through the passes.

    Attributes:
        before: the graph that AOTAutograd handed over.
        edits: pass name -> number of edits it made.
        seconds: pass name -> how long it took; "record": the copy that is ``before``.
        context: what the passes knew and found out.
        code: what Inductor made of the final graph, as Python; None where another executor runs it.
    """

    def __init__(self, gm: GraphModule, ctx: Context) -> None:
        start = time.perf_counter()
        self.before = copy_graph(gm)
        self._initial = _copy_context(ctx)
        ctx.before = self._initial.before = self.before
        self.context = ctx
        self.edits: dict[str, int] = {}
        self.code: str | None = None
        self.seconds = {"record": time.perf_counter() - start}

    def run(self, gm: GraphModule) -> None:
        """Run all passes on ``gm`` with ``self.context``."""
        for pass_ in pipeline(self.context.stage):
            start = time.perf_counter()
            try:
                self.edits[pass_.__name__] = pass_(gm, self.context)
            except VerificationError as e:
                raise e.saved_in(self._save(gm)) from None
            self.seconds[pass_.__name__] = time.perf_counter() - start

    def _save(self, gm: GraphModule) -> str:
        """Write the graph before and after the passes to a file that can be sent; returns its path."""
        gm.recompile()
        with tempfile.NamedTemporaryFile("w", prefix="zerofx-", suffix=".txt", delete=False) as file:
            file.write(f"torch {torch.__version__}\n\nbefore:{self.before.code}\nafter:{gm.code}\n{self.context}\n")
        return file.name

    def after(self, name: str) -> GraphModule:
        """The graph after the pass ``name``."""
        passes = pipeline(self.context.stage)
        names = [pass_.__name__ for pass_ in passes]
        if name not in names:
            raise KeyError(f"no pass {name!r}: the passes are {', '.join(names)}.")
        gm, ctx = copy_graph(self.before), _copy_context(self._initial)
        values = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
        with _torch.fake_mode_of(values):
            for pass_ in passes[: names.index(name) + 1]:
                pass_(gm, ctx)
        return gm

    @property
    def final(self) -> GraphModule:
        """The graph that the executor got."""
        return self.after(pipeline(self.context.stage)[-1].__name__)

    def __str__(self) -> str:
        return format_trace(self)


@dataclass
class GraphRecord:
    """One graph that Dynamo captured: its forward and backward, or its inference graph.

    ``backward_keep`` and ``backward_merge`` are the variants of the backward for `zerofx.no_sync`: inside of it, and
    the first one after.
    """

    forward: Trace | None = None
    backward: Trace | None = None
    backward_keep: Trace | None = None
    backward_merge: Trace | None = None
    inference: Trace | None = None

    def traces(self) -> Iterable[Trace]:
        """Those that have been compiled so far (a backward is compiled when it first runs)."""
        return [trace for field in fields(self) if (trace := getattr(self, field.name)) is not None]

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


def copy_graph(gm: GraphModule) -> GraphModule:
    """A copy that can be rewritten; what is not graph is shared."""
    return GraphModule(gm, copy.deepcopy(gm.graph))


def _copy_context(ctx: Context) -> Context:
    return replace(
        ctx,
        parameters=dict(ctx.parameters),
        recipes=dict(ctx.recipes),
        kept_gathered=dict(ctx.kept_gathered),
        saved_names=dict(ctx.saved_names),
        gathered=list(ctx.gathered),
        shards=list(ctx.shards),
        saved_parameters=dict(ctx.saved_parameters),
        kept=list(ctx.kept),
        reductions=list(ctx.reductions),
    )
