"""An operation outside of any compiled graph that needs a whole tensor gets it.

This is what keeps code right that Dynamo could not capture: slower (a gather per use, nothing overlapped), so the
first time each line does it there is a warning that names the line.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer

from zerofx._torch import (
    DisableTorchFunction,
    adapt_arguments,
    as_dtensor,
    inlined_alone,
    is_dtensor,
    is_wrapped,
    outside_of_transforms,
    pytree,
)
from zerofx.model.units import format_bytes
from zerofx.runtime.eager.ondemand import gather_tensor, leaf_of, reduce_gradient
from zerofx.runtime.state.callbacks import CALLBACKS
from zerofx.runtime.state.parameter import ShardedParameter, ShardedTensor, is_in_place


class _Unshard(torch.autograd.Function):
    """The full weight from a sharded parameter; its gradient goes to ``parameter.grad`` as a slice."""

    @staticmethod
    def forward(ctx: Any, parameter: ShardedParameter) -> torch.Tensor:
        ctx.parameter = parameter
        return _whole(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"double backward through the sharded parameter {ctx.parameter._slot.name!r}: gradients of gradients "
                "(create_graph=True) are not supported for sharded parameters."
            )
        # Autograd would add to the parameter's full-size grad, which has no memory: None, and done by hand.
        reduce_gradient(ctx.parameter, gradient)


@inlined_alone
def _whole_argument(function: str, x: Any) -> Any:
    """What a ``torch.autograd.Function`` outside of any graph gets for ``x``.

    Whole weights: what it makes like one (``zeros_like``) and fills with a gradient is this rank's own, all of it. And
    a hook for saved tensors, as a checkpoint has, brings a sharded one back as if it had memory.
    """
    return unshard(x, function) if isinstance(x, ShardedTensor) else x


adapt_arguments(_whole_argument)


def unshard(tensor: ShardedTensor, func_name: str) -> torch.Tensor:
    """The full tensor for an operation that needs it, differentiable where the parameter is.

    Raises:
        RuntimeError: the operation is an optimizer's. On each rank's slice it would mean something else than on the
            whole, and on the whole every rank would repeat all of the work.
    """
    frame = _caller()
    optimizer = _enclosing_optimizer(frame)
    if optimizer is not None:
        raise RuntimeError(not_elementwise(optimizer, func_name, tensor._slot.name))
    if leaf_of(tensor._group) is None:
        _warn(frame, func_name, tensor)
    with outside_of_transforms():  # a weight is gathered once, however often `vmap` maps over what meets it
        if isinstance(tensor, ShardedParameter) and tensor.requires_grad and torch.is_grad_enabled():
            tensor._group.use(trained=True)
            full = _Unshard.apply(tensor)
        else:
            full = _whole(tensor)
    # Code of the model that was not compiled sees what compiled code sees (`precision`, DTensors). A copy is to keep:
    # an average of weights in 16 bits would not move.
    full = full if tensor._compute_dtype is None or func_name == "clone" else full.to(tensor._compute_dtype)
    return full if tensor._dtensor is None else as_dtensor(full, tensor._dtensor)


def _whole(tensor: ShardedTensor) -> torch.Tensor:
    leaf = leaf_of(tensor._group) if tensor._group.weights.holds(tensor._local) else None
    return gather_tensor(tensor) if leaf is None else leaf.whole(tensor)


def not_elementwise(optimizer: str, func_name: str, parameter: str) -> str:
    """What to tell who brings an optimizer that looks at more than one element at a time."""
    return (
        f"{optimizer} is not elementwise: it uses {func_name!r} on {parameter!r}. A rank holds a flat slice of each "
        "parameter, which need not be whole rows, so only optimizers that treat every element by itself (SGD, Adam, "
        "AdamW, Adagrad, RMSprop, NAdam, RAdam, Adadelta, Adamax, ASGD, Rprop) work on it. Use one of these; "
        "zerofx.Muon, for Muon; or stage=0, in which every rank has whole parameters and any optimizer works."
    )


class GatheredView(torch.Tensor):
    """A view of a gathered weight, as eager code without autograd gets it.

    ``with torch.no_grad(): weight[0].zero_()`` writes to the gathered copy. Each rank then takes its slice of that.
    """

    _source: _Source | None = None

    @classmethod
    @inlined_alone
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").split(".")[0]
        outs = pytree.tree_leaves([kwargs.get("out"), args[0] if is_in_place(name) and args else None])
        written = [x for x in outs if isinstance(x, cls)]
        for view in written:
            if view._source is None or not view._source.is_fresh():
                raise RuntimeError(
                    f"{name!r} writes to a view of a sharded weight. The view is of a gathered copy that the weight no "
                    "longer agrees with, the write would be lost: change weight.full_tensor() and copy it back, "
                    "weight.copy_(full)."
                )
        views = [x for x in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(x, cls)]
        sources = [(x, x._source) for x in views]
        masters = {id(x): x._source.master_of(x) for x in views if written and x._source and x._source.is_fresh()}
        args, kwargs = pytree.tree_map(lambda x: masters.get(id(x), x), (args, kwargs)) if masters else (args, kwargs)
        if any(issubclass(t, ShardedTensor) for t in types):
            plain = pytree.tree_map(lambda x: x.as_subclass(torch.Tensor) if isinstance(x, cls) else x, (args, kwargs))
            result = CALLBACKS.operation(func, *plain)
        else:
            with DisableTorchFunction():
                result = func(*args, **kwargs)
        for view in written:
            view._source.write_back()  # type: ignore[union-attr]
            result = view if result is masters[id(view)] else result
        with DisableTorchFunction():
            return readonly(result, sources)


class _Source:
    """What a view was gathered from, and the whole copy that it is of.

    Where weights compute in another dtype the copy is in that. What is written to a view of it is then done to a copy
    in the weight's own dtype: what is not written keeps its digits.
    """

    def __init__(self, sharded: ShardedTensor, whole: torch.Tensor) -> None:
        self._sharded, self._whole = sharded, whole.detach()
        self._master: torch.Tensor | None = None
        self._version = version_of(sharded._local)

    def is_fresh(self) -> bool:
        """Whether the copy has the values that the weight has."""
        return self._sharded._dtensor is None and version_of(self._sharded._local) == self._version

    def master_of(self, view: torch.Tensor) -> torch.Tensor:
        """``view`` in the weight's own dtype."""
        if self._whole.dtype == self._sharded._local.dtype:
            return view
        if self._master is None:
            self._master = gather_tensor(self._sharded)
        with DisableTorchFunction():
            return self._master.as_strided(view.shape, view.stride(), view.storage_offset())

    def write_back(self) -> None:
        with torch.no_grad():
            if (master := self._master) is not None:
                self._whole.copy_(master)
            CALLBACKS.operation(torch.Tensor.copy_, (self._sharded, self._whole if master is None else master), {})
        self._version = version_of(self._sharded._local)


