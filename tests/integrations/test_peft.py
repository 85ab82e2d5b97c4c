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


def adapted(kind: str) -> Any:
    from peft import IA3Config, LoraConfig, get_peft_model

    modules = ["q_proj", "v_proj"]
    configs: dict[str, Any] = {
        "lora": LoraConfig(r=4, target_modules=modules, init_lora_weights=False),
        "dora": LoraConfig(r=4, target_modules=modules, init_lora_weights=False, use_dora=True),
        "head": LoraConfig(r=4, target_modules=modules, init_lora_weights=False, modules_to_save=["lm_head"]),
        "embedding": LoraConfig(r=4, target_modules=[*modules, "embed_tokens"], init_lora_weights=False),
        "tied": LoraConfig(r=4, target_modules=["c_attn", "wte"], init_lora_weights=False, fan_in_fan_out=True),
        "ia3": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    }
    torch.manual_seed(0)
    model = get_peft_model(ARCHITECTURES["gpt2" if kind == "tied" else "llama"].build(0), configs[kind])
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.normal_()  # IA3 begins with ones
    return model


def check_merged(kind: str, stage: int) -> None:
    from zerofx.integrations.peft import merged_parameters

    whole, model = adapted(kind), adapted(kind)
    zerofx.compile(model, stage=stage, executor="eager", groups=zerofx.Grouping(min_bytes=0))
    before = zerofx.full_state_dict(model)
    batch = make_batch("text", 2, seed=5)
    with torch.no_grad():
        logits = model(**batch).logits
    expected = {n: p.detach() for n, p in whole.merge_and_unload().named_parameters(remove_duplicate=False)}
    for ranks in ("all", 0):
        found = dict(merged_parameters(model, ranks=ranks))
        if ranks == 0 and dist.get_rank():
            assert not found
            continue
        assert set(found) == set(expected)
        for name, weight in found.items():
            assert weight.dtype == expected[name].dtype
            torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-6)
    halves = dict(merged_parameters(model, dtype=torch.bfloat16))
    torch.testing.assert_close(halves, {n: p.bfloat16() for n, p in expected.items()}, rtol=1e-2, atol=1e-5)
    after = zerofx.full_state_dict(model)
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    assert not any(getattr(module, "merged_adapters", ()) for module in model.modules())
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, logits)


@pytest.mark.parametrize("kind", ["lora", slow("tied"), slow("dora"), slow("head"), slow("embedding"), slow("ia3")])
@pytest.mark.parametrize("stage", [3, slow(2), slow(0)])
def test_merged_weights_are_those_of_merge_and_unload_and_the_model_stays(
    workers2: Workers, kind: str, stage: int
) -> None:
    workers2.run(check_merged, kind, stage, timeout=250)


def check_no_merge() -> None:
    from peft import LoraConfig, get_peft_model

    from zerofx.integrations.peft import merged_parameters

    with pytest.raises(TypeError, match=r"expected a peft\.PeftModel\. Of any other model use zerofx\.full_parameters"):
        merged_parameters(torch.nn.Linear(2, 2))
    net = torch.nn.ModuleDict({"attention": torch.nn.MultiheadAttention(8, 2), "out": torch.nn.Linear(8, 8)})
    model = zerofx.shard(get_peft_model(net, LoraConfig(target_modules=["attention"])))
    with pytest.raises(TypeError, match=r"model\.attention is a MultiheadAttention: expected a layer with weights"):
        merged_parameters(model)


def test_what_cannot_be_merged_by_layers_is_refused(workers2: Workers) -> None:
    workers2.run(check_no_merge)
