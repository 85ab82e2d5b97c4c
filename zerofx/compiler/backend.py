"""The ``torch.compile`` backend: from a Dynamo graph to a pair of functions that train on shards.

::

    Dynamo ──▶ graph + inputs ──▶ AOTAutograd ──▶ forward, backward ──▶ passes ──▶ executor ──▶ runtime
                     │                                                  (per graph)
                     └── which inputs are sharded parameters: by identity, never by name

Rewriting after the partitioner has cut forward from backward means that it works with any partitioner, any activation
checkpointing and any mixture of both: a parameter that it saves for backward is an input, which costs nothing, and
the backward graph gathers it anew.
"""

from __future__ import annotations

import inspect
import re
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from zerofx import _torch
from zerofx.compiler.options import Options
from zerofx.compiler.records import GraphRecord, Trace, copy_graph, remember
from zerofx.compiler.runtime import BackwardCode, backward_runner, forward_runner, refuse_double_backward
from zerofx.compiler.shard import shard_module
from zerofx.model.layout import GroupLayout
from zerofx.passes import edit
from zerofx.passes.context import Context, Gathered, Meanings, ParameterRef, Phase, Recipe, Sync
from zerofx.passes.save_reads import save_reads
from zerofx.passes.spare_gathers import spare_gathers
from zerofx.ranks.agree import Schedule, identity
from zerofx.ranks.tracing import observed
from zerofx.ranks.watch import watch_of, watched
from zerofx.state.group import ShardGroup
from zerofx.state.parameter import ReplicatedParameter, ShardedTensor


def zerofx_backend(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None
) -> Callable:
    """The backend behind ``torch.compile(module, backend="zerofx", options={"stage": 3, ...})``.

    A module that is not sharded yet is sharded in place, whole, when its first graph arrives.

    Args:
        gm: what Dynamo captured.
        example_inputs: its inputs; parameters are the very objects that the module holds.
        options: see `zerofx.compiler.options.Options`.
    """
    return Backend(Options.of(options or {}))(gm, example_inputs)


@dataclass(frozen=True)
class Backend:
    """A backend with checked options, as ``zerofx.compile`` hands it to ``module.compile``.

    Attributes:
        options: what the user asked for.
        pretend: for `zerofx.dry_run`, what takes the rewritten graphs in the place of ``options.executor``. The
            backward is compiled with the forward then.
    """

    options: Options
    pretend: Executed | None = None

    def __repr__(self) -> str:
        return repr(self.options)

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable:
        _torch.oldest_version_first()
        _shard_modules_of(gm, example_inputs, self.options)
        _warn_of_choice(gm)
        _strip_own_frames(gm)
        _copy_returned_views(gm, example_inputs)
        unit = _CompiledGraph(self.options, example_inputs, self.pretend)
        with _torch.functorch_config(lazy_backward=self.pretend is None, fused=self.options.executor == "inductor"):
            if self.options.executor == "inductor":
                compiled = _torch.compile_with_inductor(
                    gm, example_inputs, unit.compile_inner, unit.before_cut, whole_lookups=self.options.lookups
                )
            else:
                compiled = _torch.compile_with_aot_autograd(
                    gm, example_inputs, unit.compile_forward, unit.compile_backward, unit.compile_inference
                )
        return refuse_double_backward(compiled)


def is_zerofx(backend: Any) -> bool:
    """Whether a ``torch.compile`` backend is this one."""
    return backend is zerofx_backend or isinstance(backend, Backend)


