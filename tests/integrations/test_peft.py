"""Adapters on a frozen base in another dtype: under the Trainer as with DDP, and saved whole by rank 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

import zerofx
from tests.counting import count_collectives
from tests.integrations.launched import close, converted, plain, run_script
from tests.integrations.test_transformers import IMPORT, with_options
from tests.slow import slow
from tests.workers import Workers
from tests.zoo.architectures import ARCHITECTURES
from tests.zoo.base import make_batch

pytest.importorskip("peft", reason="peft is not installed: pip install zerofx[transformers]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install zerofx[transformers]")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_an_adapter_under_the_trainer_trains_saves_takes_the_best_and_goes_on_as_with_ddp(
    workers2: Workers, stage: int, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    text = converted("adapter", {IMPORT: with_options(stage)})
    texts, folders = (plain("adapter"), text), [str(tmp_path / name) for name in ("ddp", "zerofx")]
    expected, found = (workers2.run(run_script, t, f, timeout=280) for t, f in zip(texts, folders, strict=True))
    assert expected[0]["dtypes"] == ["torch.bfloat16", "torch.float32"]
    close(found, expected, 5e-3)
    saved = [load_file(Path(folder, "final", "adapter_model.safetensors")) for folder in folders]
    torch.testing.assert_close(*saved, rtol=5e-2, atol=5e-3)
    resumed = workers2.run(run_script, text, str(tmp_path / "again"), f"{folders[1]}/checkpoint-10", timeout=280)
    assert resumed[0]["losses"] == found[0]["losses"]
    index = FileSystemReader(f"{folders[1]}/checkpoint-10/zerofx").read_metadata().state_dict_metadata
    weights = [name for name in index if name.startswith("model.")]
    assert weights and all("lora_" in name for name in weights)  # the frozen base is left out


def lora(base: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def check_saving(stage: int, folder: str) -> None:
    from peft import PeftModel

    from zerofx.integrations import peft as ours

    torch.manual_seed(0)
    model, whole = lora(ARCHITECTURES["llama"].build(0)), lora(ARCHITECTURES["llama"].build(0))
    whole.load_state_dict(model.state_dict())
    zerofx.compile(model, stage=stage, executor="eager")
    adapter = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    with count_collectives() as log:
        ours.save_pretrained(model, folder)
    assert sum(event.payload for event in log.events) <= adapter + 4096
    dist.barrier()
    batch = make_batch("text", 2, seed=5)
    with torch.no_grad():
        loaded = PeftModel.from_pretrained(ARCHITECTURES["llama"].build(0), folder)
        torch.testing.assert_close(loaded(**batch).logits, whole(**batch).logits)
    with pytest.raises(TypeError, match=r"expected a peft\.PeftModel\. Of any other model use zerofx\.export"):
        ours.save_pretrained(torch.nn.Linear(2, 2), folder)


@pytest.mark.parametrize("stage", [3, slow(2), slow(0)])
def test_an_adapter_is_saved_whole_by_rank_0_and_nothing_but_it_travels(
    workers2: Workers, stage: int, tmp_path: Path
) -> None:
    workers2.run(check_saving, stage, str(tmp_path), timeout=250)
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 20_000
