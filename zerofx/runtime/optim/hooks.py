"""What every optimizer's step is asked before, and tells after, if it has sharded parameters.

PyTorch calls these for each ``torch.optim.Optimizer``, whatever module its parameters are of.
"""

from __future__ import annotations

import functools
import itertools
import warnings
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zerofx._torch import DisableTorchFunction, steps_running
from zerofx.runtime.eager.averages import keeps_gradients
from zerofx.runtime.eager.unshard import NotElementwise
from zerofx.runtime.optim.adamw import AdamW
from zerofx.runtime.optim.beside import warn_of_differing
from zerofx.runtime.optim.by_owner import by_owner, step_by_owner
from zerofx.runtime.optim.loaded import divide
from zerofx.runtime.optim.muon import Muon
from zerofx.runtime.optim.probe import Way, is_probing, probe
from zerofx.runtime.ranks.turns import common
from zerofx.runtime.ranks.watch import check, stepped
from zerofx.runtime.state.group import ShardGroup
from zerofx.runtime.state.parameter import ShardedTensor
from zerofx.runtime.state.parts import say_so_of
from zerofx.runtime.state.state_file import StateFile

_optim = torch.optim
_ELEMENTWISE = {
    *(_optim.Adadelta, _optim.Adagrad, _optim.Adam, _optim.Adamax, _optim.AdamW, _optim.ASGD, _optim.NAdam),
    *(_optim.RAdam, _optim.RMSprop, _optim.Rprop, _optim.SGD, AdamW, Muon),
}
"""Those of which it is known, and `Muon`, which has owners of its own; others are probed. A subclass is another."""

