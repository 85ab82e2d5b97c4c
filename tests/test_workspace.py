"""What a kernel takes inside: told for each, run once, with nothing of its caller's."""

from __future__ import annotations

import weakref

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zerofx.inspect.predict.workspace import Workspaces


def test_what_is_taken_and_given_back_is_told_and_what_is_left_is_not() -> None:
    runs: list[torch.Size] = []

    def through_a_copy(x: torch.Tensor, rows: int) -> torch.Tensor:
        runs.append(x.shape)
        return (x + 1)[:rows].clone()

    told: dict[str, int] = {}
    workspaces = Workspaces()
    with FakeTensorMode():
        small, large, again = torch.empty(64, 16), torch.empty(128, 16), torch.empty(64, 16)
    for name, x in (("small", small), ("large", large), ("again", again)):
        workspaces.want(through_a_copy, (x,), {"rows": 32}, lambda n, name=name: told.update({name: n}))
    assert not told and not runs, "nothing runs before it is asked for"
    workspaces.measure()
    assert told == {"small": 64 * 16 * 4, "large": 128 * 16 * 4, "again": 64 * 16 * 4}
    assert runs.count(torch.Size([64, 16])) == runs.count(torch.Size([128, 16])) == 2, "once to set up, once to count"


def test_arguments_are_not_held_nor_written_to() -> None:
    x = torch.ones(8)
    told: list[int] = []
    workspaces = Workspaces()
    workspaces.want(torch.ops.aten.zero_.default, (x,), {}, told.append)
    workspaces.measure()
    assert told == [0] and x.sum() == 8
    gone = weakref.ref(x)
    workspaces.want(torch.ops.aten.zero_.default, (x,), {}, told.append)
    del x
    assert gone() is None
