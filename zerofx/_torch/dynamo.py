"""What zerofx asks of Dynamo: how frames become graphs, and of which code and which inputs."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CellType, CodeType, FunctionType
from typing import Any, NoReturn

import torch
import torch._dynamo
from torch import nn
from torch.fx import GraphModule, Node

NotOneGraph = torch._dynamo.exc.Unsupported
"""With ``fullgraph=True``: what Dynamo does not capture (2.11, 2.13, 2.15)."""

FromDynamo = torch._dynamo.exc.TorchDynamoException
"""Of Dynamo itself, and of the backends that it calls; no error of code that runs between graphs (2.11, 2.13, 2.15)."""


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
    look_at_hooks()  # a frame without a graph has guards, too
    whole = module._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        return whole(*args, **kwargs)

    call.__code__ = call.__code__.replace()
    module._compiled_call_impl = torch.compile(call, **options)


def call_instead(module: nn.Module, call: Callable | None) -> None:
    """``module(...)`` is ``call(...)`` until it is compiled, but where Dynamo traces it (2.11, 2.13, 2.15).

    None: it is itself again.
    """
    module._compiled_call_impl = call


_VERSIONS = 256
"""Of one code; Dynamo's ``accumulated_recompile_limit`` is as much."""


def oldest_version_first() -> None:
    """Have Dynamo try the versions of a code in the order they were compiled in (2.11, 2.13, 2.15).

    By default the one that ran last comes first. Where a graph breaks inside of a layer, its guards do not say which
    layer: they pass for the next layer of that class too, which has a version of its own, without the break. Which one
    it runs would then depend on what this rank alone has compiled anew, for a batch of another size. It is PyTorch's
    advice to checkpoints that run another version in backward.
    """
    torch._C._dynamo.eval_frame._set_lru_cache(False)  # type: ignore[attr-defined]


def look_at_parameters() -> None:
    """Have Dynamo look at each parameter before it runs what it has compiled (2.11).

    2.11 does not where the dict that has the parameter is the one of before. A sharded parameter that is trained from
    now on would go on without a gradient. 2.13 and 2.15 look, whatever the option says.
    """
    if torch.__version__ < "2.12":
        torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags = False


@functools.cache
def ask_as_torch_does() -> None:
    """Have Dynamo ask ``__torch_function__`` where PyTorch asks it uncompiled, and nowhere else (2.11, 2.13, 2.15)."""
    _ask_only_where_enabled()
    _ask_wherever_torch_does()
    _follow_methods_in_python()


def _ask_only_where_enabled() -> None:
    """Have Dynamo answer that nothing overrides a function where overrides are off (2.11, 2.13, 2.15).

    ::

        rms_norm(x, weight)                  asks whether weight overrides it: yes
          type(weight).__torch_function__
            with DisableTorchFunction():
              rms_norm(x, weight)            asks again: PyTorch says no. Dynamo said yes, and had nobody to call

    So the graph broke in functions and methods that are written in Python and ask by themselves: ``rms_norm``, ``pad``,
    ``1 - weight``, ``weight**2``.
    """
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    handlers = TorchInGraphFunctionVariable._get_handlers()
    overrides = torch.overrides
    theirs = handlers[overrides.has_torch_function]

    def asked(self: Any, tx: Any, *args: Any) -> Any:
        # Where they are off nothing is handed in: no argument overrides anything.
        return theirs(self, tx, *(args if tx.symbolic_torch_function_state.torch_function_subclass_enabled else ()))

    for name in ("has_torch_function", "has_torch_function_variadic", "has_torch_function_unary"):
        handlers[getattr(overrides, name)] = asked


def _ask_wherever_torch_does() -> None:
    """Have Dynamo ask ``__torch_function__`` of all that asks when it runs uncompiled (2.11, 2.13, 2.15).

    It goes by the list of `torch.overrides`, which lacks some: ``torch.randn_like``, ``torch._weight_norm``, and
    functions like ``tanh`` that hand on to a method. A weight went into these as it is, not cast to what the model
    computes in (``mixed_precision=``), and what came out was float32.
    """
    from torch._dynamo.variables.torch import get_overridable_functions

    builtins = [
        getattr(where, name)
        for where in (torch._C._VariableFunctions, torch._C._nn)
        for name in dir(where)
        if name[0] != "_" and name[-1] != "_" and inspect.isbuiltin(getattr(where, name))
    ]
    handing_on = [getattr(torch.nn.functional, name) for name in ("hardsigmoid", "hardswish", "sigmoid", "tanh")]
    get_overridable_functions().update([*builtins, *handing_on, torch._weight_norm])


