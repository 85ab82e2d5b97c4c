"""Sharded tensors: full shape outside, a flat slice inside.

A `ShardedTensor` has the shape and dtype of the whole tensor and holds this rank's slice of it, a 1-D tensor that
may be empty. A `ShardedParameter` is the one that stands in the module; its slice is a view of the group's shard.
Gradients and optimizer state are plain `ShardedTensor`s of the same slot.

What ``__torch_function__`` does with an operation on one:

====================================  ==============================================================================
while Dynamo traces for zerofx        nothing: Dynamo sees an ordinary tensor of the full shape, cast to what the
                                      model computes in (`precision`)
while anything else traces            refused: its code would read memory that is not there. So are functorch's
                                      wrappers and arguments of TorchScript, which do not ask (`watch_arguments`)
metadata (shape, grad, ...)           answered as is
elementwise, among one slot           runs on the slices: optimizers, scaling, clipping (`elementwise`)
reductions to a scalar, norms         slices, then one all-reduce
anything else                         the full tensor is gathered first, differentiably (`unshard`)
====================================  ==============================================================================

The full-shape tensor's own memory is freed, and some kernels read freed memory without asking. So no operation
reaches one except through this table, and what would go around it (``.data =``, pickling) is refused. A deep copy of a
module is sharded alike (`zerofx.compiler.copies`).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from zerofx._torch import (
    DisableTorchFunction,
    DTensorLayout,
    as_dtensor,
    before_conversions,
    call_plainly,
    inlined_alone,
    is_dtensor,
    pytree,
    static_shape,
    watch_arguments,
    watch_examples,
)
from zerofx.model.layout import Slot
from zerofx.runtime.state.aliases import share_slice
from zerofx.runtime.state.backends import check_backend, refuse_backend
from zerofx.runtime.state.callbacks import CALLBACKS
from zerofx.runtime.state.gradient_hooks import Hooked
from zerofx.runtime.state.group import ShardGroup
from zerofx.runtime.state.parts import part_of_gradient
from zerofx.runtime.state.plain import PlainlyCopied, origin_of

_ASKED = "device dtype grad grad_fn is_cpu is_cuda is_leaf is_sparse layout ndim requires_grad shape".split()
_GRAD = torch.Tensor.grad.__get__  # type: ignore[union-attr]
_SHAPE = torch.Tensor.shape.__get__  # type: ignore[attr-defined]
_QUESTIONS = frozenset([*(getattr(torch.Tensor, name).__get__ for name in _ASKED), torch.is_complex])


class ShardedTensor(torch.Tensor):
    """A tensor of which this rank holds a flat slice. Made by `ShardedTensor.like`, never directly."""

    _group: ShardGroup
    _slot: Slot
    _local: torch.Tensor
    _compute_dtype: torch.dtype | None = None
    _dtensor: DTensorLayout | None = None
    _among_dtensors = False
    _from_data = False  # it is ``parameter.data``
    _aliases: Any = None  # those that share its slice, see `zerofx.runtime.state.aliases`
    _traced_as = "a gradient or optimizer state of a sharded parameter"

    @classmethod
    @inlined_alone
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():
            check_backend(cls._traced_as)
            return _traced(func, args, kwargs or {}, cls._compute_dtype, cls._among_dtensors)
        if func in _QUESTIONS and (args[0]._dtensor is None or func != _SHAPE):
            # of an optimizer, a dozen per parameter and step
            return call_plainly(func, types, args, kwargs or {})
        if torch.jit.is_tracing():
            pytree.tree_map(_refuse_argument, (args, kwargs))
        return CALLBACKS.operation(func, args, kwargs or {})

    def to_local(self) -> torch.Tensor:
        """This rank's slice: 1-D, possibly empty. A view: writing to it changes the tensor.

        Write to it itself. What is written to its ``data``, or to its memory as numpy's, nobody counts, and code that
        keeps whole weights (stages 1 and 2, optimizers by owners) goes on with the old ones.

        In compiled code of a model whose parameter was a `DTensor`: what the same call gave there.
        """
        if torch.compiler.is_dynamo_compiling():
            return local_part(self)
        return self._group.home.keep_resident(self._local)

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor, plain, on every rank. A collective: all ranks must call it, in the same order."""
        return CALLBACKS.gather(self)

    def like(self, local: torch.Tensor) -> ShardedTensor:
        """A sharded tensor of the same slot that holds ``local`` (any dtype)."""
        # One element, expanded: full shape, no memory, and no kernel can read past it.
        shell = local.new_empty(()).expand(self._slot.shape)
        return _dress(shell.as_subclass(ShardedTensor), self._group, self._slot, local)

    # What torch.distributed.checkpoint asks of a tensor; see `zerofx.checkpoint.dcp`.

    def __create_write_items__(self, name: str, tensor: Any) -> list[Any]:
        return CALLBACKS.write_items(self, name)

    def __create_chunk_list__(self) -> list[Any]:
        count_write(self)  # what is asked for here is written to next, on some ranks: all must refresh replicas alike
        return CALLBACKS.chunk_list(self)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return CALLBACKS.tensor_shard(self, index)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        held, ranks = self._local.numel(), self._group.layout.world_size
        return (
            f"{type(self).__name__}({self._slot.name!r}, shape={list(self._slot.shape)}, dtype={self._local.dtype}, "
            f"rank {self._group.rank} of {ranks} holds {held:,} of {self._slot.numel:,} elements)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        with self._group.home.only(self._local):
            memo[id(self)] = copied = self.like(self._local.clone())
        copied._compute_dtype = self._compute_dtype
        copied._group = copy.deepcopy(self._group, memo)  # the copy's, where its module is copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse("pickling (torch.save)", "use zerofx.save, or zerofx.full_state_dict, which every rank must call")

    def set_(self, *args: Any, **kwargs: Any) -> ShardedTensor:  # PyTorch asks nobody
        if len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor):
            self._refuse("set_()", "use `with torch.no_grad(): tensor.copy_(full_tensor)`")
        CALLBACKS.replace(self, args[0])
        return self

    def _refuse(self, what: str, way_out: str) -> NoReturn:
        raise RuntimeError(
            f"{what} of the sharded tensor {self._slot.name!r}: this rank holds only a slice of it; {way_out}."
        )


