"""What a simulated step asks optional features: the interface that each of them fills in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from zerofx.model.layout import GroupLayout
from zerofx.passes.context import Context


@dataclass(frozen=True)
class Simulated:
    """All are optional.

    Attributes:
        over: of the start of a collective: over how many ranks it runs, and how many of these are in this rank's row of
            a mesh; None: it is the core's.
        refreshes: stage 3: by how many ranks the shards that a graph is given are brought up to date before forward.
        sent: bytes that so many ranks send to bring a group's replica up to date (or a shard, between replicas); None:
            the replica's own.
        leaves: the groups whose gradients leave the device.
        operators: by operator, what notes a call of it: given the recorder, the operator and its arguments.
        passing: bytes of the buffers through which something of a graph leaves the device.
    """

    over: Callable[[Node, Context], tuple[int, int] | None] | None = None
    refreshes: Callable[[Context], int | None] | None = None
    sent: Callable[[Context, GroupLayout, torch.Tensor, int, bool], int | None] | None = None
    leaves: Callable[[Context], frozenset[str]] | None = None
    passing: Callable[[Context], int] | None = None
    operators: Mapping[Any, Callable[..., Any]] = field(default_factory=dict)


SIMULATED: list[Simulated] = []
"""Of all features, in the order of `zerofx.features.FEATURES`. The first that has an answer is right."""


def noting(operator: Any) -> Callable[..., Any] | None:
    """What notes a call of ``operator``; None: the recorder itself does."""
    return next((each.operators[operator] for each in SIMULATED if operator in each.operators), None)


def ask(name: str, *args: Any) -> Any:
    """The first answer that is not None, nor empty; None: there is none."""
    answers = (getattr(each, name)(*args) for each in SIMULATED if getattr(each, name) is not None)
    return next((answer for answer in answers if answer), None)
