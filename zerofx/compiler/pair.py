"""One graph of Dynamo's, compiled: AOTAutograd cuts it in two, and each half is rewritten and handed to an executor.

::

    before_cut           the joint graph: what backward recomputes is decided next
    compile_forward      context ─▶ passes ─▶ executor ─▶ a function that hands shards in
    compile_backward     the same, once for each way of treating gradients, when it is first needed
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch.fx import Graph, GraphModule, Node

from zerofx import _torch
from zerofx.compiler.activations import Away, cost, is_whole
from zerofx.compiler.activations import choose as choose_saved
from zerofx.compiler.alike import Alike, Foreseen
from zerofx.compiler.branches import by_rank, trained_beside
from zerofx.compiler.captured import check_claimable, check_one_module
from zerofx.compiler.division import Halves, Subject, check_code, divide
from zerofx.compiler.observed import observed
from zerofx.compiler.options import Options
from zerofx.compiler.progress import Progress, progress_of, wanted
from zerofx.compiler.records import GraphRecord, Trace, records_of, remember
from zerofx.compiler.rewriting import copy_graph, examples_of, fixed_inputs
from zerofx.compiler.runners import BackwardCode, backward_runner, forward_runner
from zerofx.compiler.shadow import shadow_of
from zerofx.compiler.written import check_unwritten
from zerofx.model.layout import GroupLayout
from zerofx.model.memory import Memory
from zerofx.passes import edit
from zerofx.passes.context import (
    ActivationChoice,
    Activations,
    Context,
    Division,
    Gathered,
    Meanings,
    OffloadedActivation,
    ParameterRef,
    Phase,
    Recipe,
    SavedPart,
    Sync,
)
from zerofx.passes.proof.code import Promise
from zerofx.passes.save_ahead import save_ahead
from zerofx.passes.save_entries import save_entries
from zerofx.passes.save_random import save_random
from zerofx.passes.save_reads import save_reads
from zerofx.passes.spare_gathers import spare_gathers
from zerofx.runtime.ranks.agree import Schedule, identity
from zerofx.runtime.ranks.watch import watch_of, watch_together
from zerofx.runtime.ranks.watched import watched, watched_beside
from zerofx.runtime.state.group import Family, ShardGroup
from zerofx.runtime.state.parameter import ReplicatedParameter, ShardedParameter, ShardedTensor

Executed = Callable[[GraphModule, list[Any], list[int]], Callable[..., Any]]
"""From a graph, its inputs, and which of these stay where they are, to a boxed function."""


def _run_as_is(gm: GraphModule, inputs: list[Any], static: list[int]) -> Callable:
    return _torch.boxed(gm)


class CompiledGraph:
    """The compilers for one Dynamo graph: AOTAutograd calls one for forward and later one for backward."""

    def __init__(
        self, options: Options, example_inputs: Sequence[Any], pretend: Executed | None = None, code: bool = False
    ) -> None:
        self.options = options
        self.pretend = pretend
        self.written_only = code
        sharded = {i: x for i, x in enumerate(example_inputs) if isinstance(x, (ShardedTensor, ReplicatedParameter))}
        for tensor in sharded.values():
            check_claimable(tensor)
        check_one_module(list(sharded.values()))
        self.sharded: dict[int, ParameterRef] = {
            i: ParameterRef(x._group.graph_layout, x._slot) for i, x in sharded.items()
        }
        # Weakly: Dynamo keeps what it compiled for as long as the code lives, which is longer than a model.
        groups = {x._group.graph_layout: x._group for x in sharded.values()}
        self.groups: weakref.WeakValueDictionary[GroupLayout, ShardGroup] = weakref.WeakValueDictionary(groups)
        self.record: GraphRecord = GraphRecord()
        if self.groups:
            remember(list(self.groups.values()), self.record)
        self.number = len(records_of(self.groups.values()))
        self.activations: Activations | None = None
        self.memory_budget: float | None = options.memory_budget
        self.division: Division | None = None
        self.recipes: dict[str, Recipe] = {}
        self.kept_gathered: dict[str, Gathered] = {}
        self.offloaded: dict[str, OffloadedActivation] = {}
        self.meanings: Meanings = Meanings()
        self.parts: dict[str, SavedPart] = {}
        self.alike: Alike | None = None
        self.foreseen: Foreseen | None = None
        self.written: dict[str, str] = {}
        """What forward's code writes to and returns for backward: `zerofx.passes.proof.code.check_code`."""
        self.names: frozenset[str] = frozenset(layout.name for layout in self.groups)

    def ask(self, gm: GraphModule, example_inputs: Sequence[Any]) -> None:
        """Find out what tensor-parallel ranks have alike of Dynamo's graph: a collective of theirs."""
        if (name := self.options.partition_activations) is not None and self.groups:
            alike = Alike(name, gm, example_inputs, self.family)  # type: ignore[arg-type]
            self.alike = alike if alike.ranks.size > 1 else None

    def before_cut(self, joint: GraphModule) -> None:
        """Forward and backward in one graph: what backward is to recompute is decided next."""
        check_unwritten(joint, self)
        save_reads(joint)
        if self.alike is not None:
            self.alike.learn(joint)
            self.foreseen = self.alike.foresee(joint) if self.options.memory is not None else None
        if any(group.weights.gathers for group in self.groups.values()):
            spare_gathers(joint, self.parameters(joint.graph))
        if self.options.memory is not None or not is_whole(self.options.activation_budget):
            save_random(joint)

    @contextlib.contextmanager
    def saving(self) -> Iterator[bool]:
        """Graphs that are cut inside save what `activation_budget` or `memory` says; yields whether one does."""
        budget, memory = self.options.activation_budget, Memory.of(self.options.memory)
        if memory is not None and self.groups:
            with _torch.partitioning(partial(self._divide, memory), cost):
                yield True
            return
        if budget is None or is_whole(budget) or not self.groups:
            with _torch.saving_also(self._ahead):
                yield False
            return

        def choose(cut: _torch.Cut) -> list[Node]:
            brought = self.parameters(cut.graph)
            saved, self.activations = choose_saved(
                cut,
                budget,
                fuses=self.options.executor == "inductor",
                elsewhere=self.family.held.saved_elsewhere(self.names),
                share=self.share(),
                save_entries=lambda forward: save_entries(forward, brought),
                away=self.away(),
            )
            self.family.held.saves(self.names, self.activations.saved_bytes)
            return saved

        with _torch.saving(choose, cost):
            yield True

    def _divide(self, memory: Memory, joint: GraphModule, partition: _torch.Partition) -> Halves:
        """Cut ``joint`` by the division of ``memory`` that is chosen, and note that."""
        subject = Subject(
            groups=list(self.groups.values()),
            family=self.family,
            fuses=self.options.executor == "inductor",
            pretended=self.pretend is not None,
            share=self.share(),
            away=self.away(memory.rates),
            alike=self.alike,
            parameters=self.parameters,
            contexts=partial(self.context, foreseen=True),
        )
        halves, chosen = divide(subject, memory, joint, partition)
        self.activations, self.memory_budget, self.division = chosen or (None, self.memory_budget, None)
        return halves

    def _ahead(self, joint: Graph, saved: Sequence[Node]) -> list[Node]:
        """What forward must save as well, lest backward gather out of turn."""
        if not any(group.weights.gathers for group in self.groups.values()):
            return []
        return save_ahead(joint, saved, self.parameters(joint), ahead=0 if self.memory_budget else 1)

    def away(self, rates: Any = None) -> Away | None:
        """What of activations may leave the device; ``rates``: None: those of the option."""
        store, offload = self.family.activation_store, self.family.offload
        return (
            None if store is None or offload is None else Away(ActivationChoice(store.smallest), rates or offload.rates)
        )

    def saved_parameters(self) -> list[ShardedParameter]:
        """What forward saves of sharded parameters: backward gathers them anew."""
        refs = self.record.forward.context.saved_parameters.values() if self.record.forward is not None else ()
        saved = [self.groups[ref.layout].parameter(ref.slot) for ref in refs]
        return [parameter for parameter in saved if isinstance(parameter, ShardedParameter)]

    def share(self) -> float:
        """Of all parameters that no other graph has read, the part that this one does: so much more may be saved."""
        layouts = {group.layout.name: group.layout for group in self.family.groups()}
        others = self.family.held.unread_elsewhere(self.names, frozenset(layouts))
        ours = sum(layout.numel for layout in self.groups)
        return ours / (ours + sum(layouts[name].numel for name in others))

    def parameters(self, graph: Graph) -> dict[str, ParameterRef]:
        indices = {node.name: _torch.input_index(node) for node in graph.find_nodes(op="placeholder")}
        return {name: self.sharded[i] for name, i in indices.items() if i in self.sharded}

    def compile_inner(self, gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable:
        """Inductor's ``inner_compile``."""
        phase: Phase = "forward"
        if kwargs.get("is_backward"):
            phase = "backward"
        elif kwargs.get("is_inference"):
            phase = "inference"

        def generate(gm: GraphModule, inputs: list[Any], static: list[int]) -> Callable:
            how = {**kwargs, "static_input_idxs": static}
            if self.pretend is None:
                return _torch.generate_code(gm, inputs, **how)
            run = self.pretend(gm, inputs, static)
            if self.written_only:
                run.source_code = _torch.write_code(gm, inputs, **how)  # type: ignore[attr-defined]
            return run

        static = kwargs.get("static_input_idxs") or ()
        return self._compile(gm, example_inputs, phase, generate, static)

    def compile_forward(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable:
        """The eager executor's forward."""
        return self._compile(gm, example_inputs, "forward", self.pretend or _run_as_is)

    def compile_backward(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable:
        """The eager executor's backward."""
        return self._compile(gm, example_inputs, "backward", self.pretend or _run_as_is)

    def compile_inference(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable:
        """The eager executor's graph without a backward."""
        return self._compile(gm, example_inputs, "inference", self.pretend or _run_as_is)

    def _compile(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        phase: Phase,
        execute: Executed,
        static: Sequence[int] = (),
    ) -> Callable:
        if not self.groups:
            return execute(gm, list(example_inputs), list(static))
        if phase == "backward":
            return self._compile_backward(gm, example_inputs, execute, static)
        check_unwritten(gm, self)
        ctx = self.context(gm, phase)
        compiled, kept, trace = self._rewrite(gm, ctx, example_inputs, execute, static)
        setattr(self.record, phase, trace)
        if phase == "forward":
            self.family.held.keeps(self.names, sum(x.nbytes for x in self.kept_gathered.values() if x.ranks == 1))
        saved = {i: self.groups[ref.layout].parameter(ref.slot) for i, ref in ctx.saved_parameters.items()}
        by_name = {layout.name: group for layout, group in self.groups.items()}
        gathered = {value.position: by_name[name] for name, value in self.kept_gathered.items()}
        return forward_runner(
            observed(compiled, trace),
            kept,
            [self.groups[layout] for layout in ctx.shards],
            saved,
            gathered,
            uses=list(self.groups.values()),
            trained=phase == "forward",
            published=ctx.published,
            publish=self.family.published.update,
            counted=self._counting(trace, {*saved, *gathered}) if phase == "forward" else None,
            carries=bool(ctx.weights_away),
            store=self.family.activation_store if self.offloaded and phase == "forward" else None,
            shadow=trace.shadow,
        )

    def _counting(self, trace: Trace, others: set[int]) -> Callable[[list[Any]], None] | None:
        """Tells the family what a forward saves within a budget, or in parts, but for ``others`` and its own inputs."""
        if self.activations is None and not trace.context.parts:
            return None
        outputs, names, family = edit.output_values(trace.before.graph), self.names, weakref.ref(self.family)
        computed = [i for i, x in enumerate(outputs) if isinstance(x, Node) and x.op != "placeholder"]
        saved = sorted((trace.context.saved - others).intersection(computed))

        def count(values: list[Any]) -> None:
            family().held.note_saved(names, [values[i] for i in saved])  # type: ignore[union-attr]

        return count

    def _compile_backward(
        self, gm: GraphModule, example_inputs: Sequence[Any], execute: Executed, static: Sequence[int]
    ) -> Callable:
        """The variants: each when it is first needed, and before anything runs the one that will be first."""
        n_outputs, surroundings = len(edit.output_values(gm.graph)), _torch.compile_context()
        variants: dict[tuple[Sync, bool], BackwardCode] = {}
        family, steps_inside = self.family, self.any_group().weights.steps_inside

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
        if self.division is not None and self.options.executor == "inductor" and self.pretend is None:
            check_code(self.division, self.record)
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
        ctx = self.context(gm, "backward", sync, steps)
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        compiled, inputs, trace = self._rewrite(gm, ctx, example_inputs, execute, static)
        setattr(self.record, "_".join(["backward", *ctx.ways]), trace)

        def ref(layout: GroupLayout) -> weakref.ref[ShardGroup]:
            return weakref.ref(self.groups[layout])

        by_name = {layout.name: ref(layout) for layout in self.groups}
        likes = [node.meta["val"] for node in edit.tagged(gm.graph, "kept")]
        return BackwardCode(
            observed(compiled, trace),
            inputs,
            groups=[ref(layout) for layout in ctx.shards],
            uses=[ref(layout) for layout in self.groups],
            kept=[(ref(p.layout), p.slot, like) for p, like in zip(ctx.kept, likes, strict=True)],
            gathered=[(names.index(self.kept_gathered[name].saved), by_name[name]) for name in ctx.gathered],
            reductions=[(ref(layout), mine, others) for layout, mine, others in by_rank(trace.before, ctx)],
            keeps=sync == "keep",
            steps=steps,
            carries=bool(ctx.weights_away or ctx.gradients_away),
            store=self.family.activation_store if self.offloaded else None,
            published=ctx.published,
            publish=self.family.published.update,
            names=names if ctx.parts else (),
            alike=self.alike,
            shadow=trace.shadow,
        )

    def _rewrite(self, gm: GraphModule, ctx: Context, *given: Any) -> tuple[Callable, list[int], Trace]:
        """`_rewrite_told`, in a line of progress."""
        names = list(dict.fromkeys(layout.name for layout in self.groups))
        speaks = wanted(self.options.progress) and self.any_group().sharing.everyone.rank == 0
        with progress_of(f"{ctx.name} {self.number}", names, speaks) as progress:
            return self._rewrite_told(progress, gm, ctx, *given)

    def _rewrite_told(
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
        trace = Trace(gm, ctx, pretended=self.pretend is not None)
        with _torch.fake_mode_of(example_inputs):
            trace.run(gm, progress.at_pass)
        progress.passes_done()
        brought = ctx.parameters if ctx.stage else {}
        kept = [i for i, node in enumerate(placeholders) if node.name not in brought]
        schedule, between = Schedule.of(gm, ctx), Schedule.of(gm, ctx, second=True)
        self._publish(schedule, trace, ctx.process_group)
        if self.pretend is None and self.family.turns is not None:
            number, timeout = self.family.number, self.options.timeout
            trace.shadow = shadow_of(gm, trace.before, ctx, number, schedule, timeout)
        if ctx.second_group:
            self._publish(between, trace, ctx.second_group)
        # Backward may write over an input of the model's, by its place among the inputs that are left.
        stays = [node.name not in ctx.parameters and node.name not in ctx.offloaded for node in placeholders]
        theirs = {i: k for k, i in enumerate(kept) if stays[i]}
        moved = [left.position for left in self.kept_gathered.values()] if ctx.phase == "forward" else []
        moved += [i for part in ctx.parts.values() for i in part.positions] if ctx.phase == "forward" else ()
        moved += [i for i, name in ctx.saved_names.items() if name in ctx.offloaded]
        returned = len(edit.output_values(gm.graph))
        moved += range(returned - len(ctx.published), returned) if ctx.phase == "forward" else ()
        _torch.forget_output_strides(gm, moved)
        coded = self.options.executor == "inductor" and (self.pretend is None or self.written_only)
        promise = Promise.of(gm, ctx) if coded else None
        progress.at("code for the executor")
        with _torch.donated_inputs(theirs):
            examples = examples_of(gm, ctx, placeholders, example_inputs, kept)
            compiled = execute(gm, examples, fixed_inputs(ctx, kept, static))
        _torch.forget_output_strides(gm, moved)
        trace.code = _torch.source_code(compiled)
        if promise is not None:
            progress.at("reading the code")
            self.written |= trace.check_code(promise, self.written)
        if self.pretend is None:
            compiled = self._watched_beside(compiled, gm, ctx)
            compiled = watched(compiled, schedule, ctx.process_group, self.options.timeout)
            if ctx.second_group:
                compiled = watched(compiled, between, ctx.second_group, self.options.timeout)
        return compiled, kept, trace

    def _watched_beside(self, compiled: Callable, gm: GraphModule, ctx: Context) -> Callable:
        """Tensor-parallel ranks that a graph talks to, of `partition_activations`, are under watch as well."""
        if self.alike is None:
            return compiled
        names, parts = self.alike.groups(gm.graph), Schedule.of(gm, ctx, parts=True)
        if not names and not parts.collectives:
            return compiled
        beside = watch_of(self.alike.ranks.name)
        watch_together([watch for watch in (watch_of(ctx.process_group), beside) if watch is not None])
        return watched_beside(compiled, parts, self.alike.ranks.name, self.options.timeout, names)

    def _publish(self, schedule: Schedule, trace: Trace, process_group: str) -> None:
        """Compare with the other ranks of a process group what was compiled."""
        if self.pretend is None and schedule.collectives and (watch := watch_of(process_group)) is not None:
            same = self.family.turns is None
            watch.publish(schedule, identity(trace.before, trace.context, self.family.number) if same else None)

    def context(
        self, gm: GraphModule, phase: Phase, sync: Sync = "reduce", steps: bool = False, *, foreseen: bool = False
    ) -> Context:
        """``foreseen``: of a graph that may never run, so no other rank is asked what it has alike."""
        alike = self.foreseen if foreseen else self.alike
        output = gm.graph.output_node()
        gradients = _torch.gradient_outputs(output) if phase == "backward" else {}
        return Context(
            phase=phase,
            parameters=self.parameters(gm.graph),
            saved=_torch.saved_outputs(output) if phase == "forward" else frozenset(),
            gradients=(found := {position: self.sharded[i] for position, i in gradients.items() if i in self.sharded}),
            trained=trained_beside(gm, found, self.groups, self.family.buckets),
            recipes=self.recipes,
            kept_gathered=self.kept_gathered,
            parts=self.parts,
            alike=alike.saved(gm) if alike is not None and phase == "forward" else frozenset(),
            parts_group=self.alike.ranks.name if self.alike is not None else "",
            parts_ranks=self.alike.ranks.size if self.alike is not None else 1,
            offloaded=self.offloaded,
            meanings=self.meanings,
            sync=sync,
            steps=steps,
            held_elsewhere=self.family.held.gathered_elsewhere(self.names, phase),
            largest_elsewhere=max(
                (g.gathered_nbytes for g in self.family.groups() if g.graph_layout not in self.groups), default=0
            ),
            **self._facts(),
        )

    def _facts(self) -> dict[str, Any]:
        """What of a context is the same for all graphs of a module."""
        group, family, precision = self.any_group(), self.family, self.family.precision
        return {
            "process_group": group.sharing.weights.name,
            "reduce_group": group.sharing.gradients.name,
            "replica_group": "" if group.sharing.replicas is None else group.sharing.replicas.name,
            "replicas": group.sharing.copies,
            "divides_between": group.sharing.divides_between,
            "two_hops": group.sharing.two_hops,
            "near_group": "" if group.sharing.near is None else group.sharing.near.name,
            "near_ranks": group.sharing.near_ranks,
            "crosses": group.sharing.crosses,
            "backend": group.backend,
            "stage": family.stage,
            "one_copy": group.weights.in_common,
            "buckets": family.buckets,
            "param_dtype": precision.param_dtype,
            "reduce_dtype": precision.reduce_dtype or precision.param_dtype,
            "executor": self.options.executor,
            "lookups": self.options.lookups,
            "wire": family.wire,
            "weights_away": frozenset(g.layout.name for g in self.groups.values() if g.weights.streams),
            "gradients_away": frozenset(
                g.layout.name for g in self.groups.values() if family.stage and "gradient" in g.home.streams
            ),
            "on_host": frozenset(family.on_host),
            "on_disk": family.on_disk,
            "activation_choice": self._activation_choice(),
            "memory_budget": self.memory_budget,
            "activations": self.activations,
            "division": self.division,
            "own": self.options.passes,
        }

    def _activation_choice(self) -> ActivationChoice | None:
        """What leaves: with a budget what was chosen, else all."""
        store, chosen = self.family.activation_store, self.activations
        return None if store is None else ActivationChoice(store.smallest, None if chosen is None else chosen.offloaded)

    def any_group(self) -> ShardGroup:
        return next(iter(self.groups.values()))

    @property
    def family(self) -> Family:
        """The family of these groups: a graph's groups are of one module."""
        return self.any_group().family
