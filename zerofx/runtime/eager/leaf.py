"""Leaf modules: gathered whole when they are entered, for modules whose code chooses layers by data.

A mixture of experts may run ``if rows.numel() == 0: continue`` on one rank and the expert on another. Were each expert
gathered where it is used, one rank would wait for the other for ever. A leaf module (DeepSpeed's word; FSDP's would be
a wrapped module) runs as it reads, outside of any graph, and its collectives depend on nothing that happens inside::

    forward    gather its groups          run, on plain whole weights           let the weights go
    backward   gather them again          autograd                              reduce its groups, let the weights go
               └─ `_Leave`, on outputs    └─ saved weights are looked up        └─ `_Enter`, on weights

Two autograd functions are around the module, tied together by a token, so that the engine runs both on every rank,
in this order, whatever is between them on that rank::

    ShardedParameters ──▶ _Enter ──▶ weights ──▶ the module ──▶ outputs ──▶ _Leave ──▶ outputs
                             └──────────────── token ─────────────────────────▲
                                                   inputs ────────────────────┘

``_Leave`` takes the inputs, too, so that what is before the module has a backward on every rank. A rank that did
not use a parameter counts as zeros; a parameter that no rank used has no gradient, as without zerofx.

What stays gathered from forward to backward: nothing in stage 3, unless ``memory_budget`` is infinite, or hooks of
somebody else's decide about saved tensors: `torch.utils.checkpoint` runs the module anew, weights and all. In stages 1
and 2 weights are views of the replicas, in stage 0 the parameters themselves.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import nn

from zerofx._torch import (
    DisableTorchFunction,
    as_dtensor,
    end_of_backward,
    is_dtensor,
    put_tensor,
    pytree,
    saved_tensors_are_hooked,
    with_own_code,
)
from zerofx.model.layout import Slot
from zerofx.model.rules import Rule, is_rule, matched
from zerofx.runtime.eager.ondemand import reduce_rest
from zerofx.runtime.eager.whole import Place, places_of
from zerofx.runtime.state.group import ShardGroup
from zerofx.runtime.state.parameter import ReplicatedParameter, ShardedParameter, ShardedTensor
from zerofx.runtime.state.plain import share_own

_OURS = (ShardedParameter, ReplicatedParameter)


def leaf_names(module: nn.Module, rules: Sequence[Rule] | None) -> list[str]:
    """The names of the leaf modules: of what ``rules`` match, that which is in nothing else they match.

    Args:
        rules: module classes, and patterns of names as `fnmatch` reads them (``*`` matches dots too).

    Raises:
        TypeError: a rule is neither.
        ValueError: one matches nothing, or a module that cannot be a leaf.
    """
    names: list[str] = []
    modules = dict(module.named_modules())
    for rule in rules or ():
        names += matched("leaf_modules", rule, module, modules.items())
    chosen = [name for name in modules if name in set(names)]
    outermost = [name for name in chosen if not any(_is_in(name, other) for other in chosen)]
    for name in outermost:
        if "forward" in vars(modules[name]):
            raise ValueError(
                f"leaf_modules: {name!r} has a forward of its own, set on the object, which zerofx would not get to "
                "see. Give its class that forward, or make the module around it a leaf."
            )
    return outermost


def check_rules(rules: Any) -> None:
    """Refuse what is not a list of module classes and patterns."""
    if rules is None:
        return
    known = isinstance(rules, (list, tuple)) and len(rules) > 0
    if not known or not all(map(is_rule, rules)):
        raise TypeError(
            f"leaf_modules={rules!r}: expected a list of nn.Module classes and patterns of module names, such as "
            '[MoeBlock, "layers.*.mlp"], or None.'
        )


def _is_in(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))


def make_leaves(module: nn.Module, names: Sequence[str], keep: bool) -> None:
    """Have the modules ``names``, whose parameters are sharded, gather them when they are entered.

    Their classes become such that do; copies and pickles are of the old ones. So do those of the modules around them,
    to have code of their own: a leaf module ends Dynamo's frame, the frames around it are compiled by themselves, and
    of one code Dynamo keeps eight versions, which are eight layers.

    Args:
        keep: weights stay gathered from forward to backward.
    """
    around: dict[str, None] = {}
    for name in names:
        leaf, parent = module.get_submodule(name), name
        groups = list(dict.fromkeys(p._group for p in leaf.parameters() if isinstance(p, _OURS)))
        _give_forward(leaf, _leaf_forward(type(leaf), name, keep))
        type(leaf)._zerofx_groups = groups  # type: ignore[attr-defined]
        while parent := parent.rpartition(".")[0]:
            around[parent] = None
    for name in around:
        holder = module.get_submodule(name)
        forward: Any = type(holder).forward
        if isinstance(forward, FunctionType) and "forward" not in vars(holder):
            _give_forward(holder, with_own_code(forward))


def groups_of_leaves(module: nn.Module) -> list[ShardGroup]:
    """The groups of the leaf modules in ``module``; while one runs, its parameters are plain ones and do not say."""
    return [group for m in module.modules() for group in getattr(type(m), "_zerofx_groups", ())]


def _leaf_forward(plain: type[nn.Module], name: str, keep: bool) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _run(self, name or plain.__name__, keep, plain.forward.__get__(self), args, kwargs)

    return torch.compiler.disable(forward, reason=f"{name or plain.__name__!r} is a leaf module of zerofx")


def _give_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Make ``module``'s class one that differs in ``forward`` alone."""
    plain = type(module)

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        old = plain.__new__(plain)
        old.__dict__.update(self.__dict__)
        state: Any = old.__reduce_ex__(max(2, protocol))
        return object.__new__, (plain,), *state[2:]

    names = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    module.__class__ = type(plain.__name__, (plain,), {**names, "forward": forward, "__reduce_ex__": reduce_ex})


