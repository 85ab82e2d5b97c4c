"""What was compiled: graphs before, after each pass, and final, for people to read.

A `Trace` keeps one copy of the graph as AOTAutograd made it; the graph after any pass is made anew by running the
passes up to there, which are deterministic. So records cost one copy of each graph until someone looks.
"""

from __future__ import annotations

import copy
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch.fx import GraphModule

from zerofx import _torch
from zerofx.compiler.explain import explain, has_words, purpose
from zerofx.compiler.listing import difference, python_of
from zerofx.compiler.printing import format_trace
from zerofx.passes import VerificationError, before_lower, pipeline
from zerofx.passes.context import Context, Executor
from zerofx.passes.proof.code import Promise, check_code
from zerofx.state.group import ShardGroup


class Trace:
    """One graph of a pair (forward or backward), and its way through the passes.

    Attributes:
        before: the graph that AOTAutograd handed over.
        edits: pass name -> number of edits it made.
        seconds: pass name -> how long it took; "record": the copy that is ``before``;
            "check_code": the reading of ``code``.
        context: what the passes knew and found out.
        code: what Inductor made of the final graph, as Python; None where another executor runs it.
        pretended: no executor got the graph: it is of `zerofx.dry_run`.
    """

    def __init__(self, gm: GraphModule, ctx: Context, pretended: bool = False) -> None:
        start = time.perf_counter()
        self.before = copy_graph(gm)
        self._initial = _copy_context(ctx)
        ctx.before = self._initial.before = self.before
        self.context = ctx
        self.edits: dict[str, int] = {}
        self.code: str | None = None
        self.pretended = pretended
        self.seconds = {"record": time.perf_counter() - start}

    @property
    def name(self) -> str:
        """The phase, and in brackets what it does with gradients if that is not just to reduce them."""
        return self.context.name

    def run(self, gm: GraphModule) -> None:
        """Run all passes on ``gm`` with ``self.context``."""
        for pass_ in pipeline(self.context.stage):
            start = time.perf_counter()
            try:
                self.edits[pass_.__name__] = pass_(gm, self.context)
            except VerificationError as e:
                raise e.saved_in(self._save(gm)) from None
            self.seconds[pass_.__name__] = time.perf_counter() - start

    def check_code(self, promise: Promise, written: dict[str, str]) -> dict[str, str]:
        """Check ``self.code``: see `zerofx.passes.proof.code.check_code`, which says what is given and returned."""
        start = time.perf_counter()
        try:
            found = check_code(self.code, promise, written) if self.code is not None else None
        except VerificationError as e:
            raise e.saved_in(self._save(self.final)) from None
        if found is None and promise.asks:
            warnings.warn(
                f"the code that Inductor generated for {self.name} was not checked, for it is no Python that zerofx "
                "can read (cpp_wrapper?). The graph was checked. See docs/debugging.md.",
                stacklevel=2,
            )
        self.seconds["check_code"] = time.perf_counter() - start
        return found or {}

    def _save(self, gm: GraphModule) -> str:
        """Write the graph before and after the passes, and its code, to a file that can be sent; returns its path."""
        gm.recompile()
        with tempfile.NamedTemporaryFile("w", prefix="zerofx-", suffix=".txt", delete=False) as file:
            file.write(f"torch {torch.__version__}\n\nbefore:{self.before.code}\nafter:{gm.code}\n{self.context}\n")
            file.write(f"\ncode:\n{self.code}\n" if self.code is not None else "")
        return file.name

    def after(self, name: str, *, executor: Executor | None = None) -> GraphModule:
        """The graph after the pass ``name``; ``executor``: as that one would have got it."""
        passes = pipeline(self.context.stage)
        names = [pass_.__name__ for pass_ in passes]
        if name not in names:
            raise KeyError(f"no pass {name!r}: the passes are {', '.join(names)}.")
        gm, ctx = copy_graph(self.before), _copy_context(self._initial)
        ctx.executor = executor or ctx.executor
        values = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
        with _torch.fake_mode_of(values):
            for pass_ in passes[: names.index(name) + 1]:
                pass_(gm, ctx)
        return gm

    def steps(self) -> Iterator[tuple[Callable, GraphModule]]:
        """Every pass and the graph after it, in order; cheaper than asking `after` for each."""
        gm, ctx = copy_graph(self.before), _copy_context(self._initial)
        values = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
        for pass_ in pipeline(self.context.stage):
            with _torch.fake_mode_of(values):
                pass_(gm, ctx)
            yield pass_, copy_graph(gm)

    @property
    def final(self) -> GraphModule:
        """The graph that the executor got."""
        return self.after(pipeline(self.context.stage)[-1].__name__)

    def before_lower(self) -> GraphModule:
        """The graph to read: in front of `lower`."""
        return self.after(before_lower(self.context.stage))

    def diff(self, name: str) -> str:
        """What the pass ``name`` changed, node by node; `zerofx.compiler.listing` says how to read it."""
        names = [pass_.__name__ for pass_ in pipeline(self.context.stage)]
        after = self.after(name)
        i = names.index(name)
        before = self.after(names[i - 1]) if i else self.before
        lines = difference(before.graph, after.graph) or ["  nothing"]
        return "\n".join([f"{self.name}: {name} changed", *lines])

    def history(self, words: str) -> str:
        """What every pass did to the nodes whose line has all of ``words`` (whole ones), and what that pass is for.

        ::

            >>> print(record.forward.history("all_gather blocks.1"))
            group: One collective per group over one flat buffer; weights become views of it.
            + all_gather_into_tensor_default_2: f32[50176] = all_gather_into_tensor(shard_blocks_1, 4, '0')  # ...
        """
        lines, before = [], self.before
        for pass_, after in self.steps():
            changed = [line for line in difference(before.graph, after.graph, context=0) if line[0] != " "]
            found = [line for line in changed if has_words(line, words)]
            if found:
                lines += [f"{pass_.__name__}: {purpose(pass_)}", *found]
            before = after
        return "\n".join(lines) or f"no pass has touched a node with {words!r} in its line"

    def explain(self, words: str) -> str:
        """Why zerofx's nodes that ``words`` name are there, and stand where they stand: `zerofx.compiler.explain`."""
        return explain(self, words)

    def __str__(self) -> str:
        return format_trace(self)


