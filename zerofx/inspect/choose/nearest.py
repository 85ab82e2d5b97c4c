"""What would fit where nothing does: each answer is a number that was predicted once more.

::

    memory=    the least of all alternatives; of several graphs, tried
    ranks      as many more as bytes at rest need (`Question.at_rest`), predicted there
    batch      half of what there is, or half of that, ...; a sample. Those that cannot fit are left out, by what those
               before them needed: it grows with the batch, beside what is at rest
    offload=   all that can leave the device, where no place was given
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NoReturn

import torch

from zerofx._torch import pytree
from zerofx.compiler.auto import AUTO
from zerofx.compiler.choices import Offer
from zerofx.inspect.choose.alternatives import Question
from zerofx.inspect.choose.choice import Alternative
from zerofx.inspect.predict.plan import least_number
from zerofx.model.offload import Offload
from zerofx.model.units import format_bytes

ATTEMPTS = 2
"""How many numbers of ranks are tried: the second where buffers in flight turn out larger than with fewer ranks."""


def refuse(question: Question, alternatives: list[Alternative]) -> NoReturn:
    """Say that nothing fits, what needs least, and what would fit.

    Raises:
        ValueError: always.
    """
    predicted = [each for each in alternatives if each.offers]
    if not predicted:
        possible = [each for each in alternatives if not each.impossible]
        predicted = [question.predicted(max(possible, key=lambda each: each.stage).options)]
    if not all(each.offers for each in predicted):
        raise ValueError(predicted[0].why)
    best = min(predicted, key=lambda each: each.offers[0].needs)
    least = _least(question, best)
    ways = [f"memory={least.needs:,}"]
    ways += [way for find in (_ranks, _batch, _offload) if (way := find(question, best, least)) is not None]
    raise ValueError(
        f"memory={question.memory.nbytes:,} is too small for {type(question.module).__name__} on {question.ranks}: "
        f"{best.name} needs least, {least.needs:,} bytes, of which {format_bytes(least.at_rest)} are there at rest. "
        f"What fits: {'; or '.join(ways)}.{question.memory.hint}"
    )


def _least(question: Question, best: Alternative) -> Offer:
    """What is enough: of several graphs the first one that does not fit has only guessed at those after it."""
    least = best.offers[0]
    while not question.whole:
        found = question.any_that_fits(best.options, memory=replace(question.memory, nbytes=least.needs))
        if found.division is not None:
            break
        if not found.offers:
            raise ValueError(found.why)
        least = found.offers[0]
    return least


def _ranks(question: Question, best: Alternative, least: Offer) -> str | None:
    """How many there would have to be."""
    if isinstance(question.world_size, tuple) or best.stage == 0:
        return None

    def held(ranks: int) -> float:
        there = question.at_rest(best.options, ranks)
        return math.inf if there is None else there.weights + there.moments + there.gradients

    ranks, needs = question.world_size, least.needs
    for _ in range(ATTEMPTS):
        rest = needs - held(ranks)
        enough = least_number(lambda ranks, rest=rest: rest + held(ranks) <= question.memory.nbytes)  # type: ignore[misc]
        if enough is None or enough <= ranks:
            return None
        ranks, found = enough, question.any_that_fits(best.options, world_size=enough)
        if found.division is not None:
            return f"{ranks:,} ranks"
        if not found.offers:
            return None
        needs = found.offers[0].needs
    return None


def _batch(question: Question, best: Alternative, least: Offer) -> str | None:
    """How many samples fewer."""
    tensors = [x for x in pytree.tree_leaves((question.args, question.call)) if isinstance(x, torch.Tensor) and x.dim()]
    sizes = {len(x) for x in tensors}
    if len(sizes) != 1 or (whole := sizes.pop()) < 2:
        return None
    fixed: float = least.at_rest - sum(x.nbytes for x in tensors)  # weights, and what the optimizer keeps
    if fixed > question.memory.nbytes:
        return None
    size, needs, each = whole, least.needs, (least.needs - fixed) / whole
    for half in _halves(whole):
        if half > 1 and fixed + each * half > question.memory.nbytes:
            continue
        inputs = question.args, question.call
        args, call = pytree.tree_map_only(torch.Tensor, partial(_first, half), inputs)
        found = question.any_that_fits(best.options, args=args, call=call)
        if found.division is not None:
            return f"a batch of {half} instead of {whole}"
        if not found.offers:
            return None
        each = (needs - found.offers[0].needs) / (size - half)
        size, needs = half, found.offers[0].needs
        fixed = needs - each * half
    return None


def _offload(question: Question, best: Alternative, least: Offer) -> str | None:
    """A place beside the device."""
    if question.given.get("offload") is not None or (stage := question.given.get("stage", AUTO)) == 0:
        return None
    place = "a folder" if question.device.type == "cpu" else "cpu"
    offload = Offload(place, place, place if stage in (AUTO, 3) else None, activations=place)
    found = question.any_that_fits({**best.options, "stage": 3 if stage == AUTO else stage, "offload": offload})
    if found.division is None:
        return None
    takes = f"which leaves {format_bytes(found.division.peak_bytes)} on the device"
    return f'offload="{place}", {takes}'


def _first(n: int, x: torch.Tensor) -> torch.Tensor:
    return x[:n] if x.dim() else x


def _halves(size: int) -> Iterator[int]:
    while size > 1:
        size //= 2
        yield size
