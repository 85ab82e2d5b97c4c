"""One graph of a pair, compiled: passes, then the executor, then what runs it at every step.

::

    forward      context ─▶ passes ─▶ executor ─▶ a function that puts shards where the graph expects them
    backward     the same, once for each way of treating gradients, when it is first needed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from zerofx import _torch
from zerofx.compiler.branches import by_rank
from zerofx.compiler.division import check_code
from zerofx.compiler.lean import lean
from zerofx.compiler.lowered import Lowered, LoweredBackward, LoweredForward, backward_of, forward_of, publish
from zerofx.compiler.observed import groups_of, log_compiled
from zerofx.compiler.pair import Pair
from zerofx.compiler.progress import Progress, progress_of
from zerofx.compiler.records import Trace, count, remember
from zerofx.compiler.regional import run_regions, takes
from zerofx.compiler.rewriting import copy_graph, examples_of, fixed_inputs, replaced_inputs, replaced_outputs
from zerofx.compiler.runners import BackwardCode, backward_runner
from zerofx.compiler.shadow import shadow_of
from zerofx.compiler.unit import Executed
from zerofx.compiler.written import check_unwritten
from zerofx.passes import edit
from zerofx.passes.context import Context, Executor, Phase, Sync
from zerofx.passes.kinds import NODE_KINDS
from zerofx.passes.proof.code import Promise
from zerofx.runtime.ranks.agree import Schedule, fingerprint
from zerofx.runtime.ranks.watch import watch_of, watch_together
from zerofx.runtime.ranks.watched import watched_beside
from zerofx.runtime.state.parameter import ShardedParameter


def _run_as_is(gm: GraphModule, inputs: list[Any], static: list[int]) -> Callable:
    return _torch.boxed(gm)


class Compilers:
    """The compilers of a ``pair``: AOTAutograd calls one for forward and later one for backward.

    Args:
        texts: of graphs that came from a cache (`zerofx.compiler.warm`), by `Rewriting.name`, the code that runs them:
            these are rewritten and checked, and no code is generated. None: none did.
        first: the way of backward that is compiled first; None: the one that is needed now.
        donates: whether code may write over inputs that nobody else has.
    """

    def __init__(
        self,
        pair: Pair,
        texts: dict[str, str | None] | None = None,
        first: tuple[Sync, bool] | None = None,
        donates: bool = True,
    ) -> None:
        self.first, self.donates = first, donates
        self.pair, self.unit, self.record = pair, pair.unit, pair.record
        self.texts: dict[str, str | None] = texts or {}
        self.forward_lowered: LoweredForward | None = None
        self._variant: Callable[[Sync, bool], BackwardCode] | None = None
        if self.unit.groups and texts is None:
            remember(list(self.unit.groups.values()), self.record)
        self.number = count(self.unit.groups.values())

    def inner(self, gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable:
        """Inductor's ``inner_compile``."""
        phase: Phase = "backward" if kwargs.get("is_backward") else "forward"
        phase = "inference" if kwargs.get("is_inference") else phase

        def generate(gm: GraphModule, inputs: list[Any], static: list[int]) -> Callable:
            how = {**kwargs, "static_input_idxs": static}
            if self.unit.pretend is None and self._executor(gm) == "eager":
                return run_regions(gm, self.unit, kwargs)
            if self.unit.pretend is None:
                return _torch.generate_code(gm, inputs, **how)
            run = self.unit.pretend(gm, inputs, static)
            if self.unit.code:
                run.source_code = _torch.write_code(gm, inputs, **how)  # type: ignore[attr-defined]
            return run

        return self._compile(gm, example_inputs, phase, generate, kwargs.get("static_input_idxs") or ())

    def _executor(self, gm: GraphModule) -> Executor:
        """What the passes make a graph ready for: regions run inside of a graph that runs as it reads."""
        regional = self.unit.options.executor == "regional"
        return "inductor" if regional and not takes(gm) else self.pair.executor

    def forward(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable:
        """The eager executor's forward."""
        return self._compile(gm, example_inputs, "forward", self.unit.pretend or _run_as_is)

    def backward(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable:
        """The eager executor's backward."""
        return self._compile(gm, example_inputs, "backward", self.unit.pretend or _run_as_is)

    def inference(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable:
        """The eager executor's graph without a backward."""
        return self._compile(gm, example_inputs, "inference", self.unit.pretend or _run_as_is)

    @lean
    def _compile(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        phase: Phase,
        execute: Executed,
        static: Sequence[int] = (),
    ) -> Callable:
        if not self.unit.groups:
            return execute(gm, list(example_inputs), list(static))
        if phase == "backward":
            return self._compile_backward(gm, example_inputs, execute, static)
        check_unwritten(gm, self.pair)
        ctx = self.pair.context(gm, phase)
        ctx.executor = self._executor(gm)
        compiled, common, trace = self._rewrite(gm, ctx, example_inputs, execute, static)
        setattr(self.record, phase, trace)
        saved, left = dict(ctx.found.saved_parameters), self.pair.handover.kept_gathered
        gathered = {value.position: name for name, value in left.items()}
        lowered = self.forward_lowered = LoweredForward(
            **common,
            saved=saved,
            gathered=gathered,
            stays=sum(x.nbytes for x in left.values() if x.ranks == 1),
            counted=self._counted(trace, {*saved, *gathered}, gm) if phase == "forward" else None,
            settled=self.pair.settled if phase == "forward" else None,
        )
        run = forward_of(lowered, self._watched_beside(compiled, gm, ctx), self.unit, trace.shadow)
        return self._entry(lowered, compiled, run)

    def _entry(self, lowered: Lowered, compiled: Callable, run: Callable) -> Callable:
        """``run``, as a cache takes it if there is one."""
        return _torch.entry(lowered, compiled, run) if self.pair.is_cached else run

    def _counted(self, trace: Trace, others: set[int], gm: GraphModule) -> tuple[int, ...] | None:
        """What a forward saves within a budget, or in parts, but for ``others`` and its own inputs."""
        if self.pair.activations is None and not edit.tagged(gm.graph, "part"):
            return None
        outputs = edit.output_values(trace.before.graph)
        computed = [i for i, x in enumerate(outputs) if isinstance(x, Node) and x.op != "placeholder"]
        return tuple(sorted((trace.context.saved - others).intersection(computed)))

    def _compile_backward(
        self, gm: GraphModule, example_inputs: Sequence[Any], execute: Executed, static: Sequence[int]
    ) -> Callable:
        """The variants: each when it is first needed, and before anything runs the one that will be first."""
        n_outputs, surroundings = len(edit.output_values(gm.graph)), _torch.compile_context()
        variants: dict[tuple[Sync, bool], BackwardCode] = {}
        family, steps_inside = self.unit.family, self.unit.group.weights.steps_inside
        if self._executor(gm) == "eager":
            _torch.donate_nothing()

        def variant(sync: Sync, steps: bool) -> BackwardCode:
            key = sync, steps and steps_inside
            if key not in variants:
                before = self.record.backward or self.record.backward_step
                assert before is not None
                with surroundings():
                    graph = copy_graph(before.before)
                    variants[key] = self._backward_variant(graph, *key, example_inputs, execute, static)
            return variants[key]

        first = self.first or ("reduce", family.stepper is not None and steps_inside)
        variants[first] = self._backward_variant(gm, *first, example_inputs, execute, static)
        (lowered, compiled), self._variant = self._first, variant
        if self.pair.division is not None and self.unit.options.executor == "inductor" and self.unit.pretend is None:
            check_code(self.pair.division, self.record)
        return self._entry(lowered, compiled, backward_runner(variant, family, n_outputs))

    @lean
    def variant(self, sync: Sync, steps: bool) -> BackwardCode:
        """The backward in one way of treating gradients, compiled if it was not yet."""
        assert self._variant is not None, "there is no backward"
        return self._variant(sync, steps)

    def _backward_variant(
        self,
        gm: GraphModule,
        sync: Sync,
        steps: bool,
        example_inputs: Sequence[Any],
        execute: Executed,
        static: Sequence[int],
    ) -> BackwardCode:
        ctx = self.pair.context(gm, "backward", sync, steps)
        ctx.executor = self._executor(gm)
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        n_outputs = len(edit.output_values(gm.graph))
        compiled, common, trace = self._rewrite(gm, ctx, example_inputs, execute, static)
        setattr(self.record, "_".join(["backward", *ctx.ways]), trace)
        likes = [node.meta["val"] for node in edit.tagged(gm.graph, "kept")]
        left = self.pair.handover.kept_gathered
        lowered = LoweredBackward(
            **common,
            way=(sync, steps),
            outputs=n_outputs,
            kept_gradients=tuple(zip(ctx.found.kept, likes, strict=True)),
            gathered=tuple((names.index(left[name].saved), name) for name in ctx.found.gathered),
            reductions=tuple(by_rank(trace.before, ctx)),
        )
        self._first = lowered, compiled
        check = self._check(names) if edit.tagged(gm.graph, "gather_saved") else None
        return backward_of(lowered, self._watched_beside(compiled, gm, ctx), self.unit, check, trace.shadow)

    def _check(self, names: Sequence[str]) -> Callable[[list[Any]], None]:
        """Of a backward's arguments: what tensor-parallel ranks have saved in parts comes from what they have alike."""
        alike = self.pair.alike
        assert alike is not None
        return lambda args: alike.check(dict(zip(names, args, strict=True)))

    def _rewrite(self, gm: GraphModule, ctx: Context, *given: Any) -> tuple[Callable, dict[str, Any], Trace]:
        """`_rewrite_reported`, in a line of progress."""
        with progress_of(f"{ctx.name} {self.number}", self.unit.read, self.unit.speaks) as progress:
            return self._rewrite_reported(progress, gm, ctx, *given)

    def _rewrite_reported(
        self,
        progress: Progress,
        gm: GraphModule,
        ctx: Context,
        example_inputs: Sequence[Any],
        execute: Executed,
        static: Sequence[int],
    ) -> tuple[Callable, dict[str, Any], Trace]:
        """Run the passes and the executor; returns the boxed code, what every `Lowered` says of it, and the record."""
        placeholders = gm.graph.find_nodes(op="placeholder")
        trace = Trace(gm, ctx, pretended=self.unit.pretend is not None)
        trace.activations, trace.division = self.pair.activations, self.pair.division
        with _torch.fake_mode_of(example_inputs):
            trace.run(gm, progress.at_pass)
        progress.passes_done()
        brought = ctx.parameters if ctx.stage else {}
        kept = [i for i, node in enumerate(placeholders) if node.name not in brought]
        schedules = {ctx.process_group: Schedule.of(gm, ctx)}
        if ctx.second_group:
            schedules[ctx.second_group] = Schedule.of(gm, ctx, second=True)
        what, rereads = fingerprint(trace.before, ctx, by_shapes=self.unit.options.lookups), ctx.name in self.texts
        if self.unit.pretend is None and not rereads:
            publish(schedules, what, self.unit)
            if self.unit.family.turns is not None:
                number, timeout = self.unit.family.number, self.unit.options.timeout
                trace.shadow = shadow_of(gm, trace.before, ctx, number, schedules[ctx.process_group], timeout)
        # Backward may write over an input of the model's, by its place among the inputs that are left.
        replaced = replaced_inputs(trace.before, placeholders) | ctx.parameters.keys()
        theirs = {i: k for k, i in enumerate(kept) if placeholders[i].name not in replaced}
        moved = replaced_outputs(trace.before, gm) if ctx.phase == "forward" else []
        _torch.forget_output_strides(gm, moved)
        trace.regional = self.unit.fuses and ctx.executor == "eager"
        coded = ctx.executor == "inductor" and (self.unit.pretend is None or self.unit.code)
        promise = Promise.of(gm, ctx) if coded else None
        progress.at("code for the executor")
        with _torch.donated_inputs(theirs if self.donates else {}) as donated:
            examples = examples_of(gm, replaced, placeholders, example_inputs, kept)
            fixed = fixed_inputs(ctx, kept, static)
            compiled = _unrun if rereads else execute(gm, examples, fixed)
        _torch.forget_output_strides(gm, moved)
        trace.code = self.texts.pop(ctx.name) if rereads else _torch.source_code(compiled)
        if promise is not None:
            progress.at("reading the code")
            self.pair.written |= trace.check_code(promise, self.pair.written)
        log_compiled(trace)
        common = {
            "phase": ctx.phase,
            "name": ctx.name,
            "groups": groups_of(trace),
            "kept": tuple(kept),
            "shards": tuple(ctx.found.shards),
            "schedules": schedules,
            "published": tuple(ctx.found.published),
            "carries": bool(edit.tagged(gm.graph, *(name for name, kind in NODE_KINDS.items() if kind.transfer))),
            "donates": bool(donated) and ctx.executor == "inductor" and ctx.phase == "backward",
            "elsewhere": ctx.elsewhere,
            "fingerprint": what,
            "text": trace.code,
        }
        return compiled, common, trace

    def _watched_beside(self, compiled: Callable, gm: GraphModule, ctx: Context) -> Callable:
        """Tensor-parallel ranks that a graph talks to, of `partition_activations`, are under watch as well."""
        if self.pair.alike is None or self.unit.pretend is not None:
            return compiled
        names, parts = self.pair.alike.groups(gm.graph), Schedule.of(gm, ctx, parts=True)
        if not names and not parts.collectives:
            return compiled
        beside = watch_of(self.pair.alike.ranks.name)
        watch_together([watch for watch in (watch_of(ctx.process_group), beside) if watch is not None])
        return watched_beside(compiled, parts, self.pair.alike.ranks.name, self.unit.options.timeout, names)

    def saved_parameters(self) -> list[ShardedParameter]:
        """What forward saves of sharded parameters: backward gathers them anew."""
        refs = self.forward_lowered.saved.values() if self.forward_lowered is not None else ()
        saved = [self.unit.groups[ref.layout].parameter(ref.slot) for ref in refs]
        return [parameter for parameter in saved if isinstance(parameter, ShardedParameter)]


def _unrun(args: list[Any]) -> Any:
    raise AssertionError("the code came from a cache, and runs from there")
