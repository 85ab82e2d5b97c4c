"""Which combinations of several axes to run where all would take too long: enough that every pair of values meets.

An error mostly needs two things together, a model and a stage, or a stage and an executor. So here each two values of
two axes occur together::

    @pytest.mark.parametrize(("model", "stage", "executor"), pairwise(["lstm", "vit"], STAGES, EXECUTORS))
    def test_it_trains(workers2, model, stage, executor): ...
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

Row = tuple[Any, ...]
STAGES = [0, 1, 2, 3]
EXECUTORS = ["eager", "inductor"]


def pairwise(*axes: Sequence[Any]) -> list[Row]:
    """Rows of one value per axis such that each two values of two axes stand in one row at least.

    The row that adds most pairs comes next. Of those that add as many, it is the one whose values stand first in their
    axes: what costs least should. With one executor that is cheap, one that is not, and every model in four stages,
    three of these four rows are cheap.
    """
    rows = list(itertools.product(*axes))
    missing = {pair for row in rows for pair in _pairs(row)}
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(_pairs(row) & missing))  # of equals, max takes the first
        missing -= _pairs(best)
        chosen.append(best)
    return chosen


def _pairs(row: Row) -> set[tuple[tuple[int, Any], ...]]:
    """The pairs of a row, each value with its axis. A single axis has each value for a pair."""
    return set(itertools.combinations(enumerate(row), min(2, len(row))))
