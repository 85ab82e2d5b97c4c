"""The calls that a user makes."""

from __future__ import annotations

from typing import Any

from torch import nn

from zerofx._torch import compile_module
from zerofx.backend import Backend
from zerofx.options import Options
from zerofx.records import GraphRecord, records_of
from zerofx.shard import groups_of, shard_module


def compile(module: nn.Module, *, dynamic: bool | None = None, fullgraph: bool = False, **options: Any) -> nn.Module:
    """Shard ``module`` in place and compile it; returns the same object.

    Train it as before: ``loss.backward()`` leaves sharded gradients in ``.grad``, any elementwise ``torch.optim``
    optimizer works on them, ``torch.nn.utils.clip_grad_norm_`` is right.

    Args:
        module: parameters on one device, not sharded yet. Start from the same code on every rank; weights are taken
            from rank 0 unless ``init_sync=False``.
        dynamic, fullgraph: as in ``torch.compile``.
        **options: see `zerofx.options.Options`: ``stage``, ``executor``, ``groups``, ``mesh``, ...

    Raises:
        ValueError, RuntimeError: bad options or a module that cannot be sharded; nothing has changed then.
    """
    checked = Options.of(options)
    shard_module(module, checked)
    compile_module(module, backend=Backend(checked), dynamic=dynamic, fullgraph=fullgraph)
    return module


def graphs(module: nn.Module) -> list[GraphRecord]:
    """What was compiled for ``module`` so far: one record per graph that Dynamo captured. ``print`` one to read it."""
    groups = groups_of(module)
    if not groups:
        raise ValueError(f"{type(module).__name__} is not sharded: call zerofx.compile on it first.")
    return records_of(groups)
