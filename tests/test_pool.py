"""``pool=True``: a graph takes one frame, the numbers stay, and no step but the first two allocates a large buffer."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import unittest.mock
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zerofx
from tests.slow import slow
from tests.workers import Workers
from zerofx._torch import memory_profile
from zerofx.compiler.pooled import check_pool
from zerofx.passes.pool import LEAST, Frame, Pool, Room, drawing, new_buffer, spare_pieces, the_frames, the_pool


@settings(deadline=None, max_examples=100)
@given(st.lists(st.one_of(st.integers(1, 40_000), st.integers(-20, -1)), max_size=60))
def test_pieces_never_overlap_and_free_neighbours_become_one(steps: list[int]) -> None:
    """A number above 0 takes so many bytes, one below 0 gives a piece back."""
    pool, held, mark = Pool(1 << 18), [], 0
    for step in steps:
        if step > 0 and (tensor := pool.empty([step], [1], torch.uint8)) is not None:
            mark = (mark + 1) % 256
            held.append((tensor.fill_(mark), mark))
            del tensor
        elif step < 0 and held:
            held.pop(step % len(held))
    assert all(tensor.eq(mark).all() for tensor, mark in held)
    free = pool.free()
    assert all(one[1] < other[0] for one, other in itertools.pairwise(free)), "two free pieces touch"
    assert pool.live + sum(stop - start for start, stop in free) == pool.nbytes
    held.clear()
    assert pool.free() == [(0, pool.nbytes)] and pool.live == 0


def test_a_piece_is_free_when_the_last_view_of_it_is_gone() -> None:
    pool = Pool(1 << 20)
    tensor = pool.empty([4, 100], [100, 1], torch.bfloat16)
    assert tensor is not None and not tensor._is_view() and tensor.untyped_storage().nbytes() == 800
    view = tensor[1:].t()
    del tensor
    assert len(pool.free()) == 1 and pool.free()[0][0] > 0
    del view
    assert pool.free() == [(0, pool.nbytes)]


def test_what_does_not_fit_is_allocated_as_ever() -> None:
    pool = Pool(1 << 20)
    assert pool.empty([(1 << 20) + 1], [1], torch.uint8) is None and pool.refused == 1


@pytest.fixture
def a_pool_of_its_own() -> Iterator[None]:
    for arena in (the_pool, the_frames):
        arena.cache_clear()
    yield
    for arena in (the_pool, the_frames):
        arena.cache_clear()


def test_only_large_buffers_are_taken_and_only_inside(a_pool_of_its_own: None) -> None:
    like = torch.empty(0, dtype=torch.uint8)
    before = the_pool().free()
    outside = new_buffer(like, LEAST)
    with drawing():
        small, large = new_buffer(like, LEAST - 1), new_buffer(like, LEAST)
    assert outside.untyped_storage().resizable() and small.untyped_storage().resizable()
    assert not large.untyped_storage().resizable() and the_pool().free() != before
    del large
    assert the_pool().free() == before and sum(spare_pieces()) == the_pool().reach - the_pool().live >= LEAST


FRAME = Frame(
    (Room(0, "gather", "all_gather", "h", 4096, 0, 3, 0), Room(1, "pack", "pack", "h", 400, 4, 5, 64)), 8192, 4096
)


def test_a_buffer_lies_in_its_room_and_holds_the_frame(a_pool_of_its_own: None) -> None:
    like = torch.empty(0)
    with drawing(FRAME):
        one, other, more = new_buffer(like, 1024, 0), new_buffer(like, 100, 1), new_buffer(like, 100, 7)
        inside = the_frames().live
        with drawing(FRAME):  # a graph inside of a graph
            another = new_buffer(like, 100, 1)
    assert other.data_ptr() - one.data_ptr() == 64 and other.untyped_storage().nbytes() == 400
    assert another.data_ptr() - one.data_ptr() == 64 + 8192
    assert more.untyped_storage().resizable() and not one.untyped_storage().resizable()
    assert inside == 8192 and the_frames().takes == 2
    del one, another
    assert the_frames().free()[0] == (8192, the_frames().nbytes)  # what is left holds the first frame
    del other
    assert the_frames().free() == [(0, the_frames().nbytes)]


def test_what_has_not_the_size_of_its_room_is_allocated_as_ever(a_pool_of_its_own: None) -> None:
    like = torch.empty(0)
    with drawing(FRAME):
        assert new_buffer(like, 1025, 0).untyped_storage().resizable()
        assert not new_buffer(like, 4096, 0, torch.uint8).untyped_storage().resizable()
    assert new_buffer(like, 1024, 0).untyped_storage().resizable()


class Net(nn.Module):
    """Every group has 2 MiB and more, and so has what layers give to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2048, 512)
        self.up, self.down, self.last = nn.Linear(512, 1024), nn.Linear(1024, 512), nn.Linear(512, 1024)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.table(x)
        h = self.down(F.gelu(self.up(h))) + h
        return F.mse_loss(self.last(h), y)