_rounding: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Those that were asked whether their updates are rounded away."""

_ways: weakref.WeakKeyDictionary[torch.optim.Optimizer, Way] = weakref.WeakKeyDictionary()


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """Before any optimizer's step: one that needs whole parameters gets them, or is refused before it changes anything.

    So is a step while gradients are kept back: the optimizer would not see them. And one after a collective that the
    watchdog has ended, or after an activation that could not be read: nobody knows what is in the gradients. A closure
    may run the backward that reduces them, so all this is asked after that.

    Raises:
        OffloadError: on every rank, where activations could not be written or read on one of them.
    """
    if is_probing():
        return args, kwargs
    _refuse_replaced(optimizer)
    say_so_of(optimizer)
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if callable(closure):
        closure = functools.partial(_checked_closure, optimizer, closure)
        args, kwargs = _with_closure(args, kwargs, closure)
    else:
        closure = None
        _check_gradients(optimizer)
    groups = _groups_in(optimizer)
    for shards in groups:
        shards.weights.before_step()
    for file in _files_of(groups):
        file.begin()
    check_home(optimizer)
    _warn_of_rounding(optimizer, groups)
    way = way_of(optimizer, closure=closure is not None)
    if way.kind is None:
        raise NotElementwise(type(optimizer).__name__, way.operation, way.why)
    if way.kind == "slices" and not isinstance(optimizer, (AdamW, Muon)):
        divide(optimizer)
    if way.kind == "owner" and steps_running(optimizer) == 1:
        _check_memory(optimizer, groups)
        steps = step_by_owner(optimizer, draws=way.draws)
        steps.begin(optimizer)
        if closure is not None:
            args, kwargs = _with_closure(args, kwargs, steps.closure(optimizer, closure))
    return args, kwargs


def way_of(optimizer: torch.optim.Optimizer, *, closure: bool = False) -> Way:
    """How ``optimizer`` steps on sharded parameters; the same on every rank. A collective, the first time."""
    if type(optimizer) in _ELEMENTWISE:
        return Way("slices")
    if (known := _ways.get(optimizer)) is not None:
        return known
    groups = [shards for shards in _groups_in(optimizer) if shards.family.stage]
    if not groups:
        return Way("slices")
    everyone = groups[0].sharing.everyone
    way: Way = everyone.all_gathered(probe(optimizer, closure=closure) if everyone.rank == 0 else None)[0]
    if way.kind is not None:  # one that is refused may be another with a closure, or with another group
        _ways[optimizer] = way
    return way


def _check_memory(optimizer: torch.optim.Optimizer, groups: list[ShardGroup]) -> None:
    """Refuse a file for state that owners have whole."""
    for group in groups:
        if group.home.file is not None and "moment" in group.home.file.holds:
            raise TypeError(
                f"{type(optimizer).__name__} over group {group.layout.name!r}, whose optimizer state is in a file "
                "(offload=): each parameter's owner keeps its state whole, in memory. Take an optimizer that works "
                "element by element (SGD, Adam, zerofx.AdamW), or leave offload= out."
            )


def _with_closure(args: Any, kwargs: Any, closure: Any) -> tuple[Any, Any]:
    """The arguments of ``step`` with ``closure`` for the closure among them."""
    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs


def note_replaced(parameter: torch.Tensor, name: str) -> None:
    """``parameter`` is no parameter of its module any more: an optimizer that has it would train nothing."""
    parameter._zerofx_replaced = name  # type: ignore[attr-defined]


def _refuse_replaced(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (name := getattr(parameter, "_zerofx_replaced", None)) is not None:
                raise RuntimeError(
                    f"{type(optimizer).__name__} has {name!r} as the DTensor that it was before zerofx.compile, which "
                    "has put a sharded parameter in its place: it would train nothing. Make the optimizer after "
                    "zerofx.compile, as after fully_shard."
                )


def check_home(optimizer: torch.optim.Optimizer) -> None:
    """Refuse state in the host's memory to an optimizer that would compute with it on the device.

    Raises:
        TypeError: it is not a `zerofx.AdamW`.
    """
    for group in _groups_in(optimizer):
        if group.home.staging is not None and not isinstance(optimizer, AdamW):
            raise TypeError(
                f"{type(optimizer).__name__} over group {group.layout.name!r}, whose optimizer state is in the host's "
                'memory (offload="cpu"): expected a zerofx.AdamW, which steps there. Take that, or leave offload= out.'
            )


def _warn_of_rounding(optimizer: torch.optim.Optimizer, groups: list[ShardGroup]) -> None:
    """Say once that weights of 16 bits without masters lose updates: one of 1/512 of a bfloat16 weight changes nothing.

    Optimizers that are not PyTorch's own may hold masters.
    """
    if optimizer in _rounding or isinstance(optimizer, (AdamW, Muon)) or type(optimizer) not in _ELEMENTWISE:
        return
    _rounding.add(optimizer)
    trained = (shards for shards in groups if shards.layout.requires_grad)  # a frozen base of 16 bits loses nothing
    narrow = next((shards for shards in trained if shards.layout.dtype in (torch.bfloat16, torch.float16)), None)
    if narrow is None or narrow.sharing.everyone.rank:
        return
    warnings.warn(
        f"{type(optimizer).__name__} updates {narrow.layout.name!r} in {narrow.layout.dtype}: most updates are too "
        "small for 16 bits, and get lost. Take zerofx.AdamW, which holds float32 masters; or keep the weights in "
        "float32 and give zerofx.compile a mixed_precision=zerofx.MixedPrecision(torch.bfloat16).",
        UserWarning,
        stacklevel=4,
    )


def _checked_closure(optimizer: torch.optim.Optimizer, closure: Any) -> Any:
    result = closure()
    _check_gradients(optimizer)
    return result


def _check_gradients(optimizer: torch.optim.Optimizer) -> None:
    groups = _groups_in(optimizer)
    for name in _watched(groups):
        check(name)
    for turns in dict.fromkeys(shards.family.turns for shards in groups):
        with common(
            turns, f"{type(optimizer).__name__}.step()"
        ):  # no rank runs a graph any more that adds to gradients
            pass
    for store in dict.fromkeys(shards.family.activation_store for shards in groups):
        if store is not None and store.file is not None:
            store.file.compare("The gradients are not right, on any rank.")
    for shards in groups:
        if shards.has_kept():
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() while zerofx.no_sync keeps gradients back (of "
                f"{shards.gradients.kept_slots()[0].name!r}, for one): run the last backward outside of "
                "zerofx.no_sync, or give them up with zerofx.drop_kept(module)."
            )
    if keeps_gradients(p for group in optimizer.param_groups for p in group["params"]):
        raise RuntimeError(
            f"{type(optimizer).__name__}.step() while zerofx.no_sync keeps gradients of ignored parameters back: run "
            "the last backward outside of zerofx.no_sync, or give them up with zerofx.drop_kept(module)."
        )
    if groups:
        warn_of_differing(optimizer, groups[0].sharing.everyone)


def _note_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """After any optimizer's step: the watchdogs of those who share its parameters hear of it, and the weights do.

    Raises:
        OffloadError: on every rank, where state could not be read or written on one of them.
    """
    if is_probing():
        return
    if (steps := by_owner(optimizer)) is not None and steps_running(optimizer) == 1:
        steps.end(optimizer)
    everything = _groups_in(optimizer)
    groups = [shards for shards in everything if shards.family.stage]
    if files := _files_of(groups):
        _keep_what_is_new(optimizer)
        for file in files:
            file.agree()
    for shards in groups:
        shards.weights.note_write()
    frozen = {f"{shards.family.number} {shards.layout.name}": _frozen(shards) for shards in everything}
    counted = _watched(groups)
    for name in _watched(everything):
        stepped(name, frozen, counted=name in counted)
    for shards in everything:
        shards.steps += 1


def _frozen(shards: ShardGroup) -> tuple[str, ...]:
    """The parameters of a group that require no gradient."""
    with DisableTorchFunction():  # for speed
        members = ((slot.name, shards.members.live(slot)) for slot in shards.layout.slots)
        return tuple(name for name, p in members if p is not None and not p.requires_grad)


def _files_of(groups: list[ShardGroup]) -> list[StateFile]:
    """Where the state of ``groups`` is kept, in the same order on every rank."""
    files = (shards.home.file for shards in groups)
    return [file for file in dict.fromkeys(files) if file is not None]


def _keep_what_is_new(optimizer: torch.optim.Optimizer) -> None:
    """State that an optimizer has made as a copy (SGD's momentum, of a gradient) goes where the group's lives."""
    for state in optimizer.state.values():
        for value in state.values() if isinstance(state, dict) else ():
            if isinstance(value, ShardedTensor):
                value._group.home.keep("moment", value._local)


def _watched(groups: list[ShardGroup]) -> set[str]:
    return set().union(*(sharing.watched for sharing in {shards.sharing for shards in groups}))


def _groups_in(optimizer: torch.optim.Optimizer) -> list[ShardGroup]:
    steps = by_owner(optimizer)
    lists = (group["params"] for group in optimizer.param_groups)
    parameters = itertools.chain.from_iterable((steps and steps.lists) or lists)
    groups = dict.fromkeys(getattr(parameter, "_group", None) for parameter in parameters)
    return [group for group in groups if isinstance(group, ShardGroup)]


register_optimizer_step_pre_hook(_check_step)
register_optimizer_step_post_hook(_note_step)
