"""What of a checkpoint goes where in a module and its optimizer.

Names must match, and shapes; dtypes need not. Where the precision of weights changes, the most precise number there is
counts, the *master*, wherever a checkpoint keeps it:

=========================  ================================  ==========================================
in the checkpoint          loaded into a float32 weight      loaded into a low-precision weight whose
                                                             optimizer is a `zerofx.AdamW`
=========================  ================================  ==========================================
float32 weight             the weight                        weight rounded; the master is the weight
bfloat16 weight, master    the master                        both
bfloat16 weight,           weight and remainder, joined      both (or joined, as the optimizer has it)
remainder
bfloat16 weight alone      the weight                        the weight; the master is its value
=========================  ================================  ==========================================

Optimizer state is matched by parameter. Whether ``torch.optim.AdamW`` or `zerofx.AdamW` wrote it makes no difference;
that an Adam's is loaded into an SGD is an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from zerofx.checkpoint.nested import mapped, named_leaves
from zerofx.checkpoint.ranks import CheckpointError
from zerofx.checkpoint.sources import Entry, Source
from zerofx.checkpoint.state import as_whole, is_extra_state, local, names_of, new_like, owned, plain, unwrapped
from zerofx.kernels.split import join
from zerofx.runtime.optim.adamw import AdamW
from zerofx.runtime.state.home import resident_of
from zerofx.runtime.state.parameter import ShardedTensor

MASTERS = ("master", "remainder")
SCALARS = ("step", "eta", "mu", "mu_product")
"""State that PyTorch's optimizers keep once per parameter. (Of a parameter without dimensions all state looks so.)"""
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Options that say how an optimizer computes, not what: the running program's count."""
SCHEDULED = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")
"""Options that learning-rate schedulers add."""


class Binding:
    """All that is to be read, and what to do with it then.

    Attributes:
        reads: entries, and the tensors to fill from them in place.
    """

    def __init__(self, module: nn.Module) -> None:
        self.reads: list[tuple[Entry, torch.Tensor]] = []
        self.joins: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.values: dict[str, Any] = {}
        self.numbered: list[tuple[torch.optim.Optimizer, dict[str, Any]]] = []
        self._module = unwrapped(module)

    def made(self, value: Any) -> Any:
        """``value`` with a new tensor for each `Entry` in it, whole and on the CPU."""

        def make(_: str, leaf: Any) -> Any:
            if not isinstance(leaf, Entry):
                return leaf
            self.reads.append((leaf, torch.empty(leaf.shape, dtype=leaf.dtype)))
            return self.reads[-1][1]

        return mapped(value, make)

    def finish(self) -> None:
        """Hand what was read to module and optimizer, through their own ``load_state_dict``.

        That runs their hooks; a value that was filled in place is recognised, and counted as written on every rank.
        """
        for weight, remainder in self.joins:
            with resident_of([weight, remainder]):
                mine = local(weight)
                mine.copy_(join(mine.bfloat16(), local(remainder).to(mine.device)))
        self._load(self._module)
        for optimizer, state in self.numbered:
            optimizer.load_state_dict(state)

    def _load(self, module: nn.Module) -> None:
        """``module.load_state_dict``, which knows no name that the module itself has made up for its ``state_dict``.

        bitsandbytes' layers do, for how a weight is quantized. What they return is theirs, and was filled in place.
        """
        own = {
            name
            for named in (module.named_parameters, module.named_buffers)
            for name, _ in named(remove_duplicate=False)
        }
        made_up = {name for name in self.values if name not in own and not is_extra_state(name)}
        unknown = module.load_state_dict(self.values, strict=not made_up).unexpected_keys
        now = module.state_dict() if unknown else {}
        for name in unknown:
            if not torch.equal(now[name].cpu(), self.values[name].cpu()):
                raise CheckpointError(
                    f"{name!r} is another one in the module, and its load_state_dict does not take it: expected a "
                    "module whose weights are quantized as those that were saved. Quantize it in that way."
                )


def bind(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], source: Source) -> Binding:
    """Check ``source`` against ``module`` and ``optimizers``; nothing is read yet, and nothing has changed.

    Raises:
        CheckpointError: what does not fit, by name.
    """
    binding = Binding(module)
    _bind_model(binding, module, source)
    if optimizers:
        _check_parameters(module, optimizers, source)
    for optimizer in optimizers:
        _bind_optimizer(binding, module, optimizer, source)
    return binding


