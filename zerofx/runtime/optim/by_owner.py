"""An optimizer's own, unchanged step on whole parameters, each on one rank (`zerofx.runtime.optim.owners`).

::

    between steps       param_groups: all parameters, sharded     state: of owned ones alone, whole
    in a step           param_groups: owned ones, whole           the same
                        ▲ gradients and weights travel to owners  ▼ new weights travel to the slices
    to save or load     param_groups: all parameters, sharded     state: of all parameters, sharded

So the update of a matrix is computed once, and its state is kept once: 1/M of both on each rank. An owner keeps the
whole weights as well, 1/M of the model, so that only gradients and new weights travel. It is sound where the update of
a parameter depends on no other parameter, which `zerofx.runtime.optim.probe` finds out.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerofx._torch import DisableTorchFunction, pytree
from zerofx.runtime.optim.loaded import as_parameter
from zerofx.runtime.optim.owners import Owners, by_ranks
from zerofx.runtime.ranks.sharing import Sharing
from zerofx.runtime.state.parameter import ShardedParameter, ShardedTensor, count_write

_STEPS: weakref.WeakKeyDictionary[torch.optim.Optimizer, ByOwner] = weakref.WeakKeyDictionary()


def by_owner(optimizer: torch.optim.Optimizer) -> ByOwner | None:
    """How ``optimizer`` steps by owners, if it does."""
    return _STEPS.get(optimizer)


def step_by_owner(optimizer: torch.optim.Optimizer, *, draws: bool = False) -> ByOwner:
    """From now on ``optimizer`` steps by owners. ``draws``: random numbers."""
    if optimizer not in _STEPS:
        _STEPS[optimizer] = ByOwner(optimizer, draws)
    return _STEPS[optimizer]


def wholes_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The whole weights that this rank keeps as their owner."""
    steps = _STEPS.get(optimizer)
    return [] if steps is None else list(steps.wholes.values())


def state_in_shards(optimizer: torch.optim.Optimizer) -> None:
    """The state of ``optimizer`` is sharded as its parameters are, until it steps. With owners a collective."""
    if (steps := _STEPS.get(optimizer)) is not None:
        steps.shard_state(optimizer)


