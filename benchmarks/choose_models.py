"""The models of ``benchmarks/choose.py``, each with a batch: what they spend most on differs.

=============  =========================================================================
gpt            a decoder: weights and activations alike
embedding      a large table, few layers
wide           many weights, few samples: it waits for the wire
convolutions   few weights, large activations
llama          a decoder with grouped queries, Hugging Face's
gpt2           a decoder with dropout, Hugging Face's: draws are saved, or drawn again
bert           an encoder with a large head, Hugging Face's
vit            an encoder of images, Hugging Face's
t5             an encoder and a decoder, Hugging Face's
experts        many weights, of which each sample uses all
recommender    a table of most weights, and a small net
unet           convolutions at three sizes; early activations live longest
=============  =========================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.models import GPT

Batch = tuple[torch.Tensor, torch.Tensor]


class Wide(nn.Module):
    """Few layers with many weights, on few samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(768, 768) for _ in range(6))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return (x - y).square().mean()


class Convolutions(nn.Module):
    """Images, in residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 48, 2, stride=2)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(48, 48, 3, padding=1), nn.GroupNorm(8, 48), nn.GELU(), nn.Conv2d(48, 48, 1))
            for _ in range(4)
        )
        self.head = nn.Linear(48 * 16 * 16, 100)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x.flatten(1)), y)


class Experts(nn.Module):
    """Layers of experts that are weighed by a router, all of them computed."""

    def __init__(self, layers: int = 3, dim: int = 128, experts: int = 8) -> None:
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(dim, experts) for _ in range(layers))
        self.up = nn.ParameterList(nn.Parameter(torch.randn(experts, dim, 2 * dim) / dim**0.5) for _ in range(layers))
        self.down = nn.ParameterList(nn.Parameter(torch.randn(experts, 2 * dim, dim) / dim) for _ in range(layers))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for router, up, down in zip(self.routers, self.up, self.down, strict=True):
            hidden = nn.functional.gelu(torch.einsum("sd,edh->esh", x, up))
            x = x + torch.einsum("esh,ehd,se->sd", hidden, down, router(x).softmax(-1))
        return (x - y).square().mean()


class Recommender(nn.Module):
    """A table of items, and a net over what is looked up."""

    def __init__(self, items: int = 50_000, dim: int = 32) -> None:
        super().__init__()
        self.table = nn.Embedding(items, dim)
        self.net = nn.Sequential(nn.Linear(16 * dim, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        score = self.net(self.table(x).flatten(1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(score, y)


class UNet(nn.Module):
    """Convolutions down to a quarter of the size, and up again beside what was there."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, dim, 3, padding=1)
        self.down = nn.ModuleList([self._block(dim, 2 * dim), self._block(2 * dim, 4 * dim)])
        self.up = nn.ModuleList([self._block(6 * dim, 2 * dim), self._block(3 * dim, dim)])
        self.head = nn.Conv2d(dim, 3, 1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.SiLU())

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, beside = self.stem(x), []
        for block in self.down:
            beside.append(x)
            x = block(nn.functional.avg_pool2d(x, 2))
        for block in self.up:
            x = block(torch.cat([nn.functional.interpolate(x, scale_factor=2), beside.pop()], dim=1))
        return (self.head(x) - y).square().mean()


class HuggingFace(nn.Module):
    """One of transformers' models that compute their own loss.

    Args:
        name: of the model; its configuration is the same name with ``Config`` in the place of ``of``.
        sizes: of the configuration.
        of: what the model is for.
        inputs: the name of its first argument.
    """

    def __init__(self, name: str, of: str, inputs: str = "input_ids", **sizes: Any) -> None:
        super().__init__()
        import transformers

        config = getattr(transformers, f"{name}Config")(**sizes)
        self.net = getattr(transformers, f"{name}{of}")(config)
        self.inputs = inputs

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.net(**{self.inputs: x}, labels=y).loss
        return loss


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(dist.get_rank())


def _text(vocab: int, samples: int, length: int) -> Batch:
    x, y = torch.randint(vocab, (2, samples, length), generator=_generator())
    return x, y


def _vectors(samples: int, dim: int) -> Batch:
    x, y = torch.randn(2, samples, dim, generator=_generator())
    return x, y


def _images(samples: int, classes: int) -> Batch:
    x = torch.randn(samples, 3, 32, 32, generator=_generator())
    return x, torch.arange(samples) % classes


def _pairs_of_images(samples: int) -> Batch:
    x, y = torch.randn(2, samples, 3, 32, 32, generator=_generator())
    return x, y


def _clicks(items: int, samples: int) -> Batch:
    x = torch.randint(items, (samples, 16), generator=_generator())
    return x, (x.sum(1) % 2).float()


_LLAMA = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 3}
_LLAMA |= {"num_attention_heads": 8, "num_key_value_heads": 4, "use_cache": False}
_GPT2 = {
    "vocab_size": 2048,
    "loss_type": "ForCausalLM",
    "n_embd": 256,
    "n_layer": 3,
    "n_head": 8,
    "n_positions": 64,
    "use_cache": False,
}
_BERT = {"vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8}
_BERT |= {"intermediate_size": 1024, "max_position_embeddings": 64}
_VIT = {"image_size": 32, "patch_size": 4, "hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 6}
_VIT |= {"intermediate_size": 768, "num_labels": 10}
_T5 = {"vocab_size": 2048, "d_model": 192, "d_kv": 32, "d_ff": 768, "num_layers": 2, "num_heads": 6}
_T5 |= {"use_cache": False, "decoder_start_token_id": 0}

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "gpt": (lambda: GPT(2, 384, 6, 1024, 64), lambda: _text(1024, 8, 64)),
    "embedding": (lambda: GPT(1, 128, 4, 16384, 32), lambda: _text(16384, 4, 32)),
    "wide": (Wide, lambda: _vectors(64, 768)),
    "convolutions": (Convolutions, lambda: _images(16, 100)),
    "llama": (lambda: HuggingFace("Llama", "ForCausalLM", **_LLAMA), lambda: _text(2048, 4, 64)),
    "gpt2": (lambda: HuggingFace("GPT2", "LMHeadModel", **_GPT2), lambda: _text(2048, 4, 64)),
    "bert": (lambda: HuggingFace("Bert", "ForMaskedLM", **_BERT), lambda: _text(4096, 4, 64)),
    "vit": (
        lambda: HuggingFace("ViT", "ForImageClassification", "pixel_values", **_VIT),
        lambda: _images(8, 10),
    ),
    "t5": (lambda: HuggingFace("T5", "ForConditionalGeneration", **_T5), lambda: _text(2048, 4, 32)),
    "experts": (Experts, lambda: _vectors(128, 128)),
    "recommender": (Recommender, lambda: _clicks(50_000, 64)),
    "unet": (UNet, lambda: _pairs_of_images(8)),
}
