"""What Python adds to a compile, and need not."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import FrameType

import pytest
import torch

from zerofx.compiler.lean import SLOTS, lean


@pytest.fixture(autouse=True)
def nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("zerofx.compiler.lean._programs", False)
    assert gc.get_freeze_count() == 0
    yield
    gc.unfreeze()


def slots(frame: FrameType | None) -> int:
    """Of the largest frame from ``frame`` down."""
    found = 0
    while frame is not None:
        found, frame = max(found, frame.f_code.co_stacksize), frame.f_back
    return found


@lean
def inside(x: int, *, y: int = 0) -> tuple[int, int, int]:
    return x + y, gc.get_freeze_count(), slots(sys._getframe())


def test_what_is_called_inside_stands_in_front_of_a_large_frame_and_what_was_there_before_is_not_collected() -> None:
    assert slots(sys._getframe()) < SLOTS
    result, frozen, largest = inside(1, y=2)
    assert result == 3 and frozen > 0 and largest == SLOTS
    assert gc.get_freeze_count() == 0


def test_garbage_that_is_made_inside_is_collected_inside() -> None:
    class Node:
        pass

    alive = 0

    @lean
    def make() -> None:
        nonlocal alive
        for _ in range(10):
            node = Node()
            node.itself = node  # type: ignore[attr-defined]
        del node
        gc.collect()
        alive = sum(isinstance(x, Node) for x in gc.get_objects())

    make()
    assert alive == 0


def test_an_error_comes_out_and_leaves_nothing_frozen() -> None:
    @lean
    def fail() -> None:
        raise ValueError("as it was")

    with pytest.raises(ValueError, match="as it was"):
        fail()
    assert gc.get_freeze_count() == 0


def test_what_the_program_has_frozen_stays_frozen() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    _, inner, _ = inside(1)
    assert inner >= frozen > 0 and gc.get_freeze_count() >= frozen


def test_what_is_frozen_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count goes through all that is frozen: at each graph of each compile it would cost more than is saved."""
    counted = 0
    count = gc.get_freeze_count

    def counting() -> int:
        nonlocal counted
        counted += 1
        return count()

    monkeypatch.setattr("zerofx.compiler.lean.gc.get_freeze_count", counting)
    lean(lambda: lean(lambda: None)())()
    assert counted == 1
    gc.freeze()
    for _ in range(3):
        lean(lambda: lean(lambda: None)())()
    assert counted == 2


def test_a_compile_inside_of_another_ends_nothing() -> None:
    @lean
    def outer() -> tuple[int, int]:
        before = gc.get_freeze_count()
        inside(1)
        return before, gc.get_freeze_count()

    before, after = outer()
    assert before > 0 and after > 0


def test_a_compiled_module_leaves_nothing_frozen(fake_world: object) -> None:
    import zerofx

    fake_world(2)  # type: ignore[operator]
    net = zerofx.compile(torch.nn.Linear(4, 4), executor="eager")
    net(torch.ones(2, 4)).sum().backward()
    assert gc.get_freeze_count() == 0
