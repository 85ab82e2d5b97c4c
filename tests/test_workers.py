"""The harness itself: results in order, and every way of failing reported and survived."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.workers import Processes, Workers
from zerofx._torch import is_communication_error
from zerofx.runtime.ranks.watch import watch_of


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    """Of this file's own: no other should pay for starting those that are killed here."""
    processes = Processes()
    yield processes
    processes.stop()


@pytest.fixture
def workers2(processes: Processes) -> Workers:
    return Workers(2, processes)


def total(start: int, *, scale: float = 1.0) -> tuple[int, float, torch.Tensor]:
    value = torch.tensor([float(start + dist.get_rank())])
    dist.all_reduce(value)
    return dist.get_rank(), value.item() * scale, torch.rand(2)


def fail_on(rank: int) -> None:
    expected = rank * 7
    if dist.get_rank() == rank:
        raise ValueError(f"only here, {expected}")
    dist.barrier()


def fail_everywhere() -> None:
    mine = dist.get_rank() + 40
    assert mine < 0


def hang() -> None:
    if dist.get_rank() == 0:
        dist.barrier()  # rank 1 never comes
    else:
        time.sleep(1000)


def crash() -> None:
    if dist.get_rank() == 1:
        ctypes.string_at(0)
    dist.barrier()


def alive(pid: int) -> bool:
    """Whether the process runs. One that has ended and that nobody has waited for does not: in a container whose
    first process reaps no orphans, its number is in use forever."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_results_by_rank_and_same_processes(workers2: Workers) -> None:
    assert workers2.pids == []  # lazy
    first = workers2.run(total, 1, scale=2.0)
    pids = workers2.pids
    again = workers2.run(f"{__name__}:total", 1, scale=2.0)
    assert [r[:2] for r in first] == [(0, 6.0), (1, 6.0)] == [r[:2] for r in again]
    assert torch.equal(first[0][2], again[1][2])  # seeded alike on every rank and in every run
    assert workers2.pids == pids


def begun() -> tuple[bool, int, str | None]:
    return "torch._inductor.compile_fx" in sys.modules, torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")


def test_a_rank_begins_with_all_imported_and_one_thread(workers2: Workers) -> None:
    assert workers2.run(begun) == [(True, 1, "1")] * 2


def where() -> tuple[int, int, int, float]:
    dist.all_reduce(total := torch.tensor(1.0))
    return os.getpid(), dist.get_rank(), int(os.environ["WORLD_SIZE"]), total.item()


def test_groups_of_all_sizes_share_processes(processes: Processes) -> None:
    pids: list[int] = []
    for size in (2, 3, 1, 3, 2):
        found = Workers(size, processes).run(where)
        pids = max(pids, [pid for pid, *_ in found], key=len)
        assert found == [(pids[rank], rank, size, float(size)) for rank in range(size)]
    assert pids == processes.pids and len(set(pids)) == 3


def test_unpicklable_function_leaves_the_pool_alone(workers2: Workers) -> None:
    pids = workers2.pids
    with pytest.raises(Exception, match="pickle"):
        workers2.run(lambda: None)
    assert workers2.pids == pids


def test_error_on_one_rank_shows_its_traceback_and_the_others_stack(workers2: Workers) -> None:
    before = workers2.pids
    with pytest.raises(AssertionError) as caught:
        workers2.run(fail_on, 1)
    text = str(caught.value)
    assert "ValueError: only here, 7" in text and "in fail_on" in text  # the traceback of rank 1
    assert "rank 0: still waiting" in text and "barrier" in text  # where rank 0 sat
    assert before and not any(alive(pid) for pid in before)


def test_errors_of_all_ranks_are_shown_with_values(workers2: Workers) -> None:
    with pytest.raises(AssertionError) as caught:
        workers2.run(fail_everywhere)  # on a pool that was started afresh
    assert "mine = 40" in str(caught.value) and "mine = 41" in str(caught.value)


def test_crash_names_the_signal(workers2: Workers) -> None:
    with pytest.raises(AssertionError, match="rank 1: process died: SIGSEGV"):
        workers2.run(crash)


def test_hang_is_ended_and_pool_usable_again(workers2: Workers) -> None:
    with pytest.raises(AssertionError) as caught:
        workers2.run(hang, timeout=1)
    text = str(caught.value)
    assert "rank 0: no answer after 3 s" in text and "rank 1: no answer after 3 s" in text
    assert text.count("in hang") == 2  # the stacks say where
    assert [r[:2] for r in workers2.run(total, 1)] == [(0, 3.0), (1, 3.0)]


def end_the_group() -> bool:
    """As zerofx's watchdog does, after a test of its own; gloo's connections are closed then."""
    watch = watch_of(dist.group.WORLD.group_name)
    assert watch is not None
    watch._fail("for a test")
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(1))
    return is_communication_error(caught.value)


def test_a_group_that_was_ended_is_not_used_again(workers2: Workers) -> None:
    before = workers2.run("os:getpid")
    assert workers2.run(end_the_group) == [True, True]
    assert not any(alive(pid) for pid in before)
    assert [r[:2] for r in workers2.run(total, 1)] == [(0, 3.0), (1, 3.0)]


def test_no_process_outlives_a_killed_parent() -> None:
    program = (
        "import os, time\nfrom tests.workers import Workers\n"
        "if __name__ == '__main__':\n"
        "    w = Workers(1); w.run('os:getpid'); print(w.pids[0], flush=True); time.sleep(100)\n"
    )
    root = Path(__file__).resolve().parent.parent
    with subprocess.Popen([sys.executable, "-c", program], cwd=root, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    for _ in range(600):  # a minute, for a machine that does much else
        if not alive(pid):
            return
        time.sleep(0.1)
    raise AssertionError("the worker is still there")


@pytest.mark.parametrize("world_size", [8, 3])
def test_fake_world(fake_world, world_size: int) -> None:
    fake_world(world_size, rank=2)
    assert (dist.get_world_size(), dist.get_rank()) == (world_size, 2)
    out = torch.empty(4 * world_size)
    dist.all_gather_into_tensor(out, torch.ones(4))


def test_fake_world_is_gone() -> None:
    assert not dist.is_initialized()
