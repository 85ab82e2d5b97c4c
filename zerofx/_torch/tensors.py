"""Tensors, the memory behind them, and who gets to see them."""

from __future__ import annotations

import contextlib
import copy
import copyreg
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._functorch._aot_autograd.subclass_parametrization import UnwrapTensorSubclass as UnwrapTensorSubclass
from torch._ops import OpOverload as OpOverload
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper_subclass

# torch._C (2.11, 2.13, 2.15): run a function as if no argument were a tensor subclass. Dynamo traces through it.
DisableTorchFunction = torch._C.DisableTorchFunctionSubclass


# torch._C (2.11, 2.13, 2.15): the same for one call, given as to ``__torch_function__``: (func, types, args, kwargs).
call_plainly = torch._C._disabled_torch_function_impl


# torch.utils._python_dispatch (2.11, 2.13, 2.15): a context in which a method of its own sees every operator.
TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode


@contextlib.contextmanager
def with_numbers() -> Iterator[None]:
    """Inside tensors are real, though something is being traced (2.11, 2.13, 2.15).

    Nor do operators go through Python's dispatcher. A collective that does keeps the interpreter's lock while it waits
    for gloo's. A thread of gloo's has that one, and may wait for the interpreter's, to free a tensor.
    """
    from torch._dispatch.python import no_python_dispatcher
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with no_python_dispatcher(), unset_fake_temporarily():
        yield


def fake_mode() -> contextlib.AbstractContextManager[Any]:
    """Tensors that are made inside have no memory (2.11, 2.13, 2.15)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def storage_of(ref: StorageWeakRef) -> torch.UntypedStorage | None:
    """What ``ref`` refers to, if it is still there (2.11, 2.13, 2.15)."""
    return torch.UntypedStorage._new_with_weak_ptr(ref.cdata)


def with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory and the same version counter, in a storage of its own: it ends with the last view of this one.

    Assigning ``.data`` takes over another tensor's storage and leaves the version counter (2.11, 2.13, 2.15).
    ``tensor.__dlpack__`` knows no device that was registered under a name of its own; the capsule does.
    """
    alias = tensor.detach()
    alias.data = torch.from_dlpack(torch.utils.dlpack.to_dlpack(tensor.detach()))
    return alias


def put_tensor(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Any tensor in the place of the parameter ``name`` of ``module``'s own (2.11, 2.13, 2.15)."""
    module._parameters[name] = tensor  # type: ignore[assignment]
    names = getattr(module, "_flat_weights_names", ())  # torch.nn.RNNBase has a list of them besides
    if name in names:
        module._flat_weights[names.index(name)] = tensor  # type: ignore[operator]


def before_conversions(check: Callable[[nn.Module, Callable[[torch.Tensor], torch.Tensor]], None]) -> None:
    """Have ``check(module, fn)`` called before ``module.to(...)``, ``.half()``, ... put ``fn(tensor)`` anywhere.

    PyTorch goes from tensor to tensor, and from submodule to submodule (2.11, 2.13, 2.15).
    """
    whole, here = nn.Module._apply, threading.local()

    @functools.wraps(whole)
    def _apply(self: nn.Module, fn: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(here, "inside", False):
            return whole(self, fn, *args, **kwargs)
        check(self, fn)
        here.inside = True
        try:
            return whole(self, fn, *args, **kwargs)
        finally:
            here.inside = False

    nn.Module._apply = _apply  # type: ignore[method-assign]


def around_copies(copied: Callable[[nn.Module, dict[int, Any], Callable[[], nn.Module]], nn.Module]) -> None:
    """Have ``copied(module, memo, copy)`` asked for what ``copy.deepcopy`` makes of a module; ``copy()`` makes it.

    Modules have no ``__deepcopy__`` of their own, and so `copy` takes them apart and puts them together again (2.11,
    2.13, 2.15). A subclass that has one is copied by that. A parametrized module refuses to be taken apart, and
    ``torch.nn.utils.parametrize`` gives it a ``__deepcopy__`` only where it finds none: its attributes are copied.
    """
    from torch.nn.utils.parametrize import is_parametrized

    def __deepcopy__(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        behind = type(self).__mro__[type(self).__mro__.index(nn.Module) + 1 :]
        own = next((vars(cls)["__deepcopy__"] for cls in behind if "__deepcopy__" in vars(cls)), None)

        def by_parts() -> nn.Module:
            if is_parametrized(self):
                memo[id(self)] = made = self.__new__(type(self))
                made.__dict__ = copy.deepcopy(self.__dict__, memo)
                return made
            reduce = copyreg.dispatch_table.get(type(self))
            parts: Any = self.__reduce_ex__(4) if reduce is None else reduce(self)
            return self if isinstance(parts, str) else copy._reconstruct(self, memo, *parts)  # type: ignore

        return copied(self, memo, by_parts if own is None else lambda: own(self, memo))

    nn.Module.__deepcopy__ = __deepcopy__  # type: ignore[attr-defined]


def watch_arguments(check: Callable[[Any], None], mapped: Callable[[Any], Any]) -> None:
    """Have ``check`` called with what functorch wraps and TorchScript is given (2.11, 2.13, 2.15).

    Neither asks ``__torch_function__``: they go on to kernels with the tensor as it is. ``mapped(x)`` takes the place
    of a tensor ``x`` that ``vmap`` maps over.
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
    add_dimension = torch._functorch.vmap._add_batch_dim
    torch._functorch.vmap._add_batch_dim = lambda x, *args: add_dimension(mapped(x), *args)


def _checking(function: Callable, check: Callable[[Any], None]) -> Callable:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for x in pytree.arg_tree_leaves(*args, **kwargs):
            check(x)
        return function(*args, **kwargs)

    return checked


# torch._C (2.11, 2.13, 2.15): whether a tensor is one of functorch's, a wrapper without memory of its own.
is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def outside_of_transforms() -> contextlib.AbstractContextManager[Any]:
    """What runs inside knows of no ``vmap`` and no ``torch.func.grad`` around it (2.11, 2.13, 2.15)."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def initialise_by(initialise: Callable[..., Any]) -> None:
    """Have ``torch.nn.init`` call ``initialise(function, tensor, ...)`` where it computes besides ``tensor`` itself.

    These are ``orthogonal_`` and ``sparse_``, in 2.11, 2.13 and 2.15. The others do nothing but operations on it.
    """

    def adapted(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return initialise(function, tensor, *args, **kwargs)

        return call

    for name in ("orthogonal_", "sparse_"):
        setattr(torch.nn.init, name, adapted(getattr(torch.nn.init, name)))


def adapt_arguments(adapt: Callable[[str, Any], Any]) -> None:
    """Have what is handed to a user's ``torch.autograd.Function`` go through ``adapt(name, x)`` (2.11, 2.13, 2.15).

    Dynamo goes by the name ``apply`` and does not look at this. Functions of PyTorch and zerofx are left alone.
    """
    whole = inspect.getattr_static(torch.autograd.Function, "apply")  # Python's up to 2.13, C's in 2.15

    @functools.wraps(torch.autograd.Function.apply)
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith(("torch.", "zerofx.")):
            args = tuple(adapt(cls.__name__, x) for x in args)
            kwargs = {name: adapt(cls.__name__, x) for name, x in kwargs.items()}
        return whole.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
