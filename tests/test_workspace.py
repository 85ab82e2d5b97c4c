"""What a kernel takes inside: told for each, run once, with nothing of its caller's."""

from __future__ import annotations

import os
import sys
import weakref
from types import SimpleNamespace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zerofx import _torch
from zerofx.simulate.recorder import Recorder
from zerofx.simulate.workspace import Workspaces


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


def test_a_kernel_that_refuses_zeros_counts_as_none() -> None:
    def picky(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("zeros")

    told: list[int] = []
    workspaces = Workspaces()
    workspaces.want(picky, (torch.ones(8),), {}, told.append)
    workspaces.want(torch.ops.aten.full.default, ([8], 1.0), {}, told.append)  # has no tensor to be run on
    workspaces.measure()
    assert told == [0, 0]


def test_a_sum_in_another_dtype_converts_its_input_and_generators_stay_as_they_are() -> None:
    recorder, code = Recorder(Workspaces()), SimpleNamespace(world_size=1, groups={}, updates={})
    state = torch.get_rng_state()
    with FakeTensorMode(), recorder, recorder.phase(0, "forward", code) as phase:
        x = torch.empty(64, 16, dtype=torch.bfloat16)
        out = torch.ops.aten.sum.dim_IntList(x, [0], True, dtype=torch.float32)
        noise = torch.ops.aten.rand_like.default(x)
    assert recorder.workspaces is not None
    recorder.workspaces.measure()
    given_back = [change.buffer.nbytes for change in phase.changes if not change.made]
    assert given_back == [64 * 16 * 4, 0] and (out.numel(), noise.numel()) == (16, 1024)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_the_profiler_says_of_itself_is_kept_from_the_terminal_and_errors_are_not(capfd) -> None:
    def complain() -> torch.Tensor:
        os.write(2, b"an error of C++\n")
        print("an error of Python", file=sys.stderr)
        return torch.empty(1000)

    assert _torch.allocations([complain]) == [[4000]]
    assert capfd.readouterr().err.splitlines() == ["an error of C++", "an error of Python"]
    with _torch.memory_profile() as prof:
        torch.empty(1000)
    assert capfd.readouterr().err == ""
    assert sum(e.nbytes() == 4000 for e in prof.profiler.kineto_results.events() if e.name() == "[memory]") == 1


def test_what_is_written_while_a_profile_starts_comes_out_with_marks_left_away(capfd, monkeypatch) -> None:
    start = torch.profiler.profile.start

    def noisy(profile: torch.profiler.profile) -> None:
        start(profile)
        os.write(2, b"USDT:2026-01-01 a mark\nERROR:2026-01-01 no such device\n")

    monkeypatch.setattr(torch.profiler.profile, "start", noisy)
    _torch.allocations([lambda: None])
    assert capfd.readouterr().err == "ERROR:2026-01-01 no such device\n"
