"""Ranks of one host read each other's memory: who does, when a wait is over, and what is said when nothing comes."""

from __future__ import annotations

import os
import sys
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.counting import SAME_HOST, count_collectives
from tests.workers import Workers
from zerofx.features.same_host import same_host

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a system call of Linux")
MINE, THEIRS = 1, 2
"""Tags."""


def met() -> tuple[str, dict[int, same_host.Neighbour]]:
    """A new process group of all ranks, and this rank's neighbours in it."""
    name = dist.new_group().group_name
    same_host.connect(name)
    return name, dict(same_host.neighbours(name))


def who_is_there(off: tuple[int, ...] = ()) -> list[int]:
    with mock.patch.dict(os.environ, {"ZEROFX_SAME_HOST": "0"} if dist.get_rank() in off else {}):
        return sorted(met()[1])


def test_all_ranks_of_a_host_are_neighbours(make_workers) -> None:
    assert make_workers(3).run(who_is_there) == [[1, 2], [0, 2], [0, 1]]


def test_a_rank_that_is_told_not_to_be_is_nobodys_neighbour(make_workers) -> None:
    assert make_workers(3).run(who_is_there, (1,)) == [[2], [], [0]]


def who_is_there_if_one_may_not_read(refusal: int, here: str) -> list[int]:
    """On rank 0 nothing can be read, or what is read is not what the other has; or rank 0 is in another place."""

    def forbidden(pid: int, address: int, into: torch.Tensor) -> None:
        if refusal:
            raise OSError(refusal, "forbidden")

    if dist.get_rank() == 0:
        with mock.patch.object(same_host, *(("_place", lambda: here) if here else ("read_memory", forbidden))):
            return who_is_there()
    return who_is_there()


@pytest.mark.parametrize(("refusal", "here"), [(1, ""), (0, ""), (0, "another host")])
def test_ranks_are_neighbours_only_if_each_can_read_the_other(make_workers, refusal: int, here: str) -> None:
    assert make_workers(3).run(who_is_there_if_one_may_not_read, refusal, here) == [[], [2], [1]]


