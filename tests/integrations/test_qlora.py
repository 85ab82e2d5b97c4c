"""QLoRA as its users write it: a base that transformers quantizes with bitsandbytes or torchao, and peft's adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerofx
from tests.slow import slow
from tests.workers import Workers

pytest.importorskip("peft")
VOCABULARY = 64


def save_base(folder: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **shape)).save_pretrained(folder)


def quantization(kind: str) -> Any:
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if kind == "bitsandbytes":
        double = {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.float32}
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **double)
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

    config = {"torchao int8": Int8WeightOnlyConfig, "torchao float8": Float8WeightOnlyConfig}[kind]
    return TorchAoConfig(config(version=2))


def adapted(kind: str, folder: str) -> Any:
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization(kind), dtype=torch.float32)
    base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(base, config)


def check(kind: str, stage: int, executor: str, folder: str) -> None:
    from peft import PeftModel

    from zerofx.integrations.peft import save_pretrained

    model, plain = adapted(kind, folder).train(), adapted(kind, folder).train()
    whole = sum(p.numel() * p.dtype.itemsize for p in model.parameters())
    zerofx.compile(model, stage=stage, executor=executor)
    parts = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.01) for m in (model, plain)]
    world, rank = dist.get_world_size(), dist.get_rank()
    ids = torch.randint(0, VOCABULARY, (2 * world, 12), generator=torch.Generator().manual_seed(3))
    for _ in range(3):
        model(input_ids=ids[2 * rank : 2 * rank + 2], labels=ids[2 * rank : 2 * rank + 2]).loss.backward()
        losses = [plain(input_ids=part, labels=part).loss for part in ids.split(2)]
        torch.stack(losses).mean().backward()
        for optimizer in parts:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():  # in training mode: to evaluate, bitsandbytes packs a plain model's weights for bfloat16
        trained = model(input_ids=ids).logits
        torch.testing.assert_close(trained, plain(input_ids=ids).logits, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(model.eval()(input_ids=ids).logits, trained, rtol=1e-3, atol=1e-4)
    if stage == 3:
        held = sum(p._local.nbytes for p in model.parameters())
        assert held < whole / world + 65536 < whole
    save_pretrained(model, f"{folder}/adapter")
    dist.barrier()
    again = PeftModel.from_pretrained(adapted(kind, folder).base_model.model, f"{folder}/adapter").train()
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "stage", "executor"),
    [
        slow("bitsandbytes", 3, "eager"),
        slow("torchao int8", 3, "eager"),
        slow("bitsandbytes", 3, "inductor"),
        slow("bitsandbytes", 0, "eager"),
        slow("bitsandbytes", 2, "eager"),
        slow("torchao int8", 2, "inductor"),
        slow("torchao float8", 3, "inductor"),
    ],
)
def test_adapters_of_peft_on_a_quantized_base(
    workers2: Workers, kind: str, stage: int, executor: str, tmp_path: Path
) -> None:
    pytest.importorskip(kind.split()[0])
    save_base(str(tmp_path))
    workers2.run(check, kind, stage, executor, str(tmp_path), timeout=300)


def check_refused(folder: str) -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    twice = AutoModelForCausalLM.from_pretrained(folder, quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    with pytest.raises(ValueError, match="is a Int8Params whose attribute 'CB' holds all of it once more"):
        zerofx.compile(twice.requires_grad_(False))


def test_eight_bits_of_bitsandbytes_are_refused_and_named(workers2: Workers, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    save_base(str(tmp_path))
    workers2.run(check_refused, str(tmp_path))
