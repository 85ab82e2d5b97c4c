"""Models as transformers ships them, and a few by hand, train on two ranks with the numbers of one process.

In every stage and with both executors. ``make test`` runs those that differ most from the models of tests/road. ``make
slow`` runs the first of the zoo in all, and the others in one each. ``make zoo`` runs all and writes docs/zoo.md.
"""

from __future__ import annotations

import pytest

from tests.pairwise import EXECUTORS, STAGES
from tests.slow import quick_if
from tests.zoo import table as page
from tests.zoo.architectures import ARCHITECTURES, FIRST
from tests.zoo.run import Outcome, train

# Routing by data; buffers; a recurrence that splits the graph; one layer twice.
TELLING = ["albert", "resnet", "lstm", "mixtral"]


def rows() -> list:
    every = [(name, stage, executor) for name in FIRST for stage in STAGES for executor in EXECUTORS]
    ways = [(stage, executor) for stage in STAGES for executor in EXECUTORS]
    others = [name for name in ARCHITECTURES if name not in FIRST]
    every += [(name, *ways[i % len(ways)]) for i, name in enumerate(others)]
    return every


@quick_if(lambda name, stage, executor: name in TELLING and stage == 3 and (executor == "eager" or name == "lstm"))
@pytest.mark.timeout(2100)
@pytest.mark.parametrize(("name", "stage", "executor"), rows())
def test_it_trains_as_in_one_process(workers2, name: str, stage: int, executor: str) -> None:
    if not ARCHITECTURES[name].is_here:
        pytest.skip(f"{ARCHITECTURES[name].needs} is not installed")
    outcomes = workers2.run(train, name, stage, executor, timeout=250 if executor == "eager" else 600)
    assert all(outcome.verdict == "equal" for outcome in outcomes), outcomes
    first = outcomes[
        0
    ]  # it speaks for all ranks of what is gathered outside of graphs; replicas are read without a word
    assert first.graphs or first.places or stage < 3


REGIONAL = [
    ("convnext", 3, ""),
    ("convnext", 0, ""),
    ("mixtral", 3, ""),  # its routing splits the graph
    ("gpt2", 3, "HSDP"),
    ("gpt2", 3, "hpZ"),
    ("gpt2", 3, "ZeRO-1 between replicas"),
    ("gpt2", 2, "HSDP"),
]


@pytest.mark.slow
@pytest.mark.timeout(2100)
@pytest.mark.parametrize(("name", "stage", "scheme"), REGIONAL)
def test_it_trains_in_regions_too_and_on_meshes(make_workers, name: str, stage: int, scheme: str) -> None:
    outcomes = make_workers(4 if scheme else 2).run(train, name, stage, "regional", scheme, timeout=600)
    assert all(outcome.verdict == "equal" and outcome.graphs for outcome in outcomes), outcomes


def test_other_numbers_and_weights_that_stand_still_are_not_equal() -> None:
    good = {"parameters": 1, "graphs": 1, "places": (), "loss": 1e-6, "weights": 1e-5, "still": 0.1}
    assert Outcome(**good).verdict == "equal"
    for bad in ({"loss": 1e-4}, {"weights": float("nan")}, {"still": 0.6}):
        assert Outcome(**good | bad).verdict != "equal"


LINE = {"verdict": "equal", "seconds": 90.0, "torch": "2.13.0", "transformers": "5.0"}


def test_the_page_has_a_row_for_each_model_and_says_which_cells_were_not_run() -> None:
    lines = {page.cell("vit", 1, "inductor"): LINE, page.cell("gpt2", 0, "eager"): LINE | {"verdict": "SomeError: x"}}
    text = page.page(lines)
    assert "| vit | vision | not run | not run | not run | not run | not run | equal | not run | not run |" in text
    assert "| gpt2 | decoder | SomeError: x | not run |" in text
    assert text.count("\n| ") == 2 + sum(a.needs == "transformers" for a in ARCHITECTURES.values())
    assert "1 of the 2 cells that were run are equal" in text and "`timm_vit`" in text


def test_the_page_in_the_repository_shows_what_was_measured() -> None:
    assert page.PAGE.read_text() == page.page(page.read())
    for name in page.read():
        assert name.partition(", ")[0] in ARCHITECTURES


def test_a_cell_gives_the_last_error_as_the_reason() -> None:
    error = "train failed on 2 ranks\n--- rank 0: Traceback\n  File x\nValueError: a\nzerofx.VerifyError: p|q is lost\n"
    assert page.reason(error) == "zerofx.VerifyError: p/q is lost"
    assert page.reason("train failed\n--- rank 0: no answer after 250 s") == "--- rank 0: no answer after 250 s"
