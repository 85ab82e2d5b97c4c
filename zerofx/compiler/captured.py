"""What is done with a graph of Dynamo's before AOTAutograd gets it.

=======================  ==================================================================================
`refuse_pending`         an input that a collective is still bringing would lose its gradient
`refuse_lost_writes`     a write to what a weight was cast to would not reach the weight
`shard_modules_of`       modules of ``torch.compile(module, backend="zerofx")`` are sharded when they come
`warn_of_choice`         a line that looks at data to choose a layer is named: ranks may choose differently
`strip_own_frames`       nodes name the user's line, not zerofx's
`copy_returned_views`    a view of a weight that leaves the model becomes a copy
`check_claimable`        what compiled code reads of a shard is a slice of it
`check_one_module`       the shards that a graph reads are of one module, or the code around two runs uncompiled
=======================  ==================================================================================
"""

from __future__ import annotations

import inspect
import re
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from zerofx import _torch
from zerofx._torch import is_dtensor, is_wrapped
from zerofx.compiler.options import Options
from zerofx.compiler.shard import shard_module
from zerofx.compiler.wrappers import refuse_wrapped
from zerofx.passes import edit
from zerofx.runtime.eager.averages import is_ignored
from zerofx.runtime.state.backends import run_uncompiled
from zerofx.runtime.state.parameter import ReplicatedParameter, ShardedTensor


def refuse_pending(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
    """Refuse an input that is trained and still on its way: AOTAutograd takes what it wraps, which has no gradient.

    Eager code has started a collective for it, and nobody has looked at it since: a ``RowwiseParallel`` layer outside
    of any graph, say. Plain ``torch.compile`` fails in backward, or leaves the gradient out.
    """
    for node, x in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True):
        if _torch.is_on_its_way(x) and x.requires_grad:
            raise RuntimeError(
                f"the input {node.name!r} of a graph is the result of a collective that code outside of any graph has "
                "started, and is still on its way: its gradient would be lost (in plain torch.compile, too). Compile "
                "that code as well; or have it return a copy, tensor.clone(), which waits."
            )


def shard_modules_of(gm: GraphModule, example_inputs: Sequence[Any], options: Options) -> None:
    """Shard the modules whose plain parameters came with this graph.

    Done inside of the backend call: Dynamo makes its guards afterwards, so nothing is compiled twice.
    """
    for node, x in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True):
        if is_dtensor(x) and isinstance(x, nn.Parameter) and not is_ignored(x):
            raise RuntimeError(
                f"the parameter {node.name!r} is a DTensor, and the module is being traced already: call "
                'zerofx.compile(module, mesh=mesh["dp"], ...), or zerofx.shard(module, ...) before torch.compile.'
            )
    if not any(_is_unsharded(x) for x in example_inputs):
        return
    frame = _torch.frame_locals_and_globals()
    for node, x in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True):
        if _is_unsharded(x):  # otherwise no parameter, or sharded meanwhile with the module it belongs to
            module = _module_of(node, frame)
            _check_traced(node, x, module, options)
            if (wrapper := _torch.around_forward()) is not None:
                refuse_wrapped(wrapper)
            shard_module(module, options)


def _is_unsharded(x: Any) -> bool:
    return type(x) is nn.Parameter and not is_ignored(x)


def _module_of(node: Node, frame: Any) -> nn.Module:
    """The outermost module that the parameter ``node`` belongs to, by what Dynamo calls it."""
    source = _torch.source_name(node)
    root = source.partition("._modules[")[0].partition("._parameters[")[0] if source else ""
    module = eval(root, {"L": frame[0], "G": frame[1]}) if frame and root else None
    if not isinstance(module, nn.Module):
        raise RuntimeError(
            f"the parameter {node.name!r} (from {source!r}) reached the zerofx backend outside of any module: make "
            "it a parameter of the compiled module, or call zerofx.shard(module, stage=3) first."
        )
    return module


def _check_traced(node: Node, parameter: nn.Parameter, module: nn.Module, options: Options) -> None:
    """Refuse what cannot be done any more with a module that is being traced already."""
    names = (name for name, p in module.named_parameters() if p is parameter)
    name = next(names, node.name)
    if any(isinstance(p, (ShardedTensor, ReplicatedParameter)) for p in module.parameters()):
        raise RuntimeError(
            f"the parameter {name!r} of {type(module).__name__} is not sharded while others of the module "
            "are: it was added or replaced after sharding. Add all parameters before zerofx.compile."
        )
    if parameter.is_meta:
        raise RuntimeError(
            f"the parameter {name!r} is on the meta device, and the module is being traced already: call "
            "zerofx.compile(module, ...), or zerofx.shard(module, ...) before torch.compile, which initialise it."
        )
    for option, why in (("mixed_precision", "in full precision"), ("leaf_modules", "these included")):
        if getattr(options, option) is not None:
            raise RuntimeError(
                f"{option} in torch.compile(..., backend='zerofx'): the module is being traced already, {why}. Call "
                "zerofx.compile(module, ...), or zerofx.shard(module, ...) before torch.compile."
            )