class ByOwner:
    """What is kept from step to step of one optimizer.

    Attributes:
        wholes: of parameters that this rank owns, the whole ones that the optimizer sees.
        lists: in a step, all parameters of each group of the optimizer; empty outside of one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, draws: bool) -> None:
        self._random = _Random() if draws else None
        self._owners: Owners | None = None
        self.wholes: dict[ShardedParameter, nn.Parameter] = {}
        self._versions: dict[Any, int] = {}
        self._sharded_since_step = False
        self.lists: list[list[Any]] = []
        if hasattr(optimizer, "_optimizer_state_dict_pre_hooks"):  # some never call torch.optim.Optimizer's __init__
            optimizer.register_state_dict_pre_hook(state_in_shards)

    @torch.no_grad()
    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Parameters and gradients of ``optimizer`` are whole, on their owners, until `end`. A collective."""
        self.end_failed(optimizer)
        parameters = [p for p in self._parameters(optimizer) if p.requires_grad]
        if self._owners is None or any(p not in self._owners for p in parameters):
            self.shard_state(optimizer)
            self._owners, self.wholes, self._versions = Owners(parameters), {}, {}
        self._own_state(optimizer, parameters)
        self._sharded_since_step = False
        mine = [p for p in parameters if self._owners.owns(p)]
        for p in mine:
            if p not in self.wholes:
                self.wholes[p] = nn.Parameter(torch.empty(0, dtype=p.dtype, device=p._group.device), p.requires_grad)
        self._gather_weights(parameters)
        self._gather_gradients(parameters)
        self.lists = [group["params"][:] for group in optimizer.param_groups]
        self._show_wholes(optimizer)
        for p in mine:
            if p in optimizer.state:
                optimizer.state[self.wholes[p]] = optimizer.state.pop(p)
        if self._random is not None and parameters:
            self._random.begin(parameters[0]._group.sharing)

    @torch.no_grad()
    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """The new weights are in the slices again, and ``optimizer`` has all its parameters. A collective."""
        self._put_back(optimizer)
        self._scatter_weights([p for p in self._parameters(optimizer) if p.requires_grad])
        for whole in self.wholes.values():
            whole.grad = None

    def end_failed(self, optimizer: torch.optim.Optimizer) -> None:
        """A step that raised is over: ``optimizer`` has all its parameters; weights are as they were."""
        if self.lists:
            self._put_back(optimizer)
            self._versions = {}

    def closure(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """``closure`` as the step calls it: the model has the weights that it made, and it has the gradients."""

        @functools.wraps(closure)
        def wrapped() -> Any:
            parameters = [p for params in self.lists for p in params if _is_sharded(p) and p.requires_grad]
            with torch.no_grad():
                self._scatter_weights(parameters)
                for group in {p._group: None for p in parameters}:
                    group.weights.note_write()
            self._show_shards(optimizer)  # zero_grad() in it is of the model's parameters
            result = closure()
            self._show_wholes(optimizer)
            with torch.no_grad():
                self._gather_gradients(parameters)
            return result

        return wrapped

    @torch.no_grad()
    def shard_state(self, optimizer: torch.optim.Optimizer) -> None:
        """`state_in_shards`: what is shaped as its parameter is sharded; all else every rank has as the owner does."""
        self.end_failed(optimizer)
        if self._owners is None or self._sharded_since_step:  # zerofx.save asks, and so does state_dict() in it
            return
        self._sharded_since_step = True
        for members in by_ranks(p for p in self._parameters(optimizer) if p in self._owners):
            states = {i: optimizer.state[p] for i, p in enumerate(members) if p in optimizer.state}
            owned = {i: s for i, s in states.items() if self._owners.owns(members[i]) and not _in_shards(s)}
            told = {i: _described(state, members[i]) for i, state in owned.items()}
            ranks = members[0]._group.sharing.optimizer
            everywhere = {i: state for part in ranks.all_gathered(told) for i, state in part.items()}
            for i, p in enumerate(members):
                if i in everywhere:
                    optimizer.state[p] = self._sharded(everywhere[i], owned.get(i), p)

    def _sharded(self, described: Any, state: Any, p: ShardedTensor) -> Any:
        """``described`` with a sharded tensor for each `_Slice`; ``state`` is what the owner has."""
        assert self._owners is not None
        leaves, tree = pytree.tree_flatten(described)
        mine = pytree.tree_leaves(state) if state is not None else [None] * len(leaves)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, _Slice):
                like = p.like(p._local.to(leaf.dtype))
                whole: Any = [] if state is None else [mine[i]]
                [part] = self._owners.scatter(whole, [like])
                leaves[i] = like.like(part)
            elif isinstance(leaf, torch.Tensor):
                leaves[i] = leaf if state is None else mine[i]
        return pytree.tree_unflatten(leaves, tree)

    def _own_state(self, optimizer: torch.optim.Optimizer, parameters: list[ShardedParameter]) -> None:
        """State that is sharded, as it was loaded, is whole on its parameter's owner, and nowhere else."""
        assert self._owners is not None
        for p in parameters:
            if p not in optimizer.state:
                continue
            state = optimizer.state[p]
            leaves, tree = pytree.tree_flatten(state)
            for i, leaf in enumerate(leaves):
                if isinstance(leaf, ShardedTensor):
                    leaves[i] = next(iter(self._owners.gather([as_parameter(p, leaf)])), None)
            if self._owners.owns(p):
                optimizer.state[p] = pytree.tree_unflatten(leaves, tree)
            else:
                del optimizer.state[p]

    def _gather_weights(self, parameters: list[ShardedParameter]) -> None:
        """Owners have them from the last step, unless some rank has written to its slice since."""
        assert self._owners is not None
        written: list[Any] = []
        for members in by_ranks(parameters):
            flags = torch.tensor([self._versions.get(p) != p._local._version for p in members], dtype=torch.uint8)
            there = flags.to(members[0]._group.device)
            members[0]._group.sharing.optimizer.sum_(there, dist.ReduceOp.MAX)
            written += [p for p, flag in zip(members, there.tolist(), strict=True) if flag]
        mine = [p for p in written if self._owners.owns(p)]
        for p, whole in zip(mine, self._owners.gather([_plain(p) for p in written]), strict=True):
            self.wholes[p].data = whole

    def _gather_gradients(self, parameters: list[ShardedParameter]) -> None:
        assert self._owners is not None
        with DisableTorchFunction():
            gradients = {p: p.grad for p in parameters}
        trained = [p for p in parameters if gradients[p] is not None]
        wholes = iter(self._owners.gather([gradients[p] for p in trained]))  # type: ignore[misc]
        for p in parameters:
            if self._owners.owns(p):
                self.wholes[p].grad = next(wholes) if gradients[p] is not None else None

    def _scatter_weights(self, parameters: list[ShardedParameter]) -> None:
        assert self._owners is not None
        wholes = [self.wholes[p].detach() for p in parameters if self._owners.owns(p)]
        for p, part in zip(parameters, self._owners.scatter(wholes, [_plain(p) for p in parameters]), strict=True):
            p._local.copy_(part)
            count_write(p)
        self._versions = {p: p._local._version for p in parameters}

    def _show_wholes(self, optimizer: torch.optim.Optimizer) -> None:
        for group, params in zip(optimizer.param_groups, self.lists, strict=True):
            group["params"][:] = [self.wholes.get(p, p) for p in params if p in self.wholes or not _is_sharded(p)]

    def _show_shards(self, optimizer: torch.optim.Optimizer) -> None:
        for group, params in zip(optimizer.param_groups, self.lists, strict=True):
            group["params"][:] = params

    def _put_back(self, optimizer: torch.optim.Optimizer) -> None:
        self._show_shards(optimizer)
        self.lists = []
        if self._random is not None:
            self._random.end()
        for p, whole in self.wholes.items():
            if whole in optimizer.state:
                optimizer.state[p] = optimizer.state.pop(whole)

    def _parameters(self, optimizer: torch.optim.Optimizer) -> list[ShardedParameter]:
        return [p for group in optimizer.param_groups for p in group["params"] if _is_sharded(p)]


