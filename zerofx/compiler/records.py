"""What was compiled: graphs before, after each pass, and final, for people to read."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields

from zerofx.compiler.explain import explain, has_words, purpose
from zerofx.compiler.listing import difference, python_of
from zerofx.compiler.printing import format_trace
from zerofx.compiler.regional import describe
from zerofx.compiler.rewriting import Rewriting
from zerofx.runtime.ranks.turns import Shadow
from zerofx.runtime.state.group import ShardGroup


class Trace(Rewriting):
    """One graph of a pair (forward or backward), to be read: what the passes did to it, and why.

    Attributes:
        shadow: what ranks do that do not run it (``uneven=True``).
    """

    shadow: Shadow | None = None

    def diff(self, name: str) -> str:
        """What the pass ``name`` changed, node by node; `zerofx.compiler.listing` says how to read it."""
        names = [pass_.__name__ for pass_ in self.passes]
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

    def _regions(self) -> list[str]:
        groups = {name: ref.layout.name for name, ref in self.context.parameters.items()}
        return describe(self.final, self.context.own_kinds, groups)

    def __str__(self) -> str:
        regions = self._regions() if self.regional else []
        return "\n".join([format_trace(self), *regions])


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
    restore: Callable[[], object] | None = field(default=None, repr=False)
    """Makes the graphs of what came from a cache; None: they are there."""

    def traces(self) -> Iterable[Trace]:
        """Those that have been compiled so far (a backward is compiled when it first runs)."""
        return list(self._named().values())

    def _named(self) -> dict[str, Trace]:
        found = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "restore"}
        return {name: trace for name, trace in found.items() if trace is not None}

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
        for name, trace in self._named().items():
            gm = trace.after(trace.passes[-1].__name__, executor="eager")
            needed, source = python_of(gm, name)
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


def forget(groups: Iterable[ShardGroup], record: GraphRecord) -> None:
    """Take ``record``, of a graph that is compiled anew, back."""
    for group in groups:
        _records[group].remove(record)


def records_of(groups: Iterable[ShardGroup]) -> list[GraphRecord]:
    """Every record of any of ``groups``, in the order they were compiled, with its graphs."""
    found = {id(r): r for group in groups for r in _records.get(group, ())}
    for record in found.values():
        if record.restore is not None:
            record.restore()
    return list(found.values())


def count(groups: Iterable[ShardGroup]) -> int:
    """How many records there are of any of ``groups``."""
    return len({id(r) for group in groups for r in _records.get(group, ())})
