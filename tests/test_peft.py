"""LoRA with peft, as its users write it: trains as one process, costs what the adapter costs, is saved and merged."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerofx
from tests.counting import count_collectives
from tests.slow import slow
from tests.test_parameters import full, same
from tests.workers import Workers
from tests.zoo.architectures import ARCHITECTURES
from tests.zoo.base import make_batch

pytest.importorskip("peft")


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    # Not initialised as peft does it, where half of the gradients are zero.
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False)
    return get_peft_model(ARCHITECTURES["llama"].build(0), config)


def sent(log: Any) -> int:
    return sum(e.payload for e in log.events if e.name in ("all_reduce", "all_to_all_send", "reduce"))


def check_peft(stage: int, folder: str) -> None:
    from peft import PeftModel

    model, plain = adapted(), adapted()
    zerofx.compile(model, stage=stage, executor="eager", groups=zerofx.Grouping(min_bytes=0))
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.01) for m in (model, plain)]
    for step in range(2):
        batches = [make_batch("text", 2, seed=10 * step + rank) for rank in range(2)]
        loss = model(**batches[dist.get_rank()]).loss
        with count_collectives() as log:
            loss.backward()
        torch.stack([plain(**b).loss for b in batches]).mean().backward()
        same(model, plain)  # gradients of the base: None
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    thin = sum(4 * p.numel() for p in plain.parameters() if p.requires_grad)
    base = sum(4 * p.numel() for p in plain.parameters() if not p.requires_grad)
    assert 0 < sent(log) <= 2 * thin + 4096 < base
    for p in model.parameters():
        assert p.requires_grad or p.grad is None

    with zerofx.unsharded(model, writeback=False):
        if dist.get_rank() == 0:
            model.save_pretrained(folder)
        merged = copy.deepcopy(model).merge_and_unload()
    dist.barrier()
    batch = make_batch("text", 2, seed=5)
    with torch.no_grad():
        expected = plain(**batch).logits
        loaded = PeftModel.from_pretrained(ARCHITECTURES["llama"].build(0), folder)
        torch.testing.assert_close(loaded(**batch).logits, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(merged(**batch).logits, expected, rtol=1e-4, atol=1e-5)
        with zerofx.unsharded(model):
            model.merge_adapter()  # in place: the base's slices change
        plain.merge_adapter()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(p), q, rtol=1e-4, atol=1e-5, msg=f"{name}: {{}}".format)


@pytest.mark.parametrize("stage", [3, slow(2), slow(0)])
def test_an_adapter_of_peft_trains_as_in_one_process(workers2: Workers, stage: int, tmp_path: Path) -> None:
    workers2.run(check_peft, stage, str(tmp_path), timeout=100)
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 20_000


def check_merging(stage: int) -> None:
    """Where the parameters are sharded: elementwise, so that each rank adds to its slices."""
    model, plain = adapted(), adapted()
    zerofx.shard(model, stage=stage)
    for m in (model, plain):
        m.merge_adapter()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(p), q, rtol=1e-4, atol=1e-5, msg=f"{name}: {{}}".format)


@pytest.mark.slow
def test_an_adapter_of_peft_is_merged_in_place(workers2: Workers) -> None:
    workers2.run(check_merging, 3)


def prompted(kind: str) -> Any:
    import peft

    options = {"PromptEncoderConfig": {"encoder_hidden_size": 8}}.get(kind, {})
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3, **options)
    torch.manual_seed(0)
    return peft.get_peft_model(ARCHITECTURES["llama"].build(0), config)


def check_prompts(kind: str) -> None:
    model, plain = prompted(kind), prompted(kind)
    zerofx.compile(model, stage=3)
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (model, plain)]
    for step in range(2):
        batches = [make_batch("text", 2, seed=10 * step + rank) for rank in range(2)]
        model(**batches[dist.get_rank()]).loss.backward()
        torch.stack([plain(**b).loss for b in batches]).mean().backward()
        same(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig"])
def test_a_learned_prompt_trains_as_in_one_process(workers2: Workers, kind: str) -> None:
    workers2.run(check_prompts, kind, timeout=280)
