"""Fixtures of ranks with the simulated accelerator: skipped, with the reason, where it cannot be built."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.accelerator import build
from tests.accelerator.ranks import VARIABLES
from tests.workers import Processes, Workers


@pytest.fixture(scope="session")
def accelerator2() -> Iterator[Workers]:
    if reason := build.why_not():
        pytest.skip(reason)
    build.built()
    processes = Processes(VARIABLES)
    try:
        yield Workers(2, processes)
    finally:
        processes.stop()
