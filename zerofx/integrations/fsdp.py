"""FSDP2's ``fully_shard``, for loops in the manner of torchtitan.

::

    from zerofx.integrations.fsdp import fully_shard         # was: from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)                 # a group of its own
    fully_shard(model, mp_policy=policy)                     # the rest
    optimizer = torch.optim.AdamW(model.parameters())

FSDP2 shards each module as it is named, bottom up. zerofx shards a model once, whole, for it compiles it whole. Which
call names the whole model can only be told when all have been made. So a call marks its module, and the outermost
marked module is sharded and compiled, with all marks in it, as soon as somebody wants to use it::

    model.parameters()           for the optimizer
    model(x), model.state_dict(), model.load_state_dict(...)
    copy.deepcopy(model)         the copy is sharded alike
    model.to_empty(device=...)   of a model on the meta device, which is initialised then
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from zerofx._torch import backend_name, call_instead
from zerofx.compiler.api import compile
from zerofx.integrations.states import checked_options
from zerofx.model.grouping import Grouping
from zerofx.model.precision import MixedPrecision
from zerofx.runtime.state.group import groups_of


@dataclass
class Mark:
    """What one call of `fully_shard` asked for."""

    mesh: DeviceMesh | None
    reshard_after_forward: bool | None
    policy: MixedPrecisionPolicy
    options: dict[str, Any]
    ignored: set[nn.Parameter]
    sync: bool = True
    guard: Any = None


_MARKS: weakref.WeakKeyDictionary[nn.Module, Mark] = weakref.WeakKeyDictionary()
_CLASSES: dict[type, type] = {}


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Any = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  # frozen, as in FSDP2
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    zerofx: Mapping[str, Any] | None = None,
) -> Any:
    """Have ``module`` sharded by zerofx, stage 3, together with the model that it is in.

    Args:
        module: a layer, which becomes a group of its own, or the whole model; or a list of layers.
        mesh: of one dimension, or of two (replicas, shards); the same for all modules of a model. None: all ranks.
        reshard_after_forward: False for all layers keeps all weights gathered from forward to backward. For some of
            them it is a hint that zerofx does not need: it keeps the last layers gathered as far as its budget goes.
        ignored_params: they stay plain, and their gradients this rank's own. Those of all calls count together.
        mp_policy: the module's own; what is in it and not marked has the same.
        zerofx: further options of ``zerofx.compile``; those of the call for the whole model count.

    Returns:
        ``module``, whose class has FSDP2's `set_requires_gradient_sync` now.

    Raises:
        ValueError: an argument that means nothing here; the message says what to write instead.
    """
    modules = module if isinstance(module, list) else [module]
    _refuse(shard_placement_fn, reshard_after_forward, offload_policy, zerofx)
    options = checked_options(zerofx, "fully_shard(zerofx=...)")
    for one in modules:
        if not isinstance(one, nn.Module) or isinstance(one, (nn.ModuleList, nn.ModuleDict)):
            raise ValueError(
                f"fully_shard of a {type(one).__name__}: expected a module with a forward, or a list of such."
            )
        if one in _MARKS or any(hasattr(p, "_group") for p in plain_parameters(one)):
            raise ValueError(
                f"fully_shard of a {type(one).__name__} of which parameters are sharded already: expected one call for "
                "each module, the whole model's last, and only then a use of any, such as parameters() or a forward."
            )
    for one in modules:
        _move(one, mesh)
        _mark(one, Mark(mesh, reshard_after_forward, mp_policy, dict(options), set(ignored_params or ())))  # type: ignore[arg-type]
    return module


def _refuse(placement: Any, reshard: Any, offload: Any, zerofx: Any) -> None:
    """Raise for what means nothing here."""
    if placement is not None:
        raise ValueError(
            f"shard_placement_fn={placement!r}: expected None. A rank's part of a weight is a flat run of its group, "
            "there is no dimension to choose: leave it out."
        )
    if reshard is not None and not isinstance(reshard, bool):
        raise ValueError(
            f"reshard_after_forward={reshard!r}: expected True, False or None. To keep a part gathered pass "
            "zerofx={'memory_budget': bytes} to the call for the whole model."
        )
    if type(offload) is not OffloadPolicy:
        raise ValueError(
            f"offload_policy={offload!r}: expected OffloadPolicy(), for shards are where the model is. Leave it out. "
            "Of a model on a GPU zerofx={'offload': zerofx.Offload('cpu', 'cpu', 'cpu')} has them in the host's memory."
        )
    if {"mixed_precision", "groups", "mesh", "ignored"} & set(zerofx or {}):
        raise ValueError(
            "fully_shard(zerofx=...) with mixed_precision, groups, mesh or ignored: expected other options. Those "
            "follow from mp_policy=, from which modules are marked, from mesh= and from ignored_params=."
        )


def _move(module: nn.Module, mesh: DeviceMesh | None) -> None:
    """As FSDP2 does, to the device of the mesh; the meta device is left to `to_empty`."""
    if any(p.is_meta for p in plain_parameters(module)):
        return
    kind = "cpu" if mesh is None else mesh.device_type
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if mesh is None and accelerator is not None and dist.is_initialized():
        kind = "cpu" if backend_name(dist.group.WORLD, accelerator) == "gloo" else accelerator.type  # type: ignore
    if kind != "cpu":
        module.to(torch.device(kind, torch.accelerator.current_device_index()))


def _mark(module: nn.Module, mark: Mark) -> None:
    _MARKS[module] = mark
    cls = type(module)
    if cls not in _CLASSES:
        _CLASSES[cls] = type(f"Zero{cls.__name__}", (ZeroModule, cls), {})
    module.__class__ = _CLASSES[cls]
    _wait_for_call(module, mark)


def _wait_for_call(module: nn.Module, mark: Mark) -> None:
    call_instead(module, functools.partial(_first_call, module))
    mark.guard = module.register_forward_pre_hook(_refuse_forward)


def _first_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    _use(module)
    return module(*args, **kwargs)


@torch.compiler.disable  # under somebody's torch.compile zerofx shards first, and then refuses the other compiler
def _use(module: nn.Module) -> None:
    """``module`` is about to be used: shard the outermost marked module that it is in, unless that has been done."""
    if module not in _MARKS:
        return
    root = next((m for m in _MARKS if m is not module and any(module is part for part in m.modules())), None)
    if root is not None:
        _use(root)
    elif any(p.is_meta for p in plain_parameters(module)):
        raise RuntimeError(
            f"{type(module).__name__} is on the meta device: expected `module.to_empty(device=...)` of the whole model "
            "before anything else, the optimizer too. It shards and initialises it."
        )
    else:
        shard_marked(module)


def _refuse_forward(module: nn.Module, args: Any) -> NoReturn:
    raise RuntimeError(
        f"a copy of a {type(module).__name__} that was given to fully_shard: it is not sharded, and its gradients "
        "would not be averaged. Copy a model before fully_shard, or by copy.deepcopy, which shards it."
    )


def plain_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a marked module, without that this counts as a use."""
    return (p for part in module.modules() for p in part._parameters.values() if p is not None)


