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
recomputed at a time: one group, or where that saves too much all groups of one layer. Costs are flops and bytes, not
times. So all ranks come to the same choice.

Where activations may live in a file (`zerofx.Offload`), what exceeds the budget can also leave: the first of forward
first, for they have the longest way. The disk works while the processor does. So of all answers, each with as much
taken away as it is too large, the one is taken whose step is the shortest::

    seconds = max(compute + recompute, 2 * bytes that leave / the disk's rate)

The rates are those that the user gives, the same on every rank, or an ordinary machine's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from zerofx import _torch
from zerofx.compiler.choices import Activations
from zerofx.model.units import format_bytes
from zerofx.passes import edit
from zerofx.runtime.state.group import Family
from zerofx.simulate.clock import Rates, ordinary

ASKED = 7
"""How many fractions the partitioner is asked for, beside the least."""

RUNGS = 10
"""How many fractions of what would be saved a ladder has, beside all of it."""

FEW = 3
"""How many of these, the smallest, are asked for where any division that fits will do."""

_BALANCE = {"cpu": 10}
"""Flops that a device does while it moves a byte; others do `_BALANCE_ELSEWHERE`."""
_BALANCE_ELSEWHERE = 100


class Away(NamedTuple):
    """What may leave the device, and how fast.

    Attributes:
        leaves: of the values that a forward returns, and of the places of the saved ones: the tensors that can leave,
            each with the places of its views.
        rates: None: as on an ordinary machine.
    """

    leaves: Callable[[Sequence[Any], Collection[int]], dict[Node, list[int]]]
    rates: Rates | None


AWAY: list[Callable[[Family, Rates | None], Away | None]] = []
"""Of features: what of a module's activations may leave; its rates are given, or those of the option."""


def away_of(family: Family, rates: Rates | None = None) -> Away | None:
    """What may leave; None: nothing."""
    return next((away for of in AWAY if (away := of(family, rates)) is not None), None)


class _Answer(NamedTuple):
    """What forward could save: its bytes, what of it could leave, and a step's seconds of arithmetic with it."""

    saved: list[Node]
    nbytes: int
    movable: list[tuple[Node, list[Node]]]
    compute_s: float


class _Option(NamedTuple):
    """What forward saves, and what of it leaves."""

    saved: list[Node]
    leaves: frozenset[str]
    gone: int
    kept: int
    seconds: float


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
    save_entries: Callable[..., int],
    away: Away | None = None,
) -> tuple[list[Node], Activations]:
    """What forward saves, and a record of the choice.

    Args:
        budget: of `zerofx.compiler.options.Options`: a fraction up to 1, or bytes.
        fuses: whether the executor fuses pointwise operations, so that without a budget the partitioner would save what
            is cheapest for that; else all that backward reads would be saved, but for what checkpoints recompute.
        elsewhere: bytes that other graphs of the module save.
        share: of what they leave of a budget in bytes, the part that this graph may have; others are to come.
        save_entries: of the nodes that forward computes, marks what enters each layer, or each group; returns how many
            were not marked before.
        away: what of it may leave the device; None: nothing.

    Raises:
        ValueError: a budget in bytes that is too small.
    """
    whole = _whole(cut, fuses)
    most = _nbytes(whole, cut)
    target = share * (budget - elsewhere) if budget > 1 else budget * most
    if most <= target:
        return whole, _record(cut, whole, budget, most, most)
    best: list[Node] | None = None
    least, asked = math.inf, [whole]
    for layers in (True, False):
        if not save_entries(cut.forward, layers=layers) and best is not None:
            break  # each layer is one group
        cut.marked()
        fewest = cut.saved(_torch.LEAST)
        least = min(least, _nbytes(fewest, cut))
        if best is None or _nbytes(fewest, cut) <= target:  # less is computed again at once
            best = fewest if away is not None else _most_within(target, fewest, cut)
        if away is not None:
            asked += [fewest, *(cut.saved(i / RUNGS) for i in range(1, RUNGS + 1))]
    options: list[_Option] = []
    if away is not None:
        answers = _answers(asked, cut, away)
        options = [_taken_away(answer, target, away) for answer in answers]
        least = min(_taken_away(answer, 0, away).kept for answer in answers)
    if budget > 1 and least + elsewhere > budget:
        also = f", and {format_bytes(elsewhere)} are saved by other graphs of the module" if elsewhere else ""
        raise ValueError(
            f"activation_budget={budget:,.0f} is too small: forward has to save {least:,} bytes here{also}. Expected "
            f"{least + elsewhere:,} or more; without a budget it saves {most + elsewhere:,}."
        )
    if away is not None:
        chosen = _shortest(options, target)
        return chosen.saved, _of_option(chosen, _record(cut, chosen.saved, budget, most, int(least)))
    assert best is not None, "what enters a layer was asked for"
    return best, _record(cut, best, budget, most, int(least))


def _most_within(target: float, fewest: list[Node], cut: _torch.Cut) -> list[Node]:
    """Of all that the partitioner answers what saves most within ``target``; or ``fewest``, if none does."""
    fits, exceeds, best, saved = 0.0, 1.0, fewest, _nbytes(fewest, cut)
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
    return best


def _answers(asked_for: Sequence[list[Node]], cut: _torch.Cut, away: Away) -> list[_Answer]:
    """Each of ``asked_for``, of which something may leave."""
    work = sum(cost(n) for n in cut.graph.nodes if n.op == "call_function" and not edit.is_view_or_cast(n))
    found = []
    for saved in asked_for:
        device = next((x.device.type for node in saved for x in _tensors([node.meta.get("val")])), "cpu")
        compute_s = (work + sum(map(cost, cut.recomputed(saved)))) / (away.rates or ordinary(device)).flops_per_s
        found.append(_Answer(saved, _nbytes(saved, cut), _movable(saved, cut, away), compute_s))
    return found


