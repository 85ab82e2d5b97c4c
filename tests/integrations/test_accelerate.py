"""A loop under accelerate with one line changed trains as with DistributedDataParallel, saves its state and goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.launched import as_torchrun_would, close, converted, forget, plain, run_script
from tests.workers import Workers

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install zerofx[transformers]")


def changed(stage: int) -> str:
    options = f'functools.partial(z.Accelerator, zerofx={{"stage": {stage}, "executor": "eager"}})'
    line = f"import functools, zerofx.integrations.accelerate as z; Accelerator = {options}"
    return converted("accelerator", {"from accelerate import Accelerator": line})


def results(text: str, folder: str, checkpoints: list[str]) -> list[Any]:
    """The script from the start, and from each checkpoint."""
    return [run_script(text, folder, *checkpoint) for checkpoint in [[], *([c] for c in checkpoints)]]


@pytest.fixture(scope="module")
def reference(workers2: Workers, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    """What the script does as it is: from the start, and from its checkpoint, which leaves dropout another way."""
    folder = tmp_path_factory.mktemp("ddp")
    return workers2.run(results, plain("accelerator"), str(folder), [f"{folder}/ten"], timeout=280), folder


@pytest.mark.parametrize(
    "stage", [1, 3, pytest.param(2, marks=pytest.mark.slow), pytest.param(0, marks=pytest.mark.slow)]
)
def test_one_line_changed_accumulates_clips_saves_and_goes_on_as_with_ddp(
    workers2: Workers, reference: tuple[list[Any], Path], stage: int, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    expected, folder = reference
    checkpoints = [f"{tmp_path}/ten", f"{folder}/ten"]  # its own, and one of DistributedDataParallel
    found = workers2.run(results, changed(stage), str(tmp_path), checkpoints, timeout=280)
    for (from_start, from_own, from_ddp), (start, resumed) in zip(found, expected, strict=True):
        assert len(start["losses"]) == 40 and len(start["norms"]) == 20 and len(resumed["losses"]) == 20
        close(from_start, start)
        close(from_own, resumed)
        close(from_ddp, resumed)
    weights = [load_file(path / "weights" / "model.safetensors") for path in (tmp_path, folder)]
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)


def check_refused(arguments: dict[str, Any]) -> str:
    from accelerate.utils import FullyShardedDataParallelPlugin

    from zerofx.integrations.accelerate import Accelerator

    if "fsdp_plugin" in arguments:
        arguments = {"fsdp_plugin": FullyShardedDataParallelPlugin()}
    with as_torchrun_would(), pytest.raises(ValueError) as error:
        Accelerator(cpu=True, **arguments)
    return str(error.value)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"fsdp_plugin": True},
            "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin): expected None",
        ),
        ({"dynamo_backend": "inductor"}, "'INDUCTOR' was chosen"),
        ({"zerofx": {"stage": 4}}, r"Accelerator(zerofx=...): stage=4: expected 0, 1, 2 or 3"),
        ({"zerofx": 3}, "Accelerator(zerofx=...)=3: expected a dictionary"),
    ],
)
def test_what_does_not_go_together_with_zerofx_is_refused_by_name(
    workers2: Workers, arguments: dict[str, Any], text: str
) -> None:
    assert text in workers2.run(check_refused, arguments)[0]


def test_in_one_process_nothing_is_sharded() -> None:
    from zerofx.integrations.accelerate import Accelerator
    from zerofx.integrations.states import is_sharded

    try:
        model = Accelerator(cpu=True).prepare(torch.nn.Linear(2, 2))
    finally:
        forget()
    assert type(model) is torch.nn.Linear and not is_sharded(model)
