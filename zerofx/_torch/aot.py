"""What zerofx asks of AOTAutograd: forward apart from backward, and what each input and output of theirs is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from zerofx._torch.tensors import pytree


def functorch_config(
    lazy_backward: bool = True, fused: bool = False, cached: bool = False
) -> contextlib.AbstractContextManager[Any]:
    """AOTAutograd's settings while zerofx compiles (2.11, 2.13, 2.15).

    Its cache is keyed by the graph before any rewriting: it would hand out what an earlier, plain ``torch.compile`` of
    the same model left there, and freed parameters would reach its kernels. So it is off, but for ``cached``: inside of
    `zerofx._torch.warm.autograd_cache`, where the key has a tag. ``lazy_backward``: the backward is compiled when it
    first runs, rather than with the forward.

    ``fused``: the executor fuses pointwise operations. Then what can be recomputed from what is saved anyway is not
    saved, even if backward's products read it from memory: outputs of a GELU, or of a normalisation. PyTorch's
    partitioner saves them, since recomputing means writing them once more. A third of all activations are such values.
    """
    import torch._functorch.config

    return torch._functorch.config.patch(
        enable_autograd_cache=cached,
        force_non_lazy_backward_lowering=not lazy_backward,
        ban_recompute_materialized_backward=not fused,
    )


def compile_with_aot_autograd(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    forward: Callable,
    backward: Callable,
    inference: Callable,
    partition: Callable,
) -> Callable:
    """AOTAutograd alone: each partitioned graph goes to one of the three compilers (2.11, 2.13, 2.15).

    Writes to buffers stay in the graphs, as they do with Inductor. Done after a forward, one to a buffer that a
    checkpointed layer saves would look like a write between forward and backward.

    Normalisation over the batch is decomposed, as for Inductor. Whole, it reads the running statistics in backward too,
    where nothing comes of them. A checkpointed one would save them, and backward refuse to run after another forward.

    ``partition``: what cuts the joint graph, as `zerofx._torch.cutting` makes it.
    """
    from torch._decomp import get_decompositions
    from torch._dynamo.backends.common import aot_autograd
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    aten = torch.ops.aten
    whole = [aten._native_batch_norm_legit_functional, aten.native_batch_norm_backward]
    compiler = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        decompositions=get_decompositions(whole),
        keep_inference_input_mutations=True,
    )
    with _use_lazy_graph_module(True):  # as Inductor does
        return compiler(gm, example_inputs)


def lazy_module(root: torch.nn.Module, graph: Graph) -> GraphModule:
    """A module whose code is written when somebody reads or runs it, not after each pass (2.11, 2.13, 2.15)."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph)


def compile_context() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """What AOTAutograd compiles in now, to be entered again when more is compiled later (2.11, 2.13, 2.15)."""
    from torch._guards import CompileContext, TracingContext, compile_context, tracing

    outer, inner = CompileContext.try_get(), TracingContext.try_get()

    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        with compile_context(outer), tracing(inner), functorch_config():
            yield

    return enter


def input_index(placeholder: Node) -> int | None:
    """Which input of the Dynamo graph an AOTAutograd placeholder brings; None for any other (2.11, 2.13, 2.15)."""
    from torch._functorch._aot_autograd.descriptors import PlainAOTInput

    desc = placeholder.meta.get("desc")
    return desc.idx if isinstance(desc, PlainAOTInput) else None


def inputs_written_behind(gm: GraphModule) -> set[int]:
    """The Dynamo inputs that AOTAutograd writes to after a run of this joint or forward graph (2.11, 2.13, 2.15).

    Its outputs' descriptors say so, and where the partitioner has dropped these, what AOTAutograd knows.
    """
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput, PlainAOTInput
    from torch._guards import TracingContext

    descs = gm.graph.output_node().meta.get("desc")
    if descs is None:
        if (known := TracingContext.get().fw_metadata) is None:  # a branch of torch.cond, which has no such inputs
            return set()
        return {i for i, info in enumerate(known.input_info) if info.mutates_data or info.mutates_metadata}
    written = [d.mutated_input for d in pytree.tree_leaves(descs) if isinstance(d, InputMutationAOTOutput)]
    return {of.idx for of in written if isinstance(of, PlainAOTInput)}


def saved_outputs(output: Node) -> frozenset[int]:
    """Positions at which a forward graph returns what it saves for backward (2.11, 2.13, 2.15).

    By the outputs' descriptors. The partitioner drops these where it saves the state of a random number generator, as
    it does for attention that is checkpointed: then what stands after what the caller gets.
    """
    from torch._functorch._aot_autograd import descriptors
    from torch._guards import TracingContext

    descs = _descs(output)
    if descs is None:
        first = TracingContext.get().fw_metadata.num_forward  # type: ignore[union-attr]
        return frozenset(range(first, len(output.args[0])))  # type: ignore[arg-type]
    saved = (descriptors.SavedForBackwardsAOTOutput, descriptors.SavedForBackwardsNoVcCheckAOTOutput)
    return frozenset(i for i, d in enumerate(descs) if isinstance(d, saved))


def _descs(output: Node) -> list[Any] | None:
    """What AOTAutograd says of each output (2.11, 2.13, 2.15).

    For Inductor it takes out the tokens that order effects (``linalg.solve`` may fail), and leaves them here.
    """
    from torch._functorch._aot_autograd.descriptors import BackwardTokenAOTOutput, ForwardTokenAOTOutput

    descs = output.meta.get("desc")
    if descs is None or len(descs) == len(output.args[0]):  # type: ignore[arg-type]
        return descs
    return [desc for desc in descs if not isinstance(desc, (ForwardTokenAOTOutput, BackwardTokenAOTOutput))]