class _CompiledGraph:
    """The compilers for one Dynamo graph: AOTAutograd calls one for forward and later one for backward."""

    def __init__(self, options: Options, example_inputs: Sequence[Any], pretend: Executed | None = None) -> None:
        self.options = options
        self.pretend = pretend
        sharded = {i: x for i, x in enumerate(example_inputs) if isinstance(x, (ShardedTensor, ReplicatedParameter))}
        for tensor in sharded.values():
            _check_claimable(tensor)
        self.sharded = {i: ParameterRef(x._group.layout, x._slot) for i, x in sharded.items()}
        # Weakly: Dynamo keeps what it compiled for as long as the code lives, which is longer than a model.
        self.groups = weakref.WeakValueDictionary({x._group.layout: x._group for x in sharded.values()})
        self.record = GraphRecord()
        if self.groups:
            remember(list(self.groups.values()), self.record)
        self.recipes: dict[str, Recipe] = {}
        self.kept_gathered: dict[str, Gathered] = {}
        self.meanings = Meanings()
        self.names = frozenset(layout.name for layout in self.groups)

    def before_cut(self, joint: GraphModule) -> None:
        """Forward and backward in one graph: what backward is to recompute is decided next."""
        save_reads(joint)
        if any(group.family.stage == 3 and not group.family.one_copy for group in self.groups.values()):
            spare_gathers(joint, self._parameters(joint))

    def _parameters(self, gm: GraphModule) -> dict[str, ParameterRef]:
        indices = {node.name: _torch.input_index(node) for node in gm.graph.find_nodes(op="placeholder")}
        return {name: self.sharded[i] for name, i in indices.items() if i in self.sharded}

    def compile_inner(self, gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable:
        """Inductor's ``inner_compile``."""
        phase: Phase = "forward"
        if kwargs.get("is_backward"):
            phase = "backward"
        elif kwargs.get("is_inference"):
            phase = "inference"

        def generate(gm: GraphModule, inputs: list[Any], static: list[int]) -> Callable:
            return _torch.generate_code(gm, inputs, **{**kwargs, "static_input_idxs": static})

        static = kwargs.get("static_input_idxs") or ()
        return self._compile(gm, example_inputs, phase, self.pretend or generate, static)

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
        ctx = self._context(gm, phase)
        compiled, kept, trace = self._rewrite(gm, ctx, example_inputs, execute, static)
        setattr(self.record, phase, trace)
        if phase == "forward":
            family = next(iter(self.groups.values())).family
            family.keeps(self.names, sum(left.nbytes for left in self.kept_gathered.values()))
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
        )

    def _compile_backward(
        self, gm: GraphModule, example_inputs: Sequence[Any], execute: Executed, static: Sequence[int]
    ) -> Callable:
        """The variants: each when it is first needed, and before anything runs the one that will be first."""
        n_outputs, surroundings = len(edit.output_values(gm.graph)), _torch.compile_context()
        family = next(iter(self.groups.values())).family
        variants: dict[tuple[Sync, bool], BackwardCode] = {}
        # Of one copy other ranks read what a step would write, until their backward is over.
        steps_inside = family.stage != 0 and not family.one_copy

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
        ctx = self._context(gm, "backward", sync, steps)
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
            reductions=[(ref(r.layout), r.slots) for r in ctx.reductions],
            keeps=sync == "keep",
            steps=steps,
        )

    def _rewrite(
        self, gm: GraphModule, ctx: Context, example_inputs: Sequence[Any], execute: Executed, static: Sequence[int]
    ) -> tuple[Callable, list[int], Trace]:
        """Run the passes and the executor; returns the boxed code, which old inputs it takes, and the record."""
        placeholders = gm.graph.find_nodes(op="placeholder")
        trace = Trace(gm, ctx, pretended=self.pretend is not None)
        with _torch.fake_mode_of(example_inputs):
            trace.run(gm)
        brought = ctx.parameters if ctx.stage else {}
        kept = [i for i, node in enumerate(placeholders) if node.name not in brought]
        new = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")[len(kept) :]]
        # In stage 0 a parameter stays an input; where `rematerialize` put it, the old example is something else.
        examples = [n.meta["val"] if n.name in ctx.parameters else x for n, x in zip(placeholders, example_inputs)]
        inputs = [examples[i] for i in kept] + new
        fixed = [k for k, i in enumerate(kept) if i in set(static)]
        fixed += range(len(kept), len(kept) + len(ctx.shards))
        moved = [left.position for left in self.kept_gathered.values()] if ctx.phase == "forward" else []
        _torch.forget_output_strides(gm, moved)
        schedule = Schedule.of(gm, ctx)
        if self.pretend is None and schedule.collectives and (watch := watch_of(ctx.process_group)) is not None:
            family = next(iter(self.groups.values())).family
            watch.publish(schedule, identity(trace.before, ctx, family.number))
        theirs = {i: k for k, i in enumerate(kept) if placeholders[i].name not in ctx.parameters}
        with _torch.donated_inputs(theirs):
            compiled = execute(gm, inputs, fixed)
        _torch.forget_output_strides(gm, moved)
        trace.code = _torch.source_code(compiled)
        if self.pretend is None:
            compiled = watched(compiled, schedule, ctx.process_group, self.options.timeout)
        return compiled, kept, trace

    def _context(self, gm: GraphModule, phase: Phase, sync: Sync = "reduce", steps: bool = False) -> Context:
        group = next(iter(self.groups.values()))
        precision = group.family.precision
        output = gm.graph.output_node()
        gradients = {}
        if phase == "backward":
            for position, index in _torch.gradient_outputs(output).items():
                if index in self.sharded:
                    gradients[position] = self.sharded[index]
        return Context(
            phase=phase,
            process_group=group.group_name,
            reduce_group=group.family.reduce_group or group.group_name,
            backend=group.backend,
            executor=self.options.executor,
            parameters=self._parameters(gm),
            saved=_torch.saved_outputs(output) if phase == "forward" else frozenset(),
            gradients=gradients,
            recipes=self.recipes,
            kept_gathered=self.kept_gathered,
            meanings=self.meanings,
            held_elsewhere=group.family.held_elsewhere(self.names, phase),
            largest_elsewhere=max(
                (g.gathered_nbytes for g in group.family.groups() if g.layout not in self.groups), default=0
            ),
            stage=group.family.stage,
            one_copy=group.family.one_copy,
            lookups=self.options.lookups,
            buckets=group.family.buckets,
            sync=sync,
            steps=steps,
            param_dtype=precision.param_dtype,
            reduce_dtype=precision.reduce_dtype or precision.param_dtype,
            memory_budget=self.options.memory_budget,
        )


