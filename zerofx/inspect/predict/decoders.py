"""Decoders of two families without their arithmetic: modules and parameters by Hugging Face's names, and no forward.

A plan is made of names and shapes, so it needs no library of models::

    llama      model.embed_tokens, model.layers[i].{self_attn, mlp, two norms}, model.norm, lm_head
    gpt2       transformer.{wte, wpe}, transformer.h[i].{ln_1, attn, ln_2, mlp}, transformer.ln_f; lm_head is wte

Mistral is Llama with other sizes, Qwen2 is Llama with biases on queries, keys and values.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

LLAMAS = ("llama", "mistral", "qwen2")


def decoder(config: dict[str, Any]) -> nn.Module | None:
    """The module of a configuration of `SHAPES`, on the current device; None for a family that is not here.

    Its ``config`` says how wide attention is, as that of Hugging Face's models does (`zerofx.inspect.predict.flops`).
    """
    if config["model_type"] == "gpt2":
        module, keys = _gpt2(config["n_layer"], config["n_embd"]), ("n_layer", "n_embd", "n_head")
    elif config["model_type"] in LLAMAS:
        module, keys = _llama(config), ("num_hidden_layers", "hidden_size", "num_attention_heads")
    else:
        return None
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads")
    found = {name: config[key] for name, key in zip(names, keys, strict=True)}
    module.config = SimpleNamespace(**found)  # type: ignore[assignment]
    return module


def _llama(config: dict[str, Any]) -> nn.Module:
    width, vocab = config["hidden_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    keys = width // heads * config["num_key_value_heads"]
    bias = config["model_type"] == "qwen2"

    def layer() -> nn.Module:
        attention = {"q_proj": nn.Linear(width, width, bias), "k_proj": nn.Linear(width, keys, bias)}
        attention |= {"v_proj": nn.Linear(width, keys, bias), "o_proj": nn.Linear(width, width, False)}
        inner = config["intermediate_size"]
        gated = {name: nn.Linear(width, inner, False) for name in ("gate_proj", "up_proj")}
        return _tree(
            self_attn=_tree(**attention),
            mlp=_tree(**gated, down_proj=nn.Linear(inner, width, False)),
            input_layernorm=_Norm(width),
            post_attention_layernorm=_Norm(width),
        )

    layers = nn.ModuleList(layer() for _ in range(config["num_hidden_layers"]))
    model = _tree(embed_tokens=nn.Embedding(vocab, width), layers=layers, norm=_Norm(width))
    return _tree(model=model, lm_head=nn.Linear(width, vocab, False))


def _gpt2(layers: int, width: int, vocab: int = 50257, positions: int = 1024) -> nn.Module:
    def layer() -> nn.Module:
        attention = _tree(c_attn=_Conv1D(width, 3 * width), c_proj=_Conv1D(width, width))
        mlp = _tree(c_fc=_Conv1D(width, 4 * width), c_proj=_Conv1D(4 * width, width))
        return _tree(ln_1=nn.LayerNorm(width), attn=attention, ln_2=nn.LayerNorm(width), mlp=mlp)

    table = nn.Embedding(vocab, width)
    head = nn.Linear(width, vocab, False)
    head.weight = table.weight
    stack = nn.ModuleList(layer() for _ in range(layers))
    body = _tree(wte=table, wpe=nn.Embedding(positions, width), h=stack, ln_f=nn.LayerNorm(width))
    return _tree(transformer=body, lm_head=head)


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))


class _Conv1D(nn.Module):
    """GPT-2's linear layer, whose weight is [inputs, outputs]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))


def _tree(**children: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module
