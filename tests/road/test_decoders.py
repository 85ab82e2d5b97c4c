"""Llama and GPT-2 in every stage: losses, weights, checkpoints, beside one process, DistributedDataParallel, FSDP2."""

from __future__ import annotations

import pytest

from tests.road.training import check, zerofx_run
from tests.slow import quick_if


@quick_if(lambda name, stage: (stage == 1) == (name == "gpt2"))
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_it_trains_and_saves_as_what_it_replaces(workers2, wanted, tmp_path, name: str, stage: int) -> None:
    for run in workers2.run(zerofx_run, name, stage, tmp_path / "checkpoint", timeout=280):
        for way, other in wanted(name).items():
            check(run, other, way)
