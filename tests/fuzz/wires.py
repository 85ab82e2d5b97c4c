"""Codes on the wire for fuzz cases: which, for parameters of a few elements, and what must hold whatever they lose."""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.agreement import disagreements
from tests.fuzz.recipe import Recipe
from zerofx.model import layout
from zerofx.model import wire as wires

BLOCK = 32
WIRES = {
    "small": zerofx.Wire("int8", "int4", BLOCK),
    "bf16": zerofx.Wire("bf16", "bf16", BLOCK),
    "fp8": zerofx.Wire("fp8", "fp8", BLOCK),
    "int8": zerofx.Wire("int8", "int8", BLOCK),
    "int4": zerofx.Wire("int8", "int4", BLOCK),
    "feedback": zerofx.Wire("int8", "int4", BLOCK, error_feedback=True),
}


def wire_of(recipe: Recipe, one_copy: bool = False) -> zerofx.Wire | None:
    """What a case is compiled with. ``one_copy``: no weights travel."""
    wire = WIRES.get(recipe.wire)
    if wire is None or recipe.stage == 0:
        return None
    if recipe.scheme_of_mesh:
        wire = replace(wire, between="nodes")
    return replace(wire, weights=None) if one_copy or recipe.scheme_of_mesh == "shard" else wire


def in_codes(recipe: Recipe) -> bool:
    """Whether its numbers are others than those of one process."""
    return wire_of(recipe) is not None and recipe.wire != "small"


@contextlib.contextmanager
def small_blocks() -> Iterator[None]:
    """Parameters of half a block travel in codes."""
    with contextlib.ExitStack() as stack:
        for module in (layout, wires):
            stack.enter_context(unittest.mock.patch.object(module, "BLOCKED_NUMEL", BLOCK // 2))
        yield


def differing(net: nn.Module) -> list[str]:
    """What to say of the weights that ranks hold in different bits."""
    return [f"rank {dist.get_rank()}: {name} differs between ranks" for name in disagreements(net)]


def check_coded(sharded: Callable[[Callable[[nn.Module], None]], dict[str, Any]]) -> str:
    """Run a case. Returns what is wrong: weights that differ between ranks after a step, or are not finite."""
    wrong: list[str] = []
    values = sharded(lambda net: wrong.extend(differing(net)))
    wrong += [
        f"rank {dist.get_rank()}: {name} is not finite"
        for name, value in values.items()
        if isinstance(value, torch.Tensor) and not value.isfinite().all()
    ]
    return "\n".join(wrong)