def _run(module: nn.Module, name: str, keep: bool, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """One call of a leaf module. Where its weights are whole already (`zerofx.unsharded`) it just runs."""
    places = {p: at for p, at in places_of(module).items() if isinstance(p, _OURS)}
    if not places:
        return forward(*args, **kwargs)
    call = _Call(name, list(places), keep)
    for group in call.groups:
        group.use(trained=torch.is_grad_enabled())
    call.gather()
    inputs = [x for x in _tensors((args, kwargs)) if x.requires_grad and not isinstance(x, ShardedTensor)]
    trained = [p for p in places if p.requires_grad]
    whole = {p: call.whole(p) for p in places}
    token = None
    if torch.is_grad_enabled() and (inputs or trained):
        anchor = torch.zeros((), requires_grad=True)
        token, *weights = _Enter.apply(call, trained, anchor, *trained)
        whole.update(zip(trained, weights, strict=True))
    whole = {p: w if p._dtensor is None else as_dtensor(w, p._dtensor) for p, w in whole.items()}
    with call.checking_writes(), call.saving(token is not None), _in_place(whole, places):
        outputs = forward(*args, **kwargs)
    if token is None or not keep:
        call.let_go()
    return outputs if token is None else _leave(call, token, outputs, inputs)


@contextlib.contextmanager
def _in_place(whole: dict[Any, torch.Tensor], places: dict[Any, list[Place]]) -> Iterator[None]:
    """The whole weights stand where the parameters stood."""
    for p, at in places.items():
        share_own(p, whole[p])
        for holder, attribute in at:
            put_tensor(holder, attribute, whole[p])
    try:
        yield
    finally:
        for p, at in places.items():
            for holder, attribute in at:
                put_tensor(holder, attribute, p)


class _Call:
    """One call of a leaf module: what is whole for it, and from when to when.

    Attributes:
        name: the module's.
        groups: those that its parameters are in, the same on every rank.
        buffers: group -> its whole flat buffer, while it is gathered. Empty in stage 0.
        gathers_again: whether backward does.
        found: gradients that came another way than through autograd's graph; see `collect`.
    """

    def __init__(self, name: str, parameters: Sequence[Any], keep: bool) -> None:
        self.name = name
        self.groups: list[ShardGroup] = list(dict.fromkeys(p._group for p in parameters))
        self.stage, self.keep = self.groups[0].family.stage, keep
        self.buffers: dict[ShardGroup, torch.Tensor] = {}
        self.gathers_again = self.stage in (1, 2)  # which takes no time: the replicas are there
        self.found: dict[tuple[ShardGroup, Slot], torch.Tensor] = {}
        self._written = self._shards_written()

    def gather(self) -> None:
        """All groups, whole, in one collective each; nothing where they are."""
        if self.stage == 0 or self.buffers:
            return
        started = {group: group.gathered.start() for group in self.groups}
        self.buffers = {g: torch.ops._c10d_functional.wait_tensor(buffer) for g, buffer in started.items()}

    def let_go(self) -> None:
        """What autograd has not saved is free."""
        self.buffers = {}

    def whole(self, parameter: Any) -> torch.Tensor:
        """The whole weight, plain, in what the model computes in."""
        if self.stage:
            return parameter._group.layout.view(self.buffers[parameter._group], parameter._slot)
        with DisableTorchFunction():
            return parameter.detach().to(parameter._compute_dtype or parameter.dtype)

    @contextlib.contextmanager
    def checking_writes(self) -> Iterator[None]:
        """Refuse a forward that writes to a gathered weight: it would be lost."""
        before = [buffer._version for buffer in self.buffers.values()]
        yield
        if [buffer._version for buffer in self.buffers.values()] != before:
            raise RuntimeError(
                f"the leaf module {self.name!r} writes to one of its parameters in forward. What it wrote to is a "
                "gathered copy: keep what forward changes in a buffer, or write between steps in zerofx.unsharded."
            )

    def saving(self, recording: bool) -> contextlib.AbstractContextManager[Any]:
        """A context in which autograd saves where a weight lies, not the weight; see the end of the file's law."""
        if not recording or self.stage != 3 or self.keep or saved_tensors_are_hooked():
            return contextlib.nullcontext()
        self.gathers_again = True
        owners = {buffer.untyped_storage().data_ptr(): group for group, buffer in self.buffers.items()}

        def pack(x: torch.Tensor) -> tuple[Any, ...]:
            there = x.layout == torch.strided and not is_dtensor(x)  # of a DTensor autograd saves the parts as well
            group = owners.get(x.untyped_storage().data_ptr()) if there else None
            if group is None or x.dtype != self.buffers[group].dtype:
                return x, x._version
            return group, x.size(), x.stride(), x.storage_offset()

        def unpack(saved: tuple[Any, ...]) -> torch.Tensor:
            if isinstance(saved[0], torch.Tensor):
                return self._unwritten(*saved)
            self.gather()
            group, *where = saved
            return self.buffers[group].as_strided(*where)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def enter_backward(self) -> None:
        """The weights that forward had are there again."""
        if self._shards_written() != self._written:
            self._refuse("a parameter")
        if self.gathers_again:
            self.gather()
        if self.buffers or self.stage == 0:
            for group in self.groups:
                group.leaf = self
        end_of_backward(self.leave_backward)  # where nobody asked for gradients of weights `reduce` is not called

    def collect(self, group: ShardGroup, slot: Slot, gradient: torch.Tensor) -> None:
        """A gradient of code that is run anew in backward: a reentrant checkpoint's, inside of the module."""
        before = self.found.get((group, slot))
        self.found[group, slot] = gradient if before is None else before + gradient

    def reduce(self, parameters: Sequence[Any], gradients: Sequence[torch.Tensor | None]) -> None:
        """Average the gradients of whole ``parameters`` over the ranks: one collective for each group."""
        for p, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                self.collect(p._group, p._slot, gradient)
        brought = {p._group: {} for p in parameters}  # type: dict[ShardGroup, dict[Slot, torch.Tensor]]
        for (group, slot), gradient in self.found.items():
            brought[group][slot] = gradient
        self.leave_backward()
        if self.groups[0].family.sync:
            reduce_rest(self.groups[0].family)
        for group in self.groups:
            if group in brought:
                group.reduce(brought[group])

    def leave_backward(self) -> None:
        """The weights are free again."""
        self.let_go()
        self.found = {}
        for group in self.groups:
            if group.leaf is self:
                group.leaf = None

    def _shards_written(self) -> list[int]:
        return [group.shard._version for group in self.groups] if self.stage else []

    def _unwritten(self, x: torch.Tensor, version: int) -> torch.Tensor:
        """``x``, which autograd saved through hooks, and so does not check itself."""
        return x if x._version == version else self._refuse("a tensor that is needed for its gradient")

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{what} of the leaf module {self.name!r}, between forward and backward. Run backward before the "
            "optimizer's step, and update weights by hand only between steps."
        )