def _taken_away(answer: _Answer, target: float, away: Away) -> _Option:
    """Of what ``answer`` saves, as much leaves as it is larger than ``target``, if so much can."""
    kept, gone, leaves = answer.nbytes, 0, set[str]()
    for whole, nodes in answer.movable:
        if kept <= target:
            break
        nbytes = edit.hinted_nbytes(whole.meta["val"])
        kept, gone = kept - nbytes, gone + nbytes
        leaves |= {node.name for node in nodes}
    disk = (away.rates and away.rates.disk_bytes_per_s) or ordinary("cpu").of_disk()
    return _Option(answer.saved, frozenset(leaves), gone, kept, max(answer.compute_s, 2 * gone / disk))


def _shortest(options: Sequence[_Option], target: float) -> _Option:
    """Of those that keep at most ``target``, the one with the shortest step; else the one that keeps least."""
    fitting = [option for option in options if option.kept <= target]
    return min(fitting or options, key=lambda o: (o.seconds, o.gone) if fitting else (o.kept, o.seconds))


def _of_option(option: _Option, record: Activations) -> Activations:
    return replace(record, saved_bytes=option.kept, offloaded=option.leaves, offloaded_bytes=option.gone)


def _movable(saved: Sequence[Node], cut: _torch.Cut, away: Away) -> list[tuple[Node, list[Node]]]:
    """The tensors that could leave, in forward's order, and which of ``saved`` are they, or views of them."""
    ours = cut.inputs.union(cut.forward)
    outputs = _torch.pytree.tree_leaves(cut.graph.output_node().args[0])
    returned = [x for x in outputs if isinstance(x, Node) and x in ours]
    sizes = [x for x in cut.inputs if isinstance(x.meta.get("val"), torch.SymInt)]
    values = [*returned, *saved, *sizes]
    found = away.leaves(values, range(len(returned), len(values)))
    order = {node: i for i, node in enumerate(cut.forward)}
    wholes = sorted((whole for whole in found if whole in order), key=order.__getitem__)
    return [(whole, [values[i] for i in found[whole]]) for whole in wholes]


def _whole(cut: _torch.Cut, fuses: bool) -> list[Node]:
    return cut.saved(1) if fuses or cut.has_checkpoints() else cut.read_by_backward()


def top_rung(cut: _torch.Cut, nbytes: float, fuses: bool) -> tuple[list[Node], Activations]:
    """The first of `ladders`: all that forward would save without a budget. It is known at once."""
    whole = _whole(cut, fuses)
    most = _nbytes(whole, cut)
    return whole, replace(_record(cut, whole, nbytes, most, most), option="memory")


def ladders(
    cut: _torch.Cut,
    nbytes: float,
    fuses: bool,
    save_entries: Callable[..., int],
    away: Away | None = None,
    few: bool = False,
) -> list[list[tuple[list[Node], Activations]]]:
    """All that forward could save under one fraction or another, the most first, for a budget of ``nbytes`` for all.

    In the first ladder what enters each group is saved. Where layers are several groups there is another one, of what
    saves less than that: what enters each layer. More is there at once while it is computed again. Where something may
    leave the device there is one more: for each of several targets, what leaves and what is computed again so that a
    step is short.

    ``fuses``, ``save_entries``, ``away``: see `choose`. ``few``: only the smallest fractions beside all.
    """
    whole = _whole(cut, fuses)
    most = _nbytes(whole, cut)
    found: list[dict[int, list[Node]]] = []  # by bytes
    for layers in (True, False):
        if not save_entries(cut.forward, layers=layers) and found:
            break  # each layer is one group
        cut.marked()
        asked = [cut.saved(max(_torch.LEAST, i / RUNGS)) for i in range(FEW if few else RUNGS + 1)]
        found.insert(0, {_nbytes(saved, cut): saved for saved in reversed(asked)})
    found[0][most] = whole
    found[1:] = [{n: saved for n, saved in rungs.items() if n < min(found[0])} for rungs in found[1:]]
    leave: dict[int, _Option] = {}
    if away is not None:
        answers = _answers([saved for rungs in found for saved in rungs.values()], cut, away)
        for i in range(RUNGS + 1):
            target = most * (RUNGS - i) / RUNGS
            option = _shortest([_taken_away(answer, target, away) for answer in answers], target)
            if option.gone:
                leave.setdefault(option.kept, option)
    least = min([*itertools.chain(*found), *leave])

    def record(saved: list[Node]) -> Activations:
        return replace(_record(cut, saved, nbytes, most, least), option="memory")

    again = [[(rungs[n], record(rungs[n])) for n in sorted(rungs, reverse=True) if n <= most] for rungs in found]
    options = [leave[n] for n in sorted(leave, reverse=True)]
    away_from = [(option.saved, _of_option(option, record(option.saved))) for option in options]
    return [ladder for ladder in (*again, away_from) if ladder]


def _record(cut: _torch.Cut, saved: list[Node], budget: float, most: int, least: int) -> Activations:
    again = cut.recomputed(saved)
    return Activations(
        budget=budget,
        saved_bytes=_nbytes(saved, cut),
        whole_bytes=most,
        least_bytes=least,
        recomputed=frozenset(node.name for node in again),
        flops=sum(map(flops, again)),
        work=sum(map(cost, again)),
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
