"""What would fit where nothing does: each answer is a number that was predicted once more.

::

    memory=    the least of all alternatives
    ranks      as many more as bytes at rest need (`Question.at_rest`), predicted there
    batch      half of what there is, or half of that, ...: from the first on that may fit, by what the batch takes and
               what one sample does
    offload=   all that can leave the device, where no place was given
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NoReturn

import torch

from zerofx._torch import pytree
from zerofx.compiler.auto import AUTO
from zerofx.compiler.choices import Division, Offer
from zerofx.inspect.choose.alternatives import Question
from zerofx.inspect.choose.choice import Alternative
from zerofx.inspect.predict.plan import least_number
from zerofx.model.offload import Offload
from zerofx.model.units import format_bytes

SLACK = 1.25
"""More ranks than bytes at rest ask for, where buffers in flight turn out larger than here."""


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
    least = best.offers[0]
    ways = [f"memory={least.needs:,}"]
    ways += [way for find in (_ranks, _batch, _offload) if (way := find(question, best, least)) is not None]
    raise ValueError(
        f"memory={question.memory.nbytes:,} is too small for {type(question.module).__name__} on {question.ranks}: "
        f"{best.name} needs least, {least.needs:,} bytes, of which {format_bytes(least.at_rest)} are there at rest. "
        f"What fits: {'; or '.join(ways)}.{question.memory.hint}"
    )


def _ranks(question: Question, best: Alternative, least: Offer) -> str | None:
    """How many there would have to be."""
    if isinstance(question.world_size, tuple) or best.stage == 0:
        return None

    def held(ranks: int) -> float:
        there = question.at_rest(best.options, ranks)
        return math.inf if there is None else there.weights + there.moments + there.gradients

    rest = least.needs - held(question.world_size)
    if (enough := least_number(lambda ranks: rest + held(ranks) <= question.memory.nbytes)) is None:
        return None
    for ranks in (enough, int(enough * SLACK) + 1):
        if question.any_that_fits(best.options, world_size=ranks).division is not None:
            return f"{ranks:,} ranks"
    return None


def _batch(question: Question, best: Alternative, least: Offer) -> str | None:
    """How many samples fewer."""
    tensors = [x for x in pytree.tree_leaves((question.args, question.call)) if isinstance(x, torch.Tensor) and x.dim()]
    sizes = {len(x) for x in tensors}
    if len(sizes) != 1:
        return None
    (whole,) = sizes

    def of(size: int) -> Division | None:
        inputs = question.args, question.call
        args, call = pytree.tree_map_only(torch.Tensor, lambda x: x[:size] if x.dim() else x, inputs)
        return question.any_that_fits(best.options, args=args, call=call).division

    if whole == 1 or (one := of(1)) is None:
        return None
    each = (least.needs - one.peak_bytes) / (whole - 1)  # what a sample adds, more or less
    may = (half for half in _halves(whole) if one.peak_bytes + each * (half - 1) <= question.memory.nbytes)
    size = next((half for half in may if half == 1 or of(half) is not None), 1)
    return f"a batch of {size} instead of {whole}"


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


def _halves(size: int) -> Iterator[int]:
    while size > 1:
        size //= 2
        yield size
