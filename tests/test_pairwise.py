"""The selection of a large table: every pair of values meets in it, and no row is for nothing."""

from __future__ import annotations

import itertools

import pytest

from tests.pairwise import EXECUTORS, STAGES, pairwise

AXES = {
    "models": (["a", "b", "c", "d", "e"], STAGES, EXECUTORS),
    "one_model": (["a"], STAGES, EXECUTORS),
    "four_axes": (["a", "b", "c"], [2, 3], STAGES, EXECUTORS),
    "equal_values": ([1, 2], [1, 2], [2, 1]),
    "one_axis": ([1, 2, 3],),
}


def pairs(rows: list[tuple]) -> set[tuple]:
    return {(i, row[i], k, row[k]) for row in rows for i, k in itertools.combinations(range(len(row)), 2)}


@pytest.mark.parametrize("name", AXES)
def test_every_pair_of_values_meets(name: str) -> None:
    assert pairs(pairwise(*AXES[name])) == pairs(list(itertools.product(*AXES[name])))
    for i, axis in enumerate(AXES[name]):
        assert {row[i] for row in pairwise(*AXES[name])} == {*axis}


@pytest.mark.parametrize("name", AXES)
def test_no_row_could_be_left_out(name: str) -> None:
    rows = pairwise(*AXES[name])
    for row in rows if len(AXES[name]) > 1 else ():
        assert pairs([other for other in rows if other != row]) < pairs(rows)


def test_a_model_takes_four_rows_and_one_of_them_the_dear_executor() -> None:
    models = [f"model{i}" for i in range(40)]
    rows = pairwise(models, STAGES, EXECUTORS)
    assert len(rows) == 4 * len(models)
    assert sum(executor == "inductor" for _, _, executor in rows) == len(models)


def test_the_selection_is_the_same_every_time() -> None:
    assert pairwise(*AXES["four_axes"]) == pairwise(*AXES["four_axes"])
