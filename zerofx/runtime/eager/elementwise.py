"""Which operations run on slices, which are answered as they are, and which need the whole tensor.

`dispatch` is the body of ``ShardedTensor.__torch_function__``. It goes by the operation's name, so that a function, a
method, an in-place method and an aten operator of one name are one row of a table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerofx._torch import DTensorLayout, call_plainly, gradient_edge, is_dtensor, pytree
from zerofx.runtime.eager.norms import complete, everywhere, norms
from zerofx.runtime.eager.ondemand import gather_tensor
from zerofx.runtime.eager.reductions import flat_view, reduction
from zerofx.runtime.eager.unshard import readonly, unshard, version_of
from zerofx.runtime.eager.writes import BY_POSITION, write
from zerofx.runtime.state.aliases import unshare_slice
from zerofx.runtime.state.callbacks import CALLBACKS
from zerofx.runtime.state.home import Home, resident_of
from zerofx.runtime.state.parameter import (
    ShardedParameter,
    ShardedTensor,
    check_conversion,
    check_memory,
    count_write,
    detach,
    is_in_place,
    same_device,
)

_NAMED = """
    abs add addcdiv addcmul atan2 bfloat16 ceil clamp clamp_max clamp_min clip clone conj contiguous copy copysign
    cos cpu cuda div double empty_like eq exp expm1 fill float floor floor_divide fmax fmin fmod frac
    full_like ge gt half heaviside hypot isfinite isinf isnan le lerp log log10 log1p log2 logical_and
    logical_not logical_or logical_xor lt masked_fill maximum minimum mul multiply nan_to_num ne neg negative
    ones_like pow reciprocal relu remainder round rsqrt rsub sgn sigmoid sign sin sqrt square sub subtract
    tanh to true_divide trunc type type_as where zero zeros_like absolute divide _to_copy
    """.split()
_OPERATORS = """
    abs neg eq ne lt le gt ge and iand or ior xor ixor add iadd radd sub isub rsub mul imul rmul div idiv rdiv
    truediv itruediv rtruediv floordiv ifloordiv rfloordiv mod imod rmod pow ipow rpow setitem
    """.split()
ELEMENTWISE = frozenset([*_NAMED, *(f"__{name}__" for name in _OPERATORS)])
"""Operations whose result at one element depends on that element alone. In-place ones end in ``_`` besides."""

_CONVERSIONS = frozenset("bfloat16 cpu cuda double float half to type type_as".split())
"""Those that give the tensor itself where device and dtype stay, which is what ``module.to(...)`` relies on."""

_IN_PLACE = frozenset(_function for name in _NAMED if (_function := getattr(torch.Tensor, name + "_", None)))

_SET_GRAD = torch.Tensor.grad.__set__  # type: ignore[union-attr]

CREATION = frozenset({"empty_like", "full_like", "ones_like", "zeros_like"})
"""Operations that read nothing but shape and dtype: never differentiated."""

LISTS = ("_foreach_", "_fused_", "_amp_foreach_")
"""Operations on lists of tensors: elementwise all, but for the norm."""

METADATA = frozenset(
    """
    _backward_hooks _has_compatible_shallow_copy_type _is_view _is_zerotensor __format__ __hash__ __len__
    dim dim_order element_size get_device has_names is_complex is_conj is_contiguous is_distributed
    is_floating_point is_inference is_neg is_pinned is_same_size is_set_to is_shared is_signed is_storage
    is_tensor ndimension nelement numel register_hook register_post_accumulate_grad_hook requires_grad_ result_type
    retain_grad size storage_offset stride untyped_storage
    """.split()
)
"""Operations that never look at elements."""


def dispatch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on arguments of which one is, or holds, a `ShardedTensor`. Their state is resident meanwhile.

    But where nobody looks at elements: ``zero_grad`` would read all weights from a file.
    """
    if torch.is_grad_enabled() and getattr(func, "__module__", "") == "torch.nn.init":
        with torch.no_grad():  # which is what it does itself, further in
            return dispatch(func, args, kwargs)
    if not Home.any_away or name_of(func) in METADATA or _is_zero_grad(func, args) or _is_question(func):
        return _dispatch(func, args, kwargs)
    with resident_of(_sharded([*args, *kwargs.values()])):
        return _dispatch(func, args, kwargs)


def _is_question(func: Callable[..., Any]) -> bool:
    """Whether it is ``x.is_quantized`` or its like. PyTorch 2.11 asks so while it makes fake tensors."""
    return name_of(func) == "__get__" and func.__self__.__name__.startswith("is_")  # type: ignore[attr-defined]


