"""What an optimizer does with a parameter, found out by a few steps on small stand-ins.

::

    optimizer ──copy, its parameters replaced by small ones──▶  whole, all of them together      ┐
                                                                sharded, on one pretended rank   │ every operation fits?
                                                                whole, half of them at a time    ┘ the same numbers?

========================================  =====================  ==============================================
operations                                 the update of one       way
                                           depends on others
========================================  =====================  ==============================================
element by element, and numbers of a       either                  ``"slices"``: as it is, on flat slices
whole parameter (norms, sums, dots)
others (products, means of rows, views)    no                      ``"owner"``: `zerofx.runtime.optim.by_owner`
others                                     yes                     refused: no rank has all parameters whole
========================================  =====================  ==============================================

Two parameters are in different halves for one bit of their numbers at least, so any that depend on each other are told
apart once. Random numbers are drawn anew for each operation, so that they do not depend on what was drawn before.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from zerofx._torch import TorchDispatchMode, pytree, step_of
from zerofx.model.layout import make_layout
from zerofx.runtime.eager.unshard import NotElementwise
from zerofx.runtime.ranks.sharing import OneGroup
from zerofx.runtime.state.group import Family, ShardGroup
from zerofx.runtime.state.parameter import ShardedParameter, ShardedTensor, shard_parameter

SCALES = (1.0, 1.0, 1e-3, 30.0, 1.0)
"""Of the gradients at each step: thresholds on norms are crossed both ways."""

SMALL = 1024
"""Elements of a parameter that is looked at in its own shape."""

AT_AN_END = 3
"""How many parameters of one group and number of dimensions are looked at: of the first, and of the last."""

Optimizer = torch.optim.Optimizer


@dataclass(frozen=True)
class Way:
    """How an optimizer steps.

    Attributes:
        kind: ``"slices"`` or ``"owner"``; None: neither.
        operation: what the optimizer does that slices cannot give; empty for slices.
        why: why it is refused; empty where it is not.
        draws: whether it draws random numbers.
    """

    kind: Literal["slices", "owner"] | None
    operation: str = ""
    why: str = ""
    draws: bool = False


def probe(optimizer: Optimizer, *, closure: bool) -> Way:
    """How ``optimizer``, of which some parameters are sharded, is to step; nothing of it changes.

    Args:
        closure: whether its step is given one.
    """
    eager = torch.compiler.set_stance("force_eager")  # what the optimizer compiles, it compiles for its own parameters
    with _random_states_kept(), torch.no_grad(), eager, _PerOperationRandom() as drawn:
        _probing.append(optimizer)
        try:
            return replace(_Trial(optimizer, closure).way(), draws=drawn.some)
        finally:
            _probing.pop()


_probing: list[Optimizer] = []


def is_probing() -> bool:
    """Whether a step that runs now is of a copy: an optimizer's step may call that of its parent, which has hooks."""
    return bool(_probing)


class _Trial:
    """Copies of one optimizer step on small parameters.

    Attributes:
        keeps_state: whether copies begin with the state that the optimizer has. It may be of the sizes of its own
            parameters, as it was loaded. But some make state as they are made.
    """

    def __init__(self, optimizer: Optimizer, closure: bool) -> None:
        self._optimizer, self._closure = optimizer, closure
        self._chosen = _chosen(optimizer)
        self.keeps_state = False

    def way(self) -> Way:
        try:
            together = self._run(_whole_ones(self._chosen))
        except Exception as e:  # of the optimizer's own code, which may do anything
            failed = e
            self.keeps_state = True
            try:
                together = self._run(_whole_ones(self._chosen))
            except Exception:
                why = f"and its step on a few small parameters raises {type(failed).__name__} ({failed})"
                return Way(None, "something", why)
        try:
            self._run(_sharded_ones(self._chosen))
            return Way("slices")
        except NotElementwise as e:
            operation = e.operation
        except Exception as e:
            operation = f"what raises {type(e).__name__} ({e})"
        if self._depend(together):
            return Way(None, operation, "while the update of one parameter depends on others")
        return Way("owner", operation)

    def _depend(self, together: dict[Any, list[torch.Tensor]]) -> bool:
        """Whether half of the parameters are updated otherwise than ``together`` with the others."""
        chosen = self._chosen
        bits = range((len(chosen) - 1).bit_length())
        halves = [[p for i, p in enumerate(chosen) if i >> bit & 1 == side] for bit in bits for side in (0, 1)]
        for half in [*halves, chosen[:1]]:  # one alone, as a rank may have it: other groups are empty
            try:
                apart = self._run(_whole_ones(chosen, half))
            except Exception:  # it does not work without the others
                return True
            if not _agree(together, apart):
                return True
        return False

    def _run(self, small: dict[Any, nn.Parameter]) -> dict[Any, list[torch.Tensor]]:
        return _run(self._optimizer, small, self._closure, keeps_state=self.keeps_state)


