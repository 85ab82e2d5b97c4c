"""A sharded module does not go into a wrapper that would shard it, or average its gradients, once more.

::

    zerofx.compile(model)
    DistributedDataParallel(model)      refused, before it reads memory that a sharded parameter does not have
    fully_shard(model)                  refused, before it has gathered the parameters and put its own in their place

PyTorch tells a hook of every module that becomes part of another one. A wrapper takes its module in that way. FSDP, of
either kind, looks for a mark on each parameter first. On one of zerofx's it finds a refusal.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from zerofx._torch import FSDP_MARKS
from zerofx.runtime.state.parameter import ReplicatedParameter, ShardedTensor

_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")


def refuse_wrapper(wrapper: nn.Module, name: str, module: nn.Module | None) -> None:
    """Raise where ``wrapper`` is one of PyTorch's for parallel training, and ``module`` has sharded parameters."""
    bases = (c for c in type(wrapper).__mro__ if c.__module__.startswith("torch."))
    found = next((c.__name__ for c in bases if c.__name__ in _WRAPPERS), None)
    if found is None or module is None:
        return
    for parameter in module.parameters():
        if isinstance(parameter, (ShardedTensor, ReplicatedParameter)):
            raise ValueError(
                f"{found} around {type(module).__name__}, whose {parameter._slot.name!r} zerofx has sharded: zerofx "
                "averages the gradients over the ranks already. Call the module itself, without the wrapper."
            )


def _refuse_mark(wrapper: str, parameter: Any) -> NoReturn:
    """In the place of FSDP's mark."""
    raise ValueError(
        f"{wrapper} of {parameter._slot.name!r}, which zerofx has sharded: zerofx divides it and averages its gradient "
        "already. Leave one of both out; zerofx.integrations.fsdp takes over programs that call fully_shard."
    )


register_module_module_registration_hook(refuse_wrapper)
for _mark, _wrapper in FSDP_MARKS.items():
    for _kind in (ShardedTensor, ReplicatedParameter):
        setattr(_kind, _mark, property(partial(_refuse_mark, _wrapper)))
