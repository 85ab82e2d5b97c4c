"""The model zoo: architectures that nobody prepared, small, with random weights and no network.

Each is a configuration class of transformers and what makes it small; the batch follows from its family::

    text      input_ids, labels of the same shape
    pairs     an encoder-decoder: input_ids, and labels for the decoder
    vision    pixel_values, one label an image (or one a pixel)
    audio     samples or spectrograms
    both      images and text

Dropout of any kind is off, so that one process can repeat what ranks do.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.base import (
    CLASSES,
    GROUPED,
    IMAGE,
    LETTERS,
    PAIR,
    PATCHES,
    PICTURE,
    SMALL,
    SOUND,
    VOCAB,
    Architecture,
)
from tests.zoo.images import IMAGES
from tests.zoo.sounds import SOUNDS
from tests.zoo.texts import TEXTS


class UNet(nn.Module):
    """Down and up again, with what was on the way down brought along: convolutions both ways, batch normalisation."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()

        def block(inputs: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())

        self.down = nn.ModuleList([block(3, width), block(width, 2 * width), block(2 * width, 4 * width)])
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * n, n, 2, stride=2) for n in (2 * width, width))
        self.merge = nn.ModuleList(block(2 * n, n) for n in (2 * width, width))
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, passed = pixel_values, []
        for i, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if i else x)
            passed.append(x)
        for up, merge, skip in zip(self.up, self.merge, reversed(passed[:-1]), strict=True):
            x = merge(torch.cat([up(x), skip], 1))
        return F.cross_entropy(self.head(x), labels)


class Recurrent(nn.Module):
    """An LSTM language model: PyTorch's own recurrence, where Dynamo splits the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 32)
        self.lstm = nn.LSTM(32, 24, num_layers=2, batch_first=True)
        self.head = nn.Linear(24, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.lstm(self.embedding(input_ids))[0])
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Classifier(nn.Module):
    """A model of timm's, with a loss."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        import timm.models

        self.model = getattr(timm.models, name)(num_classes=CLASSES, **options)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(pixel_values), labels)


def _timm(name: str, **options: Any) -> Architecture:
    return Architecture("vision (timm)", "image", make=lambda: Classifier(name, **options), needs="timm")


_EXPERTS = {**GROUPED, "num_experts_per_tok": 2}
_STATES = {**SMALL, "state_size": 8, "conv_kernel": 4, "expand": 2}
_CLIP = dict(
    projection_dim=16,
    text_config={k: v for k, v in SMALL.items() if k != "use_cache"},
    vision_config=dict(
        hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4, image_size=IMAGE, patch_size=8
    ),
)
A = Architecture

