"""The calls that a user makes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zerofx._torch import compile_module
from zerofx.compiler.auto import chosen, is_open
from zerofx.compiler.backend import Backend
from zerofx.compiler.options import Options
from zerofx.compiler.records import GraphRecord, Trace, records_of
from zerofx.compiler.shadow import end_forwards
from zerofx.compiler.shard import shard_module
from zerofx.runtime.state.group import ShardGroup, groups_of


def compile(
    module: nn.Module, *, dynamic: bool | None = None, fullgraph: bool = False, batch: Any = None, **options: Any
) -> nn.Module:
    """Shard ``module`` in place and compile it; returns the same object.

    Train it as before. ``loss.backward()`` leaves sharded gradients in ``.grad``. Any elementwise ``torch.optim``
    optimizer works on them, and ``torch.nn.utils.clip_grad_norm_`` is right.

    Args:
        module: not sharded yet, with its parameters on one device. Build it by the same code on every rank. Weights are
            taken from rank 0 unless ``init_sync=False``.
        dynamic, fullgraph: as in ``torch.compile``.
        batch: what ``module`` is called with: a tensor, a tuple of arguments, or a dictionary of keyword arguments.
            With it and ``memory=`` the stage is chosen, and what else was left open (`zerofx.choose`): with
            ``wire="auto"`` whether collectives are quantized. Only shapes and dtypes count; they should be the largest
            that come.
        **options: see `zerofx.compiler.options.Options`: ``stage``, ``executor``, ``groups``, ``mesh``, ...

    Raises:
        ValueError, RuntimeError: bad options, or a module that cannot be sharded. Nothing has changed then.
    """
    choice = chosen(module, options, batch) if is_open(options, batch) else None
    checked = Options.of(options if choice is None else choice.options)
    if fullgraph and checked.leaf_modules is not None:
        raise ValueError("fullgraph=True with leaf_modules: leaf modules run outside of any graph. Leave one out.")
    groups = shard_module(module, checked)
    compiled = functools.partial(_compile, options=checked, dynamic=dynamic, fullgraph=fullgraph)
    compiled(module)
    for family in {group.family for group in groups}:
        family.recipe = replace(family.recipe, compiled=compiled, choice=choice)
    return module


def _compile(module: nn.Module, *, options: Options, dynamic: bool | None, fullgraph: bool) -> None:
    """Have ``module``, which is sharded, compiled when it is called."""
    compile_module(module, backend=Backend(options), dynamic=dynamic, fullgraph=fullgraph)
    turns = next((group.family.turns for group in groups_of(module)), None)
    if turns is not None:
        end_forwards(module, turns)


@contextlib.contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Backward passes inside keep their gradients on this rank. The first one after it reduces them with its own.

    ::

        for batch in micro_batches[:-1]:
            with zerofx.no_sync(model):
                loss_of(model, batch).backward()
        loss_of(model, micro_batches[-1]).backward()

    Kept gradients are whole, and this rank's own. They are not in ``.grad``, so ``zero_grad`` does not see them
    (`drop_kept` gives them up). An optimizer's step is refused while there are any. Every rank must enter and leave at
    the same passes.
    """
    with synchronizing(module, False):
        yield


@contextlib.contextmanager
def synchronizing(module: nn.Module, sync: bool) -> Iterator[None]:
    """Whether a backward inside reduces gradients, whatever is around it."""
    families = {group.family: group.family.sync for group in _groups(module)}
    for family in families:
        family.sync = sync
    try:
        yield
    finally:
        for family, before in families.items():
            family.sync = before


def drop_kept(module: nn.Module) -> None:
    """Give up the gradients that `no_sync` kept: what ``zero_grad`` is to those in ``.grad``."""
    for group in _groups(module):
        group.gradients.drop_kept()
        if (averages := group.family.averages) is not None:
            averages.drop_kept()


def graphs(module: nn.Module) -> list[GraphRecord]:
    """What was compiled for ``module`` so far: one record per graph that Dynamo captured. ``print`` one to read it."""
    return records_of(_groups(module))


def published(module: nn.Module) -> dict[str, torch.Tensor]:
    """What passes of your own published when their graphs ran last, by name (`zerofx.passes.edit.publish`).

    The tensors are the graphs' outputs: reading a number of one on a GPU waits until the stream has come to it.
    """
    return {name: x for family in {g.family for g in _groups(module)} for name, x in family.published.items()}


def verify(record: GraphRecord | Trace) -> None:
    """Check rewritten graphs against every rule of `zerofx.passes.verify`; that happens on each compile anyway.

    ``record``: of `graphs`, or one graph of it. A graph of one's own goes to ``zerofx.passes.verify(gm, ctx)``.

    Raises:
        VerificationError: a rule is broken; it names the rule, the node, the group and the line of the model.
    """
    for trace in record.traces() if isinstance(record, GraphRecord) else [record]:
        trace.after("verify")


def _groups(module: nn.Module) -> list[ShardGroup]:
    groups = groups_of(module)
    if not groups:
        raise ValueError(f"{type(module).__name__} is not sharded: call zerofx.compile on it first.")
    return groups