class ShardedParameter(Hooked, ShardedTensor, nn.Parameter):
    """A parameter of a sharded module: what `shard_parameter` made of an ``nn.Parameter`` in place.

    Every parameter has a subclass of its own. Dynamo guards on the exact class, so code that was compiled for one
    parameter's group is never run with another's, even where two models share code and all shapes are equal.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._refuse("copy.deepcopy", "copy the module that holds it, or `parameter.full_tensor()`")


def local_part(parameter: Any) -> torch.Tensor:
    """What ``DTensor.to_local()`` gives of a parameter that stands for one, as Dynamo traces it."""
    dtype = type(parameter)._compute_dtype
    with DisableTorchFunction():
        return parameter.view_as(parameter) if dtype is None else parameter.to(dtype)


class ReplicatedParameter(Hooked, PlainlyCopied):
    """A parameter of a module under plain data parallelism (stage 0): whole, with its own memory, in all plain code.

    Like a `ShardedParameter` it has a class of its own, and Dynamo sees it cast to what the model computes in. Where
    code that is not compiled uses it, its gradient is averaged by a hook. Its memory may be replaced (``.data =``), for
    compiled code gets it anew at each call; its dtype and device may not, for groups and compiled code have them.
    """

    _group: ShardGroup
    _slot: Slot
    _compute_dtype: torch.dtype | None = None
    _dtensor: DTensorLayout | None = None
    _among_dtensors = False

    @classmethod
    @inlined_alone
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():
            return _traced(func, args, kwargs or {}, cls._compute_dtype, cls._among_dtensors)
        kwargs = kwargs or {}
        if any(issubclass(t, ShardedTensor) for t in types):
            return CALLBACKS.operation(func, args, kwargs)
        if func in _CONVERTED and isinstance(args[0], ReplicatedParameter):
            check_conversion(args[0], args[1])
        if cls._among_dtensors and func == _GRAD and (layout := args[0]._dtensor) is not None:
            gradient, over = call_plainly(func, types, args, {}), args[0]._group.sharing.divide(layout)
            return part_of_gradient(gradient, over) if over and gradient is not None else gradient
        return _run_as(cls._compute_dtype, func, args, kwargs, cls._among_dtensors)

    def to_local(self) -> torch.Tensor:
        """Of one that stands for a `DTensor`: what the same call gave there."""
        return local_part(self)


class ReplicatedView(torch.Tensor):
    """A view of a `ReplicatedParameter` that computes in another dtype: it is cast where it meets that, too.

    ``x @ weight.t()`` outside of any graph, with ``x`` in 16 bits: PyTorch asks about ``weight.t()`` before it asks
    about the product. Each dtype has a subclass.
    """

    _compute_dtype: torch.dtype | None = None
    _dtensor = None

    @classmethod
    @inlined_alone
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():
            return _traced(func, args, kwargs or {}, cls._compute_dtype)
        if any(issubclass(t, ShardedTensor) for t in types):
            return CALLBACKS.operation(func, args, kwargs or {})
        return _run_as(cls._compute_dtype, func, args, kwargs or {})

    def plain(self) -> torch.Tensor:
        """The view as an ordinary tensor, of the same memory."""
        return self.as_subclass(torch.Tensor)

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        memo[id(self)] = copied = copy.deepcopy(self.plain(), memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)


@functools.cache
def _view_class(dtype: torch.dtype) -> type[ReplicatedView]:
    return type("ReplicatedView", (ReplicatedView,), {"__module__": __name__, "_compute_dtype": dtype})


def _run_as(
    dtype: torch.dtype | None, func: Callable, args: Any, kwargs: dict[str, Any], dtensors: bool = False
) -> Any:
    """``func`` outside of any graph, on whole parameters and views of them, which compute in ``dtype``.

    ``dtensors``: some of these stand for DTensors, and are some where they meet others.
    """
    with DisableTorchFunction():
        met = dtensors and any(map(is_dtensor, pytree.arg_tree_leaves(*args, **kwargs)))
        if dtype is None and not met:
            return func(*args, **kwargs)
        if met or _meets(func, args, kwargs, dtype):
            args = _computed(args)
            kwargs = {name: _computed(value) for name, value in kwargs.items()}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "").split(".")[0]
        if name == "detach" or is_in_place(name) or func is _DATA:  # they are for who wants masters
            return result
        wholes = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, _WHOLE)]
        bases = {id(x._base if x._is_view() else x) for x in wholes}

        def mark(x: Any) -> Any:
            view = type(x) is torch.Tensor and x._is_view() and id(x._base) in bases
            return x.as_subclass(_view_class(dtype)) if view else x

        return pytree.tree_map(mark, result)


_WHOLE = (ReplicatedParameter, ReplicatedView)
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


# Where ``module.to(...)`` puts a converted parameter: in ``parameter.data``, or in a new parameter after asking this.
_CONVERTED = (torch.Tensor.data.__set__, torch._has_compatible_shallow_copy_type)  # type: ignore[attr-defined]


def same_device(a: torch.device, b: torch.device) -> bool:
    """Whether both are one device: ``cpu:0`` is the CPU."""
    return a.type == b.type and (a.index == b.index or a.type == "cpu")


def check_conversion(parameter: ShardedTensor | ReplicatedParameter, new: torch.Tensor) -> None:
    """Raise where ``new``, which is to take the parameter's place, has another dtype or is on another device."""
    if parameter.dtype != new.dtype or not same_device(parameter.device, new.device):
        raise RuntimeError(
            f"converting {parameter._slot.name!r} from {parameter.dtype} on {parameter.device} to {new.dtype} on "
            f"{new.device}: its group, its optimizer and compiled code are bound to the dtype and device it has. "
            "Convert the module before zerofx.compile or zerofx.shard; to compute in 16 bits pass "
            "mixed_precision=zerofx.MixedPrecision(torch.bfloat16)."
        )