def version_of(tensor: torch.Tensor) -> int:
    """How often ``tensor`` was written; tensors of inference mode do not count that."""
    return -1 if tensor.is_inference() else tensor._version


def readonly(result: Any, inputs: Sequence[tuple[torch.Tensor, Any]]) -> Any:
    """``result``, with every tensor in it that shares memory with one of ``inputs`` made a `GatheredView`.

    ``inputs``: tensors, each with what it was gathered from, or with the source of the view that it is.
    """

    def memory(x: Any) -> int | None:
        # Those of functorch do not tell what memory they wrap, and a DTensor has none of its own.
        own = isinstance(x, torch.Tensor) and not is_wrapped(x) and not is_dtensor(x)
        return x.untyped_storage().data_ptr() if own and x.numel() else None

    shared = {address: (x, of) for x, of in inputs if (address := memory(x)) is not None}

    def mark(x: Any) -> Any:
        if (found := shared.get(memory(x))) is None:  # type: ignore[arg-type]
            return x
        view = x.as_subclass(GatheredView)
        whole, of = found
        view._source = _Source(of, whole) if isinstance(of, ShardedTensor) else of
        return view

    return pytree.tree_map(mark, result)


_HERE = str(Path(__file__).parents[2])
_TORCH = str(Path(torch.__file__).parent)
_warned: set[tuple[str, int]] = set()


def _caller() -> FrameType | None:
    """The innermost frame that is neither ours nor PyTorch's, or is an optimizer's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if _optimizer_of(frame) is not None or not name.startswith((_HERE, _TORCH)):
            return frame
        frame = frame.f_back
    return None


def _enclosing_optimizer(frame: FrameType | None) -> str | None:
    """The optimizer whose step computes here: not one that has called a closure, in which a model runs."""
    inside: set[int] = set()  # by identity: code that Dynamo has made may have constants that cannot be hashed
    while frame is not None:
        owner = _optimizer_of(frame)
        if owner is not None and "step" in frame.f_code.co_name:
            others = (x for x in frame.f_locals.values() if x is not owner and callable(x))
            given = (id(code) for x in others for code in _codes_of(x))
            return type(owner).__name__ if inside.isdisjoint(given) else None
        inside.add(id(frame.f_code))
        frame = frame.f_back
    return None


def _codes_of(function: Any) -> Iterator[Any]:
    """The code that runs where ``function`` is called: of a function, a method, a partial, an object."""
    while isinstance(function, functools.partial):
        function = function.func
    if not hasattr(function, "__code__") and not hasattr(function, "__func__"):
        function = inspect.getattr_static(type(function), "__call__", None)
    while function is not None:
        function = getattr(function, "__func__", function)
        if (code := getattr(function, "__code__", None)) is not None:
            yield code
        function = getattr(function, "__wrapped__", None)


def _optimizer_of(frame: FrameType) -> Optimizer | None:
    """The optimizer of which this frame runs a method, whatever it calls ``self``."""
    names = frame.f_code.co_varnames
    owner = frame.f_locals.get(names[0]) if names else None
    return owner if isinstance(owner, Optimizer) else None


def _warn(frame: FrameType | None, func_name: str, tensor: ShardedTensor) -> None:
    place = (frame.f_code.co_filename, frame.f_lineno) if frame else ("unknown", 0)
    if place in _warned:
        return
    _warned.add(place)
    if tensor._group.sharing.everyone.rank:  # all ranks come here, and one speaks
        return
    size = format_bytes(tensor._slot.numel * tensor._local.element_size())
    ranks = tensor._group.layout.world_size
    warnings.warn_explicit(
        f"{func_name!r} needs the whole of {tensor._slot.name!r} outside of a compiled graph: it is gathered here, at "
        f"every use, {size} from all {ranks} ranks. Right, but slow: compile the code around it.",
        UserWarning,
        *place,
    )
