"""Every private PyTorch interface that zerofx uses, and the versions each was seen in.

When a new PyTorch breaks something, this is the file to mend; nothing else imports a private module.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from types import CellType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._ops import OpOverload as OpOverload
from torch.distributed.checkpoint import metadata as _metadata
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION as DCP_VERSION  # noqa: F401
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.fx import GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef
from torch.utils import _pytree as pytree

# torch._C (2.11, 2.13, 2.15): run a function as if no argument were a tensor subclass. Dynamo traces through it.
DisableTorchFunction = torch._C.DisableTorchFunctionSubclass


def functorch_config(lazy_backward: bool = True) -> contextlib.AbstractContextManager[Any]:
    """AOTAutograd's settings while zerofx compiles (2.11, 2.13, 2.15).

    Its cache is keyed by the graph before any rewriting: it would hand out what an earlier, plain ``torch.compile`` of
    the same model left there, and freed parameters would reach its kernels. ``lazy_backward``: the backward is
    compiled when it first runs, rather than with the forward.
    """
    import torch._functorch.config

    return torch._functorch.config.patch(
        enable_autograd_cache=False, force_non_lazy_backward_lowering=not lazy_backward
    )


def inductor_config() -> contextlib.AbstractContextManager[Any]:
    """Inductor's settings while zerofx compiles: keep what the passes decided (2.11, 2.13, 2.15).

    ``reorder_for_peak_memory`` sinks each gather to its wait, ``reorder_for_locality`` moves producers to their users;
    ``allow_buffer_reuse`` holds the memory of a gathered buffer until some later buffer of that size takes it over,
    and does not know that `zerofx.passes.ops.all_to_all_pairwise` still sends what it was given after it has returned.
    """
    import torch._inductor.config

    return torch._inductor.config.patch(
        reorder_for_peak_memory=False,
        reorder_for_locality=False,
        reorder_for_compute_comm_overlap=False,
        allow_buffer_reuse=False,
    )


def storage_of(ref: StorageWeakRef) -> torch.UntypedStorage | None:
    """What ``ref`` refers to, if it is still there (2.11, 2.13, 2.15)."""
    return torch.UntypedStorage._new_with_weak_ptr(ref.cdata)


def compile_module(module: nn.Module, **options: Any) -> None:
    """``module.compile(**options)`` through a frame of the module's own (2.11, 2.13, 2.15).

    Dynamo keeps what it compiled with the code of the outermost frame, eight versions at most, for as long as that
    code lives. A copy of the code per module means that models of one class neither share the eight, nor outlive
    themselves. And Dynamo skips PyTorch's own frames, such as ``nn.Sequential.forward``, unless it is inside already.

    Where a graph breaks inside of a layer each layer is a version of the layers' code. Beyond the eighth they would run
    uncompiled, and on a rank that has compiled one for another shape from an earlier layer on than on the others: so
    there may be more (2.13, 2.15; 2.11 has no such option).
    """
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options["recompile_limit"] = _VERSIONS
    whole = module._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        return whole(*args, **kwargs)

    call.__code__ = call.__code__.replace()
    module._compiled_call_impl = torch.compile(call, **options)


_VERSIONS = 256
"""Of one code; Dynamo's ``accumulated_recompile_limit`` is as much."""


def oldest_version_first() -> None:
    """Have Dynamo try the versions of a code in the order they were compiled in (2.11, 2.13, 2.15).

    By default the one that ran last comes first. Where a graph breaks inside of a layer, its guards do not say which
    layer: they pass for the next layer of that class too, which has a version of its own, without the break. Which one
    it runs would then depend on what this rank alone has compiled anew, for a batch of another size. It is PyTorch's
    advice to checkpoints that run another version in backward.
    """
    torch._C._dynamo.eval_frame._set_lru_cache(False)


def watch_arguments(check: Callable[[Any], None]) -> None:
    """Have ``check`` called with what functorch wraps and TorchScript is given (2.11, 2.13, 2.15).

    Neither asks ``__torch_function__``: they go on to kernels with the tensor as it is.
    """
    owners: list[tuple[Any, str]] = [
        (torch._functorch.eager_transforms, "_wrap_tensor_for_grad"),
        (torch._functorch.eager_transforms, "_maybe_wrap_functional_tensor"),
        (torch._functorch.vmap, "_add_batch_dim"),
        (torch._C.ScriptFunction, "__call__"),
        (torch._C.ScriptMethod, "__call__"),
    ]
    for owner, name in owners:
        setattr(owner, name, _checking(getattr(owner, name), check))


