"""One graph on its way through the passes: as it was before, what each pass did, and how to make it anew.

The passes are deterministic. So a `Rewriting` keeps one copy of the graph as AOTAutograd made it, and makes the graph
after any pass anew by running the passes up to there. That costs one copy of each graph until someone looks.
"""

from __future__ import annotations

import copy
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from zerofx import _torch
from zerofx.compiler.choices import Activations, Division
from zerofx.passes import Pass, VerificationError, before_lower, edit, pipeline
from zerofx.passes.adopt import adopt
from zerofx.passes.context import Context, Executor
from zerofx.passes.own import Pass as OwnPass
from zerofx.passes.own import in_front
from zerofx.passes.proof.code import Promise, check_code


class Rewriting:
    """One graph of a pair (forward or backward), and its way through the passes.

    Attributes:
        before: the graph that AOTAutograd handed over.
        edits: pass name -> number of edits it made.
        seconds: pass name -> how long it took; "record": the copy that is ``before``; "check_code": the reading of
            ``code``.
        context: what the passes knew and found out.
        activations: what was saved and recomputed within a budget; None: there is none, or it changes nothing.
        division: how ``memory`` was divided; None: there is no such budget.
        code: what Inductor made of the final graph, as Python; None where another executor runs it.
        regional: its regions are compiled, and it runs as it reads (`zerofx.compiler.regional`).
        pretended: nothing runs the graph: it is of `zerofx.dry_run`.

    Args:
        before: a copy of ``gm`` that nothing will change; None: it is made now.
    """

    def __init__(
        self, gm: GraphModule, ctx: Context, pretended: bool = False, before: GraphModule | None = None
    ) -> None:
        start = time.perf_counter()
        self.before: GraphModule = before or copy_graph(gm)
        self._initial = ctx.copy()
        ctx.before = self._initial.before = self.before
        self.context = ctx
        self.activations: Activations | None = None
        self.division: Division | None = None
        self.edits: dict[str, int] = {}
        self.code: str | None = None
        self.pretended = pretended
        self.regional = False
        self.seconds: dict[str, float] = {"record": time.perf_counter() - start}

    @property
    def name(self) -> str:
        """The phase, and in brackets what it does with gradients if that is not just to reduce them."""
        return self.context.name

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes of this graph, in order, the user's among them."""
        return pipeline(self.context.stage, self.context.own, self.context)

    def run(self, gm: GraphModule, told: Callable[[str, int, int], None] | None = None) -> None:
        """Run all passes on ``gm`` with ``self.context``.

        ``told`` hears of each before it runs: its name, its number, and of how many.
        """
        for i, pass_ in enumerate(self.passes, start=1):
            start = time.perf_counter()
            if told is not None:
                told(pass_.__name__, i, len(self.passes))
            try:
                self.edits[pass_.__name__] = self._apply(pass_, gm, self.context)
            except VerificationError as e:
                raise (self._blamed(e) or e).saved_in(self._save(gm)) from None
            except Exception as e:
                blamed = None if isinstance(pass_, OwnPass) else self._blamed(e)
                if blamed is None:
                    raise
                raise blamed from e
            self.seconds[pass_.__name__] = time.perf_counter() - start

    def _apply(self, pass_: Pass, gm: GraphModule, ctx: Context) -> int:
        if not isinstance(pass_, OwnPass):
            return pass_(gm, ctx)
        front = pass_ in in_front(self.passes)
        edits = adopt(pass_, gm, ctx, front=front)
        if front:
            ctx.before = copy_graph(gm)
        return edits

    def _blamed(self, error: Exception) -> VerificationError | None:
        """``error`` as one of the user's pass that brought it about; None where it comes without any of them, too."""
        own = [pass_ for pass_ in self.passes if isinstance(pass_, OwnPass)]
        for k in range(len(own) + 1) if own else ():
            gm, ctx = copy_graph(self.before), self._initial.copy()
            ctx.handover.meanings = copy.deepcopy(ctx.handover.meanings)
            try:
                for pass_ in self.passes:
                    if pass_ not in own[k:]:
                        self._apply(pass_, gm, ctx)
            except Exception:
                return VerificationError.by_pass(own[k - 1].name, self.name, error) if k else None
        return None

    def check_code(self, promise: Promise, written: dict[str, str]) -> dict[str, str]:
        """Check ``self.code``: see `zerofx.passes.proof.code.check_code`, which says what is given and returned."""
        start = time.perf_counter()
        try:
            found = check_code(self.code, promise, written) if self.code is not None else None
        except VerificationError as e:
            raise e.saved_in(self._save(self.final)) from None
        if found is None and promise.asks and self._speaks():
            warnings.warn(
                f"the code that Inductor generated for {self.name} was not checked, for it is no Python that zerofx "
                "can read (cpp_wrapper?). The graph was checked. See docs/debugging.md.",
                stacklevel=2,
            )
        self.seconds["check_code"] = time.perf_counter() - start
        return found or {}

    def _speaks(self) -> bool:
        """Whether it is this rank that warns of what all have."""
        return _torch.resolve_process_group(self.context.process_group).rank() == 0

    def _save(self, gm: GraphModule) -> str:
        """Write the graph before and after the passes, and its code, to a file that can be sent; returns its path."""
        gm.recompile()
        with tempfile.NamedTemporaryFile("w", prefix="zerofx-", suffix=".txt", delete=False) as file:
            file.write(f"torch {torch.__version__}\n\nbefore:{self.before.code}\nafter:{gm.code}\n{self.context}\n")
            file.write(f"\ncode:\n{self.code}\n" if self.code is not None else "")
        return file.name

    def after(self, name: str, *, executor: Executor | None = None) -> GraphModule:
        """The graph after the pass ``name``; ``executor``: as that one would have got it."""
        passes = self.passes
        names = [pass_.__name__ for pass_ in passes]
        if name not in names:
            raise KeyError(f"no pass {name!r}: the passes are {', '.join(names)}.")
        gm, ctx = copy_graph(self.before), self._initial.copy()
        ctx.executor = executor or ctx.executor
        values = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
        with _torch.fake_mode_of(values):
            for pass_ in passes[: names.index(name) + 1]:
                self._apply(pass_, gm, ctx)
        return gm

    def steps(self) -> Iterator[tuple[Callable[..., int], GraphModule]]:
        """Every pass and the graph after it, in order; cheaper than asking `after` for each."""
        gm, ctx = copy_graph(self.before), self._initial.copy()
        values = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
        for pass_ in self.passes:
            with _torch.fake_mode_of(values):
                self._apply(pass_, gm, ctx)
            yield pass_, copy_graph(gm)

    @property
    def final(self) -> GraphModule:
        """The graph that the executor got."""
        return self.after(self.passes[-1].__name__)

    def before_lower(self) -> GraphModule:
        """The graph to read: before `lower`."""
        return self.after(before_lower(self.context))