def _bind_model(binding: Binding, module: nn.Module, source: Source) -> None:
    state = unwrapped(module).state_dict()
    aliases = {name: names for names in names_of(module).values() for name in names}
    missing: list[str] = []
    done: set[str] = set()
    for name, value in state.items():
        known = [name, *aliases.get(name, [])]
        if not isinstance(value, torch.Tensor) or is_extra_state(name):
            # Of any kind and size, whatever the module has now. Of an empty one old folders have nothing.
            if name not in source.values and name not in source.model and not _is_empty(value):
                missing.append(name)
            value = binding.made(source.values.get(name, source.model.get(name, {})))
        elif not any(n in source.model for n in known):
            missing.append(name)
        elif not done & set(known):  # tied weights once
            key = next(n for n in known if n in source.model)
            _bind_weight(binding, source, name, key, value)
            done.add(name)
        binding.values[name] = value
    unexpected = sorted((source.model.keys() | source.values.keys()) - state.keys())
    if missing or unexpected:
        parts = [f"it lacks {_some(missing)}"] if missing else []
        parts += [f"it has {_some(unexpected)}, which the module has not"] if unexpected else []
        raise CheckpointError(f"{source.where} is not of this {type(unwrapped(module)).__name__}: {'; '.join(parts)}.")


def _is_empty(value: Any) -> bool:
    return isinstance(value, (dict, list)) and not value


def _bind_weight(binding: Binding, source: Source, name: str, key: str, value: torch.Tensor) -> None:
    entry = source.model[key]
    _check(source, name, entry, value)
    state = (source.optimizer or {}).get(key, {})
    if value.dtype.itemsize >= 4 and value.is_floating_point() and entry.dtype.itemsize < 4:
        if isinstance(state.get("master"), Entry):
            _check(source, f"the master of {name}", state["master"], value)
            entry = state["master"]
        elif isinstance(state.get("remainder"), Entry) and entry.dtype == torch.bfloat16:
            _check(source, f"the remainder of {name}", state["remainder"], value, whole=True)
            remainder = new_like(value, torch.int16)
            binding.reads.append((state["remainder"], remainder))
            binding.joins.append((value, remainder))
    binding.reads.append((entry, value))


def _check(source: Source, name: str, entry: Entry, value: torch.Tensor, *, whole: bool = False) -> None:
    if entry.shape != tuple(value.shape):
        raise CheckpointError(
            f"{source.where} is not of this module: {name} has shape {list(entry.shape)} there, "
            f"{list(value.shape)} here."
        )
    same_kind = entry.dtype.is_floating_point == value.dtype.is_floating_point
    if not whole and entry.dtype != value.dtype and not (same_kind and value.dtype.is_floating_point):
        raise CheckpointError(f"{source.where}: {name} is {entry.dtype} there, {value.dtype} here.")


def _check_parameters(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], source: Source) -> None:
    """Refuse a ``source`` of optimizers of other parameters."""
    if source.optimizer is None:
        raise CheckpointError(
            f"{source.where} holds no optimizer's state: load without the optimizer for weights alone."
        )
    aliases = {names[0]: names for names in names_of(module).values()}
    mine = {name for optimizer in optimizers for _, name, _ in owned(module, optimizer)}
    strangers = sorted(source.optimizer.keys() - {n for name in mine for n in aliases[name]})
    lacking = sorted(name for name in mine if not any(n in source.options for n in aliases[name]))
    if strangers or lacking:
        parts = [f"{_some(lacking)} of this optimizer had none when it was saved"] if lacking else []
        parts += [f"it has state of {_some(strangers)}, which this optimizer does not have"] if strangers else []
        raise CheckpointError(f"{source.where} is of an optimizer of other parameters: {'; '.join(parts)}.")


def _bind_optimizer(binding: Binding, module: nn.Module, optimizer: torch.optim.Optimizer, source: Source) -> None:
    assert source.optimizer is not None
    aliases = {names[0]: names for names in names_of(module).values()}
    mine = {name: (number, p) for number, name, p in owned(module, optimizer)}
    found = {name: next(n for n in aliases[name] if n in source.options) for name in mine}
    numbered = {p: (number, name) for name, (number, p) in mine.items()}
    groups = []
    for group in optimizer.param_groups:
        members = [numbered[p] for p in group["params"]]
        options = _options(source, optimizer, group, [found[name] for _, name in members])
        groups.append({**options, "params": [number for number, _ in members]})
    states = {}
    known = {n: p for name, (_, p) in mine.items() for n in aliases[name]}
    per_element = _per_element({name: state for name, state in source.optimizer.items() if name in known}, known)
    for name, (number, parameter) in mine.items():
        saved = next((source.optimizer[n] for n in aliases[name] if n in source.optimizer), None)
        if saved:
            states[number] = _bind_state(binding, source, optimizer, name, parameter, saved, per_element)
    own, beside = binding.made(source.own), binding.made(source.beside)
    binding.numbered.append((optimizer, {**beside, "state": {**states, **own}, "param_groups": groups}))