def _chosen(optimizer: Optimizer) -> list[Any]:
    """Some parameters of each group and number of dimensions."""
    found: list[Any] = []
    for group in optimizer.param_groups:
        kinds: dict[int, list[Any]] = {}
        for p in group["params"]:
            if p.requires_grad:
                kinds.setdefault(p.dim(), []).append(p)
        for of_a_kind in kinds.values():
            found += of_a_kind if len(of_a_kind) <= 2 * AT_AN_END else of_a_kind[:AT_AN_END] + of_a_kind[-AT_AN_END:]
    return found


def _small(shape: torch.Size) -> tuple[int, ...]:
    """A shape of as many dimensions: even sizes stay even, and what is small stays as it is."""
    if shape.numel() <= SMALL:
        return tuple(shape)
    return tuple(size if size <= 8 else 8 if size % 2 == 0 else 7 for size in shape)


def _values(i: int, p: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(i)
    return torch.randn(_small(p.shape), generator=generator, dtype=torch.float32).to(p.device, p.dtype)


def _whole_ones(chosen: list[Any], of: list[Any] | None = None) -> dict[Any, nn.Parameter]:
    return {p: nn.Parameter(_values(i, p)) for i, p in enumerate(chosen) if of is None or any(p is x for x in of)}


def _sharded_ones(chosen: list[Any]) -> dict[Any, nn.Parameter]:
    """The same, sharded over one rank that is not there: what does not fit slices is refused as it would be."""
    found = _whole_ones(chosen)
    for i, (p, small) in enumerate(found.items()):
        if isinstance(p, ShardedParameter):
            layout = make_layout(f"stand-in {i}", [(p._slot.name, small.shape)], small.dtype, 1)
            group = ShardGroup(layout, OneGroup.pretended(1), small.device, Family(stage=3))
            shard_parameter(small, group, layout.slots[0])
            small._stand_in_of = group  # type: ignore[attr-defined]  # groups are held by what holds their module
    return found


def _run(
    optimizer: Optimizer, small: dict[Any, nn.Parameter], closure: bool, *, keeps_state: bool
) -> dict[Any, list[torch.Tensor]]:
    """What a few steps of a copy of ``optimizer`` on ``small`` make of these: by parameter weights and state."""
    stand_in = _copied(optimizer, small, {id(p): x for p, x in small.items()}, keeps_state)
    starts = {p: _whole(x).clone() for p, x in small.items()}
    _seed(0)
    random.seed(0)
    step = step_of(stand_in)  # not our own hooks

    def gradients(scale: float, number: int) -> torch.Tensor:
        """Of one direction, with noise: what estimates a distance (Defazio and Mishchenko 2023) is to see one."""
        for p, x in small.items():
            generator = torch.Generator().manual_seed(_number(optimizer, p))
            direction = torch.randn(x.shape, generator=generator, dtype=torch.float32)
            generator.manual_seed(1000 * number + _number(optimizer, p))
            noise = 0.1 * torch.randn(x.shape, generator=generator, dtype=torch.float32)
            x.grad = ((direction + noise) * scale).to(x.device, x.dtype)
        return torch.tensor(1.0)

    for number, scale in enumerate(SCALES):
        gradients(scale, number)
        step(stand_in, *([functools.partial(gradients, scale, number)] if closure else []))
    numbers = {id(x): _numbers_of(group) for group in stand_in.param_groups for x in group["params"]}
    return {
        p: [_whole(x) - starts[p], *_tensors_of(stand_in.state.get(x, {})), *numbers[id(x)]] for p, x in small.items()
    }


def _tensors_of(state: Any) -> list[torch.Tensor]:
    """What it is made of, as tensors; numbers are some."""
    leaves = [x for x in pytree.tree_leaves(state) if isinstance(x, (torch.Tensor, float, int))]
    return [torch.as_tensor(x) for x in leaves if not isinstance(x, ShardedTensor)]


def _numbers_of(group: dict[str, Any]) -> list[torch.Tensor]:
    """What an optimizer keeps of all parameters of a group together."""
    return _tensors_of({name: value for name, value in group.items() if name != "params"})


def _number(optimizer: Optimizer, p: Any) -> int:
    """The number of ``p`` among all parameters of ``optimizer``."""
    every = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return next(i for i, x in enumerate(every) if x is p)


def _copied(optimizer: Optimizer, parameters: dict[Any, Any], memo: dict[int, Any], keeps_state: bool) -> Optimizer:
    """A copy of ``optimizer`` whose parameters are ``parameters[p]``, or left out; hooks are not copied.

    Modules are shared, and what cannot be copied is.
    """
    new = object.__new__(type(optimizer))
    memo[id(optimizer)] = new
    groups = []
    for group in optimizer.param_groups:
        params = [parameters[p] for p in group["params"] if p in parameters]
        memo[id(group["params"])] = params
        memo[id(group)] = made = {}
        made.update({k: params if k == "params" else _copy_of(v, memo) for k, v in group.items()})
        groups.append(made)
    memo[id(optimizer.param_groups)] = groups
    state = memo[id(optimizer.state)] = collections.defaultdict(dict)
    for key, value in optimizer.state.items() if keeps_state else ():
        if not isinstance(key, torch.Tensor):
            state[key] = _copy_of(value, memo)
    for p, x in parameters.items() if keeps_state else ():
        if p in optimizer.state:
            state[x] = pytree.tree_map(functools.partial(_small_state, memo, p, x), optimizer.state[p])
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            new.__dict__[name] = memo[id(value)] if id(value) in memo else _copied(value, parameters, memo, keeps_state)
        elif name.endswith("_hooks"):
            new.__dict__[name] = collections.OrderedDict()
        elif name != "step":  # schedulers put one of their own there
            new.__dict__[name] = _copy_of(value, memo)
    return new


def _small_state(memo: dict[int, Any], p: Any, small: Any, value: Any) -> Any:
    """State that was there before the first step, of the size of the stand-in: one value for all elements."""
    if isinstance(value, torch.Tensor) and value.shape == p.shape and value.dim():
        local = value._local if isinstance(value, ShardedTensor) else value
        one = local.reshape(-1)[0] if local.numel() else local.new_zeros(())
        like = small._local if isinstance(small, ShardedTensor) else small
        made = torch.zeros_like(like, dtype=value.dtype) + one
        return small.like(made) if isinstance(small, ShardedTensor) else made.detach()
    return _copy_of(value, memo)


def _copy_of(value: Any, memo: dict[int, Any]) -> Any:
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, nn.Module):
        return value
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # process groups, generators, what refuses it: it is shared
        return value