@dataclass
class GraphRecord:
    """One graph that Dynamo captured: its forward and backward, or its inference graph.

    ``backward_keep`` and ``backward_merge`` are the variants of the backward for `zerofx.no_sync`: inside of it, and
    the first one after. Those with ``step`` are for `zerofx.step_in_backward`.
    """

    forward: Trace | None = None
    backward: Trace | None = None
    backward_keep: Trace | None = None
    backward_merge: Trace | None = None
    backward_step: Trace | None = None
    backward_merge_step: Trace | None = None
    inference: Trace | None = None

    def traces(self) -> Iterable[Trace]:
        """Those that have been compiled so far (a backward is compiled when it first runs)."""
        return [trace for field in fields(self) if (trace := getattr(self, field.name)) is not None]

    @property
    def pretended(self) -> bool:
        """Whether it is of `zerofx.dry_run`: no executor got the graphs."""
        return any(trace.pretended for trace in self.traces())

    def diff(self, name: str) -> str:
        """What the pass ``name`` changed in each graph: ``print(record.diff("prefetch"))``."""
        return "\n".join(trace.diff(name) for trace in self.traces())

    def explain(self, words: str) -> str:
        """Which pass placed a node, and why there: ``print(record.explain("all_gather blocks.1"))``; in each graph.

        Args:
            words: of the node's line, whole ones: a kind and a group, or the node's name.

        Raises:
            ValueError: no graph has such a node.
        """
        said, missing = [], None
        for trace in self.traces():
            try:
                said.append(trace.explain(words))
            except ValueError as e:
                missing = e
        if not said and missing is not None:
            raise missing
        return "\n".join(said)

    @property
    def code(self) -> str:
        """The rewritten graphs as a Python file: a function for each, its inputs named; it runs where the ranks are.

        Whatever the executor, it is what the eager one would run: gathers, waits, discards and all, in order.

        Raises:
            RuntimeError: a graph holds a constant that cannot be written as text.
        """
        imports, functions = {"torch": "import torch", "zerofx": "import zerofx"}, []
        for field in fields(self):
            trace = getattr(self, field.name)
            if trace is not None:
                gm = trace.after(pipeline(trace.context.stage)[-1].__name__, executor="eager")
                needed, source = python_of(gm, field.name)
                imports |= needed
                functions.append(source)
        return "\n\n".join(["\n".join(imports.values()) + "\n", *functions])

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
