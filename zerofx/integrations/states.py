"""What the trainers have in common: a module is compiled once, and optimizers' states are whole in their files.

::

    optimizer of shards ── full_optimizer_state ──▶ state_dict() as if never sharded, on rank 0 ──▶ a file
    optimizer of shards ◀── load_optimizer_state ── the same, read on every rank ◀─────────────────── a file

`zerofx.save` needs neither: it writes shards. These are for files that other programs are to read, and for theirs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence, Sized
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from zerofx.checkpoint.export import gathered_value
from zerofx.checkpoint.nested import mapped
from zerofx.compiler.api import compile, no_sync
from zerofx.compiler.auto import check_open, is_open
from zerofx.runtime.state.group import groups_of
from zerofx.runtime.state.parameter import ShardedTensor

OF_COMPILE = ("dynamic", "fullgraph")
"""Options of ``zerofx.compile`` that are ``torch.compile``'s."""

BATCH = "batch"
"""The option by which others are chosen."""


def checked_options(options: Mapping[str, Any] | None, where: str, *, loads: bool = False) -> dict[str, Any]:
    """``options`` for ``zerofx.compile``; a wrong one is refused now and not when the model comes.

    ``loads``: where a batch is missing, a loader will give one (`first_batch`).

    Raises:
        ValueError: what `Options` refuses; it says ``where`` the options were given.
    """
    if options is not None and not isinstance(options, Mapping):
        raise ValueError(f"{where}={options!r}: expected a dictionary of zerofx.compile's options, such as stage=3.")
    given = dict(options or {})
    try:
        batch = given.get(BATCH, () if loads and lacks_batch(given) else None)
        check_open({name: value for name, value in given.items() if name not in (*OF_COMPILE, BATCH)}, batch)
    except ValueError as e:
        raise ValueError(f"{where}: {e}") from e
    return given


def lacks_batch(options: Mapping[str, Any]) -> bool:
    """Whether there is something to choose, and no batch to choose by."""
    return BATCH not in options and is_open(dict(options), None)


def first_batch(loader: DataLoader | None) -> Mapping[str, Any]:
    """A batch of ``loader``'s first samples, for its shapes. No sampler is asked, no random number of the run is lost.

    Raises:
        ValueError: there is no loader of a dataset with ``len`` and indices, or its batches are not dictionaries: who
            calls the model with what is not known then.
    """
    dataset: Any = getattr(loader, "dataset", None)
    batch: Any = None
    if loader is not None and isinstance(dataset, Sized) and hasattr(dataset, "__getitem__"):
        size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1
        states = random.getstate(), torch.get_rng_state()
        batch = loader.collate_fn([dataset[i % len(dataset)] for i in range(size)])
        random.setstate(states[0])
        torch.set_rng_state(states[1])
    if not isinstance(batch, Mapping):
        found = "no data loader yet" if loader is None else f"a loader of {type(dataset).__name__}"
        raise ValueError(
            f'"auto" without "batch" in zerofx=, and {found}: expected one whose dataset has a length and indices, and '
            "whose batches are dictionaries that the model is called with. Give zerofx={'batch': ...}, what it is "
            "called with."
        )
    return batch


def is_sharded(module: nn.Module) -> bool:
    """Whether zerofx has the module's parameters, in any stage."""
    return bool(groups_of(module))


def stage_of(module: nn.Module) -> int | None:
    """The stage of a sharded module; None of a plain one."""
    groups = groups_of(module)
    return groups[0].family.stage if groups else None


def compile_once(module: nn.Module, options: Mapping[str, Any]) -> nn.Module:
    """``module``, sharded and compiled; as it is where it is sharded already, or has no parameters."""
    if is_sharded(module) or next(module.parameters(), None) is None:
        return module
    return compile(module, **options)


def accumulating(module: nn.Module) -> Any:
    """Around all micro-batches of a step but the last.

    Stages 0 and 1 keep gradients on the rank, as DistributedDataParallel's ``no_sync`` does. Stages 2 and 3 reduce each
    micro-batch, for whole gradients are what they are to spare. None: there is nothing to do.
    """
    stage = stage_of(module)
    return no_sync(module) if stage is not None and stage < 2 else None


def full_optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """``optimizer.state_dict()`` as if nothing were sharded, on the CPU of rank 0; {} on the others. A collective."""
    state = optimizer.state_dict()
    whole: dict[Any, dict[str, Any]] = {}
    for number in sorted(state["state"], key=str):  # in one order on all ranks
        values = state["state"][number]
        in_order = dict(sorted(values.items())) if isinstance(values, dict) else values
        whole[number] = mapped(in_order, lambda _, value: gathered_value(value) if _is_tensor(value) else value)
    return {**state, "state": whole} if _rank_of(optimizer) == 0 else {}


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _rank_of(optimizer: torch.optim.Optimizer) -> int:
    """This rank's place among those that share the optimizer's parameters."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    shared = next((group for p in parameters if (group := getattr(p, "_group", None)) is not None), None)
    if shared is not None:
        return shared.rank
    return dist.get_rank() if dist.is_initialized() else 0


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """``optimizer.load_state_dict(state)`` of a whole state that every rank has read: each takes its slices."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    if len(numbers) != len(parameters):
        raise ValueError(
            f"the state of an optimizer of {len(numbers)} parameters for {type(optimizer).__name__} of "
            f"{len(parameters)}: load it into an optimizer of the same parameters, in the same order."
        )
    states = {
        number: {what: mapped(value, partial(_slice, parameter), what) for what, value in values.items()}
        for number, parameter in zip(numbers, parameters)
        if (values := state["state"].get(number))
    }
    optimizer.load_state_dict({**state, "state": {**state["state"], **states}})


def _slice(parameter: torch.Tensor, what: str, value: Any) -> Any:
    """This rank's part of ``value``, where that has an element for each of a sharded parameter's."""
    if not isinstance(parameter, ShardedTensor) or not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, ShardedTensor) or value.shape != parameter.shape or (what == "step" and not value.dim()):
        return value
    mine = parameter.like(torch.empty_like(parameter.to_local(), dtype=value.dtype))
    mine.copy_(value)
    return mine


def unwrapped_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside of what accelerate (``optimizer``) and Lightning (``_optimizer``) put around it."""
    while (inner := vars(optimizer).get("_optimizer", vars(optimizer).get("optimizer"))) is not None:
        optimizer = inner
    return optimizer


def pairs(models: Sequence[nn.Module], optimizers: Sequence[Any]) -> Iterator[tuple[str, nn.Module, Any]]:
    """What `zerofx.save` takes together: each optimizer with its models, and models without one, under names."""
    alone = dict(enumerate(models))
    for i, optimizer in enumerate(map(unwrapped_optimizer, optimizers)):
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        owners = [j for j, m in enumerate(models) if not updated.isdisjoint(map(id, m.parameters()))]
        if not owners:
            raise ValueError(
                f"the parameters of optimizer {i}, {type(optimizer).__name__}, belong to none of the {len(models)} "
                "models that are saved or loaded with it: hand over its model, too."
            )
        for owner in owners:
            alone.pop(owner, None)
        one = models[owners[0]] if len(owners) == 1 else nn.ModuleList([models[j] for j in owners])
        yield f"model_{'_'.join(map(str, owners))}_optimizer_{i}", one, optimizer
    for j, model in alone.items():
        yield f"model_{j}", model, None