class _Enter(torch.autograd.Function):
    """The trained weights of a call, whole, and its token; in backward their gradients are reduced.

    It takes the parameters so that the engine visits them, as it would without zerofx.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, trained: list[Any], anchor: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.trained = call, trained
        return torch.zeros_like(anchor), *map(call.whole, trained)

    @staticmethod
    def backward(ctx: Any, _: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"double backward (create_graph=True) through the leaf module {ctx.call.name!r}: gradients of "
                "gradients are not supported for sharded parameters."
            )
        ctx.call.reduce(ctx.trained, gradients)
        return None, None, None, *[None] * len(ctx.trained)


class _Leave(torch.autograd.Function):
    """What a call returns, copied, as the caller may write to it; in backward the weights are gathered again.

    The token is saved so that a checkpoint around the module has to come this far when it runs it again, on every rank.

    What stands in front runs its backward on every rank, with nothing to add. A sharded weight there gets zeros of its
    own accord; a whole one of stage 0 would get no gradient and have none averaged, so there zeros are made here.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, token: torch.Tensor, outputs: int, *tensors: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        inputs = tensors[outputs:]
        ctx.call, ctx.nothing = call, [x.new_zeros(()).expand(x.shape) if call.stage == 0 else None for x in inputs]
        ctx.save_for_backward(token)
        return tuple(x.clone() for x in tensors[:outputs])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (_,) = ctx.saved_tensors
        ctx.call.enter_backward()
        return None, None, None, *gradients, *ctx.nothing  # the engine runs what is after a None, too


