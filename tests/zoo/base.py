"""What an architecture of the zoo is, what makes it small, and the batches that it takes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

VOCAB, LENGTH, IMAGE, CLASSES = 131, 12, 32, 7
IMAGE_TOKEN, PATCH_TOKENS = 3, 4
"""What stands in a text for a part of an image, and how many do: 2 x 2 patches."""

SMALL = dict(
    *[{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2}],
    num_attention_heads=4,
    max_position_embeddings=64,
    use_cache=False,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
GROUPED = {**SMALL, "num_key_value_heads": 2}
LETTERS = {"vocab_size": VOCAB, "d_model": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PAIR = dict(
    *[{**LETTERS, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 44, "decoder_ffn_dim": 44}],
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    max_position_embeddings=64,
    decoder_start_token_id=1,
    use_cache=False,
)
PICTURE = {"image_size": IMAGE, "num_labels": CLASSES, "problem_type": "single_label_classification"}
PATCHES = dict(
    *[{**PICTURE, "patch_size": 8, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2}],
    num_attention_heads=4,
)
SOUND = dict(
    *[{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2}],
    num_attention_heads=4,
    conv_dim=(16, 16),
    conv_stride=(4, 4),
    conv_kernel=(8, 8),
    num_feat_extract_layers=2,
    num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2,
    apply_spec_augment=False,
    ctc_zero_infinity=True,
    ctc_loss_reduction="mean",
)

COMMON = dict(
    *[
        {
            **GROUPED,
            "head_dim": 8,
            "sliding_window": 8,
            "dim": 32,
            "hidden_dim": 44,
            "emb_dim": 32,
            "embedding_size": 16,
        }
    ],
    **{
        "d_model": 32,
        "n_embd": 32,
        "n_layer": 2,
        "n_layers": 2,
        "n_head": 4,
        "n_heads": 4,
        "d_inner": 44,
        "ffn_dim": 44,
    },
    **{"num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4},
    **{"moe_k": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "first_k_dense_replace": 1},
    **{"n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{"qk_rope_head_dim": 8, "state_size": 8, "conv_kernel": 4, "expand": 2, "mamba_d_state": 8, "mamba_n_heads": 8},
    **{"mamba_d_head": 8, "mamba_n_groups": 1, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
)
"""What makes a model of text small; a configuration takes what it has a field for (`Architecture.fitted`)."""


@dataclass(frozen=True)
class Architecture:
    """A model: ``make`` builds it; or ``model`` is a class of transformers, ``config`` what its configuration gets.

    ``fitted``: what its configuration gets beside that, where it has a field of the name. ``needs``: a package
    that the zoo has models of where it is installed. ``chaotic``: a rounding error, such as a kernel makes that finds
    its input at another address, grows past any tolerance within three steps; numbers are compared in 64 bits then.
    """

    family: str
    batch: str
    model: str = ""
    config: Any = None
    make: Callable[[], nn.Module] | None = None
    fitted: Any = None
    needs: str = "transformers"
    chaotic: bool = False

    @property
    def is_here(self) -> bool:
        """Whether the package that it is of can be imported."""
        try:
            importlib.import_module(self.needs)
        except (ImportError, RuntimeError):  # timm needs a torchvision that was made for this PyTorch
            return False
        return True

    def build(self, seed: int) -> nn.Module:
        """In training mode, weights from the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return (self.make() if self.make is not None else self._of_transformers()).train()

    def _of_transformers(self) -> nn.Module:
        import transformers

        cls = getattr(transformers, self.model)
        known = {*cls.config_class.__dataclass_fields__, *cls.config_class.attribute_map}
        fitted = {name: value for name, value in (self.fitted or {}).items() if name in known}
        config = cls.config_class(**fitted | (self.config or {}))
        todo = [config]
        while todo:
            part = todo.pop()
            for name, value in list(vars(part).items()):
                if "drop" in name and isinstance(value, float):
                    setattr(part, name, 0.0)
                elif isinstance(value, transformers.PretrainedConfig):
                    todo.append(value)
        return cls._from_config(config)


def make_batch(kind: str, rows: int, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """``rows`` rows as keyword arguments of the model, what is not integers in ``dtype``."""
    generator = torch.Generator().manual_seed(seed)

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(3, high, (rows, *shape), generator=generator)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(rows, *shape, generator=generator).to(dtype)

    if kind == "text":
        return {"input_ids": integers(VOCAB, LENGTH), "labels": integers(VOCAB, LENGTH)}
    if kind == "pairs":
        return {"input_ids": integers(VOCAB, LENGTH), "labels": integers(VOCAB, LENGTH - 3)}
    if kind == "classes":
        return {"input_ids": integers(VOCAB, LENGTH), "labels": integers(CLASSES)}
    if kind == "image":
        return {"pixel_values": normal(3, IMAGE, IMAGE), "labels": integers(CLASSES)}
    if kind == "pixels":
        return {"pixel_values": normal(3, IMAGE, IMAGE), "labels": integers(CLASSES, IMAGE, IMAGE)}
    if kind == "spectrogram":
        return {"input_features": normal(16, 40), "labels": integers(VOCAB, LENGTH)}
    if kind == "video":
        return {"pixel_values": normal(4, 3, IMAGE, IMAGE), "labels": integers(CLASSES)}
    if kind == "clip":
        return {"pixel_values_videos": normal(4, 3, IMAGE, IMAGE), "labels": integers(CLASSES)}
    if kind == "frames":
        return {
            "input_features": normal(40, 16),
            "attention_mask": torch.ones(rows, 40, dtype=torch.long),
            "labels": integers(VOCAB, 3),
        }
    if kind == "sound":
        return {"input_values": normal(40, 16), "labels": integers(CLASSES)}
    if kind == "series":
        return {"past_values": normal(32, 2), "future_values": normal(8, 2)}
    if kind == "history":
        series = {f"{when}_values": normal(length, 2) for when, length in (("past", 24), ("future", 8))}
        times = {f"{when}_time_features": normal(length, 1) for when, length in (("past", 24), ("future", 8))}
        return {**series, **times, "past_observed_mask": torch.ones(rows, 24, 2)}
    if kind in ("caption", "answer"):
        tokens = integers(VOCAB, LENGTH)
        tokens[:, 1 : 1 + PATCH_TOKENS] = IMAGE_TOKEN
        batch = {"input_ids": tokens, "pixel_values": normal(3, IMAGE, IMAGE), "labels": integers(VOCAB, LENGTH)}
        if kind == "answer":  # the image and the question see each other, the answer sees what is before it
            batch["token_type_ids"] = (torch.arange(LENGTH) > PATCH_TOKENS + 1).long().expand(rows, -1)
        return batch
    if kind == "read":
        return {
            "pixel_values": normal(3, IMAGE, IMAGE),
            "input_ids": integers(VOCAB, LENGTH),
            "labels": integers(VOCAB, LENGTH),
        }
    if kind == "samples":
        return {"input_values": normal(640), "labels": integers(VOCAB, 5)}
    assert kind == "both", kind
    return {"input_ids": integers(VOCAB, LENGTH), "pixel_values": normal(3, IMAGE, IMAGE), "return_loss": True}