def _follow_methods_in_python() -> None:
    """Have Dynamo follow methods of tensors that PyTorch writes in Python, of subclasses too (2.11, 2.13, 2.15).

    Of ``weight.norm`` it asked ``__torch_function__`` as of an attribute like ``weight.shape``, with the function's own
    ``__get__``, which it could not trace. So ``norm``, ``split`` and the like broke the graph. Now they are looked up
    as a plain tensor's, and asked about when they are called.
    """
    from torch._dynamo.variables import TensorVariable
    from torch._dynamo.variables.torch_function import TensorWithTFOverrideVariable

    lookup = "tp_getattro_impl" if hasattr(TensorWithTFOverrideVariable, "tp_getattro_impl") else "var_getattr"
    theirs, of_plain = getattr(TensorWithTFOverrideVariable, lookup), getattr(TensorVariable, lookup)

    def look_up(self: Any, tx: Any, name: str) -> Any:
        method = vars(torch.Tensor).get(name)
        inherited = isinstance(method, FunctionType) and inspect.getattr_static(self.class_type, name) is method
        return (of_plain if inherited else theirs)(self, tx, name)

    setattr(TensorWithTFOverrideVariable, lookup, look_up)


def look_at_hooks() -> None:
    """Have Dynamo see hooks of modules that are registered after it has compiled a call of theirs (2.11, 2.13, 2.15).

    By default it guards on hooks that were there, and not on that there were none.
    """
    torch._dynamo.config.skip_nnmodule_hook_guards = False


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