ARCHITECTURES: dict[str, Architecture] = {
    # Decoders
    "gpt2": A("decoder", "text", "GPT2LMHeadModel", {**SMALL, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "llama": A("decoder", "text", "LlamaForCausalLM", GROUPED),
    "mistral": A("decoder", "text", "MistralForCausalLM", {**GROUPED, "sliding_window": 8}),
    "qwen2": A("decoder", "text", "Qwen2ForCausalLM", {**GROUPED, "tie_word_embeddings": True}),
    "qwen3": A("decoder", "text", "Qwen3ForCausalLM", {**GROUPED, "head_dim": 8}),
    "gemma2": A("decoder", "text", "Gemma2ForCausalLM", {**GROUPED, "head_dim": 8, "sliding_window": 8}),
    "phi": A("decoder", "text", "PhiForCausalLM", SMALL),
    "gpt_neox": A("decoder", "text", "GPTNeoXForCausalLM", SMALL),
    "opt": A("decoder", "text", "OPTForCausalLM", {**SMALL, "ffn_dim": 44, "word_embed_proj_dim": 32}),
    "bloom": A("decoder", "text", "BloomForCausalLM", {**SMALL, "n_layer": 2, "n_head": 4}),
    "falcon": A("decoder", "text", "FalconForCausalLM", SMALL),
    "olmo2": A("decoder", "text", "Olmo2ForCausalLM", GROUPED),
    # Encoders
    "bert": A("encoder", "text", "BertForMaskedLM", SMALL),
    "roberta": A("encoder", "text", "RobertaForMaskedLM", SMALL),
    "albert": A("encoder", "text", "AlbertForMaskedLM", {**SMALL, "embedding_size": 16}),
    "distilbert": A("encoder", "text", "DistilBertForMaskedLM", {**SMALL, "dim": 32, "hidden_dim": 44, "n_heads": 4}),
    "electra": A("encoder", "text", "ElectraForMaskedLM", {**SMALL, "embedding_size": 16}),
    "deberta_v2": A(
        "encoder",
        "text",
        "DebertaV2ForMaskedLM",
        {**SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    "modernbert": A("encoder", "text", "ModernBertForMaskedLM", {**SMALL, "cls_token_id": 1, "sep_token_id": 2}),
    # Encoder-decoders
    "t5": A(
        *("encoder-decoder", "pairs", "T5ForConditionalGeneration"),
        {**LETTERS, "d_kv": 8, "d_ff": 44, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    ),
    "bart": A("encoder-decoder", "pairs", "BartForConditionalGeneration", PAIR),
    # Mixtures of experts
    "mixtral": A("experts", "text", "MixtralForCausalLM", {**_EXPERTS, "num_local_experts": 4}),
    "qwen2_moe": A(
        *("experts", "text", "Qwen2MoeForCausalLM"),
        {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    ),
    # State spaces and recurrences
    "mamba": A("state space", "text", "MambaForCausalLM", _STATES),
    "mamba2": A("state space", "text", "Mamba2ForCausalLM", {**_STATES, "num_heads": 8, "head_dim": 8, "n_groups": 2}),
    "lstm": A("recurrent", "text", make=Recurrent),
    # Vision
    "vit": A("vision", "image", "ViTForImageClassification", PATCHES),
    "beit": A("vision", "image", "BeitForImageClassification", PATCHES),
    "swin": A(
        *("vision", "image", "SwinForImageClassification"),
        {**PICTURE, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4},
    ),
    "convnext": A(
        "vision",
        "image",
        "ConvNextForImageClassification",
        {**PICTURE, "depths": [1, 1], "hidden_sizes": [16, 32], "num_stages": 2},
    ),
    "resnet": A(
        *("vision", "image", "ResNetForImageClassification"),
        {**PICTURE, "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    ),
    "regnet": A(
        *("vision", "image", "RegNetForImageClassification"),
        {**PICTURE, "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4},
    ),
    "mobilenet_v2": A(
        *("vision", "image", "MobileNetV2ForImageClassification"),
        {**PICTURE, "depth_multiplier": 0.25, "output_stride": 8},  # 32: images of one pixel, of two rows to be normed
        chaotic=True,
    ),
    "segformer": A(
        *("vision", "pixels", "SegformerForSemanticSegmentation"),
        dict(
            *[{"num_labels": CLASSES, "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1]}],
            hidden_sizes=[16, 32],
            patch_sizes=[7, 3],
            strides=[4, 2],
            num_attention_heads=[1, 2],
            mlp_ratios=[2, 2],
            decoder_hidden_size=16,
        ),
    ),
    "unet": A("vision", "pixels", make=UNet),
    "timm_vit": _timm("VisionTransformer", img_size=IMAGE, patch_size=8, embed_dim=32, depth=2, num_heads=4),
    "timm_mixer": _timm("MlpMixer", img_size=IMAGE, patch_size=8, embed_dim=32, num_blocks=2),
    "timm_convnext": _timm("ConvNeXt", depths=(1, 1, 1, 1), dims=(8, 16, 16, 32)),
    "timm_densenet": _timm("DenseNet", growth_rate=4, block_config=(2, 2)),
    "timm_xcit": _timm("Xcit", img_size=IMAGE, patch_size=8, embed_dim=32, depth=2, num_heads=4, cls_attn_layers=1),
    # Audio
    "whisper": A(
        *("audio", "spectrogram", "WhisperForConditionalGeneration"),
        {**PAIR, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 32},
    ),
    "wav2vec2": A("audio", "samples", "Wav2Vec2ForCTC", SOUND),
    "hubert": A("audio", "samples", "HubertForCTC", SOUND),
    # Images and text
    "clip": A("multimodal", "both", "CLIPModel", _CLIP),
    "siglip": A("multimodal", "both", "SiglipModel", {k: v for k, v in _CLIP.items() if k != "projection_dim"}),
}
FIRST = tuple(ARCHITECTURES)
"""Those that tests run in every way. Of the others they run each in one way."""
ARCHITECTURES |= {**TEXTS, **IMAGES, **SOUNDS}
