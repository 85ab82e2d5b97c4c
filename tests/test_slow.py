"""What `make slow` runs: cases by a condition, in shares that are all of them; a condition without effect is found."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests import slow


class Item:
    """A case as pytest has it."""

    def __init__(self, *marks: pytest.MarkDecorator, **params: Any) -> None:
        self.marks = [mark.mark for mark in marks]
        self.callspec = self
        self.params = params
        self.nodeid = f"test_x.py::test_x[{params}]"

    def iter_markers(self, name: str) -> list[pytest.Mark]:
        return [mark for mark in self.marks if mark.name == name]

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next(iter(self.iter_markers(name)), None)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.mark)


def slow_cases(condition: pytest.MarkDecorator) -> tuple[list[Any], list[str]]:
    """Of four cases those that are slow, and the tests whose condition is without effect."""
    items: list[Any] = [Item(condition, stage=s, executor=e) for s in (2, 3) for e in ("eager", "inductor")]
    for item in items:
        slow.mark(item)
    marked = [tuple(item.params.values()) for item in items if item.get_closest_marker("slow")]
    return marked, slow.without_effect(items)


def test_a_condition_reads_the_parameters_that_it_names() -> None:
    assert slow_cases(slow.quick_if(lambda stage: stage == 3)) == ([(2, "eager"), (2, "inductor")], [])
    both = slow.slow_if(lambda executor, stage: executor == "inductor" and stage == 3)
    assert slow_cases(both) == ([(3, "inductor")], [])


def test_a_condition_that_tells_no_case_from_another_is_found() -> None:
    for mark in (slow.quick_if(lambda stage: stage == 4), slow.slow_if(lambda stage: stage == 4)):
        assert slow_cases(mark)[1] == ["test_x.py::test_x"]


def test_shares_are_all_of_it_and_each_has_all_stages_and_executors() -> None:
    every: list[Any] = list(itertools.product(range(50), range(4), ("eager", "inductor")))
    shares = [slow.share(every, f"{k}/25") for k in range(1, 26)]
    assert sorted(case for share in shares for case in share) == every
    for share in shares:
        assert len(share) == 16 and len({(stage, executor) for _, stage, executor in share}) == 8
    for wrong in ("0/25", "26/25", "1/24"):
        with pytest.raises(pytest.UsageError, match="K/N"):
            slow.share(every, wrong)