_told: weakref.WeakKeyDictionary[nn.Module, set[tuple[str, int]]] = weakref.WeakKeyDictionary()
"""The lines of which `warn_of_choice` has warned."""


def warn_of_choice(gm: GraphModule) -> None:
    """Name the line where a module with layers of its own looks at data to see what runs next, and what to do."""
    place, frame = _torch.chosen_by_data(gm), _torch.frame_locals_and_globals()
    if place is None or frame is None:
        return
    outer = frame[0].get("self", getattr(frame[0].get("whole"), "__self__", None))  # see `_torch.compile_module`
    modules = outer.modules() if isinstance(outer, nn.Module) else ()
    module = next((m for m in modules if _is_line_of(place, inspect.unwrap(type(m).forward))), None)
    layers = [p for child in module.children() for p in child.parameters()] if module is not None else []
    groups = [p._group for p in layers if isinstance(p, (ShardedTensor, ReplicatedParameter))]
    if not groups or groups[0].sharing.everyone.size == 1 or groups[0].sharing.everyone.rank:
        return  # all ranks come here, and one speaks
    if place in _told.setdefault(outer, set()):  # type: ignore[arg-type]  # there are groups, so there is a module
        return
    _told[outer].add(place)  # type: ignore[index]
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


def copy_returned_views(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
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


def refuse_lost_writes(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
    """Refuse a write to a weight in a model that computes in another dtype: it would go to the cast weight.

    By the version counters of Dynamo's fake tensors, which no name of an operator has to be known for.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    weights = {n: x for n, x in zip(inputs, example_inputs, strict=True) if hasattr(type(x), "_compute_dtype")}
    if not any(x._compute_dtype for x in weights.values()):
        return
    casts: dict[Any, Any] = {}
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if not isinstance(value, torch.Tensor) or is_wrapped(value) or value.layout != torch.strided:
            continue
        memory = value.untyped_storage()._cdata
        if node.op == "call_method" and node.target == "to" and node.args[0] in weights:
            casts[memory] = weights[node.args[0]]
        if memory in casts and value._version:
            raise RuntimeError(
                f"forward writes to the parameter {casts[memory]._slot.name!r}, which it computes with in "
                f"{value.dtype}: the write would go to the cast weight and be lost. Write under torch.no_grad() "
                "outside of the module's forward, or leave param_dtype of mixed_precision= out."
            )


def strip_own_frames(gm: GraphModule) -> None:
    """Dynamo traced through frames of zerofx: take them out, so that nodes name the user's line."""
    own = f'  File "{Path(__file__).parents[1]}'
    for node in gm.graph.nodes:
        trace = node.meta.get("stack_trace")
        if trace and own in trace:
            frames = re.split(r"(?m)^(?=  File )", trace)
            node.meta["stack_trace"] = "".join(frame for frame in frames if not frame.startswith(own))


def check_one_module(tensors: Sequence[ShardedTensor | ReplicatedParameter]) -> None:
    """A graph's collectives, stage and dtypes are those of one module; groups of two may have one name.

    Where two modules meet, in the loss of a student and its teacher, the code around them runs as it reads. What it
    calls of each is compiled for itself, with its own options.
    """
    first = next(iter(tensors), None)
    other = next((x for x in tensors if x._group.family is not tensors[0]._group.family), None)
    if first is None or other is None:
        return
    names = f"{first._slot.name!r} and {other._slot.name!r} of two modules that were sharded one by one"
    if (code := _torch.skippable_code()) is None:
        raise RuntimeError(
            f"one graph reads {names}: expected weights of one. Put both into one module, and shard that."
        )
    run_uncompiled(
        code,
        f"{code.co_name!r} reads {names}: it runs uncompiled, and each module in graphs of its own. For one graph put "
        "both into one nn.Module, and compile that; or leave torch.compile out around this function.",
    )


def check_claimable(tensor: ShardedTensor | ReplicatedParameter) -> None:
    """Compiled code reads weights from the group's shard: whatever is not a slice of it must not get there."""
    if isinstance(tensor, ReplicatedParameter):
        return
    if not tensor._group.weights.holds(tensor._local):
        raise RuntimeError(
            f"{tensor!r} reaches compiled code, but it is not a parameter (a gradient, or optimizer state?). Compiled "
            "code works on whole tensors: pass tensor.full_tensor() instead."
        )
