"""`activation_budget`: what forward saves for backward, and what backward computes again instead.

::

    whole      all that forward would save                 22.4 MB     activation_budget=1, or None
      ▲
    saved      what it does save: the most that fits       11.3 MB     activation_budget=0.5
      ▲
    least      what enters each block, drawings            2.7 MB      activation_budget=0

What is recomputed is up to PyTorch's partitioner: a knapsack of bytes and costs, and a minimum cut. It is asked for a
fraction, and answers with what may be more or less than that; so it is asked for several, and of the answers that fit
the one is taken that saves most. `save_entries` has marked what enters a block, so backward has no more than one block
recomputed at a time. Costs are flops and bytes, not times. So all ranks come to the same choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from zerofx import _torch
from zerofx.model.units import format_bytes
from zerofx.passes import edit
from zerofx.passes.context import Activations

ASKED = 7
"""How many fractions the partitioner is asked for, beside the least."""

RUNGS = 10
"""How many fractions of what would be saved a `ladder` has, beside all of it."""

_BALANCE = {"cpu": 10}
"""Flops that a device does while it moves a byte; others do `_BALANCE_ELSEWHERE`."""
_BALANCE_ELSEWHERE = 100


def is_whole(budget: float | None) -> bool:
    """Whether an `activation_budget` leaves everything as it is."""
    return budget is None or budget == 1


def given(chosen: Activations) -> str:
    """The option by which ``chosen`` was, as it was given; bytes rounded."""
    budget = format_bytes(chosen.budget) if chosen.budget > 1 else format(chosen.budget, "g")
    return f"{chosen.option}={budget}"


def cost(node: Node) -> float:
    """Of computing ``node`` once more, in flops: its own, or those that could be done while its bytes move."""
    value = node.meta.get("val")
    first = next((x for x in _tensors([value])), None)
    if first is None:
        return 1.0
    moved = sum(map(edit.hinted_nbytes, _tensors([value, *(x.meta.get("val") for x in node.all_input_nodes)])))
    balance = _BALANCE.get(first.device.type, _BALANCE_ELSEWHERE)
    return float(max(flops(node), balance * moved, 1))


def flops(node: Node) -> int:
    """By `torch.utils.flop_counter`'s formulas; 0 for what has none."""
    packet = getattr(node.target, "_overloadpacket", None)
    formula = flop_registry.get(packet)
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:  # in PyTorch's own table since 2.15
        return int(sdpa_flop_count(*_shapes(edit.values(node.args[:3]))))
    if formula is None:
        return 0
    args, kwargs, out = _shapes((*edit.values((node.args, node.kwargs)), node.meta["val"]))
    return int(formula(*args, **kwargs, out_val=out))


def choose(
    cut: _torch.Cut,
    budget: float,
    *,
    fuses: bool,
    elsewhere: int,
    share: float,
    save_entries: Callable[[Sequence[Node]], object],
) -> tuple[list[Node], Activations]:
    """What forward saves, and a record of the choice.

    Args:
        budget: of `zerofx.compiler.options.Options`: a fraction up to 1, or bytes.
        fuses: whether the executor fuses pointwise operations, so that without a budget the partitioner would save what
            is cheapest for that; else all that backward reads would be saved, but for what checkpoints recompute.
        elsewhere: bytes that other graphs of the module save.
        share: of what they leave of a budget in bytes, the part that this graph may have; others are to come.
        save_entries: marks what enters a block, of the nodes that forward computes.

    Raises:
        ValueError: a budget in bytes that is too small.
    """
    whole = cut.saved(1) if fuses or cut.has_checkpoints() else cut.read_by_backward()
    most = _nbytes(whole, cut)
    target = share * (budget - elsewhere) if budget > 1 else budget * most
    if most <= target:
        return whole, _record(cut, whole, budget, most, most)
    save_entries(cut.forward)
    cut.marked()
    best = cut.saved(_torch.LEAST)
    least = _nbytes(best, cut)
    if budget > 1 and least + elsewhere > budget:
        also = f", and {format_bytes(elsewhere)} are saved by other graphs of the module" if elsewhere else ""
        raise ValueError(
            f"activation_budget={budget:,.0f} is too small: forward has to save {least:,} bytes here{also}. Expected "
            f"{least + elsewhere:,} or more; without a budget it saves {most + elsewhere:,}."
        )
    fits, exceeds, saved = 0.0, 1.0, least
    for _ in range(ASKED):
        middle = (fits + exceeds) / 2
        asked = cut.saved(middle)
        nbytes = _nbytes(asked, cut)
        if nbytes > target:
            exceeds = middle
            continue
        fits = middle
        if nbytes > saved:
            best, saved = asked, nbytes
    return best, _record(cut, best, budget, most, least)


def ladder(
    cut: _torch.Cut, nbytes: float, fuses: bool, save_entries: Callable[[Sequence[Node]], object]
) -> list[tuple[list[Node], Activations]]:
    """All that forward could save under one fraction or another, the most first, for a budget of ``nbytes`` for all.

    ``fuses``, ``save_entries``: see `choose`.
    """
    whole = cut.saved(1) if fuses or cut.has_checkpoints() else cut.read_by_backward()
    most = _nbytes(whole, cut)
    save_entries(cut.forward)
    cut.marked()
    rungs = {most: whole}
    for i in range(RUNGS + 1):
        saved = cut.saved(max(_torch.LEAST, i / RUNGS))
        rungs.setdefault(_nbytes(saved, cut), saved)
    least = min(rungs)
    return [
        (rungs[n], replace(_record(cut, rungs[n], nbytes, most, least), option="memory"))
        for n in sorted(rungs, reverse=True)
        if n <= most
    ]


def _record(cut: _torch.Cut, saved: list[Node], budget: float, most: int, least: int) -> Activations:
    again = cut.recomputed(saved)
    return Activations(
        budget=budget,
        saved_bytes=_nbytes(saved, cut),
        whole_bytes=most,
        least_bytes=least,
        recomputed=frozenset(node.name for node in again),
        flops=sum(map(flops, again)),
    )


def _nbytes(saved: Sequence[Node], cut: _torch.Cut) -> int:
    """Bytes of the memory that ``saved`` keeps between forward and backward; inputs are there anyway."""
    seen: dict[int, int] = {}
    for node in saved:
        source = node
        while edit.is_view_or_cast(source):  # of a parameter: backward makes it anew (`rematerialize`)
            source = edit.sources(source)[0]
        if source not in cut.inputs:
            storages = [x.untyped_storage() for x in _tensors([node.meta.get("val")])]
            seen.update((storage._cdata, int(_torch.without_symbols(storage.nbytes()))) for storage in storages)
    return sum(seen.values())


def _shapes(values: Any) -> Any:
    """``values`` with their shapes for tensors; dimensions that are symbols as they were when they were captured."""
    return _torch.pytree.tree_map_only(torch.Tensor, lambda x: _torch.without_symbols(tuple(x.shape)), values)


def _tensors(values: Sequence[object]) -> list[torch.Tensor]:
    return [x for x in _torch.pytree.tree_leaves(list(values)) if isinstance(x, torch.Tensor)]
