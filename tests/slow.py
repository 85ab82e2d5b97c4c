"""Which cases of a test ``make test`` leaves to ``make slow``::

    @quick_if(lambda stage, executor: stage == 3 and executor == "eager")  # all others are slow
    @pytest.mark.parametrize("executor", ["eager", "inductor"])
    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test_it_trains(workers2, stage, executor): ...

``@slow_if(...)`` says which are slow. A condition's arguments are parameters of the test. In a list of cases
``slow(3, "inductor")`` is a slow one. A test that is slow as a whole has ``@pytest.mark.slow``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

Condition = Callable[..., object]


def quick_if(condition: Condition) -> pytest.MarkDecorator:
    return slow_if(condition, wanted=False)


def slow_if(condition: Condition, wanted: bool = True) -> pytest.MarkDecorator:
    return pytest.mark.slow_if.with_args(condition, wanted)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def mark(item: pytest.Item) -> None:
    """Marks a case as slow where its test's conditions say so."""
    for marker in item.iter_markers("slow_if"):
        condition, wanted = marker.args
        params = item.callspec.params  # type: ignore[attr-defined]
        if bool(condition(*(params[name] for name in inspect.signature(condition).parameters))) == wanted:
            item.add_marker(pytest.mark.slow)


def share(items: list[pytest.Item], shard: str) -> list[pytest.Item]:
    """``2/25``: the 2nd, the 27th, ... Of each long test every share has some cases, and takes about as long.

    Cases come in products of stages and executors: with an even N all of a share could be Inductor's.
    """
    k, n = map(int, shard.split("/"))
    if not 1 <= k <= n or n % 2 == 0:
        raise pytest.UsageError(f"--shard={shard}: K/N has 1 <= K <= N, and N is odd")
    return items[k - 1 :: n]


def without_effect(items: Iterable[pytest.Item]) -> list[str]:
    """Tests whose condition holds for none of their cases, or for all: it tells nothing apart, as behind a rename."""
    found: dict[str, set[bool]] = {}
    for item in items:
        if item.get_closest_marker("slow_if"):
            found.setdefault(item.nodeid.partition("[")[0], set()).add(item.get_closest_marker("slow") is not None)
    return [name for name, slow in found.items() if len(slow) == 1]
