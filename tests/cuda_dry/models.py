"""The models whose CUDA code is written and read: small, with sizes that a GPU's kernels like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.models import GPT
from tests.passes.generated import Experts

BATCH, LENGTH, VOCAB, HIDDEN, HEADS, LAYERS = 2, 64, 512, 128, 2, 2


def _tokens() -> torch.Tensor:
    return torch.randint(VOCAB, (BATCH, LENGTH))


def _hugging_face(model: str, config: str, **sizes: Any) -> nn.Module:
    import transformers

    return getattr(transformers, model)._from_config(getattr(transformers, config)(**sizes), attn_implementation="sdpa")


def _gpt() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model = GPT(layers=LAYERS, dim=HIDDEN, heads=HEADS, vocab=VOCAB, length=LENGTH)
    return model, {"x": _tokens(), "y": _tokens()}


def _llama() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model = _hugging_face(
        *("LlamaForCausalLM", "LlamaConfig"),
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    tokens = _tokens()
    return model, {"input_ids": tokens, "labels": tokens}


def _bert() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model = _hugging_face(
        *("BertForMaskedLM", "BertConfig"),
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=LENGTH,
    )
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[:, LENGTH - 3 :] = 0
    return model, {"input_ids": _tokens(), "attention_mask": mask, "labels": _tokens()}


def _convnext() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(
        depths=[1, 1],
        hidden_sizes=[32, 64],
        num_stages=2,
        image_size=32,
        num_labels=16,  # type: ignore[call-arg]
        problem_type="single_label_classification",  # else the first forward writes it into the config
    )
    batch = {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(16, (BATCH,))}
    return ConvNextForImageClassification(config), batch


def _experts() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Experts(dim=HIDDEN, experts=4), {"x": torch.randn(64, HIDDEN), "y": torch.randn(64, HIDDEN)}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]] = {
    "gpt": _gpt,
    "llama": _llama,
    "bert": _bert,
    "convnext": _convnext,
    "experts": _experts,
}
"""By name: a model, and what it is called with."""
