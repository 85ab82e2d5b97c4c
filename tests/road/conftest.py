"""What zerofx must compute, once for all stages of a model."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.road.training import Run, others
from tests.workers import Workers


@pytest.fixture(scope="module")
def wanted(workers2: Workers) -> Callable[[str], dict[str, Run]]:
    return functools.cache(lambda name: workers2.run(others, name)[0])