def train_with(off: tuple[int, ...]) -> tuple[list[torch.Tensor], set[str], set[str]]:
    """Whole weights after three steps of stage 3, by which way messages went, and the state of PyTorch's generator."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 3))
    generator = torch.get_rng_state()
    with mock.patch.dict(os.environ, {"ZEROFX_SAME_HOST": "0"} if dist.get_rank() in off else {}):
        from torch.distributed.device_mesh import DeviceMesh

        mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
        model = zerofx.compile(model, stage=3, mesh=mesh, executor="eager")
    assert torch.get_rng_state().equal(generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(3, 4, 7, generator=torch.Generator().manual_seed(dist.get_rank()))
    with count_collectives() as log:
        for batch in x:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    pairwise = [event for event in log.events if event.name.startswith("all_")]
    near = {event.name for event in pairwise if event.operator == SAME_HOST}
    far = {event.name for event in pairwise if event.operator != SAME_HOST}
    return [p.full_tensor() for p in model.parameters()], near, far


def test_training_is_the_same_with_and_without_and_where_only_some_are_neighbours(make_workers) -> None:
    ways = {off: make_workers(3).run(train_with, off) for off in ((), (0,), (0, 1))}
    both = {f"all_{what}_{way}" for what in ("gather", "to_all") for way in ("send", "recv")}
    assert [(near, far) for _, near, far in ways[()]] == [(both, set())] * 3
    assert [(near, far) for _, near, far in ways[0,]] == [(set(), both), (both, both), (both, both)]
    assert [(near, far) for _, near, far in ways[0, 1]] == [(set(), both)] * 3
    for off in ((0,), (0, 1)):
        for (weights, *_), (expected, *_) in zip(ways[off], ways[()], strict=True):
            assert all(a.equal(b) for a, b in zip(weights, expected, strict=True))


def overwrite_what_was_sent() -> float:
    """Rank 0 overwrites what it sent as soon as its wait is over, long before rank 1 comes to read."""
    other = 1 - dist.get_rank()
    neighbour, sent, got = met()[1][other], torch.full((1 << 20,), 1.0 + dist.get_rank()), torch.zeros(1 << 20)
    if dist.get_rank() == 1:
        time.sleep(0.5)
    neighbour.exchange(got, sent, MINE).wait()
    sent.fill_(-1.0)
    assert got.eq(got[0]).all()
    return got[0].item()


def test_a_wait_is_over_when_the_other_has_read(workers2: Workers) -> None:
    assert workers2.run(overwrite_what_was_sent) == [2.0, 1.0]


def cross() -> list[float]:
    """Two process groups, two tags in each; every rank waits in an order of its own."""
    rank = dist.get_rank()
    neighbours = [met()[1][1 - rank] for _ in range(2)]
    got = [torch.zeros(3) for _ in range(4)]
    started = [
        neighbours[i // 2].exchange(into, torch.full((3,), 10.0 * rank + i), MINE + i % 2) for i, into in enumerate(got)
    ]
    for i in range(4) if rank else (2, 3, 1, 0):
        started[i].wait()
    return [into[0].item() for into in got]


def test_ranks_may_wait_in_different_orders(workers2: Workers) -> None:
    assert workers2.run(cross, timeout=60) == [[10.0, 11.0, 12.0, 13.0], [0.0, 1.0, 2.0, 3.0]]


def run_ahead(messages: int, late: bool) -> float:
    """Both start more than a socket holds, and none is waited for; ``late``: rank 1 when rank 0 has started all."""
    rank = dist.get_rank()
    neighbour, got = met()[1][1 - rank], torch.zeros(messages)
    sent = torch.arange(1.0 * messages)
    if late and rank == 1:
        time.sleep(1)
    started = [neighbour.exchange(got[i : i + 1], sent[i : i + 1], MINE) for i in range(messages)]
    for exchange in started:
        exchange.wait()
    assert got.equal(sent)
    return got.sum().item()


@pytest.mark.parametrize("late", [False, True])
def test_more_messages_than_a_socket_holds_arrive(workers2: Workers, late: bool) -> None:
    assert len(set(workers2.run(run_ahead, 5000, late, timeout=60))) == 1


def never_meet(sizes: tuple[int, int], tags: tuple[int, int], how: str) -> str:
    """Exchanges that do not fit; rank 0 gives up after a while, or its time is over."""
    rank = dist.get_rank()
    name, neighbours = met()
    neighbour = neighbours[1 - rank]
    neighbour.timeout = 0.5 if how == "timeout" else 60.0
    exchange = neighbour.exchange(torch.zeros(sizes[rank]), torch.ones(sizes[rank]), tags[rank])
    if how == "give up":
        same_host.give_up(name)
    try:
        exchange.wait()
    except RuntimeError as e:
        dist.barrier()
        return str(e)
    return "no error"


@pytest.mark.parametrize(("sizes", "tags"), [((3, 4), (MINE, MINE)), ((3, 3), (MINE, THEIRS))])
@pytest.mark.parametrize(("how", "why"), [("timeout", "not answered for 0.5 s"), ("give up", "given up")])
def test_messages_that_do_not_fit_never_meet(workers2: Workers, sizes: Any, tags: Any, how: str, why: str) -> None:
    for rank, said in enumerate(workers2.run(never_meet, sizes, tags, how, timeout=60)):
        assert f"rank {1 - rank}" in said and why in said


def outlive() -> str:
    """Rank 1 closes its end, as the system does for a process that was killed."""
    rank = dist.get_rank()
    neighbour = met()[1][1 - rank]
    if rank == 1:
        neighbour.connection.close()
        return ""
    try:
        neighbour.exchange(torch.zeros(3), torch.ones(3), MINE).wait()
    except RuntimeError as e:
        return str(e)
    return "no error"


def test_who_waits_for_a_rank_that_is_gone_gets_an_error_that_names_it(workers2: Workers) -> None:
    said, _ = workers2.run(outlive, timeout=60)
    assert "rank 1" in said and ("closed the connection" in said or "Broken pipe" in said)
