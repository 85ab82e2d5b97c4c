"""Fixtures that all tests share: groups of gloo ranks, and process groups that only pretend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
import torch._dynamo
import torch.distributed as dist

from tests import slow
from tests.workers import Processes, Workers

# The first tensor that is made under a device settles which functions make tensors there. transformers has replaced
# ``torch.linspace`` while it loads a model: where it comes first, no later model has its ``linspace`` on the device.
with torch.device("meta"):
    torch.empty(0)


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


@pytest.fixture(scope="module", autouse=True)
def no_lengths_of_other_files() -> None:
    """Dynamo forgets the shapes it has seen: a second length of a file before would make a size dynamic in this one."""
    torch._dynamo.reset()


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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="K/N", default="1/1", help="of the tests selected, the K-th of N shares")


def pytest_itemcollected(item: pytest.Item) -> None:
    slow.mark(item)


LONG = ("test_code.py", "test_verify.py", "test_structure.py", "test_accelerator.py", "test_types.py", "test_docs.py")
"""Files that take a minute for a few tests, or for what comes before them."""


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    whole = not any("::" in arg for arg in config.args)
    if whole and (names := slow.without_effect(items)):
        raise pytest.UsageError(f"conditions that tell no case from another: {names}")
    yield  # -m and -k deselect
    share = slow.share(items, config.getoption("shard"))
    config.hook.pytest_deselected(items=[item for item in items if item not in set(share)])
    # The road first. Then what takes long, and files of many tests: at the end one would keep one process waiting.
    files = Counter(item.path for item in share)

    def turn(item: pytest.Item) -> tuple[bool, bool, int]:
        return item.path.parent.name != "road", item.path.name not in LONG, -files[item.path]

    items[:] = sorted(share, key=turn)
