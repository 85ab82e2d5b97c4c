"""What train_gpt.py trains, and on what: a GPT over bytes, and the source code of Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding: turn pairs of features by angles that grow with the position."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, context, features of a head]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, dim: int, heads: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 256)
        frequencies = 1000 ** -torch.linspace(0, 1, dim // heads // 2)
        angles = torch.outer(torch.arange(context), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next byte, [batch, context, 256]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def load_text(path: Path | None) -> tuple[Tensor, Tensor]:
    """Text to train on and text held out: every 20th file of the standard library, or the last 20th of a file."""
    if path is None:
        library = Path(sysconfig.get_path("stdlib"))
        skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data"}
        files = [f for f in sorted(library.rglob("*.py")) if skipped.isdisjoint(f.relative_to(library).parts)]
        held_out = b"".join(f.read_bytes() for f in files[::20])
        del files[::20]
        text = b"".join(f.read_bytes() for f in files)[:8_000_000]
    else:
        text = path.read_bytes()
        cut = len(text) * 19 // 20
        text, held_out = text[:cut], text[cut:]
    text_bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return text_bytes, torch.frombuffer(bytearray(held_out), dtype=torch.uint8)


def bigram_entropy(text: Tensor) -> float:
    """Entropy of a byte given the one before it, in nats, counted on this very text."""
    pairs = text[:-1].long() * 256 + text[1:]
    joint = torch.bincount(pairs, minlength=256 * 256).view(256, 256) / len(pairs)
    return (torch.special.entr(joint).sum() - torch.special.entr(joint.sum(1)).sum()).item()


def windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each [len(starts), context]: a target is the byte after its input."""
    positions = (starts[:, None] + torch.arange(context)).to(text.device)
    return text[positions].long(), text[positions + 1].long()