def _check_claimable(tensor: ShardedTensor | ReplicatedParameter) -> None:
    """Compiled code reads weights from the group's shard: whatever is not a slice of it must not get there."""
    if isinstance(tensor, ReplicatedParameter):
        return
    if not tensor._group.holds(tensor._local):
        raise RuntimeError(
            f"{tensor!r} reaches compiled code, but it is not a parameter (a gradient, or optimizer state?). Compiled "
            "code works on whole tensors: pass tensor.full_tensor() instead."
        )


Executed = Callable[[GraphModule, list[Any], list[int]], Callable]
"""From a graph, its inputs, and which of these stay where they are, to a boxed function."""


def _run_as_is(gm: GraphModule, inputs: list[Any], static: list[int]) -> Callable:
    return _torch.boxed(gm)


def _shard_modules_of(gm: GraphModule, example_inputs: Sequence[Any], options: Options) -> None:
    """Shard the modules whose plain parameters came with this graph.

    Done inside of the backend call: Dynamo makes its guards afterwards, so nothing is compiled twice.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    if not any(type(x) is nn.Parameter for x in example_inputs):
        return
    frame = _torch.frame_locals_and_globals()
    for node, x in zip(inputs, example_inputs, strict=True):
        if type(x) is not nn.Parameter:
            continue  # no parameter, or sharded meanwhile with the module it belongs to
        source = _torch.source_name(node)
        root = source.partition("._modules[")[0].partition("._parameters[")[0] if source else ""
        module = eval(root, {"L": frame[0], "G": frame[1]}) if frame and root else None
        if not isinstance(module, nn.Module):
            raise RuntimeError(
                f"the parameter {node.name!r} (from {source!r}) reached the zerofx backend outside of any module: make "
                "it a parameter of the compiled module, or call zerofx.shard(module, stage=3) first."
            )
        if any(isinstance(p, (ShardedTensor, ReplicatedParameter)) for p in module.parameters()):
            raise RuntimeError(
                f"the parameter {node.name!r} of {type(module).__name__} is not sharded while others of the module "
                "are: it was added or replaced after sharding. Add all parameters before zerofx.compile."
            )
        if x.is_meta:
            raise RuntimeError(
                f"the parameter {node.name!r} is on the meta device, and the module is being traced already: call "
                "zerofx.compile(module, ...), or zerofx.shard(module, ...) before torch.compile, which initialise it."
            )
        if options.mixed_precision is not None:
            raise RuntimeError(
                "mixed_precision in torch.compile(..., backend='zerofx'): the module is being traced already, in full "
                "precision. Call zerofx.compile(module, ...), or zerofx.shard(module, ...) before torch.compile."
            )
        if options.leaf_modules is not None:
            raise RuntimeError(
                "leaf_modules in torch.compile(..., backend='zerofx'): the module is being traced already, these "
                "included. Call zerofx.compile(module, ...), or zerofx.shard(module, ...) before torch.compile."
            )
        shard_module(module, options)


def _warn_of_choice(gm: GraphModule) -> None:
    """Name the line where a module with layers of its own looks at data to see what runs next, and what to do."""
    place, frame = _torch.chosen_by_data(gm), _torch.frame_locals_and_globals()
    if place is None or frame is None:
        return
    outer = frame[0].get("self", getattr(frame[0].get("whole"), "__self__", None))  # see `_torch.compile_module`
    modules = outer.modules() if isinstance(outer, nn.Module) else ()
    module = next((m for m in modules if _is_line_of(place, inspect.unwrap(type(m).forward))), None)
    layers = [p for child in module.children() for p in child.parameters()] if module is not None else []
    groups = [p._group for p in layers if isinstance(p, (ShardedTensor, ReplicatedParameter))]
    if not groups or groups[0].layout.world_size == 1:
        return
    name = type(module).__name__
    warnings.warn_explicit(
        f"this line looks at data, and {name} has layers that may run or not run because of it. Where one rank runs a "
        "layer and another does not, they wait for each other's collectives for ever. If that can be (a mixture of "
        f"experts), have it gathered whole: zerofx.compile(model, leaf_modules=[{name}]); see docs/models.md.",
        UserWarning,
        *place,
    )


def _is_line_of(place: tuple[str, int], function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == place[0] and place[1] in {line for *_, line in code.co_lines()}


def _copy_returned_views(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
    """A view of a weight that the model returns becomes a copy: the gathered memory behind it will be given back.

    Done on Dynamo's graph: AOTAutograd would make such an output anew from its input, the weight without memory.
    """

    def memory(node: Any) -> int | None:
        value = node.meta.get("example_value") if isinstance(node, Node) else None
        return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None

    inputs = gm.graph.find_nodes(op="placeholder")
    weights = {memory(node) for node, x in zip(inputs, example_inputs, strict=True) if isinstance(x, ShardedTensor)}
    output, edits = gm.graph.output_node(), 0
    for node in output.all_input_nodes:
        if memory(node) in weights - {None}:
            with gm.graph.inserting_before(output):
                copy = gm.graph.call_function(torch.clone, (node,))
            copy.meta |= {key: node.meta[key] for key in ("example_value", "stack_trace") if key in node.meta}
            output.replace_input_with(node, copy)
            edits += 1
    edit.finish(gm, edits)


def _strip_own_frames(gm: GraphModule) -> None:
    """Dynamo traced through frames of zerofx: take them out, so that nodes name the user's line."""
    own = f'  File "{Path(__file__).parents[1]}'
    for node in gm.graph.nodes:
        trace = node.meta.get("stack_trace")
        if trace and own in trace:
            frames = re.split(r"(?m)^(?=  File )", trace)
            node.meta["stack_trace"] = "".join(frame for frame in frames if not frame.startswith(own))
