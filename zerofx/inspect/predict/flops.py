"""How much arithmetic a token costs, by the parameters that it meets: no forward is run.

A weight that a token is multiplied with costs a multiplication and an addition: 2 operations in forward. Backward has
the same product twice, for the gradient of what came in and for that of the weight (Kaplan et al., 2020)::

    forward   2 W                W weights that tokens are multiplied with, W' of them trained
    backward  2 W + 2 W'         all trained: the 6 W of the literature

==========================================  ================================================================
multiplied                                  every parameter of two dimensions or more
not multiplied                              tables that are looked up (``nn.Embedding``), unless tied to a head
multiplied with some of the tokens          weights of experts, by the configuration's experts per token
==========================================  ================================================================

Attention has no weights: each token is multiplied with ``s`` keys and ``s`` values, 4 s d operations in a layer of
width ``d`` (Chowdhery et al., 2022). A causal mask halves what is needed and, by convention, not what is counted.
A convolution's weights are multiplied with every position, so that a token must be one.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one token."""

    forward: float
    backward: float


def flops_per_token(module: nn.Module, sequence_length: int | None = None) -> Flops:
    """What a token costs in ``module``.

    Args:
        module: on any device, the meta device included. For a mixture of experts and for attention its ``config`` is
            read, as Hugging Face's models have one.
        sequence_length: tokens that attend to each other; None: attention is not counted.

    Raises:
        ValueError: no ``config`` that says how wide attention is.
    """
    looked_up = {id(x.weight) for x in module.modules() if isinstance(x, nn.Embedding)}
    multiplied = {id(x.weight) for x in module.modules() if isinstance(x, nn.Linear)}
    met, trained = 0.0, 0.0
    for name, parameter in module.named_parameters():
        if parameter.dim() < 2 or id(parameter) in looked_up - multiplied:
            continue
        share = _share_of_tokens(module, name)
        met += share * parameter.numel()
        trained += share * parameter.numel() * parameter.requires_grad
    attention = 0.0 if sequence_length is None else 4.0 * sequence_length * _width(module)
    return Flops(2 * met + attention, 2 * met + 2 * trained + 2 * attention)


def _share_of_tokens(module: nn.Module, name: str) -> float:
    """The part of all tokens that meets this parameter."""
    config = getattr(module, "config", None)
    experts = next((n for n in (getattr(config, key, None) for key in _EXPERTS) if n), None)
    if experts is None or "experts" not in name.split("."):
        return 1.0
    return float(getattr(config, "num_experts_per_tok", experts)) / float(experts)


def _width(module: nn.Module) -> int:
    """Heads times their dimension, over all layers."""
    config = getattr(module, "config", None)
    layers, heads = (getattr(config, key, None) for key in ("num_hidden_layers", "num_attention_heads"))
    if layers is None or heads is None or config is None or getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"sequence_length: how wide attention is in {type(module).__name__} is not known: it has no Hugging Face "
            "config of one stack of layers. Leave it out, or give flops_per_token with attention in it."
        )
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(layers * heads * head)
