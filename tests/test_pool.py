"""``pool=True``: large buffers come from one arena, the numbers stay, and no step but the first allocates any."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zerofx
from tests.workers import Workers
from zerofx._torch import memory_profile
from zerofx.compiler.pooled import check_pool
from zerofx.passes.pool import LEAST, Pool, drawing, new_buffer, spare_pieces, the_pool


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
    the_pool.cache_clear()
    yield
    the_pool.cache_clear()


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


def train(stage: int, executor: str, pool: bool) -> tuple[list[float], list[int], int]:
    """Losses; bytes of each large allocation of the last step; how far the pool reached in the last two steps."""
    torch.manual_seed(0)
    net = zerofx.compile(copy.deepcopy(Net()), stage=stage, executor=executor, pool=pool)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses, reach, events = [], [], []
    for step in range(4):
        x = torch.arange(512).view(4, 128) + 7 * step + torch.distributed.get_rank()
        y = torch.full((4, 128, 1024), 0.1)

        def run(x: torch.Tensor = x, y: torch.Tensor = y) -> None:
            loss = net(x, y)
            loss.backward()
            losses.append(loss.item())

        if step == 3:
            with memory_profile() as prof:
                run()
            events = [e.nbytes() for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
        else:
            run()
        optimizer.step()
        optimizer.zero_grad()
        reach.append(the_pool().reach)
    return losses, [n for n in events if n >= LEAST], reach[-1] - reach[-2]


def train_with_and_without(cases: list[tuple[int, str]]) -> list[Any]:
    return [(*case, train(*case, pool=False), train(*case, pool=True)) for case in cases]


def check(results: list[Any]) -> None:
    for rank in results:
        for stage, executor, (wanted, before, _), (found, after, grown) in rank:
            assert found == wanted, (stage, executor)
            assert len(after) < len(before) and not (after and executor == "inductor"), (stage, executor, after)
            assert grown == 0, "the pool grew after the first steps"


def test_numbers_are_the_same_and_generated_code_allocates_nothing_large_any_more(workers2: Workers) -> None:
    check(workers2.run(train_with_and_without, [(3, "inductor"), (3, "eager"), (2, "eager")], timeout=280))


@pytest.mark.slow
def test_numbers_are_the_same_in_every_stage(workers2: Workers) -> None:
    cases = [(stage, "inductor") for stage in (0, 1, 2)] + [(1, "eager")]
    check(workers2.run(train_with_and_without, cases, timeout=500))


def test_a_pool_where_there_is_none_is_refused(fake_world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="pool=True: the module is on cuda:0, where PyTorch's allocator keeps"):
        check_pool(torch.device("cuda", 0))
    monkeypatch.setattr("sys.platform", "darwin")
    fake_world(2)
    with pytest.raises(ValueError, match="pool=True on darwin: expected Linux"):
        zerofx.compile(nn.Linear(2, 2), pool=True)
