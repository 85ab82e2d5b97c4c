"""Small models for tests, the batches that go with them, and what one process makes of them.

Every model is called as ``loss_of(model, batch)`` with the batch a dictionary of tensors. There is no dropout
and no ignored label, and each loss is a mean over the batch: the mean of the losses over equal slices of a
batch is the loss over the whole batch. So a run on M ranks, each with its slice, must reproduce
:func:`reference_run` on one.

The sizes (vocabulary 131, hidden 35 in 5 heads, 77 in the feed-forward layers) divide by neither 2 nor 3, so
most parameters divide by neither and sharding must pad.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Batch = dict[str, torch.Tensor]

VOCAB, HIDDEN, HEADS, FEED_FORWARD, LAYERS, LENGTH = 131, 35, 5, 77, 3, 17
CLASSES, IMAGE, PATCH = 11, 15, 5


class MLP(nn.Module):
    """Three different linear layers: no repeated block to recognise, biases everywhere."""

    def __init__(self, inputs: int = 13, hidden: int = 29, outputs: int = 7) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, hidden)
        self.second = nn.Linear(hidden, hidden)
        self.third = nn.Linear(hidden, outputs)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.first(x))
        hidden = hidden + torch.tanh(self.second(hidden))
        return F.mse_loss(self.third(hidden), y)


class Tied(nn.Module):
    """A language model whose head is its embedding: one parameter, two uses, two gradients to add up."""

    def __init__(self, vocab: int = VOCAB, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.body = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = self.head(torch.tanh(self.body(self.embedding(x))))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


class Block(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, dim // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """The plain decoder of the speed benchmarks; ``blocks`` is the ModuleList of its layers."""

    def __init__(self, layers: int = 8, dim: int = 512, heads: int = 8, vocab: int = 4096, length: int = 256) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.positions = nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def gpt2(loss_type: str | None = "ForCausalLM") -> nn.Module:
    """Tied embeddings and Conv1D weights (stored transposed). One graph, as its loss type is set by hand."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=LENGTH + 2,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        n_inner=FEED_FORWARD,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel._from_config(config, attn_implementation="sdpa")
    model.loss_type = loss_type
    return model


def gpt2_two_graphs() -> nn.Module:
    """GPT-2 as it comes: a warning about the loss type breaks the graph between logits and loss."""
    return gpt2(loss_type=None)


def llama() -> nn.Module:
    """Rotary positions (a buffer), RMS norms, grouped key-value heads, no biases, an untied head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        head_dim=6,  # rotary positions need an even one
        max_position_embeddings=LENGTH + 2,
        attention_dropout=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM._from_config(config, attn_implementation="sdpa")


def bert() -> nn.Module:
    """A bidirectional encoder with a tied masked-language head and an integer position buffer."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=LENGTH + 2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM._from_config(config, attn_implementation="sdpa")


def vit() -> nn.Module:
    """A convolution over patches, bare parameters (class token, positions) and a classifier."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=IMAGE,
        patch_size=PATCH,
        hidden_size=HIDDEN,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,  # type: ignore[call-arg]
        problem_type="single_label_classification",  # else the first forward writes it into the config
    )
    return ViTForImageClassification._from_config(config, attn_implementation="sdpa")


def gpt() -> nn.Module:
    return GPT(layers=LAYERS, dim=HIDDEN, heads=HEADS, vocab=VOCAB, length=LENGTH)


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "mlp": MLP,
    "tied": Tied,
    "gpt": gpt,
    "gpt2": gpt2,
    "gpt2_two_graphs": gpt2_two_graphs,
    "llama": llama,
    "bert": bert,
    "vit": vit,
}
HUGGING_FACE = ("gpt2", "gpt2_two_graphs", "llama", "bert", "vit")


def build(name: str, seed: int = 0) -> nn.Module:
    """A model in training mode, its weights fixed by the seed. The global generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return BUILDERS[name]().train()


def make_batch(name: str, batch: int, seed: int = 0) -> Batch:
    """The whole batch of all ranks, as keyword arguments of the model."""
    generator = torch.Generator().manual_seed(seed)

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    if name == "mlp":
        return {"x": normal(batch, 13), "y": normal(batch, 7)}
    if name in ("tied", "gpt"):
        return {"x": integers(VOCAB, batch, LENGTH), "y": integers(VOCAB, batch, LENGTH)}
    if name in ("gpt2", "gpt2_two_graphs", "llama"):
        tokens = integers(VOCAB, batch, LENGTH)
        return {"input_ids": tokens, "labels": tokens}
    if name == "bert":
        mask = torch.ones(batch, LENGTH, dtype=torch.long)
        mask[:, LENGTH - 3 :] = integers(2, batch, 3)  # padding hides keys; every position keeps its label
        tokens = integers(VOCAB, batch, LENGTH)
        return {"input_ids": tokens, "attention_mask": mask, "labels": integers(VOCAB, batch, LENGTH)}
    if name == "vit":
        return {"pixel_values": normal(batch, 3, IMAGE, IMAGE), "labels": integers(CLASSES, batch)}
    raise KeyError(name)


def slice_batch(batch: Batch, rank: int, world_size: int) -> Batch:
    """One rank's equal part of a batch, contiguous as a data loader would hand it out."""
    size = next(iter(batch.values())).shape[0]
    assert size % world_size == 0, f"a batch of {size} has no {world_size} equal slices"
    part = size // world_size
    return {key: value[rank * part : (rank + 1) * part].clone() for key, value in batch.items()}


def loss_of(model: Callable[..., Any], batch: Batch) -> torch.Tensor:
    """Calls the model and finds the loss in what it returns."""
    out = model(**batch)
    return out if isinstance(out, torch.Tensor) else out.loss


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def reference_run(
    name: str,
    steps: int = 3,
    optimizer_factory: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd,
    *,
    batch: int = 12,
    seed: int = 0,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Trains on the whole batch in this process alone, uncompiled: losses by step, and the final parameters.

    Step i sees ``make_batch(name, batch, seed=i)``; a run that is to be compared must do the same.
    """
    model = build(name, seed)
    optimizer = optimizer_factory(model.parameters())
    losses = []
    for step in range(steps):
        loss = loss_of(model, make_batch(name, batch, seed=step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {key: value.detach().clone() for key, value in model.named_parameters()}