def check_memory(parameter: ShardedTensor, new: torch.Tensor) -> None:
    """Raise where ``new``, which is to take the parameter's place, is anything but the parameter's own slice."""
    if isinstance(new, ShardedTensor) and new._local is parameter._local:
        return  # `module.to(...)` that changed nothing
    check_conversion(parameter, new)
    if new.shape != parameter.shape:
        shapes = f"giving the shape {list(new.shape)} (as resize_token_embeddings does) to {list(parameter.shape)}"
        parameter._refuse(shapes, "resize before zerofx.compile or zerofx.shard")
    way_out = "use `with torch.no_grad(): parameter.copy_(full_tensor)`"
    parameter._refuse("assigning .data (as module.to_empty and module._apply do)", way_out)


def _check_all(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Refuse a conversion of ``module`` before any of its tensors has changed."""
    with torch.no_grad():
        for parameter in module.parameters():
            if isinstance(parameter, ShardedParameter):
                check_memory(parameter, fn(parameter))
            elif isinstance(parameter, ReplicatedParameter):
                check_conversion(parameter, fn(parameter))


before_conversions(_check_all)


def shard_parameter(parameter: nn.Parameter, group: ShardGroup, slot: Slot) -> None:
    """Turn ``parameter`` into a `ShardedParameter` in place: copy its slice to the group's shard, free the rest.

    The object stays the same, so optimizers that hold it stay right. One of no elements, where its slot has some, is
    yet to be initialised: there is nothing to copy.
    """
    piece = group.layout.piece(slot, group.rank)
    replica = group.weights.own_replica
    with torch.no_grad(), group.home.resident():
        local = group.local(slot, group.shard)
        whole = parameter.detach()
        if whole.shape == torch.Size(slot.shape):
            if replica is not None:
                group.layout.view(replica, slot).copy_(whole)
            local.copy_(whole.reshape(-1).narrow(0, piece.in_parameter, piece.length))
        else:
            local.fill_(torch.nan if local.is_floating_point() else 0)
        del whole, local
        # The old memory is let go, not emptied: a tensor elsewhere may share it. Before the new is made, for the peak.
        parameter.data = parameter.new_empty(0)
        parameter.data = parameter.new_empty(slot.shape)
    parameter.untyped_storage().resize_(0)
    adopt_shell(parameter, group, slot)


def adopt_shell(parameter: nn.Parameter, group: ShardGroup, slot: Slot) -> None:
    """Turn ``parameter``, which has its shape and no memory any more, into the `ShardedParameter` of ``slot``."""
    _become(parameter, ShardedParameter, group, slot)
    with group.home.shaping(group.shard):
        _dress(parameter, group, slot, group.local(slot, group.shard))


def replicate_parameter(parameter: nn.Parameter, group: ShardGroup, slot: Slot) -> None:
    """Turn ``parameter`` into a `ReplicatedParameter` in place: nothing but its class changes."""
    _become(parameter, ReplicatedParameter, group, slot)
    parameter._group, parameter._slot = group, slot  # type: ignore[attr-defined]


def copy_parameter(parameter: ShardedParameter | ReplicatedParameter, group: ShardGroup) -> nn.Parameter:
    """The parameter of the same slot in ``group``, a copy of the parameter's own: its slice is there.

    Without what the class that it was has put on it: see `zerofx.runtime.state.plain.copy_own`.
    """
    slot = parameter._slot
    if isinstance(parameter, ReplicatedParameter):
        made = nn.Parameter(parameter.detach().as_subclass(torch.Tensor).clone(), parameter.requires_grad)
        replicate_parameter(made, group, slot)
        return made
    made = nn.Parameter(torch.empty(0, dtype=parameter.dtype, device=parameter.device), parameter.requires_grad)
    made.data = made.new_empty(slot.shape)
    made.untyped_storage().resize_(0)
    adopt_shell(made, group, slot)
    return made


def _become(parameter: nn.Parameter, cls: type, group: ShardGroup, slot: Slot) -> None:
    members = {
        "__module__": __name__,
        "_traced_as": f"the sharded parameter {slot.name!r}",
        "_compute_dtype": group.layout.param_dtype,
        "_dtensor": group.dtensors.get(slot),
        "_among_dtensors": bool(group.sharing.foreign),
        **origin_of(parameter),
    }
    static_shape(parameter)
    parameter.__class__ = type(cls.__name__, (cls,), members)
    group.members.add(slot, parameter)


def _traced(
    func: Callable, args: Any, kwargs: dict[str, Any], dtype: torch.dtype | None, dtensors: bool = False
) -> Any:
    """``func`` as Dynamo is to see it: on ordinary tensors, the weights among them as the model computes with them.

    ``dtensors``: some of these are DTensors.

    While it compiles Dynamo also looks at the parameter itself, for real: that is let through as it is.
    """
    with DisableTorchFunction():
        if (dtype is not None or dtensors) and torch.compiler.is_dynamo_compiling():
            args = _computed(args)
            kwargs = {name: _computed(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _computed(x: Any) -> Any:
    """``x`` with weights as the model computes with them: each in its own dtype, and DTensors where they were some."""
    if isinstance(x, (ShardedParameter, *_WHOLE)):
        layout, dtype = type(x)._dtensor, type(x)._compute_dtype
        if dtype is not None:
            x = x.to(dtype.to_complex() if x.is_complex() else dtype)
        return x if layout is None else as_dtensor(x, layout)
    if isinstance(x, (list, tuple)):
        return type(x)([_computed(item) for item in x])
    return x


def _meets(func: Callable, args: Any, kwargs: dict[str, Any], dtype: torch.dtype | None) -> bool:
    """Whether ``func`` brings parameters and activations of ``dtype``, or indices, together, and writes to neither."""
    name = getattr(func, "__name__", "").split(".")[0]
    written = is_in_place(name) or name.startswith("__set")
    if dtype is None or written or func in (torch.autograd.backward, torch.autograd.grad):
        return False
    met = [x for x in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(x, torch.Tensor)]
    others = [x for x in met if not isinstance(x, _WHOLE)]
    dtypes = (dtype, dtype.to_complex())
    return any(x.dtype in dtypes or not (x.is_floating_point() or x.is_complex()) for x in others)


def is_in_place(name: str) -> bool:
    """Whether the operation of this name writes to its first argument."""
    if name.startswith("__"):
        return name in _IN_PLACE
    return name.endswith("_")


_IN_PLACE = {f"__i{name}__" for name in "add sub mul truediv floordiv mod pow and or xor lshift rshift matmul".split()}
_IN_PLACE.add("__setitem__")


def _refuse_example(x: Any) -> None:
    if isinstance(x, ShardedTensor):
        refuse_backend(x._traced_as)


def _refuse_argument(x: Any) -> None:
    """Raise for a sharded tensor that reaches code which would read the memory it does not have."""
    if not torch.compiler.is_compiling() and isinstance(x, ShardedTensor):
        raise RuntimeError(
            f"the sharded tensor {x._slot.name!r} reaches a transform of torch.func (grad, vjp, vmap, ...) "
            "or TorchScript, which read its memory, and this rank has only a slice. Pass parameter.full_tensor(), or "
            "use weights inside of `with zerofx.unsharded(module):`."
        )


def _mapped(x: Any) -> Any:
    """What ``vmap`` maps over for a parameter that computes in another dtype. It asks nothing later."""
    whole = isinstance(x, _WHOLE) or (torch.compiler.is_compiling() and isinstance(x, ShardedParameter))
    if not whole or type(x)._compute_dtype is None:
        return x
    return x.to(type(x)._compute_dtype)


watch_arguments(_refuse_argument, _mapped)
watch_examples(_refuse_example)


def _dress(tensor: Any, group: ShardGroup, slot: Slot, local: torch.Tensor) -> Any:
    tensor._group, tensor._slot, tensor._local = group, slot, local
    if group.dtensors:
        tensor._dtensor = group.dtensors.get(slot)
    return tensor


def count_write(tensor: ShardedTensor) -> None:
    """Count a write, so that a backward that saved the old value raises, and replicas are refreshed.

    The slice's too: PyTorch's fused optimizers count none.
    """
    count_writes([tensor])


def count_writes(tensors: Sequence[ShardedTensor]) -> None:
    """`count_write` of all."""
    with DisableTorchFunction():
        torch.autograd.graph.increment_version([x for tensor in tensors for x in (tensor, tensor._local)])


def detach(tensor: ShardedTensor) -> ShardedTensor:
    """A detached alias: same slice, same version counter (what ``Tensor.detach`` is to a plain tensor)."""
    with DisableTorchFunction():
        alias = tensor.detach().as_subclass(ShardedTensor)
    share_slice(alias, tensor)
    return _dress(alias, tensor._group, tensor._slot, tensor._local)
