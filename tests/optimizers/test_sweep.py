"""Optimizers of PyTorch and transformers, sharded and in one process; `make optimizers` takes all that it finds."""

from __future__ import annotations

import pytest

from tests.optimizers.sweep import compare, makers
from tests.workers import Workers

REFUSED = {"torch.LBFGS"}
DOES_NOT_TRAIN = {"torch.SparseAdam"}


@pytest.mark.parametrize("stage", [1, 3])
def test_optimizers_of_torch_and_transformers_are_equal_or_refused_by_name(workers3: Workers, stage: int) -> None:
    for name in makers():
        if name.startswith(("torch.", "transformers.")):
            [(kind, why), *others] = workers3.run(compare, name, stage)
            expected = "refused" if name in REFUSED else "does not train" if name in DOES_NOT_TRAIN else "equal"
            assert kind == expected, f"{name}: {why}"
            assert {kind for kind, _ in others} == {kind}
            assert kind != "refused" or why.startswith(f"{name.removeprefix('torch.')} is not elementwise")
