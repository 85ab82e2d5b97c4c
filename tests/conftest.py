"""Fixtures that all tests share: groups of gloo ranks, and process groups that only pretend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.workers import Processes, Workers


@pytest.fixture(scope="session")
def make_workers() -> Iterator[Callable[[int], Workers]]:
    """A group of any size: ``make_workers(5)``. All of a session run in the same processes, which start when used."""
    processes = Processes()
    try:
        yield lambda world_size: Workers(world_size, processes)
    finally:
        processes.stop()


@pytest.fixture(scope="session")
def workers2(make_workers: Callable[[int], Workers]) -> Workers:
    return make_workers(2)


@pytest.fixture(scope="session")
def workers3(make_workers: Callable[[int], Workers]) -> Workers:
    return make_workers(3)


@pytest.fixture
def fake_world() -> Iterator[Callable[..., None]]:
    """``fake_world(8)``: this process believes that it is rank 0 (or ``rank=``) of 8.

    Collectives of the fake process group return at once and move nothing, so graphs of any world size can be
    compiled and counted in one process; numbers that went through a collective mean nothing.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def leave() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def enter(world_size: int, rank: int = 0) -> None:
        leave()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    assert not dist.is_initialized(), "a process group is left over from an earlier test"
    try:
        yield enter
    finally:
        leave()


SLOW = Path(__file__).with_name("slow.txt")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what tests/slow.txt names. A line that names nothing of a file that was collected whole is an error."""
    lines = {line for line in SLOW.read_text().splitlines() if line and not line.startswith("#")}
    found = set[str]()
    for item in items:
        named = lines & {item.nodeid, item.nodeid.partition("[")[0]}
        found |= named
        if named:
            item.add_marker(pytest.mark.slow)
    whole = {item.nodeid.partition("::")[0] for item in items} if not any("::" in arg for arg in config.args) else set()
    if stale := sorted(line for line in lines - found if line.partition("::")[0] in whole):
        raise pytest.UsageError(f"{SLOW} names tests that are not there: {stale}. Take these lines out.")