def _checking(function: Callable, check: Callable[[Any], None]) -> Callable:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for x in pytree.arg_tree_leaves(*args, **kwargs):
            check(x)
        return function(*args, **kwargs)

    return checked


def adapt_arguments(adapt: Callable[[str, Any], Any]) -> None:
    """Have what is handed to a user's ``torch.autograd.Function`` go through ``adapt(name, x)`` (2.11, 2.13, 2.15).

    Dynamo goes by the name ``apply`` and does not look at this. Functions of PyTorch and zerofx are left alone.
    """
    whole = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

    @functools.wraps(whole)
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith(("torch.", "zerofx.")):
            args = tuple(adapt(cls.__name__, x) for x in args)
            kwargs = {name: adapt(cls.__name__, x) for name, x in kwargs.items()}
        return whole(cls, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]


def with_own_code(function: FunctionType) -> FunctionType:
    """A copy of ``function``, and of what it wraps, whose compiled versions Dynamo keeps apart (2.11, 2.13, 2.15)."""
    wrapped = getattr(function, "__wrapped__", None)
    own = with_own_code(wrapped) if isinstance(wrapped, FunctionType) else wrapped
    cells = function.__closure__ or ()
    closure = tuple(CellType(own) if own is not None and cell.cell_contents is wrapped else cell for cell in cells)
    code = function.__code__.replace()
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    if own is not None:
        copy.__wrapped__ = own  # type: ignore[attr-defined]
    return copy


@contextlib.contextmanager
def uncompiled(module: nn.Module) -> Iterator[None]:
    """``module`` and what is in it run as they read, whatever ``.compile`` made of them (2.11, 2.13, 2.15)."""
    compiled = {m: m._compiled_call_impl for m in module.modules() if m._compiled_call_impl is not None}
    for m in compiled:
        m._compiled_call_impl = None
    try:
        yield
    finally:
        for m, call in compiled.items():
            m._compiled_call_impl = call


def compile_with_inductor(gm: GraphModule, example_inputs: Sequence[Any], inner_compile: Callable) -> Callable:
    """AOTAutograd and Inductor, with ``inner_compile`` in the place of the code generator (2.11, 2.13, 2.15)."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, list(example_inputs), inner_compile=inner_compile)  # type: ignore[return-value]


def compile_context() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """What AOTAutograd compiles in now, to be entered again when more is compiled later (2.11, 2.13, 2.15)."""
    from torch._guards import CompileContext, TracingContext, compile_context, tracing

    outer, inner = CompileContext.try_get(), TracingContext.try_get()

    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        with compile_context(outer), tracing(inner), functorch_config():
            yield

    return enter


def end_of_backward(callback: Callable[[], None]) -> None:
    """Inside a backward pass: call ``callback`` once it is through (2.11, 2.13, 2.15)."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def inside_backward() -> bool:
    """Whether the engine runs a backward pass on this thread (2.11, 2.13, 2.15)."""
    return torch._C._current_graph_task_id() != -1