def _leave(call: _Call, token: torch.Tensor, outputs: Any, inputs: list[torch.Tensor]) -> Any:
    """``outputs``, every tensor in them that can have a gradient through `_Leave`."""
    found = {id(x): x for x in _tensors(outputs)}
    if not found:
        opaque = [x for x in pytree.tree_leaves(outputs) if not isinstance(x, (torch.Tensor, int, float, str))]
        if opaque:
            raise TypeError(
                f"the leaf module {call.name!r} returns a {type(opaque[0]).__name__}, in which zerofx finds no tensor: "
                "return tensors, or tuples, lists, dictionaries or dataclasses of them."
            )
        return outputs
    left = dict(zip(found, _Leave.apply(call, token, len(found), *found.values(), *inputs), strict=True))
    return _map(lambda x: left.get(id(x), x), outputs)


def _tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors in ``tree`` that can have a gradient."""
    found: list[torch.Tensor] = []
    _map(lambda x: found.append(x) if x.is_floating_point() or x.is_complex() else None, tree)
    return found


def _map(fn: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """``tree``, with ``fn`` on its tensors: containers that pytree knows, and dataclasses."""

    def visit(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return fn(x)
        if not dataclasses.is_dataclass(x) or isinstance(x, type):
            return x
        new = copy.copy(x)
        for field in dataclasses.fields(x):
            object.__setattr__(new, field.name, _map(fn, getattr(x, field.name)))
        return new

    return pytree.tree_map(visit, tree)
