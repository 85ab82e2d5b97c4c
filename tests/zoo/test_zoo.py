"""Models as transformers ships them, and a few by hand, train on two ranks with the numbers of one process.

Here those that differ most; ``make slow`` runs all, ``make zoo`` writes what came of it to docs/zoo.md.
"""

from __future__ import annotations

import pytest

from tests.zoo.architectures import ARCHITECTURES
from tests.zoo.run import train

# Routing by data; buffers; a recurrence that splits the graph; one layer twice.
TELLING = {"mixtral": 3, "resnet": 2, "lstm": 3, "albert": 1}
REST = [name for name in ARCHITECTURES if name not in TELLING]


def check(workers, name: str, stage: int) -> None:
    for outcome in workers.run(train, name, stage, timeout=250):
        assert outcome.loss < 1e-5 and outcome.weights < 1e-4, outcome
        assert outcome.graphs or outcome.places
        assert outcome.still < 0.2, outcome  # most have gradients, or equal numbers would mean nothing


@pytest.mark.parametrize("name", TELLING)
def test_it_trains_as_in_one_process(workers2, name: str) -> None:
    check(workers2, name, TELLING[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", REST)
def test_all_train_as_in_one_process(workers2, name: str) -> None:
    if not ARCHITECTURES[name].is_here:
        pytest.skip(f"{ARCHITECTURES[name].needs} is not installed")
    check(workers2, name, 3)