def copy_graph(gm: GraphModule) -> GraphModule:
    """A copy that can be rewritten; what is not graph is shared."""
    return _torch.lazy_module(gm, copy.deepcopy(gm.graph))


def replaced_inputs(before: GraphModule, inputs: Sequence[Node]) -> set[str]:
    """The names of those of a graph's ``inputs`` for which passes have put something else."""
    old = before.graph.find_nodes(op="placeholder")
    return {new.name for new, was in zip(inputs, old) if new.meta.get("val") is not was.meta.get("val")}


def replaced_outputs(before: GraphModule, gm: GraphModule) -> list[int]:
    """The numbers of the outputs for which passes have put what has another shape, or other strides."""

    def seen(value: Any) -> str:
        value = value.meta.get("val") if isinstance(value, Node) else None
        return f"{tuple(value.shape)} {value.stride()}" if isinstance(value, torch.Tensor) else ""

    old = [*map(seen, edit.output_values(before.graph))]
    new = [*map(seen, edit.output_values(gm.graph))]
    return [i for i, value in enumerate(new) if i >= len(old) or value != old[i]]


def examples_of(
    gm: GraphModule, replaced: Collection[str], old: Sequence[Node], example_inputs: Sequence[Any], kept: Sequence[int]
) -> list[Any]:
    """Examples of the rewritten graph's inputs: the ``old`` ones that are ``kept``, and the new ones.

    Of what passes have ``replaced`` the old example is something else.
    """
    examples = [n.meta["val"] if n.name in replaced else x for n, x in zip(old, example_inputs)]
    new = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")[len(kept) :]]
    return [examples[i] for i in kept] + new


def fixed_inputs(ctx: Context, kept: Sequence[int], static: Sequence[int]) -> list[int]:
    """Which inputs of the rewritten graph stay where they are in memory: those that did, and the groups' buffers."""
    fixed = [k for k, i in enumerate(kept) if i in set(static)]
    return [*fixed, *range(len(kept), len(kept) + len(ctx.found.shards))]