failing: list[bool] = []


@torch.compiler.disable
def fail_if_told() -> None:
    if failing:
        raise RuntimeError("in the middle of a step")


class Broken(Net):
    """With a graph break in the middle, where it can fail."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.table(x)
        h = self.down(F.gelu(self.up(h))) + h
        fail_if_told()
        return F.mse_loss(self.last(h), y)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(512).view(4, 128) + 7 * step + torch.distributed.get_rank(), torch.full((4, 128, 1024), 0.1)


def held() -> int:
    """Bytes of frames that somebody holds."""
    the_frames().free()
    return the_frames().live


def reached() -> int:
    return the_pool().reach + the_frames().reach


@contextlib.contextmanager
def misses() -> Iterator[list[int]]:
    """Bytes of each buffer that an operator of zerofx takes from malloc inside."""
    found: list[int] = []

    def noted(like: torch.Tensor, *args: Any) -> torch.Tensor:
        out = new_buffer(like, *args)
        found.extend([out.nbytes] * out.untyped_storage().resizable())
        return out

    with contextlib.ExitStack() as patches:
        for module in ("ops", "coded", "feedback", "carry"):
            patches.enter_context(unittest.mock.patch(f"zerofx.passes.{module}.new_buffer", noted))
        yield found


@dataclass
class Trained:
    """What one training was like.

    Attributes:
        losses: of each step.
        events: bytes of each large allocation of the last step.
        missed: bytes of each buffer of a collective that malloc gave in it.
        grown: how far the arenas grew in it.
        frames: how many it took.
        left: bytes of frames that are taken when all is over.
    """

    losses: list[float]
    events: list[int]
    missed: list[int]
    grown: int
    frames: int
    left: int


SMALL = 9e6
"""Gathered bytes: the largest group and little more, so that none stays gathered."""


def train(stage: int, executor: str, pool: bool, forwards: int = 1, model: type[Net] = Net, **options: Any) -> Trained:
    """Four steps, each of ``forwards`` forwards and then as many backwards."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    net = zerofx.compile(copy.deepcopy(model()), stage=stage, executor=executor, pool=pool, **options)
    away = options.get("offload")
    ours = away is not None and away.optimizer is not None
    optimizer: Any = (zerofx.AdamW if ours else torch.optim.SGD)(net.parameters(), lr=0.01)
    losses, events, missed, before, taken = [], [], [], 0, 0
    for step in range(4):
        batches = [batch(step + 10 * i) for i in range(forwards)]  # they are no large allocations of the step's

        def run(batches: list[Any] = batches) -> None:
            for loss in reversed([net(x, y) for x, y in batches]):
                loss.backward()
                losses.append(loss.item())

        if step == 3:
            before, taken = reached(), the_frames().takes
            with memory_profile() as prof, misses() as missed:
                run()
            events = [e.nbytes() for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
            taken = the_frames().takes - taken
        else:
            run()
        optimizer.step()
        optimizer.zero_grad()
    large = [n for n in events if n >= LEAST]
    return Trained(losses, large, missed, reached() - before, taken, held())


Case = tuple[int, str, dict[str, Any]]


def train_with_and_without(cases: list[Case]) -> list[Any]:
    return [(case, train(*case[:2], False, **case[2]), train(*case[:2], True, **case[2])) for case in cases]


def check(results: list[Any]) -> None:
    for rank in results:
        for (stage, executor, options), without, found in rank:
            case = stage, executor, options
            assert found.losses == without.losses, case
            assert len(found.events) < len(without.events), case
            assert not found.events or executor == "eager", (case, found.events)
            assert not found.missed and (without.missed or not stage), (case, found.missed)
            assert not found.grown and not found.left and not without.frames, case
            passes = options.get("forwards", 1)
            if options.get("model") is Broken:
                assert found.frames >= 2 * passes, (case, found.frames)
            else:  # a forward that gathers nothing, or only what stays gathered, needs none
                graphs = (stage > 0 or "offload" in options) + ("memory_budget" in options)
                assert found.frames == passes * graphs, (case, found.frames)


def test_numbers_are_the_same_and_nothing_large_is_allocated_any_more(workers2: Workers) -> None:
    cases = [(3, "inductor", {"memory_budget": SMALL}), (2, "eager", {})]
    check(workers2.run(train_with_and_without, cases, timeout=280))


@pytest.mark.parametrize("executor", ["eager", slow("inductor")])
def test_what_comes_from_a_file_lies_in_the_frame(workers2: Workers, tmp_path: Path, executor: str) -> None:
    where = str(tmp_path)
    away = zerofx.Offload(where, weights=where, activations=where)
    cases: list[Case] = [(3, executor, {"memory_budget": SMALL, "offload": away})]
    cases += [(0, executor, {"offload": zerofx.Offload(activations=where)})] * (executor == "inductor")
    check(workers2.run(train_with_and_without, cases, timeout=280))


def test_two_forwards_before_a_backward_have_two_frames(workers2: Workers) -> None:
    cases = [(3, "eager", {"forwards": 2, "memory_budget": SMALL}), (3, "eager", {"model": Broken})]
    check(workers2.run(train_with_and_without, cases, timeout=280))


@pytest.mark.slow
def test_numbers_are_the_same_in_every_stage(workers2: Workers) -> None:
    cases: list[Case] = [(stage, "inductor", {}) for stage in (0, 1, 2, 3)]
    cases += [(1, "eager", {}), (3, "eager", {}), (3, "inductor", {"model": Broken, "forwards": 2})]
    check(workers2.run(train_with_and_without, cases, timeout=500))


def fail_in_the_middle() -> tuple[list[float], list[float], int, int]:
    """Losses of three steps; the same with an error between them; bytes of frames taken then; how far they grew."""
    losses: tuple[list[float], list[float]] = ([], [])
    reach = [0, 0]
    for fails in (False, True):
        torch.manual_seed(0)
        torch._dynamo.reset()
        net = zerofx.compile(Broken(), stage=3, executor="eager", pool=True, memory_budget=SMALL)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            if fails and step == 2:
                reach[0] = the_frames().reach
                failing.append(True)
                with pytest.raises(RuntimeError, match="in the middle"):
                    net(*batch(step))
                failing.clear()
            loss = net(*batch(step))
            loss.backward(retain_graph=True)
            optimizer.zero_grad()
            loss.backward()  # the second time, of what forward saved
            losses[fails].append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    reach[1] = the_frames().reach
    return *losses, held(), reach[1] - reach[0]


def test_after_an_error_in_the_middle_of_a_step_training_goes_on(workers2: Workers) -> None:
    for before, after, live, grown in workers2.run(fail_in_the_middle, timeout=120):
        assert before == after and len(before) == 3 and before[0] != before[2]
        assert live == 0 and grown == 0


def fail_inside_of_a_graph() -> tuple[int, int, bool]:
    """A collective fails while a graph runs: bytes of frames held meanwhile, and after; whether losses are alike."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    net = zerofx.compile(Net(), stage=2, executor="eager", pool=True)
    x, y = batch(0)
    net(x, y).backward()
    loss = net(x, y)
    with unittest.mock.patch("zerofx.passes.ops.all_to_all_pairwise_", side_effect=RuntimeError("no way")):
        try:
            loss.backward()
        except RuntimeError as error:
            meanwhile = held() if error.__traceback__ is not None else -1
    gc.collect()
    again = net(x, y)
    again.backward()
    return meanwhile, held(), again.item() == loss.item()


def test_a_frame_is_given_back_when_a_graph_fails(workers2: Workers) -> None:
    for meanwhile, after, alike in workers2.run(fail_inside_of_a_graph, timeout=120):
        assert meanwhile > 0 == after and alike  # what the error knows of is not written over


def test_a_pool_where_there_is_none_is_refused(fake_world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="pool=True: the module is on cuda:0, where PyTorch's allocator keeps"):
        check_pool(torch.device("cuda", 0))
    monkeypatch.setattr("sys.platform", "darwin")
    fake_world(2)
    with pytest.raises(ValueError, match="pool=True on darwin: expected Linux"):
        zerofx.compile(nn.Linear(2, 2), pool=True)