class _Random:
    """Each owner draws numbers of its own in a step; after it, every rank has drawn one."""

    def __init__(self) -> None:
        self._kept = contextlib.ExitStack()

    def begin(self, sharing: Sharing) -> None:
        seed = sharing.everyone.all_gathered(int(torch.randint(2**31, ())))[0]
        self._kept.enter_context(torch.random.fork_rng())
        torch.manual_seed(seed + sharing.optimizer.rank)  # replicas draw the same

    def end(self) -> None:
        self._kept.close()


class _Slice:
    """In a description of state: a tensor that is shaped as its parameter."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


def _described(state: Any, p: ShardedTensor) -> Any:
    def describe(x: Any) -> Any:
        whole = isinstance(x, torch.Tensor) and x.shape == torch.Size(p._slot.shape) and x.dim() > 0
        return _Slice(x.dtype) if whole else x.detach().cpu() if isinstance(x, torch.Tensor) else x

    return pytree.tree_map(describe, state)


def _in_shards(state: Any) -> bool:
    return any(isinstance(x, ShardedTensor) for x in pytree.tree_leaves(state))


def _is_sharded(p: Any) -> bool:
    return isinstance(p, ShardedParameter)


def _plain(p: ShardedTensor) -> Any:
    return p.like(p._local)