def traced_for(is_ours: Callable[[Any], bool]) -> bool:
    """While Dynamo traces: whether the graph goes to a backend that ``is_ours``, alone or inside of wrappers.

    False in any other tracer (2.11, 2.13, 2.15). Dynamo looks at each parameter about a hundred times, and each look
    asks: the answer is kept with the trace.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        output = InstructionTranslator.current_tx().output
    except AttributeError:
        return False
    answers: dict[Any, bool] = vars(output).setdefault("_zerofx_traced_for", {})
    if is_ours not in answers:
        answers[is_ours] = _leads_to(output.compiler_fn, is_ours)
    return answers[is_ours]


def _leads_to(backend: Any, is_ours: Callable[[Any], bool]) -> bool:
    """Whether ``backend`` is one that ``is_ours``, alone or inside of wrappers."""
    todo, seen = [backend], []
    while todo:
        if is_ours(backend := todo.pop()):
            return True
        seen.append(backend)
        for name in ("__wrapped__", "_torchdynamo_orig_backend", "compiler_fn"):
            inner = getattr(backend, name, None)
            if inner is not None and not any(inner is x for x in seen):
                todo.append(inner)
    return False


def trace_gradients(is_ours: Callable[[Any], bool]) -> None:
    """Have Dynamo trace ``torch.autograd.grad`` in what it compiles for a backend that ``is_ours``.

    It has an option for that, which is off by default (2.13, 2.15; 2.11 has none), and the graph breaks there. The
    option is on for our frames alone. Of ``Tensor.backward`` it would make writes to ``.grad`` of parameters, whole
    and unreduced: there the graph goes on to break.
    """
    from torch._dynamo import convert_frame
    from torch._dynamo.variables.tensor import TensorVariable

    config = torch._dynamo.config
    if not hasattr(config, "trace_autograd_ops"):
        return
    theirs, backward = convert_frame._compile, TensorVariable.method_backward
    goes_to = _backend_of_frames()
    ours: list[bool] = []  # of each frame that is compiled now

    @functools.wraps(theirs)
    def compile_frame(*args: Any, **kwargs: Any) -> Any:
        ours.append(_leads_to(goes_to(args, kwargs), is_ours))
        try:
            with config.patch(trace_autograd_ops=True) if ours[-1] else contextlib.nullcontext():
                return theirs(*args, **kwargs)
        finally:
            ours.pop()

    @functools.wraps(backward)
    def break_there(*args: Any, **kwargs: Any) -> Any:
        with config.patch(trace_autograd_ops=False) if ours and ours[-1] else contextlib.nullcontext():
            return backward(*args, **kwargs)

    convert_frame._compile = compile_frame
    TensorVariable.method_backward = break_there  # type: ignore[method-assign]


def compile_inside_of(around: Callable[[Callable], Callable], is_ours: Callable[[Any], bool]) -> None:
    """Have Dynamo compile frames for a backend that ``is_ours`` as ``around`` wraps that (2.11, 2.13, 2.15)."""
    from torch._dynamo import convert_frame

    theirs = convert_frame._compile
    wrapped, goes_to = around(theirs), _backend_of_frames()

    @functools.wraps(theirs)
    def compile_frame(*args: Any, **kwargs: Any) -> Any:
        return (wrapped if _leads_to(goes_to(args, kwargs), is_ours) else theirs)(*args, **kwargs)

    convert_frame._compile = compile_frame


def _backend_of_frames() -> Callable[[Sequence[Any], Mapping[str, Any]], Any]:
    """From what Dynamo compiles a frame with, its backend."""
    from torch._dynamo import convert_frame

    place = list(inspect.signature(convert_frame._compile).parameters).index("compiler_fn")
    return lambda args, kwargs: args[place] if len(args) > place else kwargs["compiler_fn"]


_skipped: list[bool] = []
"""Of each frame that Dynamo compiles now, whether this call of it is to run as it reads."""


def skip_calls() -> None:
    """Have `skip_call` work (2.11, 2.13, 2.15).

    Dynamo's own ``SkipFrame`` leaves the code uncompiled for good, whatever it is called with, and what it calls is
    compiled. And where ``fullgraph=True`` asks for compiled code, its absence is an error (2.13).
    """
    from torch._dynamo import convert_frame
    from torch._dynamo.types import ConvertFrameReturn, FrameAction, FrameExecStrategy

    theirs = convert_frame._compile
    count = getattr(torch._C._dynamo.eval_frame, "set_fullgraph_compiled_frame_count", None)

    @functools.wraps(theirs)
    def compile_frame(*args: Any, **kwargs: Any) -> Any:
        _skipped.append(False)
        try:
            result = theirs(*args, **kwargs)
        finally:
            skipped = _skipped.pop()
        if not skipped:
            return result
        if count is not None:
            compiled = count(-1)
            count(compiled + 1 if compiled >= 0 else compiled)
        return ConvertFrameReturn(FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP), apply_to_code=False)

    convert_frame._compile = compile_frame


def compiles_now() -> bool:
    """Whether Dynamo compiles a frame, in whatever thread, once `skip_calls` was called."""
    return bool(_skipped)


def skippable_code() -> CodeType | None:
    """The code of the frame that Dynamo compiles now, if `skip_call` may be called (2.11, 2.13, 2.15).

    What is exported must be traced. So must a frame in which PyTorch runs ``torch.cond`` outside of any graph: as it
    reads, it would lose the gradients of what its branches close over.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        tx = InstructionTranslator.current_tx().output.root_tx
    except AttributeError:
        return None
    if not _skipped or tx.export or f"torch{os.sep}_higher_order_ops" in tx.f_code.co_filename:
        return None
    return tx.f_code


def watch_examples(check: Callable[[Any], None]) -> None:
    """Have ``check`` see each input of which a trace for export is about to copy the memory (2.11, 2.13, 2.15)."""
    from torch._dynamo.variables import builder

    theirs = builder._clone_input

    @functools.wraps(theirs)
    def clone(value: Any, fake_mode: Any) -> Any:
        check(value)
        return theirs(value, fake_mode)

    builder._clone_input = clone


def skip_call() -> NoReturn:
    """While Dynamo traces: this call of the frame runs as it reads, with all that it calls; the next is traced anew."""
    from torch._dynamo.exc import SkipFrame

    _skipped[-1] = True
    raise SkipFrame("zerofx")


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


def static_shape(parameter: nn.Parameter) -> None:
    """Have Dynamo take the sizes of ``parameter`` for numbers, never symbols (2.11, 2.13, 2.15).

    It does so for plain parameters, but for subclasses only where it knows the module that holds them. Two frames that
    share code and not sizes, each layer's after a graph break inside of a layer, would have symbols in their layouts.
    """
    torch._dynamo.mark_static(parameter)
