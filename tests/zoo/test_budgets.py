"""`memory=` over the zoo: no step holds more than was said, nor 3 percent less, and losses stay the same.

Each of the first of the zoo in one way of eight (stages, micro-batches, no_sync, bfloat16): all are with five or more
others. The later ones are left out: a budget takes minutes a model.
"""

from __future__ import annotations

import pytest

from tests.zoo.architectures import ARCHITECTURES, FIRST
from tests.zoo.budgets import OUTSIDE, WAYS, steps_within

WHOLE = [name for name in FIRST if name not in OUTSIDE]


@pytest.mark.slow
@pytest.mark.timeout(2100)
@pytest.mark.parametrize("name", WHOLE)
def test_no_architecture_takes_more_than_its_budget(workers2, name: str) -> None:
    if not ARCHITECTURES[name].is_here:
        pytest.skip(f"{ARCHITECTURES[name].needs} is not installed")
    way = WAYS[3 * WHOLE.index(name) % len(WAYS)]
    for rank in workers2.run(steps_within, name, way, [0, 0.6], timeout=650):
        for at in rank:
            assert at.peak <= at.said <= at.budget, (at, way)
            assert at.said <= 1.03 * at.peak, (at, way)
            assert at.off <= 1e-5, (at, way)
