"""AOTAutograd's cache on disk: what it is asked for zerofx's graphs, and an entry's code as zerofx runs it.

::

    key      Dynamo's graph, inputs, settings   (PyTorch)    + a tag: all else that decides a rewrite   (zerofx)
    value    AOTAutograd's wrappers             (PyTorch)    + of each graph its code and a `Lowered`   (zerofx)
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from torch.fx import GraphModule

from zerofx._torch.aot import strides_unreported

Load = Callable[[Any, Callable[..., Any]], Callable[..., Any]]
"""Binds what was written with some code, and that code, to this process."""

_LOAD: contextvars.ContextVar[Load] = contextvars.ContextVar("zerofx_load")
_TAG: contextvars.ContextVar[str | None] = contextvars.ContextVar("zerofx_tag", default=None)


def autograd_cache_is_on() -> bool:
    """Whether PyTorch's caches are to be used (``TORCHINDUCTOR_AUTOGRAD_CACHE=0``: no) (2.11, 2.13, 2.15)."""
    import torch._functorch.config
    import torch._inductor.config
    import torch.compiler.config

    off = torch.compiler.config.force_disable_caches
    return bool(torch._functorch.config.enable_autograd_cache and torch._inductor.config.fx_graph_cache and not off)


@contextlib.contextmanager
def autograd_cache(tag: str, load: Load) -> Iterator[None]:
    """Graphs that AOTAutograd compiles inside come from its cache, or go there, under keys with ``tag``.

    What comes from there goes through ``load``. An exception of its is a miss (2.11, 2.13, 2.15).
    """
    import torch._functorch.config
    import torch.compiler.config

    theirs = torch.compiler.config.cache_key_tag
    settings = {"enable_autograd_cache": True, "enable_remote_autograd_cache": False}
    tokens = _LOAD.set(load), _TAG.set(theirs)
    try:
        with (
            torch._functorch.config.patch(settings),
            torch.compiler.config.patch(cache_key_tag=f"{theirs} {tag}"),  # type: ignore[attr-defined]
        ):
            yield
    finally:
        _LOAD.reset(tokens[0])
        _TAG.reset(tokens[1])


def users_tag() -> str:
    """The tag of a user's own: Inductor's cache of code has no part in ours, so that ranks share its entries."""
    import torch.compiler.config

    theirs = _TAG.get()
    return torch.compiler.config.cache_key_tag if theirs is None else theirs


def copy_captured(gm: GraphModule) -> GraphModule:
    """A copy of Dynamo's graph, by which AOTAutograd still knows what its inputs are (2.11, 2.13, 2.15)."""
    copied = GraphModule(gm, copy.deepcopy(gm.graph))
    copied.meta |= gm.meta
    if hasattr(gm, "_param_name_to_source"):
        copied._param_name_to_source = gm._param_name_to_source
    inputs = (graph.find_nodes(op="placeholder") for graph in (gm.graph, copied.graph))
    for theirs, ours in zip(*inputs, strict=True):
        if hasattr(theirs, "_dynamo_source"):
            ours._dynamo_source = theirs._dynamo_source
    return copied


def cacheable(compiler: Callable) -> Callable:
    """A compiler for AOTAutograd whose results `entry` made: only of such it asks its cache (2.11, 2.13, 2.15)."""
    from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
    from torch._inductor.output_code import OutputCode

    return SerializableAOTDispatchCompiler(OutputCode, compiler)


def entry(lowered: Any, code: Any, run: Callable) -> Callable:
    """``run``, which runs ``code``, as AOTAutograd's cache takes it; ``lowered`` is written beside it."""
    made = _entry(lowered, code)
    made.run = run
    return made


def _entry(lowered: Any, code: Any, tokens: int = 0) -> Any:
    return _entries()(lowered, code, tokens)