def _per_element(states: dict[str, dict[str, Any]], parameters: dict[str, torch.Tensor]) -> dict[str, bool]:
    """Which names of state stand for a number per element of the parameter (True), which for one in all."""
    found: dict[str, bool] = {}
    for name, state in states.items():
        for what, value in (pair for key, values in state.items() for pair in named_leaves(values, key)):
            one = not isinstance(value, Entry) or math.prod(value.shape) == 1 != parameters[name].numel()
            found[what] = found.get(what, what not in SCALARS) and not one
    return found


def _bind_state(
    binding: Binding,
    source: Source,
    optimizer: torch.optim.Optimizer,
    name: str,
    parameter: torch.Tensor,
    saved: dict[str, Any],
    per_element: dict[str, bool],
) -> dict[str, Any]:
    whole = plain(parameter)
    low = parameter.is_floating_point() and parameter.dtype.itemsize < 4
    keeps_masters = isinstance(optimizer, AdamW) and optimizer.master is not None and low
    if keeps_masters and not set(MASTERS) & set(saved):
        weight = source.model.get(name)
        if weight is not None and weight.dtype.itemsize >= 4:
            saved = {**saved, "master": weight}
    weight = source.model.get(name)
    told = weight is not None and weight.sharded

    def made(what: str, value: Any) -> Any:
        if not isinstance(value, Entry):
            return value
        if value.shape != whole.shape or not (value.sharded if told else per_element.get(what, True)):
            return binding.made(value)
        target = _target(optimizer, parameter, what, value.dtype)
        binding.reads.append((value, as_whole(parameter, target)))
        return target

    # The weight is the master where nobody keeps one.
    return {what: mapped(value, made, what) for what, value in saved.items() if what not in MASTERS or keeps_masters}


def _target(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, what: str, dtype: torch.dtype) -> torch.Tensor:
    """Where to read state to: where the optimizer has it already, else a new tensor, which it takes over."""
    there = optimizer.state.get(parameter, {}).get(what)
    fits = isinstance(there, torch.Tensor) and there.shape == parameter.shape and there.dtype == dtype
    if fits and isinstance(there, ShardedTensor) == isinstance(parameter, ShardedTensor):
        return there
    return new_like(parameter, dtype)


def _options(
    source: Source, optimizer: torch.optim.Optimizer, group: dict[str, Any], names: list[str]
) -> dict[str, Any]:
    """The options of a parameter group: those that were saved for its parameters, which must agree."""
    current = {k: v for k, v in group.items() if k != "params"}
    if not names:
        return current
    saved = [source.options[name] for name in names]
    for name, options in zip(names, saved):
        for option, value in options.items():
            if option not in IMPLEMENTATION and not _equal(value, saved[0].get(option)):
                raise CheckpointError(
                    f"{source.where}: {names[0]} and {name} are in one parameter group of this optimizer and were in "
                    f"two when it was saved, with {option}={saved[0].get(option)!r} and {value!r}. Group them as then."
                )
    ours = current.keys() - set(IMPLEMENTATION) - set(SCHEDULED)
    theirs = saved[0].keys() - set(IMPLEMENTATION) - set(SCHEDULED)
    if ours - theirs and theirs - ours:
        raise CheckpointError(
            f"{source.where} holds the state of another kind of optimizer than {type(optimizer).__name__}: it has the "
            f"options {sorted(theirs - ours)} and not {sorted(ours - theirs)}."
        )
    taken = {k: _as(v, current.get(k)) for k, v in saved[0].items() if k in ours or k in SCHEDULED}
    return {**current, **taken}


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return b is not None and a is not None and bool(torch.as_tensor(a) == torch.as_tensor(b))
    return (tuple(a) == tuple(b)) if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) else a == b


def _as(value: Any, current: Any) -> Any:
    """``value`` as a tensor or a number, as the running optimizer has it."""
    if isinstance(current, torch.Tensor):
        return torch.as_tensor(value, dtype=current.dtype, device=current.device).clone()
    if isinstance(value, torch.Tensor) and isinstance(current, (int, float)):
        return value.item()
    return value


def _some(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:3]))
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
