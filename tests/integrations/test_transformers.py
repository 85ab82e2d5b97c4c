"""A script of transformers' Trainer with one line changed trains as with DistributedDataParallel, stops and goes on."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import zerofx
from tests.integrations.launched import as_torchrun_would, close, converted, forget, plain, run_script
from tests.slow import quick_if
from tests.workers import Workers

pytest.importorskip("transformers", reason="transformers is not installed: pip install zerofx[transformers]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install zerofx[transformers]")

IMPORT = "from transformers import Trainer"
OURS = "from zerofx.integrations.transformers import Trainer"


def with_options(stage: int, name: str = "Trainer") -> str:
    """The changed line, with options: a stage, and no Inductor."""
    options = f'functools.partial(z.{name}, zerofx={{"stage": {stage}, "executor": "eager"}})'
    return f"import functools, zerofx.integrations.transformers as z; {name} = {options}"


Run = tuple[list[Any], Path]
"""What each rank found, and the folder."""


@pytest.fixture(scope="module")
def run(workers2: Workers, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int | None], Run]:
    """The script with a stage, or as it is (None); run once for all tests."""
    found: dict[int | None, Run] = {}

    def once(stage: int | None) -> Run:
        if stage not in found:
            text = plain("trainer") if stage is None else converted("trainer", {IMPORT: with_options(stage)})
            folder = tmp_path_factory.mktemp("trainer")
            found[stage] = workers2.run(run_script, text, str(folder), timeout=250), folder
        return found[stage]

    return once


@quick_if(lambda stage: stage == 3)
@pytest.mark.parametrize("stage", [2, 3])
def test_one_line_changed_trains_evaluates_saves_and_takes_the_best_as_with_ddp(
    run: Callable[[int | None], Run], stage: int
) -> None:
    from transformers import LlamaForCausalLM

    (expected, theirs), (found, ours) = run(None), run(stage)
    assert len(found[0]["losses"]) == 20 and len(found[0]["evaluations"]) == 4
    close(found, expected)
    assert expected[0]["best"] != "checkpoint-20"  # so that a better model was loaded
    saved = [LlamaForCausalLM.from_pretrained(path / "final").state_dict() for path in (ours, theirs)]
    torch.testing.assert_close(*saved, rtol=1e-3, atol=1e-4)
    assert (ours / "checkpoint-10" / "zerofx").is_dir() and not (ours / "checkpoint-10/optimizer.pt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_goes_on_from_a_checkpoint_with_the_losses_of_one_that_was_not_interrupted(
    workers2: Workers, run: Callable[[int | None], Run], stage: int, tmp_path: Path
) -> None:
    """With dropout, accumulation and a schedule: generators, moments and the place in the data are restored."""
    full, folder = run(stage)
    text = converted("trainer", {IMPORT: with_options(stage)})
    resumed = workers2.run(run_script, text, str(tmp_path), str(folder / "checkpoint-10"), timeout=250)
    for one, other in zip(resumed, full, strict=True):
        assert len(one["losses"]) == 20  # the history of the first ten is in the checkpoint
        assert one["losses"] == other["losses"] and one["evaluations"] == other["evaluations"]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_goes_on_from_a_checkpoint_of_ddp_and_of_another_stage(
    workers2: Workers, run: Callable[[int | None], Run], stage: int, tmp_path: Path
) -> None:
    full, folder = run(None)
    text = converted("trainer", {IMPORT: with_options(stage)})
    for checkpoint in (folder / "checkpoint-10", run(5 - stage)[1] / "checkpoint-10"):
        resumed = workers2.run(run_script, text, str(tmp_path), str(checkpoint), timeout=250)
        for one, other in zip(resumed, full, strict=True):
            close(one["losses"], other["losses"])


@pytest.mark.slow
def test_the_line_of_the_documentation_trains_with_inductor(workers2: Workers, tmp_path: Path) -> None:
    assert f"-{IMPORT}\n+{OURS}\n" in documentation()
    ours = converted("trainer", {IMPORT: OURS})
    # Generated code draws other numbers for dropout.
    texts = [text.replace("attention_dropout=0.1", "attention_dropout=0.0") for text in (plain("trainer"), ours)]
    folders = [str(tmp_path / name) for name in ("ddp", "zerofx")]
    expected, found = (workers2.run(run_script, t, f, timeout=280) for t, f in zip(texts, folders))
    close(found[0], expected[0])


@pytest.mark.slow
def test_adafactor_trains_and_goes_on_from_a_checkpoint_as_with_ddp(workers2: Workers, tmp_path: Path) -> None:
    option = 'learning_rate=0.002,\n    optim="adafactor",'
    texts = [plain("trainer"), converted("trainer", {IMPORT: with_options(3)})]
    theirs, ours = (text.replace("learning_rate=0.02,", option) for text in texts)
    assert option in theirs
    expected = workers2.run(run_script, theirs, str(tmp_path / "ddp"), timeout=250)
    found = workers2.run(run_script, ours, str(tmp_path / "zerofx"), timeout=250)
    close(found[0]["losses"], expected[0]["losses"])
    resumed = workers2.run(
        run_script, ours, str(tmp_path / "again"), str(tmp_path / "zerofx/checkpoint-10"), timeout=250
    )
    assert resumed[0]["losses"] == found[0]["losses"]


def documentation() -> str:
    (page,) = Path(zerofx.__file__).parent.parent.joinpath("docs").rglob("integrations.md")
    return page.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_generate_in_evaluation_gives_the_tokens_of_ddp_on_ranks_that_stop_at_different_steps(
    workers2: Workers, stage: int, tmp_path: Path
) -> None:
    texts = [plain("seq2seq")]
    texts.append(
        converted("seq2seq", {"from transformers import Seq2SeqTrainer": with_options(stage, "Seq2SeqTrainer")})
    )
    expected, found = (workers2.run(run_script, text, str(tmp_path), timeout=250) for text in texts)
    assert expected[0]["length"] != expected[1]["length"]
    for one, other in zip(found, expected, strict=True):
        assert one["tokens"] == other["tokens"]
        close(one["loss"], other["loss"])


def check_refused(folder: str, arguments: dict[str, Any]) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    from zerofx.integrations.transformers import Trainer

    small = {
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(**small))
    with as_torchrun_would():
        args = TrainingArguments(output_dir=folder, use_cpu=True, report_to=[])
        for name, value in arguments.items():
            setattr(args, name, value)
        with pytest.raises(ValueError) as error:
            Trainer(model=model, args=args)
    return str(error.value)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"deepspeed": "ds.json"}, "deepspeed='ds.json'): expected it unset with zerofx. zerofx is what shards"),
    ({"fsdp": "full_shard"}, "fsdp='full_shard'): expected it unset with zerofx. zerofx is what shards the model"),
    ({"torch_compile": True}, "torch_compile=True): expected it unset with zerofx. zerofx compiles the model itself"),
    ({"auto_find_batch_size": True}, "auto_find_batch_size=True): expected it unset with zerofx."),
    ({"bf16_full_eval": True}, "evaluate with the precision of training"),
]


def test_what_does_not_go_together_with_zerofx_is_refused_by_name(workers2: Workers, tmp_path: Path) -> None:
    for arguments, text in REFUSED:
        assert text in workers2.run(check_refused, str(tmp_path), arguments)[0]


def test_in_one_process_the_trainer_is_that_of_transformers(tmp_path: Path) -> None:
    results = []
    for text in (plain("trainer"), converted("trainer", {IMPORT: with_options(3)})):
        for name in ("max", "eval", "save"):
            text = re.sub(rf"{name}_steps=\d+", f"{name}_steps=2", text)
        namespace: dict[str, Any] = {"__name__": "__main__"}
        with mock.patch.object(sys, "argv", ["script.py", str(tmp_path)]), mock.patch.dict(os.environ):
            exec(compile(text, "script.py", "exec"), namespace)
        forget()
        results.append(namespace["result"])
    assert results[0] == results[1]


@pytest.mark.slow
def test_options_are_chosen_by_a_batch_of_the_trainers_own_data(
    workers2: Workers, run: Callable[[int | None], Run], tmp_path: Path
) -> None:
    options = {"stage": "auto", "memory": "1GB", "executor": "eager"}
    line = f"Trainer = functools.partial(z.Trainer, zerofx={options})"
    text = converted("trainer", {IMPORT: f"import functools, zerofx.integrations.transformers as z; {line}"})
    found, expected = workers2.run(run_script, text, str(tmp_path), timeout=280), run(None)[0]
    close(found[0]["losses"], expected[0]["losses"])
    said = (tmp_path / "checkpoint-5" / "zerofx" / "choice.txt").read_text()
    assert " for LlamaForCausalLM on 2 ranks within 1.0 GB\n" in said