def _named(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """`plain_parameters` with their names."""
    for prefix, part in module.named_modules():
        for name, p in part._parameters.items():
            if p is not None:
                yield f"{prefix}.{name}" if prefix else name, p


def shard_marked(root: nn.Module, device: Any = None) -> None:
    """Shard and compile ``root`` as the marks in it say. Every rank must do it, as every rank uses the model."""
    marks = {m: mark for m in root.modules() if (mark := _MARKS.get(m)) is not None}
    whole = marks[root]
    layers = {m: mark for m, mark in marks.items() if m is not root}
    _check_alike(root, marks)
    options = dict(whole.options)
    if layers:
        options["groups"] = Grouping(lambda name, module: module in layers)
        if all(mark.reshard_after_forward is False for mark in layers.values()):
            options.setdefault("memory_budget", math.inf)
    elif whole.reshard_after_forward is False:
        options.setdefault("memory_budget", math.inf)
    if any(mark.policy != MixedPrecisionPolicy() for mark in marks.values()):
        named = {name: marks[m] for name, m in root.named_modules() if m in marks}
        options["mixed_precision"] = {name: _Policy.of(mark.policy) for name, mark in named.items()}
    ignored = set().union(*(mark.ignored for mark in marks.values()))
    if left := {name: "leave" for name, p in _named(root) if p in ignored}:
        options["ignored"] = left
    if device is not None:
        options["device"] = device
    for m, mark in marks.items():
        del _MARKS[m]
        call_instead(m, None)
        mark.guard.remove()
    try:
        compile(root, mesh=whole.mesh, **{"stage": 3, **options})
    except BaseException:
        for m, mark in marks.items():
            _MARKS[m] = mark
            _wait_for_call(m, mark)
        raise
    for group in groups_of(root):
        group.family.sync = all(mark.sync for mark in marks.values())


def _check_alike(root: nn.Module, marks: dict[nn.Module, Mark]) -> None:
    """Raise where modules of one model ask for what holds for all of it, and differ."""
    whole, names = marks[root], {m: name for name, m in root.named_modules()}
    for module, mark in marks.items():
        if mark.mesh != whole.mesh:
            raise ValueError(
                f"fully_shard: mesh={mark.mesh!r} for {names[module]!r} and {whole.mesh!r} for the whole "
                f"{type(root).__name__}: expected the same for all modules of a model."
            )


class _Policy(MixedPrecision):
    """A policy with FSDP2's casts: a layer's inputs and outputs are those of the layer, whatever is around it."""

    @staticmethod
    def of(policy: MixedPrecisionPolicy) -> MixedPrecision:
        return _Policy(policy.param_dtype, policy.reduce_dtype, policy.output_dtype, policy.cast_forward_inputs)

    def casts(self, computed: Any, around: Any) -> tuple[torch.dtype | None, torch.dtype | None]:
        return super().casts(self.param_dtype, None)


class ZeroModule(nn.Module):
    """What `fully_shard` adds to a module's class: of FSDP2's methods those that mean something here."""

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: backward keeps gradients on this rank; the first one after reduces them with its own.

        It holds for the whole model. See `zerofx.no_sync`.
        """
        mark = _MARKS.get(self)
        if mark is not None:
            mark.sync = requires_gradient_sync
        for group in {p._group for p in plain_parameters(self) if hasattr(p, "_group")}:
            group.family.sync = requires_gradient_sync

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Nothing: every gather starts ahead of its use as it is."""

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Nothing: every gather starts ahead of its use as it is."""

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Nothing: gradients are reduced, and weights dropped, when a backward ends."""

    def unshard(self, async_op: bool = False) -> NoReturn:
        raise NotImplementedError(
            "unshard(): expected `with zerofx.unsharded(module):`, whole weights inside of the block."
        )

    def reshard(self) -> NoReturn:
        raise NotImplementedError("reshard(): expected nothing in its place; weights are dropped after their last use.")

    def to_empty(self, *, device: Any, recurse: bool = True) -> Any:
        """Of a marked model on the meta device: it is sharded, initialised module by module, and compiled."""
        if self in _MARKS and any(p.is_meta for p in plain_parameters(self)):
            shard_marked(self, device)
            return self
        return super().to_empty(device=device, recurse=recurse)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        _use(self)
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        _use(self)
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        _use(self)
        return super().load_state_dict(*args, **kwargs)