def _whole(x: Any) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, ShardedTensor) else x.detach()


def _agree(together: dict[Any, list[torch.Tensor]], apart: dict[Any, list[torch.Tensor]]) -> bool:
    """Whether both give ``apart``'s parameters the same updates and state, but for rounding."""
    for p, alone in apart.items():
        if len(alone) != len(together[p]):
            return False
        for a, b in zip(alone, together[p], strict=True):
            if a.shape != b.shape or (a.numel() and _largest(a, b) > 1e-3 * _largest(b)):
                return False
    return True


def _largest(x: torch.Tensor, less: torch.Tensor | None = None) -> float:
    wide = x.to(torch.float64) if less is None else x.to(torch.float64) - less.to(torch.float64)
    return float(wide.abs().max())


class _PerOperationRandom(TorchDispatchMode):
    """What an operation draws follows from its name and sizes alone. ``some``: it has drawn some."""

    some = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and (kwargs or {}).get("generator") is None:
            self.some = True
            sizes = [tuple(x.shape) for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
            _seed(sum(map(ord, f"{func}{sizes}")))
        return func(*args, **(kwargs or {}))


def _seed(seed: int) -> None:
    """As ``torch.manual_seed``, which keeps a list of its calls for devices that are not in use yet."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


@contextlib.contextmanager
def _random_states_kept() -> Iterator[None]:
    before = random.getstate()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(before)