def _dispatch(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """An optimizer comes here several times per parameter and step: what it does most is done first."""
    if func in _IN_PLACE and isinstance(args[0], ShardedTensor) and not torch.is_grad_enabled():
        result = _on_slices(func, args, kwargs, args[0], args[0])
        if result is not NotImplemented:
            return result
    if _is_zero_grad(func, args):
        return _as_is(func, args, kwargs)
    name = name_of(func)
    if not args and (first := next((key for key in _FIRST if key in kwargs), None)) is not None:
        args, kwargs = (kwargs[first],), {key: value for key, value in kwargs.items() if key != first}
    if name in ("__get__", "__set__", "__delete__"):
        return _attribute(func, name, func.__self__.__name__, args)  # type: ignore[attr-defined]
    if name in _SIZES and (layout := getattr(args[0], "_dtensor", None)) is not None:
        return _size_of(layout, name, *args[1:], **kwargs)
    if name in METADATA or (name == "type" and len(args) == 1 and not kwargs):  # `type()` is a question
        return _as_is(func, args, kwargs)
    answer = _answer(func, name, args, kwargs)
    if answer is not NotImplemented:
        return answer

    sharded = _sharded([*args, *kwargs.values()])
    written = kwargs.get("out", args[0] if is_in_place(name) and args else None)
    for x in sharded if name.startswith(LISTS) and name.endswith("_") else [written]:
        _check_leaf(x)
    if isinstance(written, ShardedTensor) and torch.is_grad_enabled():
        _check_operands(written, name, args, kwargs)
    tracked = torch.is_grad_enabled() and any(x.requires_grad for x in sharded)
    if not tracked or name in CREATION:
        if name.startswith(LISTS):
            return _on_lists(func, name, args, kwargs, sharded)
        if _is_elementwise(name):
            result = _on_slices(func, args, kwargs, sharded[0] if written is None else written, written)
            if result is not NotImplemented:
                return result
        for answer in (flat_view(name, args, kwargs), reduction(name, args, kwargs)):
            if answer is not NotImplemented:
                return answer
    return _on_full(func, name, args, kwargs, written, tracked)


def _answer(func: Callable, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What has an answer of its own, or none at all; NotImplemented: neither."""
    if name == "data_ptr":
        if _asked_by("safetensors"):
            args[0]._refuse(
                "safetensors' save_file()", "save what zerofx.full_state_dict(module) gives rank 0; every rank calls it"
            )
        return 0  # there is no memory of this shape: whoever copies memory must copy the slice
    if name == "new_empty" and isinstance(args[0], ShardedTensor):
        return _new_empty(*args, **kwargs)
    if name in ("__repr__", "__str__"):
        return ShardedTensor.__repr__(args[0])
    if name == "detach" and isinstance(args[0], ShardedTensor):
        return detach(args[0])
    if name == "detach_":
        return args[0].requires_grad_(False)  # no sharded tensor has a past that it could be cut off from
    if name == "view_as" and isinstance(args[0], ShardedTensor) and args[0].shape == args[1].shape:
        if not (torch.is_grad_enabled() and args[0].requires_grad):
            return detach(args[0])
    if func is torch.autograd.backward:
        return _backward(*args, **kwargs)
    if func is torch.autograd.grad:
        raise RuntimeError(
            "torch.autograd.grad with respect to sharded parameters: their gradients are shards and go to .grad. Call "
            "loss.backward() and read parameter.grad."
        )
    if name == "share_memory_":
        args[0]._refuse(
            "share_memory()", "share the memory of zerofx.full_state_dict(module), which every rank must call"
        )
    if name in ("set_", "resize_", "resize_as_", "backward"):
        args[0]._refuse(f"{name}()", "use what autograd offers on the module's outputs, or before sharding")
    return NotImplemented


_FIRST = ("tensor", "input", "self", "x", "tensors")
"""What PyTorch calls the first argument: ``torch.nn.init``, ``torch``, ``torch._foreach_*``, ``torch.linalg``."""


def _is_zero_grad(func: Callable, args: tuple) -> bool:
    return func == _SET_GRAD and args[1] is None


def name_of(func: Callable) -> str:
    """The name of an operation, whatever it is called as."""
    return getattr(func, "__name__", str(func)).split(".")[0]


def _asked_by(package: str) -> bool:
    """Whether code of that package called what zerofx answers now."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("zerofx.", "torch.")):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith(package)


def _is_elementwise(name: str) -> bool:
    return (name.rstrip("_") if not name.startswith("__") else name) in ELEMENTWISE


def _sharded(values: Sequence[Any]) -> list[ShardedTensor]:
    """The sharded tensors among ``values``, in lists and dicts too."""
    if any(isinstance(x, (list, tuple, dict)) for x in values):
        values = pytree.tree_leaves(values)
    return [x for x in values if isinstance(x, ShardedTensor)]


def _as_is(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    return call_plainly(func, (), args, kwargs)


def _backward(*args: Any, inputs: Any = (), **kwargs: Any) -> None:
    """``backward(inputs=parameters)``: by their edges in the autograd graph, which is all the engine needs of them."""
    edges = [gradient_edge(x) for x in ([inputs] if isinstance(inputs, torch.Tensor) else inputs)]
    torch.autograd.backward(*args, **kwargs, inputs=edges)  # type: ignore[misc]


def _new_empty(like: ShardedTensor, *size: Any, **kwargs: Any) -> torch.Tensor:
    """Memory for a tensor like this one: sharded, where it is to have its shape. What async savers copy to."""
    shape = torch.Size(size[0] if size and isinstance(size[0], (list, tuple)) else kwargs.pop("size", size))
    if shape == like.shape:
        return like.like(like._local.new_empty(like._local.shape, **kwargs))
    return like._local.new_empty(shape, **kwargs)


_SIZES = frozenset({"size", "stride", "numel", "nelement", "__len__"})


def _size_of(layout: DTensorLayout, name: str, dim: int | None = None) -> Any:
    """What a question of ``_SIZES`` has for an answer: of the whole tensor, of which this rank trains a part."""
    if name in ("numel", "nelement"):
        return layout.shape.numel()
    sizes: Any = layout.stride if name == "stride" else layout.shape
    return sizes[0] if name == "__len__" else sizes if dim is None else sizes[dim]


def _attribute(func: Callable, action: str, name: str, args: tuple) -> Any:
    tensor = args[0]
    if name == "shape" and tensor._dtensor is not None:
        return tensor._dtensor.shape
    if name == "data" and action == "__get__":
        values = detach(tensor)
        values._from_data = True
        return values
    if name == "data":
        _replace(tensor, args[1])
        return None
    if name in ("T", "mT", "H", "mH", "real", "imag"):
        return _on_full(func, name, args, {}, written=None, tracked=torch.is_grad_enabled() and tensor.requires_grad)
    if name == "grad" and action == "__set__" and args[1] is not None:
        args = (tensor, _as_gradient(tensor, args[1]))
    return _as_is(func, args, {})


def _replace(tensor: ShardedTensor, new: torch.Tensor) -> None:
    """What ``tensor.data = new`` and ``tensor.set_(new)`` mean: the values of a whole tensor, or of a sharded one."""
    if new.shape != tensor.shape:
        check_memory(tensor, new)
    if isinstance(new, ShardedTensor) and new._local is tensor._local:
        return
    check_conversion(tensor, new)
    with torch.no_grad(), tensor._group.home.only(tensor._local):
        unshare_slice(tensor)
        tensor.copy_(new)


CALLBACKS.replace = _replace


def _as_gradient(tensor: ShardedTensor, gradient: torch.Tensor) -> ShardedTensor:
    """``gradient`` as ``tensor.grad`` can hold it: of a plain, full-size one this rank's slice."""
    same_slot = not isinstance(gradient, ShardedTensor) or _same_slot(gradient, tensor)
    if same_slot and isinstance(gradient, ShardedTensor) and gradient._local.dtype == tensor._local.dtype:
        return gradient
    if gradient.shape != tensor.shape or gradient.dtype != tensor.dtype or not same_slot:
        raise RuntimeError(
            f"assigning to .grad of {tensor._slot.name!r}: expected a gradient of shape {list(tensor.shape)} and "
            f"{tensor.dtype}, full or this parameter's own shard, got {list(gradient.shape)} and {gradient.dtype}"
            f"{'' if same_slot else f', a shard of {gradient._slot.name!r}: assign its full_tensor()'}."  # type: ignore[attr-defined]
        )
    return gradient if isinstance(gradient, ShardedTensor) else tensor.like(_narrow(tensor, gradient).clone())


def _on_slices(func: Callable, args: tuple, kwargs: dict[str, Any], like: Any, written: Any) -> Any:
    """An elementwise operation on slices laid out as ``like`` is; NotImplemented where some argument is not."""
    if not isinstance(like, ShardedTensor):
        return NotImplemented
    if func is torch.Tensor.__setitem__ and not isinstance(args[1], ShardedTensor):
        return NotImplemented  # by mask it is elementwise, by position it is not

    def local(x: Any) -> Any:
        if isinstance(x, ShardedTensor):
            if _laid_alike(x, like):
                return x._local
            if written is None or x.shape != like.shape:
                raise _Mismatch
            return _narrow(like, gather_tensor(x))
        if not isinstance(x, torch.Tensor):
            return x
        if x.numel() == 1 and x.dim() <= len(like._slot.shape) and not is_dtensor(x):
            return x.reshape(1) if x.dim() > 1 else x  # it goes with each element, and slices have one dimension
        if x.shape == like.shape and written is not None:
            return _narrow(like, x)
        if written is not None or name_of(func) in _CONVERSIONS or not _masks(x, like):
            raise _Mismatch
        return _narrow(like, x.expand(like.shape))

    try:
        local_args = [local(x) for x in args]
        local_kwargs = {k: local(v) for k, v in kwargs.items() if k != "memory_format"}
    except _Mismatch:
        return NotImplemented
    result = func(*local_args, **local_kwargs)
    if written is not None:
        count_write(like)
        return like
    if result is like._local or _changes_nothing(func, result, like._local, kwargs):
        return like
    if result.device != like._local.device and isinstance(like, ShardedParameter):
        like._refuse(f"moving to {result.device}", "move the module before zerofx.compile or zerofx.shard")
    made = like.like(like._group.home.keep("moment", result) if name_of(func) in CREATION else result)
    made._compute_dtype = like._compute_dtype  # what is gathered of it later is what the model computes with
    return made


def _masks(x: torch.Tensor, like: ShardedTensor) -> bool:
    """Whether the plain ``x`` goes with a gradient or moment ``like``, element by element or row by row: a mask, say.

    With a weight the result is whole: it is computed with in a model, not in an optimizer or a hook.
    """
    if like._group.weights.holds(like._local) or like._dtensor is not None or is_dtensor(x):
        return False
    if torch.is_grad_enabled() and x.requires_grad:
        return False
    return x.dim() <= len(like._slot.shape) and all(
        n in (1, m) for n, m in zip(reversed(x.shape), reversed(like._slot.shape), strict=False)
    )


def _changes_nothing(func: Callable, result: torch.Tensor, local: torch.Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether ``func`` was to convert, and there was nothing to. PyTorch copies from ``cpu`` to ``cpu:0``."""
    converts = getattr(func, "__name__", "") in _CONVERSIONS and not kwargs.get("copy")
    return converts and result.dtype == local.dtype and same_device(result.device, local.device)


def _same_slot(a: ShardedTensor, b: ShardedTensor) -> bool:
    return a._group is b._group and (a._slot is b._slot or a._slot == b._slot)


def _laid_alike(a: ShardedTensor, b: ShardedTensor) -> bool:
    """Whether every rank has the same elements of both: of one slot, or of two modules that were sharded alike."""
    if _same_slot(a, b):
        return True
    one, other = a._group, b._group
    if a._slot.shape != b._slot.shape or one.group_name != other.group_name or a._dtensor != b._dtensor:
        return False
    pieces = ((one.layout.piece(a._slot, r), other.layout.piece(b._slot, r)) for r in range(one.layout.world_size))
    return all((p.in_parameter, p.length) == (q.in_parameter, q.length) for p, q in pieces)


def _on_lists(func: Callable, name: str, args: tuple, kwargs: dict[str, Any], sharded: Sequence[ShardedTensor]) -> Any:
    if name == "_foreach_norm":
        return _foreach_norm(*args, **kwargs)
    if name == "_foreach_max":
        return tuple(x.max() for x in args[0])
    lists = [i for i, x in enumerate(args) if isinstance(x, (list, tuple)) and len(x) == len(args[0])]
    columns = list(zip(*(args[i] for i in lists), strict=True)) if 0 in lists and name.startswith("_foreach_") else []
    if any(not _are_slices(column) for column in columns):
        found = [_aligned(column, written=name.endswith("_")) for column in columns]
        args = tuple([row[lists.index(i)] for row in found] if i in lists else x for i, x in enumerate(args))
    local_args, local_kwargs = pytree.tree_map(
        lambda x: x._local if isinstance(x, ShardedTensor) else x, (args, kwargs)
    )
    if name.startswith("_amp_foreach_non_finite_check"):
        with complete(sharded):
            result = func(*local_args, **local_kwargs)
            everywhere(args[1], dist.ReduceOp.MAX, sharded[0])
    else:
        result = func(*local_args, **local_kwargs)
    if name.endswith("_"):
        for x in sharded:
            count_write(x)
        return result
    likes = args[0] if isinstance(args[0], (list, tuple)) else args[1]
    return type(result)(
        like.like(r) if isinstance(like, ShardedTensor) else r for like, r in zip(likes, result, strict=True)
    )


def _foreach_norm(self: Sequence[torch.Tensor], ord: Any = 2, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """With the names that PyTorch has for its arguments."""
    return norms(self, ord, dtype)


def _are_slices(column: tuple[Any, ...]) -> bool:
    """Whether what an operation on lists takes together is laid out alike, or no tensors of a size."""
    tensors = [x for x in column if isinstance(x, torch.Tensor) and x.dim()]
    sharded = [x for x in tensors if isinstance(x, ShardedTensor)]
    return not sharded or (len(sharded) == len(tensors) and all(_laid_alike(x, sharded[0]) for x in sharded[1:]))


def _aligned(column: tuple[Any, ...], *, written: bool) -> tuple[Any, ...]:
    """The same, made alike: as the first, which is ``written``, or as the first that is sharded."""
    sharded = next((x for x in column if isinstance(x, ShardedTensor)), None)
    like = column[0] if written else sharded
    if not isinstance(like, ShardedTensor):
        return tuple(gather_tensor(x) if isinstance(x, ShardedTensor) else x for x in column)

    def fit(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.dim() or (isinstance(x, ShardedTensor) and _laid_alike(x, like)):
            return x
        return like.like(_narrow(like, gather_tensor(x) if isinstance(x, ShardedTensor) else x))

    return tuple(fit(x) for x in column)


def _on_full(func: Callable, name: str, args: tuple, kwargs: dict[str, Any], written: Any, tracked: bool) -> Any:
    if isinstance(written, ShardedTensor) and not written._group.family.rewritable:
        return write(func, name, args, kwargs, written, name in BY_POSITION or _is_elementwise(name))
    gathered: dict[int, tuple[ShardedTensor, torch.Tensor, int]] = {}

    def full(x: Any) -> Any:
        if not isinstance(x, ShardedTensor):
            return x
        if id(x) not in gathered:
            whole = gather_tensor(x) if x._group.family.rewritable else unshard(x, name)
            gathered[id(x)] = x, whole, version_of(whole)
        return gathered[id(x)][1]

    args, kwargs = pytree.tree_map(full, (args, kwargs))
    result = func(*args, **kwargs)
    if isinstance(written, ShardedTensor):
        return written.copy_(gathered[id(written)][1])
    for x, whole, version in gathered.values():
        if version_of(whole) != version:  # it writes, and its name does not say so: an embedding with max_norm
            with torch.no_grad():
                x.copy_(whole.detach())
    return result if tracked else readonly(result, [(whole, x) for x, whole, _ in gathered.values()])


def _narrow(like: ShardedTensor, full: torch.Tensor) -> torch.Tensor:
    """The part of a plain, full-shape tensor that lies where ``like``'s slice lies."""
    piece = like._group.layout.piece(like._slot, like._group.rank)
    if (layout := like._dtensor) is not None:
        full = layout.local_of(full.detach()) if is_dtensor(full) else layout.part_of(full)
    full = full if full.layout == torch.strided else full.to_dense()
    return full.detach().reshape(-1).narrow(0, piece.in_parameter, piece.length)


def _check_leaf(tensor: Any) -> None:
    if torch.is_grad_enabled() and isinstance(tensor, ShardedParameter) and tensor.requires_grad:
        raise RuntimeError(
            f"the parameter {tensor._slot.name!r} requires grad and is being written in place: do it under "
            "torch.no_grad()."
        )


def _check_operands(written: ShardedTensor, name: str, args: tuple, kwargs: dict[str, Any]) -> None:
    """Refuse a write that would lose the gradient of what is written: slices have no autograd graph.

    To ``weight.data`` it may: whoever writes there (peft's ``weight.data += delta``) wants no graph.
    """
    if written._from_data:
        return
    values = pytree.tree_leaves((args, kwargs))
    if any(isinstance(x, torch.Tensor) and not isinstance(x, ShardedTensor) and x.requires_grad for x in values):
        written._refuse(
            f"writing what requires grad by {name!r}", "compute a new tensor: `weight + x`, not `weight += x`"
        )


CALLBACKS.operation = dispatch


class _Mismatch(Exception):
    """The operands are not slices of one layout."""
