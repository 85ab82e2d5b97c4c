"""Training with NCCL's spelling gives what gloo's gives: the same graphs as on GPUs, run for real on gloo ranks.

``make test`` runs a part: every stage, both executors, two ranks and three. ``make slow`` runs all of the table that
``python -m tests.nccl`` writes.
"""

from __future__ import annotations

import unittest.mock
from typing import Any

import pytest

from tests.nccl.events import races, under_way
from tests.nccl.page import PAGE, read, table
from tests.nccl.parity import Cell, cells, run
from tests.nccl.stand_in import AT_LAST, AT_ONCE, Moment, nccl_spelling
from tests.seams.test_seams import train
from tests.slow import quick_if
from tests.workers import Workers
from zerofx.passes import PIPELINE, edit, lower


def spell_both_ways(options: dict[str, Any], optimizer: str, moments: list[Moment]) -> tuple[float, int, list[str]]:
    """On each rank: the largest difference from gloo's spelling, how many collectives, and what raced."""
    wanted, worst, started, found = train(options, optimizer), 0.0, 0, []
    for moment in moments:
        with nccl_spelling(moment) as group:
            trained = train(options, optimizer)
            events = group.log.events
            started += len([event for event in events if event.kind == "start"])
            found += [*races(events), *map(str, under_way(events))]
        worst = max(worst, *((a - b).abs().max().item() for a, b in zip(trained, wanted, strict=True)))
        assert all(x.isfinite().all() for x in trained)
    return worst, started, found


WAYS: dict[str, tuple[dict[str, Any], int, list[Moment]]] = {
    "0 eager, 2 ranks": ({"stage": 0, "executor": "eager"}, 2, [AT_LAST]),
    "1 eager, 3 ranks": ({"stage": 1, "executor": "eager"}, 3, [AT_LAST]),
    "2 eager, 2 ranks": ({"stage": 2, "executor": "eager"}, 2, [AT_ONCE, AT_LAST]),
    "3 eager, 3 ranks": ({"stage": 3, "executor": "eager"}, 3, [AT_ONCE, AT_LAST]),
    "3 eager, a leaf module": ({"stage": 3, "executor": "eager", "leaf_modules": ["expert"]}, 2, [AT_LAST]),
    "2 inductor, 2 ranks": ({"stage": 2, "executor": "inductor"}, 2, [AT_LAST]),
    "3 inductor, 2 ranks": ({"stage": 3, "executor": "inductor"}, 2, [AT_LAST]),
}


@quick_if(lambda way: way in ("0 eager, 2 ranks", "1 eager, 3 ranks"))
@pytest.mark.parametrize("way", WAYS)
def test_nccls_spelling_trains_as_gloos(make_workers, way: str) -> None:
    options, ranks, moments = WAYS[way]
    bound = 0.0 if ranks == 2 else 1e-6  # of two numbers there is one sum
    for worst, started, found in make_workers(ranks).run(spell_both_ways, options, "torch", moments, timeout=200):
        assert worst <= bound
        assert started > 0
        assert not found


def train_without_waits() -> bool:
    """Whether numbers tell where a wait for a gather is missing: outputs are NaN until then."""

    def lower_without_waits(gm: Any, ctx: Any) -> int:
        edits = lower(gm, ctx)
        for discard in edit.tagged(gm.graph, "discard"):  # or there is no memory where the gather comes too late
            gm.graph.erase_node(discard)
        for wait in edit.tagged(gm.graph, "wait"):
            wait.replace_all_uses_with(wait.args[0])
            gm.graph.erase_node(wait)
        return edit.finish(gm, edits + 1)

    passes = tuple(lower_without_waits if pass_ is lower else pass_ for pass_ in PIPELINE if pass_.__name__ != "verify")
    with unittest.mock.patch("zerofx.passes.PIPELINE", passes), nccl_spelling(AT_LAST):
        losses = train({"stage": 3, "executor": "eager"})
    return bool(losses[0].isnan())


def test_a_missing_wait_shows_in_the_numbers(workers2: Workers) -> None:
    assert workers2.run(train_without_waits) == [True, True]


def test_the_page_shows_what_was_measured() -> None:
    assert table(read()) in PAGE.read_text(), "run python -m tests.nccl --page"


@pytest.mark.slow
@pytest.mark.parametrize("cell", cells(), ids=str)
def test_a_cell_of_the_table_is_equal(make_workers, cell: Cell) -> None:
    assert run(make_workers(cell.ranks), cell).equal
