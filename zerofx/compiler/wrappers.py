"""A sharded module does not go into a wrapper that would shard it, or average its gradients, once more.

::

    zerofx.compile(model)
    DistributedDataParallel(model)      refused, before it reads memory that a sharded parameter does not have
    fully_shard(model)                  refused, before it has gathered the parameters and put its own in their place

The same in the other order: such a wrapper, or a module that has one inside, is not sharded.

::

    zerofx.compile(DistributedDataParallel(model))      refused

PyTorch tells a hook of every module that becomes part of another one. A wrapper takes its module in that way. FSDP, of
either kind, looks for a mark on each parameter first. On one of zerofx's it finds a refusal.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, NoReturn

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from zerofx._torch import FSDP_MARKS
from zerofx.runtime.state.parameter import ReplicatedParameter, ShardedTensor

_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")
_SHARDED_IN_PLACE = {"FSDPModule": "fully_shard", "ReplicateModule": "replicate"}
"""What functions of PyTorch make of a module: they change its class."""


def refuse_wrapper(wrapper: nn.Module, name: str, module: nn.Module | None) -> None:
    """Raise where ``wrapper`` is one of PyTorch's for parallel training, and ``module`` has sharded parameters."""
    found = _base(wrapper, _WRAPPERS)
    if found is None or module is None:
        return
    for parameter in module.parameters():
        if isinstance(parameter, (ShardedTensor, ReplicatedParameter)):
            raise ValueError(
                f"{found} around {type(module).__name__}, whose {parameter._slot.name!r} zerofx has sharded: zerofx "
                "averages the gradients over the ranks already. Call the module itself, without the wrapper."
            )


def refuse_wrapped(module: nn.Module) -> None:
    """Raise where ``module`` is one of PyTorch's for parallel training, or has one inside."""
    for name, inner in module.named_modules():
        found = _base(inner, (*_WRAPPERS, *_SHARDED_IN_PLACE))
        if found is None:
            continue
        what = f"{name!r} is a {found}" if name else f"the module is a {found}"
        do = f"give it {name + '.' if name else ''}module, what is inside"
        if found in _SHARDED_IN_PLACE:
            do = f"leave {_SHARDED_IN_PLACE[found]} out"
        raise ValueError(
            f"{what}: it averages gradients over the ranks, and zerofx does so itself. Instead, {do}: "
            "zerofx.compile(model, stage=3) takes its place."
        )


def _base(module: nn.Module, names: tuple[str, ...]) -> str | None:
    """The first of PyTorch's classes of these ``names`` that ``module`` is of."""
    bases = (c for c in type(module).__mro__ if c.__module__.startswith("torch."))
    return next((c.__name__ for c in bases if c.__name__ in names), None)


def _refuse_mark(wrapper: str, parameter: Any) -> NoReturn:
    """In the place of FSDP's mark. Who else looks for the mark, such as an optimizer, finds none."""
    asking = sys._getframe(1).f_globals.get("__name__", "")
    if not asking.startswith("torch.distributed."):
        mark = next(name for name, kind in FSDP_MARKS.items() if kind == wrapper)
        raise AttributeError(mark)
    raise ValueError(
        f"{wrapper} of {parameter._slot.name!r}, which zerofx has sharded: zerofx divides it and averages its gradient "
        "already. Leave one of both out; zerofx.integrations.fsdp takes over programs that call fully_shard."
    )


register_module_module_registration_hook(refuse_wrapper)
for _mark, _wrapper in FSDP_MARKS.items():
    for _kind in (ShardedTensor, ReplicatedParameter):
        setattr(_kind, _mark, property(partial(_refuse_mark, _wrapper)))
