"""Bytes of a step as they were predicted, over the zoo: live at the peak within 3 percent, received exactly.

Here two whose kernels take memory of their own (convolutions). ``make slow`` runs the first of the zoo, ``make zoo``
writes what came of it to docs/zoo.md.
"""

from __future__ import annotations

import pytest

from tests.slow import slow
from tests.zoo.architectures import ARCHITECTURES, FIRST
from tests.zoo.predicted import OUTSIDE, measure

TELLING = [("unet", 3), slow("resnet", 2)]
WHOLE = [name for name in FIRST if name not in OUTSIDE]


def check(workers, name: str, stage: int, executor: str = "eager") -> None:
    for figures in workers.run(measure, name, stage, executor, timeout=250):
        assert figures.predicted_wire == figures.wire > 0
        assert abs(figures.off) < 0.03, figures


@pytest.mark.parametrize(("name", "stage"), TELLING)
def test_a_step_takes_the_bytes_that_were_predicted(workers2, name: str, stage: int) -> None:
    check(workers2, name, stage)


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_every_architecture_takes_the_bytes_that_were_predicted(workers2, name: str) -> None:
    if not ARCHITECTURES[name].is_here:
        pytest.skip(f"{ARCHITECTURES[name].needs} is not installed")
    check(workers2, name, 3)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("name", ["llama", "t5", "vit", "regnet", "mixtral"])
def test_other_stages_take_the_bytes_that_were_predicted(workers2, name: str, stage: int) -> None:
    check(workers2, name, stage)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stage"), [("llama", 3), ("vit", 2), ("unet", 3)])
def test_what_inductor_writes_takes_the_bytes_that_were_predicted(workers2, name: str, stage: int) -> None:
    check(workers2, name, stage, "inductor")
