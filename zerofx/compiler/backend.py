"""The ``torch.compile`` backend: from a Dynamo graph to a pair of functions that train on shards.

::

    Dynamo ──▶ graph + inputs ──▶ AOTAutograd ──▶ forward, backward ──▶ passes ──▶ executor ──▶ runtime
                     │                                                  (per graph)
                     └── which inputs are sharded parameters: by identity, never by name

Graphs are rewritten when the partitioner has cut forward from backward, so any partitioner and any checkpoints do: a
parameter that is saved for backward is an input, which costs nothing, and the backward graph gathers it anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from zerofx import _torch
from zerofx.compiler.artifacts import with_artifacts
from zerofx.compiler.captured import (
    copy_returned_views,
    refuse_lost_writes,
    refuse_pending,
    shard_modules_of,
    strip_own_frames,
    warn_of_choice,
)
from zerofx.compiler.choices import Search
from zerofx.compiler.compilers import Compilers
from zerofx.compiler.cut import Cut
from zerofx.compiler.lean import lean
from zerofx.compiler.options import Options
from zerofx.compiler.pair import Pair
from zerofx.compiler.records import forget
from zerofx.compiler.regions import inline_regions
from zerofx.compiler.rewriting import copy_graph
from zerofx.compiler.runners import watch_backward
from zerofx.compiler.unit import Executed, Unit
from zerofx.compiler.warm import Warm, is_cacheable, tag_of
from zerofx.compiler.written import Written, write_to_copies, writing
from zerofx.runtime.state.callbacks import CALLBACKS
from zerofx.runtime.state.parameter import ReplicatedParameter, ShardedTensor


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
        pretend: for `zerofx.dry_run`, what takes graphs in the executor's place, the backward with the forward.
        code: whether Inductor writes its code for these graphs all the same. It is read, and not compiled.
        probe: whether `memory=` may run kernels, for what they take inside of themselves.
        search: finds a division of `memory=`; None: the fastest that fits.
        unread: what graphs without parameters were given, which `memory=` counts: inputs that were then cast, say.
    """

    options: Options
    pretend: Executed | None = None
    code: bool = False
    probe: bool = True
    search: Search | None = None
    unread: list[weakref.ref[torch.Tensor]] = field(default_factory=list, compare=False)

    def __repr__(self) -> str:
        return repr(self.options)

    @with_artifacts
    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable:
        _torch.oldest_version_first()
        _torch.look_at_parameters()
        _torch.look_at_hooks()
        inline_regions(gm)
        refuse_pending(gm, example_inputs)
        shard_modules_of(gm, example_inputs, self.options)
        warn_of_choice(gm)
        refuse_lost_writes(gm, example_inputs)
        strip_own_frames(gm)
        copy_returned_views(gm, example_inputs)
        before = copy_graph(gm) if any(isinstance(x, ShardedTensor) for x in example_inputs) else gm
        try:
            return self._compile(gm, example_inputs)
        except Exception as e:
            if (written := Written.in_chain(e)) is None:
                raise
        write_to_copies(before, written.places)
        return writing(self._compile(before, example_inputs), written.places)

    def _compile(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable:
        _torch.know_bounds(gm)
        unit = Unit.of(self.options, example_inputs, self.pretend, self.code, self.probe, self.search)
        pair = Pair(unit, "inductor" if self.options.executor == "inductor" else "eager")
        compilers = Compilers(pair)
        try:
            return self._compile_pair(gm, example_inputs, compilers)
        except Exception:  # Dynamo may begin anew, and so may `__call__`
            forget(unit.groups.values(), pair.record)
            raise

    def _compile_pair(self, gm: GraphModule, example_inputs: Sequence[Any], compilers: Compilers) -> Callable:
        pair, unit, cut = compilers.pair, compilers.unit, Cut(compilers.pair)
        cut.note_given(example_inputs, self.unread)
        if torch.is_grad_enabled():
            cut.compare(gm, example_inputs)
        lazy = self.pretend is None and self.options.memory is None  # with it all is known before anything runs
        if not is_cacheable(unit):
            return watch_backward(_cut(gm, example_inputs, cut, compilers, lazy), compilers.saved_parameters)
        for node in gm.graph.find_nodes(op="placeholder"):  # each parameter has a class of its own, of this process
            ours = isinstance(node.type, type) and issubclass(node.type, (ShardedTensor, ReplicatedParameter))
            node.type = None if ours else node.type
        warm, pair.is_cached = Warm(pair, partial(_cut_again, _torch.copy_captured(gm))), True
        with _torch.autograd_cache(tag_of(unit), warm.load):
            compiled = _cut(gm, example_inputs, cut, compilers, lazy)
        compilers.forward_lowered = warm.forward or compilers.forward_lowered
        return watch_backward(compiled, compilers.saved_parameters)


def _cut(gm: GraphModule, example_inputs: Sequence[Any], cut: Cut, compilers: Compilers, lazy: bool) -> Callable:
    """AOTAutograd traces the graph and cuts it, and ``compilers`` take the halves."""
    pair = compilers.pair
    with (
        _torch.functorch_config(lazy_backward=lazy, fused=pair.unit.fuses, cached=pair.is_cached),
        cut.saving() as budgeted,
    ):
        if pair.unit.fuses:
            whole = pair.unit.options.lookups
            return _torch.compile_with_inductor(
                gm, example_inputs, compilers.inner, cut.before_cut, whole_lookups=whole
            )
        decides = budgeted or pair.alike is not None or pair.unit.dequantizes
        partition = _torch.cutting(cut.before_cut if decides else None, recomputes=budgeted)
        made = _torch.cacheable if pair.is_cached else lambda compiler: compiler
        forward, backward, inference = map(made, (compilers.forward, compilers.backward, compilers.inference))
        return _torch.compile_with_aot_autograd(gm, example_inputs, forward, backward, inference, partition)


def _cut_again(gm: GraphModule, compilers: Compilers) -> None:
    """`_cut` of a graph that came from a cache, forward and backward, on fake inputs."""
    fakes = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    _cut(_torch.copy_captured(gm), fakes, Cut(compilers.pair), compilers, lazy=False)


def is_zerofx(backend: Any) -> bool:
    """Whether a ``torch.compile`` backend is this one."""
    return backend is zerofx_backend or isinstance(backend, Backend)


CALLBACKS.is_zerofx = is_zerofx
_torch.trace_gradients(is_zerofx)
_torch.compile_inside_of(lean, is_zerofx)