def generate_code(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable:
    """Inductor's code generator for one partitioned graph; returns a boxed callable (2.11, 2.13, 2.15)."""
    from torch._inductor.compile_fx import compile_fx_inner

    with inductor_config():
        return compile_fx_inner(gm, example_inputs, **kwargs)


def boxed(gm: GraphModule) -> Callable:
    """A function of a list, which it empties, so that inputs are freed after their last use (2.11, 2.13, 2.15)."""
    from torch.fx.graph import _BoxedCodeGen

    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()

    def run(args: list[Any]) -> Any:
        return gm(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def pin_order(gm: GraphModule, after: dict[Node, list[Node]]) -> None:
    """Make Inductor run each key after its values, as if it read them (2.11, 2.13, 2.15)."""
    from torch._inductor.fx_passes.control_dependencies import control_deps, preserve_node_ordering

    if torch._C.DispatchKey.Autograd not in control_deps.py_kernels:  # 2.11
        control_deps.py_impl(torch._C.DispatchKey.Autograd)(lambda deps, subgraph, *args: subgraph(*args))
    preserve_node_ordering(gm.graph, after)  # type: ignore[arg-type]


def pinned(node: Node) -> tuple[Any, tuple[Any, ...], dict[str, Any], tuple[Node, ...]] | None:
    """The target, arguments and keywords that `pin_order` hid in ``node``, and what it must follow; else None.

    Arguments are nodes of ``node``'s own graph (2.11, 2.13, 2.15).
    """
    if getattr(node.target, "_name", "") != "control_deps":
        return None
    after, subgraph, *args = node.args
    inner = getattr(node.graph.owning_module, subgraph.target).graph  # type: ignore[union-attr, arg-type]
    outer = dict(zip(inner.find_nodes(op="placeholder"), args))
    (call,) = (n for n in inner.nodes if n.op == "call_function")
    target_args, kwargs = pytree.tree_map_only(Node, outer.__getitem__, (call.args, call.kwargs))
    return call.target, target_args, kwargs, tuple(after)  # type: ignore[arg-type]


def forget_output_strides(gm: GraphModule, positions: Sequence[int]) -> None:
    """What forward returns at ``positions`` is no longer what AOTAutograd saw there (2.11, 2.13, 2.15).

    To be called before the code is generated and after: Inductor lays outputs out as they were, and AOTAutograd's
    backward inputs as Inductor's outputs are.
    """
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    recorded: list[Any] = [gm.graph.output_node().meta.get("original_output_strides")]
    recorded += [context.output_strides] if context is not None else []
    for strides in recorded:
        for position in positions if strides else ():
            strides[position] = None


def compile_with_aot_autograd(
    gm: GraphModule, example_inputs: Sequence[Any], forward: Callable, backward: Callable, inference: Callable
) -> Callable:
    """AOTAutograd alone: each partitioned graph goes to one of the three compilers (2.11, 2.13, 2.15).

    Writes to buffers stay in the graphs, as they do with Inductor. Done after a forward, one to a buffer that a
    checkpointed layer saves would look like a write between forward and backward.

    Normalisation over the batch is decomposed, as for Inductor. Whole, it reads the running statistics in backward too,
    where nothing comes of them. A checkpointed one would save them, and backward refuse to run after another forward.
    """
    from torch._decomp import get_decompositions
    from torch._dynamo.backends.common import aot_autograd

    aten = torch.ops.aten
    whole = [aten._native_batch_norm_legit_functional, aten.native_batch_norm_backward]
    compilers = {"fw_compiler": forward, "bw_compiler": backward, "inference_compiler": inference}
    compiler = aot_autograd(**compilers, decompositions=get_decompositions(whole), keep_inference_input_mutations=True)
    return compiler(gm, example_inputs)


def input_index(placeholder: Node) -> int | None:
    """Which input of the Dynamo graph an AOTAutograd placeholder brings; None for any other (2.11, 2.13, 2.15)."""
    from torch._functorch._aot_autograd.descriptors import PlainAOTInput

    desc = placeholder.meta.get("desc")
    return desc.idx if isinstance(desc, PlainAOTInput) else None


def saved_outputs(output: Node) -> frozenset[int]:
    """Positions at which a forward graph returns what it saves for backward (2.11, 2.13, 2.15).

    By the outputs' descriptors. The partitioner drops these where it saves the state of a random number generator, as
    it does for attention that is checkpointed: then what stands behind what the caller gets.
    """
    from torch._functorch._aot_autograd import descriptors
    from torch._guards import TracingContext

    descs = output.meta.get("desc")
    if descs is None:
        first = TracingContext.get().fw_metadata.num_forward  # type: ignore[union-attr]
        return frozenset(range(first, len(output.args[0])))  # type: ignore[arg-type]
    saved = (descriptors.SavedForBackwardsAOTOutput, descriptors.SavedForBackwardsNoVcCheckAOTOutput)
    return frozenset(i for i, d in enumerate(descs) if isinstance(d, saved))


def gradient_outputs(output: Node) -> dict[int, int]:
    """Position in a backward graph's outputs -> the Dynamo input whose gradient it is (2.11, 2.13, 2.15)."""
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput

    return {
        i: d.grad_of.idx
        for i, d in enumerate(output.meta["desc"])
        if isinstance(d, GradAOTOutput) and isinstance(d.grad_of, PlainAOTInput)
    }


@contextlib.contextmanager
def fake_mode_of(values: Sequence[Any]) -> Iterator[Any]:
    """The fake tensor mode that ``values`` were made in (2.11, 2.13, 2.15)."""
    from torch._guards import detect_fake_mode

    mode = detect_fake_mode(list(values))
    assert mode is not None, "these graphs were traced with fake tensors"
    with mode:
        yield mode


# torch.utils._python_dispatch (2.11, 2.13, 2.15): a context in which a method of its own sees every operator.
TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode


def fake_mode() -> contextlib.AbstractContextManager[Any]:
    """Tensors that are made inside have no memory (2.11, 2.13, 2.15)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def allocations(runs: Sequence[Callable[[], object]]) -> list[list[int]]:
    """Calls ``runs``; for each the bytes that it allocated on the CPU, and as negative numbers gave back, in order.

    What a run returns is held until the next is over (2.11, 2.13, 2.15).
    """
    activities, name = [torch.profiler.ProfilerActivity.CPU], "zerofx::run"
    with torch.profiler.profile(activities=activities, profile_memory=True) as prof:
        for run in runs:
            with torch.profiler.record_function(name):
                held = run()  # noqa: F841
    events = prof.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    spans = sorted((e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name() == name)
    return [[nbytes for time, nbytes in changes if start <= time <= end] for start, end in spans]


def without_symbols(value: Any) -> Any:
    """``value`` (or a tuple) with numbers for symbols, as they were when it was captured (2.11, 2.13, 2.15)."""
    return pytree.tree_map_only((torch.SymInt, torch.SymFloat, torch.SymBool), lambda x: x.node.hint, value)


def source_code(compiled: Any) -> str | None:
    """The Python code that Inductor wrote for what `generate_code` returned, from its cache too (2.11, 2.13, 2.15)."""
    return getattr(compiled, "source_code", None)


def profiler_is_on() -> bool:
    """Whether `torch.profiler` records this thread now."""
    return torch.autograd._profiler_enabled()


def frame_locals_and_globals() -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Locals and globals of the frame that Dynamo compiles now: what a graph input's source refers to.

    Seen in 2.11, 2.13, 2.15. None outside of a compilation.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        tx = InstructionTranslator.current_tx()
    except AttributeError:
        return None
    return tx.output.local_scope, tx.output.global_scope


def inlined_alone(fn: Callable) -> Callable:
    """Dynamo traces through ``fn`` from a caller's frame; called from plain code it runs as it is (2.11, 2.13, 2.15).

    Dynamo would compile it as a frame of its own where plain code is called from compiled code. It does not tell one
    getter of a tensor that is handed in as ``func`` from another, and would answer ``device`` with the ``dtype``.
    """
    from torch._dynamo.types import FrameAction, FrameExecStrategy

    strategy = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)  # what it calls, too
    torch._C._dynamo.eval_frame.set_code_exec_strategy(fn.__code__, strategy)
    return fn


# torch._dynamo (2.11, 2.13, 2.15): Dynamo runs the decorated function while it traces, and keeps the answer.
run_while_tracing = torch._dynamo.assume_constant_result


def traced_for(is_ours: Callable[[Any], bool]) -> bool:
    """While Dynamo traces: whether the graph goes to a backend that ``is_ours``, alone or inside of wrappers.

    False in any other tracer (2.11, 2.13, 2.15).
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        todo = [InstructionTranslator.current_tx().output.compiler_fn]
    except AttributeError:
        return False
    seen: list[Any] = []
    while todo:
        if is_ours(backend := todo.pop()):
            return True
        seen.append(backend)
        for name in ("__wrapped__", "_torchdynamo_orig_backend", "compiler_fn"):
            inner = getattr(backend, name, None)
            if inner is not None and not any(inner is x for x in seen):
                todo.append(inner)
    return False


def source_name(placeholder: Node) -> str | None:
    """The Python expression, over ``L`` and ``G``, that a Dynamo graph's input came from.

    ``source.name`` is a property since 2.10 and was a method before; seen in 2.11, 2.13, 2.15.
    """
    grapharg = placeholder.meta.get("grapharg")
    source = getattr(grapharg, "source", None)
    if source is None:
        return None
    return source.name() if callable(source.name) else source.name


def chosen_by_data(gm: GraphModule) -> tuple[str, int] | None:
    """File and line where Dynamo ended this graph because what comes next depends on values (2.11, 2.13, 2.15)."""
    reason: Any = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break or not reason.user_stack:
        return None
    of_data = ("Data-dependent", "Data dependent", "Dynamic shape operator", "Dynamic slicing")
    innermost = reason.user_stack[-1]
    return (innermost.filename, innermost.lineno) if reason.reason.startswith(of_data) else None


def static_shape(parameter: nn.Parameter) -> None:
    """Have Dynamo take the sizes of ``parameter`` for numbers, never symbols (2.11, 2.13, 2.15).

    It does so for plain parameters, but for subclasses only where it knows the module that holds them. Two frames that
    share code and not sizes, each layer's after a graph break inside of a layer, would have symbols in their layouts.
    """
    torch._dynamo.mark_static(parameter)


def gradient_edge(tensor: torch.Tensor) -> Any:
    """Where the gradient of ``tensor`` arrives in the autograd graph (2.11, 2.13, 2.15)."""
    with DisableTorchFunction():
        return torch.autograd.graph.get_gradient_edge(tensor)


def saved_tensors_are_hooked() -> bool:
    """Whether ``torch.autograd.graph.saved_tensors_hooks`` are active: a checkpoint's, say (2.11, 2.13, 2.15)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def put_tensor(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Any tensor in the place of the parameter ``name`` of ``module``'s own (2.11, 2.13, 2.15)."""
    module._parameters[name] = tensor  # type: ignore[assignment]
    names = getattr(module, "_flat_weights_names", ())  # torch.nn.RNNBase has a list of them besides
    if name in names:
        module._flat_weights[names.index(name)] = tensor  # type: ignore[operator]


def will_accumulate(parameter: torch.Tensor) -> bool:
    """Inside a backward pass: whether the engine would accumulate into ``parameter.grad`` in this pass.

    False under ``backward(inputs=...)`` without this parameter (2.11, 2.13, 2.15).

    Raises:
        RuntimeError: the pass is ``torch.autograd.grad`` with respect to this parameter.
    """
    return torch._C._will_engine_execute_node(gradient_edge(parameter).node)


def resolve_process_group(name: str) -> dist.ProcessGroup:
    """The live process group of that name (2.11, 2.13, 2.15).

    Raises:
        RuntimeError: there is none (any more).
    """
    return torch.distributed.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def default_store() -> dist.Store:
    """The store by which all ranks found each other (2.11, 2.13, 2.15)."""
    return torch.distributed.distributed_c10d._get_default_store()


def register_work(tensor: torch.Tensor, work: dist.Work) -> None:
    """``_c10d_functional.wait_tensor`` of ``tensor``, or of a view of it, waits for ``work`` too (2.11, 2.13, 2.15)."""
    torch._C._distributed_c10d._register_work(tensor, work)


class PretendedGroup:
    """What looks like rank 0 of a process group to those who only ask for names; it cannot send anything."""

    def __init__(self, group_name: str, world_size: int, backend: str) -> None:
        self.group_name, self._size, self._backend = group_name, world_size, backend

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._size

    def _get_backend(self, device: torch.device) -> PretendedGroup:  # see backend_name
        return self

    def name(self) -> str:
        return self._backend


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """The communication backend that ``group`` uses for tensors on ``device`` (2.11, 2.13, 2.15)."""
    return group._get_backend(device).name()


def has_backend(group: dist.ProcessGroup, names: Sequence[str]) -> bool:
    """Whether a backend of ``group`` is one of ``names`` (2.11, 2.13, 2.15)."""
    return any(name in dist.get_backend_config(group) for name in names)


def abort_collectives(name: str) -> None:
    """End all that this rank waits for in a process group; the waits raise (2.11, 2.13, 2.15).

    ``ProcessGroup.abort`` does nothing on gloo. There, a receive that times out closes all connections of the group.
    """
    group = resolve_process_group(name)
    if not has_backend(group, ("gloo",)):
        group.abort()
        return
    with contextlib.suppress(RuntimeError):  # the time-out, which is what this is for
        other = (group.rank() + 1) % group.size()
        group.recv([torch.empty(1)], other, _NOBODY_SENDS).wait(datetime.timedelta(milliseconds=10))


def is_communication_error(error: RuntimeError) -> bool:
    """Whether the backend raised it, to judge by its text: it has no class of its own (2.11, 2.13, 2.15)."""
    text = str(error)
    return isinstance(error, dist.DistError) or "gloo/transport" in text or "pair closure" in text


_NOBODY_SENDS = 0x7A68
"""A message tag."""


def index_class(module: str, name: str) -> Any:
    """What a checkpoint's index (``.metadata``) may name; None for anything else (2.11, 2.13, 2.15).

    Data classes, an enumeration, dtypes, sizes and layouts. The path that the folder once had becomes a string.
    """
    if module == _metadata.__name__ and name in _INDEX_CLASSES:
        return getattr(_metadata, name)
    if (module, name) == (StorageInfo.__module__, StorageInfo.__name__):
        return StorageInfo
    if (module, name) == ("torch.serialization", "_get_layout"):
        return torch.serialization._get_layout
    if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
        return getattr(torch, name)
    if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath", "PurePosixPath"):
        return lambda *parts: "/".join(map(str, parts))
    return None


_INDEX_CLASSES = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