@functools.cache
def _entries() -> Any:
    """The class: Inductor is imported when the first graph is compiled (2.11, 2.13, 2.15)."""
    import torch._functorch.config
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache, BypassAOTAutogradCache
    from torch._inductor.output_code import CompiledFxGraph, OutputCode

    class Entry(OutputCode):
        """The code of one graph, what it is bound by, and how many tokens a forward takes (`_with_tokens`)."""

        def __init__(self, lowered: Any, code: Any, tokens: int) -> None:
            # Of the instance: wrappers take what it has in its __dict__. There is a key, so AOTAutograd saves it.
            self._boxed_call, self._fx_graph_cache_key = True, "zerofx"
            self.lowered, self.code, self.tokens = lowered, code, tokens
            self.run: Callable = code

        def __call__(self, inputs: Sequence[Any]) -> Any:
            return self.run(inputs)

        def prepare_for_serialization(self) -> None:
            if isinstance(self.code, CompiledFxGraph):
                self.code = copy.copy(self.code)
                self.code.prepare_for_serialization()
            elif (gm := getattr(self.code, "graph_module", None)) is not None and not gm.state_dict():
                self.code = _text_of(gm), {name: _prepared(region) for name, region in gm.named_children()}
            else:
                raise BypassAOTAutogradCache("zerofx: code with constants, or none of Inductor's")

        def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Any) -> None:
            if isinstance(self.code, tuple):
                text, regions = self.code
                code = _function_of(text, {name: _loaded_region(each, graph_kwargs) for name, each in regions.items()})
            else:
                code = _loaded(self.code, example_inputs, graph_kwargs)
            self.run = _with_tokens(_LOAD.get()(self.lowered, code), self.tokens)

        def set_triton_bundle(self, triton_bundle: Any) -> None:
            pass

        def __reduce__(self) -> Any:
            return _entry, (self.lowered, self.code, self.tokens)

    theirs = AOTAutogradCache.make_entry

    signature = inspect.signature(theirs)

    def make(*args: Any, **kwargs: Any) -> Any:
        """A backward is compiled, and both are written, when it first runs: whatever the settings are then.

        That a backward may not write over its inputs under ``retain_graph=True`` is looked at by who loads the entry.
        """
        given = signature.bind(*args, **kwargs)
        if not isinstance(forward := inspect.unwrap(given.arguments["compiled_fw_func"]), Entry):
            return theirs(*args, **kwargs)
        metadata = given.arguments["runtime_metadata"] = copy.copy(given.arguments["runtime_metadata"])
        metadata.bw_donated_idxs = []
        forward.tokens = len(metadata.tokens)
        with torch._functorch.config.patch(bundled_autograd_cache=True):
            return theirs(*given.args, **given.kwargs)

    AOTAutogradCache.make_entry = staticmethod(make)  # type: ignore[method-assign]
    return Entry


def _with_tokens(run: Callable, tokens: int) -> Callable:
    """``run``, called without the ``tokens`` that order effects (2.11, 2.13, 2.15).

    Without Inductor a graph takes them before its inputs, and returns them before its outputs. AOTAutograd
    sees to that, but not where the code comes from its cache.
    """

    def without(inputs: list[Any]) -> Any:
        taken = [None] * tokens + inputs
        inputs.clear()  # boxed: what is not an input any more may be freed
        return run(taken)[tokens:]

    return without if tokens else run


def _text_of(gm: GraphModule) -> str:
    """The graph as Python: what it imports, and its boxed function (2.11, 2.13, 2.15)."""
    from torch.fx.graph_module import _format_import_block, sys_importer

    code = gm.graph.python_code("self")
    return f"{_format_import_block(code.globals, sys_importer)}\n{code.src}"


def _loaded(code: Any, example_inputs: Sequence[Any], graph_kwargs: Any) -> Callable:
    """What was written of a graph's code, to run (2.11, 2.13, 2.15)."""
    from torch._functorch._aot_autograd.aot_autograd_result import BundledOutputCodeLoadable

    loadable = BundledOutputCodeLoadable(code)
    return loadable.post_compile(loadable.load(example_inputs), graph_kwargs)


def _loaded_region(code: Any, graph_kwargs: Any) -> Callable:
    """The same of a region's, which is not the graph's (2.11, 2.13, 2.15)."""
    with strides_unreported():
        return _loaded(code, (), {**graph_kwargs, "static_input_idxs": ()})


def _prepared(region: Any) -> Any:
    """The code of a module that calls it, to be written (2.11, 2.13, 2.15)."""
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
    from torch._inductor.output_code import CompiledFxGraph

    if not isinstance(code := getattr(region, "code", None), CompiledFxGraph):
        raise BypassAOTAutogradCache("zerofx: a graph that calls others, or code that is none of Inductor's")
    code = copy.copy(code)
    code.prepare_for_serialization()
    return code


def _function_of(text: str, regions: dict[str, Callable]) -> Callable[[list[Any]], Any]:
    """The boxed function that `_text_of` wrote, and what it calls by name (2.11, 2.13, 2.15)."""
    from torch.fx.graph_module import _forward_from_src

    function = _forward_from_src(text, {})
    return lambda args: function(SimpleNamespace(**regions), args)