def gradient_outputs(output: Node) -> dict[int, int]:
    """Position in a backward graph's outputs -> the Dynamo input whose gradient it is (2.11, 2.13, 2.15)."""
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput

    return {
        i: d.grad_of.idx
        for i, d in enumerate(_descs(output) or ())
        if isinstance(d, GradAOTOutput) and isinstance(d.grad_of, PlainAOTInput)
    }


def forget_output_strides(gm: GraphModule, positions: Sequence[int]) -> None:
    """What forward returns at ``positions`` is no longer what AOTAutograd saw there, or more (2.11, 2.13, 2.15).

    To be called before the code is generated and after: Inductor lays outputs out as they were, and AOTAutograd's
    backward inputs as Inductor's outputs are.
    """
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    recorded: list[Any] = [gm.graph.output_node().meta.get("original_output_strides")]
    recorded += [context.output_strides] if context is not None else []
    for strides in recorded:
        for position in positions if strides else ():
            if position < len(strides):
                strides[position] = None


def strides_unreported() -> contextlib.AbstractContextManager[Any]:
    """What is compiled, or loaded, inside is no whole graph: AOTAutograd hears nothing of it (2.11, 2.13, 2.15)."""
    from torch._guards import TracingContext

    inside = TracingContext.try_get() is not None
    return TracingContext.report_output_strides() if inside else contextlib.nullcontext()


@contextlib.contextmanager
def donated_inputs(places: Mapping[int, int]) -> Iterator[list[int]]:
    """While code is generated inside: where inputs are now that a backward may write over (2.11, 2.13, 2.15).

    AOTAutograd finds saved tensors that nobody else has, and Inductor writes over them. It knows them by their places
    in the graph that AOTAutograd made. ``places``: of those that are still inputs, from there to where they are now.
    By the old ones Inductor would write over what stands there now: a tangent that others read, or a shard. Yields the
    new ones.
    """
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    donated = metadata.bw_donated_idxs if metadata is not None else None
    if metadata is None or donated is None:
        yield []
        return
    metadata.bw_donated_idxs = [places[i] for i in donated if i in places]
    try:
        yield metadata.bw_donated_idxs
    finally:
        metadata.bw_donated_idxs = donated


def donate_nothing() -> None:
    """The backward that is compiled now writes over none of its inputs (2.11, 2.13, 2.15).

    Where AOTAutograd has found some that it may, it refuses ``retain_graph=True``, whatever compiled the backward. The
    list is one for all that know of it.
    """
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is not None and metadata.bw_donated_idxs:
        metadata.bw_donated_idxs.clear()


@contextlib.contextmanager
def fake_mode_of(values: Sequence[Any]) -> Iterator[Any]:
    """The fake tensor mode that ``values`` were made in (2.11, 2.13, 2.15)."""
    from torch._guards import detect_fake_mode

    mode = detect_fake_mode(list(values))
    assert mode is not None, "these graphs were traced with fake tensors"
    with mode:
        yield mode


def is_tangent(node: Node) -> bool:
    """Whether a joint graph's node is the gradient of an output (2.11, 2.13, 2.15)."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def tangents(graph: Graph) -> dict[Node, Node]:
    """Of a joint graph: each gradient of an output that comes as an input, and that output (2.11, 2.13, 2.15)."""
    from torch._functorch._aot_autograd.descriptors import TangentAOTInput

    output = graph.output_node()
    by_desc = dict(zip(output.meta["desc"], output.args[0]))  # type: ignore[arg-type]
    found = {}
    for node in graph.find_nodes(op="placeholder"):
        desc = node.meta.get("desc")
        if isinstance(desc, TangentAOTInput) and isinstance(of := by_desc.get(desc.output), Node):
            found[node] = of
    return found


def written_behind(graph: Graph) -> list[Node]:
    """Inputs of a joint graph that AOTAutograd writes to when forward has run (2.11, 2.13, 2.15).

    Those whose writes autograd sees: the graph returns what is to be in them.
    """
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

    returned = graph.output_node().meta.get("desc") or ()
    mutated = {desc.mutated_input for desc in returned if isinstance(desc, InputMutationAOTOutput)}
    return [node for node in graph.find_nodes(op="placeholder") if node.meta.get("desc") in mutated]


def must_save(node: Node) -> None:
    """Have the partitioner save ``node`` rather than recompute it, if backward needs it (2.11, 2.13, 2.15)."""
    from torch.utils.checkpoint import CheckpointPolicy

    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def must_recompute(node: Node) -> None:
    """Have the partitioner recompute ``node`` in backward, from what it reads (2.11, 2.13, 2.15)."""
    from torch.utils.checkpoint import CheckpointPolicy

    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def saving_is_decided(node: Node) -> bool:
    """Whether a checkpoint, `must_save` or `must_recompute` has marked ``node`` (2.11, 2.13, 2.15)."""
    return node.meta.get("recompute") is not None


def runs_again(node: Node) -> bool:
    """Whether a checkpoint has marked ``node`` to be computed once more in backward (2.11, 2.13, 2.15)."""
    from torch._functorch.partitioners import must_recompute

    return must_recompute(node)
