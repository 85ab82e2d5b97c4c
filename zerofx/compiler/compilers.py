"""One graph of a pair, compiled: passes, then the executor, then what runs it at every step.

::

    forward      context ─▶ passes ─▶ executor ─▶ a function that puts shards where the graph expects them
    backward     the same, once for each way of treating gradients, when it is first needed
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from zerofx import _torch
from zerofx.compiler.branches import by_rank
from zerofx.compiler.division import check_code
from zerofx.compiler.observed import observed
from zerofx.compiler.pair import Pair
from zerofx.compiler.progress import Progress, progress_of, wanted
from zerofx.compiler.records import Trace, records_of, remember
from zerofx.compiler.rewriting import copy_graph, examples_of, fixed_inputs, replaced_inputs, replaced_outputs
from zerofx.compiler.runners import BackwardCode, backward_runner, forward_runner
from zerofx.compiler.shadow import shadow_of
from zerofx.compiler.unit import Executed
from zerofx.compiler.written import check_unwritten
from zerofx.model.layout import GroupLayout
from zerofx.passes import edit
from zerofx.passes.context import Context, Phase, Sync
from zerofx.passes.kinds import NODE_KINDS
from zerofx.passes.proof.code import Promise
from zerofx.runtime.ranks.agree import Schedule, identity
from zerofx.runtime.ranks.watch import watch_of, watch_together
from zerofx.runtime.ranks.watched import watched, watched_beside
from zerofx.runtime.state.group import ShardGroup
from zerofx.runtime.state.parameter import ShardedParameter


def _run_as_is(gm: GraphModule, inputs: list[Any], static: list[int]) -> Callable:
    return _torch.boxed(gm)


class Compilers:
    """The compilers of a ``pair``: AOTAutograd calls one for forward and later one for backward."""

    def __init__(self, pair: Pair) -> None:
        self.pair, self.unit, self.record = pair, pair.unit, pair.record
        if self.unit.groups:
            remember(list(self.unit.groups.values()), self.record)
        self.number = len(records_of(self.unit.groups.values()))

    def inner(self, gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable:
        """Inductor's ``inner_compile``."""
        phase: Phase = "forward"
        if kwargs.get("is_backward"):
            phase = "backward"
        elif kwargs.get("is_inference"):
            phase = "inference"

        def generate(gm: GraphModule, inputs: list[Any], static: list[int]) -> Callable:
            how = {**kwargs, "static_input_idxs": static}
            if self.unit.pretend is None:
                return _torch.generate_code(gm, inputs, **how)
            run = self.unit.pretend(gm, inputs, static)
            if self.unit.code:
                run.source_code = _torch.write_code(gm, inputs, **how)  # type: ignore[attr-defined]
            return run

        static = kwargs.get("static_input_idxs") or ()
        return self._compile(gm, example_inputs, phase, generate, static)

    def forward(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable:
        """The eager executor's forward."""
        return self._compile(gm, example_inputs, "forward", self.unit.pretend or _run_as_is)

    def backward(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable:
        """The eager executor's backward."""
        return self._compile(gm, example_inputs, "backward", self.unit.pretend or _run_as_is)

    def inference(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable:
        """The eager executor's graph without a backward."""
        return self._compile(gm, example_inputs, "inference", self.unit.pretend or _run_as_is)

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
        compiled, kept, trace = self._rewrite(gm, ctx, example_inputs, execute, static)
        setattr(self.record, phase, trace)
        carries = _carries(gm)
        left = self.pair.handover.kept_gathered
        if phase == "forward":
            self.unit.family.footprint.keeps(self.unit.names, sum(x.nbytes for x in left.values() if x.ranks == 1))
        saved = {i: self.unit.groups[ref.layout].parameter(ref.slot) for i, ref in ctx.found.saved_parameters.items()}
        by_name = {layout.name: group for layout, group in self.unit.groups.items()}
        gathered = {value.position: by_name[name] for name, value in left.items()}
        parted = bool(edit.tagged(gm.graph, "part"))
        counted = self._counting(trace, {*saved, *gathered}, parted) if phase == "forward" else None
        return forward_runner(
            observed(compiled, trace),
            kept,
            [self.unit.groups[layout] for layout in ctx.found.shards],
            saved,
            gathered,
            uses=list(self.unit.groups.values()),
            trained=phase == "forward",
            published=ctx.found.published,
            publish=self.unit.family.published.update,
            counted=counted,
            carries=carries,
            store=self.unit.family.activation_store if carries and phase == "forward" else None,
            shadow=trace.shadow,
        )

    def _counting(self, trace: Trace, others: set[int], parted: bool) -> Callable[[list[Any]], None] | None:
        """Tells the family what a forward saves within a budget, or in parts, but for ``others`` and its own inputs."""
        if self.pair.activations is None and not parted:
            return None
        outputs, names, family = edit.output_values(trace.before.graph), self.unit.names, weakref.ref(self.unit.family)
        computed = [i for i, x in enumerate(outputs) if isinstance(x, Node) and x.op != "placeholder"]
        saved = sorted((trace.context.saved - others).intersection(computed))

        def count(values: list[Any]) -> None:
            family().footprint.note_saved(names, [values[i] for i in saved])  # type: ignore[union-attr]

        return count

    def _compile_backward(
        self, gm: GraphModule, example_inputs: Sequence[Any], execute: Executed, static: Sequence[int]
    ) -> Callable:
        """The variants: each when it is first needed, and before anything runs the one that will be first."""
        n_outputs, surroundings = len(edit.output_values(gm.graph)), _torch.compile_context()
        variants: dict[tuple[Sync, bool], BackwardCode] = {}
        family, steps_inside = self.unit.family, self.unit.group.weights.steps_inside

        def variant(sync: Sync, steps: bool) -> BackwardCode:
            key = sync, steps and steps_inside
            if key not in variants:
                before = self.record.backward or self.record.backward_step
                assert before is not None
                with surroundings():
                    graph = copy_graph(before.before)
                    variants[key] = self._backward_variant(graph, *key, example_inputs, execute, static)
            return variants[key]

        first: tuple[Sync, bool] = "reduce", family.stepper is not None and steps_inside
        variants[first] = self._backward_variant(gm, *first, example_inputs, execute, static)
        if self.pair.division is not None and self.unit.options.executor == "inductor" and self.unit.pretend is None:
            check_code(self.pair.division, self.record)
        return backward_runner(variant, family, n_outputs)

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
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        compiled, inputs, trace = self._rewrite(gm, ctx, example_inputs, execute, static)
        setattr(self.record, "_".join(["backward", *ctx.ways]), trace)

        def ref(layout: GroupLayout) -> weakref.ref[ShardGroup]:
            return weakref.ref(self.unit.groups[layout])

        by_name = {layout.name: ref(layout) for layout in self.unit.groups}
        likes, carries = [node.meta["val"] for node in edit.tagged(gm.graph, "kept")], _carries(gm)
        left = self.pair.handover.kept_gathered
        return BackwardCode(
            observed(compiled, trace),
            inputs,
            groups=[ref(layout) for layout in ctx.found.shards],
            uses=[ref(layout) for layout in self.unit.groups],
            kept=[(ref(p.layout), p.slot, like) for p, like in zip(ctx.found.kept, likes, strict=True)],
            gathered=[(names.index(left[name].saved), by_name[name]) for name in ctx.found.gathered],
            reductions=[(ref(layout), mine, others) for layout, mine, others in by_rank(trace.before, ctx)],
            keeps=sync == "keep",
            steps=steps,
            carries=carries,
            store=self.unit.family.activation_store if carries else None,
            published=ctx.found.published,
            publish=self.unit.family.published.update,
            check=self._check(names) if edit.tagged(gm.graph, "gather_saved") else None,
            shadow=trace.shadow,
        )

    def _check(self, names: Sequence[str]) -> Callable[[list[Any]], None]:
        """Of a backward's arguments: what tensor-parallel ranks have saved in parts comes from what they have alike."""
        alike = self.pair.alike
        assert alike is not None
        return lambda args: alike.check(dict(zip(names, args, strict=True)))

    def _rewrite(self, gm: GraphModule, ctx: Context, *given: Any) -> tuple[Callable, list[int], Trace]:
        """`_rewrite_reported`, in a line of progress."""
        names = list(dict.fromkeys(layout.name for layout in self.unit.groups))
        speaks = wanted(self.unit.options.progress) and self.unit.group.sharing.everyone.rank == 0
        with progress_of(f"{ctx.name} {self.number}", names, speaks) as progress:
            return self._rewrite_reported(progress, gm, ctx, *given)

    def _rewrite_reported(
        self,
        progress: Progress,
        gm: GraphModule,
        ctx: Context,
        example_inputs: Sequence[Any],
        execute: Executed,
        static: Sequence[int],
    ) -> tuple[Callable, list[int], Trace]:
        """Run the passes and the executor; returns the boxed code, which old inputs it takes, and the record."""
        placeholders = gm.graph.find_nodes(op="placeholder")
        trace = Trace(gm, ctx, pretended=self.unit.pretend is not None)
        trace.activations, trace.division = self.pair.activations, self.pair.division
        with _torch.fake_mode_of(example_inputs):
            trace.run(gm, progress.at_pass)
        progress.passes_done()
        brought = ctx.parameters if ctx.stage else {}
        kept = [i for i, node in enumerate(placeholders) if node.name not in brought]
        schedule, between = Schedule.of(gm, ctx), Schedule.of(gm, ctx, second=True)
        self._publish(schedule, trace, ctx.process_group)
        if self.unit.pretend is None and self.unit.family.turns is not None:
            number, timeout = self.unit.family.number, self.unit.options.timeout
            trace.shadow = shadow_of(gm, trace.before, ctx, number, schedule, timeout)
        if ctx.second_group:
            self._publish(between, trace, ctx.second_group)
        # Backward may write over an input of the model's, by its place among the inputs that are left.
        replaced = replaced_inputs(trace.before, placeholders) | ctx.parameters.keys()
        theirs = {i: k for k, i in enumerate(kept) if placeholders[i].name not in replaced}
        moved = replaced_outputs(trace.before, gm) if ctx.phase == "forward" else []
        _torch.forget_output_strides(gm, moved)
        coded = self.unit.options.executor == "inductor" and (self.unit.pretend is None or self.unit.code)
        promise = Promise.of(gm, ctx) if coded else None
        progress.at("code for the executor")
        with _torch.donated_inputs(theirs):
            examples = examples_of(gm, replaced, placeholders, example_inputs, kept)
            compiled = execute(gm, examples, fixed_inputs(ctx, kept, static))
        _torch.forget_output_strides(gm, moved)
        trace.code = _torch.source_code(compiled)
        if promise is not None:
            progress.at("reading the code")
            self.pair.written |= trace.check_code(promise, self.pair.written)
        if self.unit.pretend is None:
            compiled = self._watched_beside(compiled, gm, ctx)
            compiled = watched(compiled, schedule, ctx.process_group, self.unit.options.timeout)
            if ctx.second_group:
                compiled = watched(compiled, between, ctx.second_group, self.unit.options.timeout)
        return compiled, kept, trace

    def _watched_beside(self, compiled: Callable, gm: GraphModule, ctx: Context) -> Callable:
        """Tensor-parallel ranks that a graph talks to, of `partition_activations`, are under watch as well."""
        if self.pair.alike is None:
            return compiled
        names, parts = self.pair.alike.groups(gm.graph), Schedule.of(gm, ctx, parts=True)
        if not names and not parts.collectives:
            return compiled
        beside = watch_of(self.pair.alike.ranks.name)
        watch_together([watch for watch in (watch_of(ctx.process_group), beside) if watch is not None])
        return watched_beside(compiled, parts, self.pair.alike.ranks.name, self.unit.options.timeout, names)

    def _publish(self, schedule: Schedule, trace: Trace, process_group: str) -> None:
        """Compare with the other ranks of a process group what was compiled."""
        if self.unit.pretend is None and schedule.collectives and (watch := watch_of(process_group)) is not None:
            number, by_shapes, same = self.unit.family.number, self.unit.options.lookups, self.unit.family.turns is None
            what = identity(trace.before, trace.context, number, by_shapes=by_shapes) if same else None
            watch.publish(schedule, what)

    def saved_parameters(self) -> list[ShardedParameter]:
        """What forward saves of sharded parameters: backward gathers them anew."""
        refs = self.record.forward.context.found.saved_parameters.values() if self.record.forward is not None else ()
        saved = [self.unit.groups[ref.layout].parameter(ref.slot) for ref in refs]
        return [parameter for parameter in saved if isinstance(parameter, ShardedParameter)]


def _carries(gm: GraphModule) -> bool:
    """Whether a graph moves state between the device and where it lives."""
    return bool(edit.tagged(gm.graph, *(name for name, kind in NODE_KINDS.items() if kind.transfer)))
