"""Well-known models without their weights: what `python -m zerofx plan --model NAME` plans for.

The table is facts from published configurations, in the names of Hugging Face's ``transformers``. The module is made on
the meta device: parameters with shapes and no memory, so that 405 billion take seconds. Decoders are made here
(`decoders`), other models by transformers. Any other model is named by its ``config.json``::

    plan --model llama-3.1-70b        a row of the table, made here
    plan --model t5-11b               a row of the table, made by transformers
    plan --model path/to/config.json  what stands there: "architectures", "hidden_size", ...
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerofx.inspect.predict.decoders import decoder

_GPT2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False}
_QWEN = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": False}


def _decoder(
    family: dict[str, Any], layers: int, hidden: int, inner: int, heads: int, key_heads: int, vocab: int
) -> Any:
    """A decoder of Llama's kind: grouped-query attention, a gated feed-forward layer."""
    return family | {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "vocab_size": vocab,
    }


_MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "tie_word_embeddings": False}
_MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "tie_word_embeddings": False}

SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": _GPT2 | {"n_layer": 12, "n_embd": 768, "n_head": 12},
    "gpt2-xl": _GPT2 | {"n_layer": 48, "n_embd": 1600, "n_head": 25},
    "llama-2-7b": _decoder(_LLAMA, 32, 4096, 11008, 32, 32, 32000),
    "llama-2-70b": _decoder(_LLAMA, 80, 8192, 28672, 64, 8, 32000),
    "llama-3.1-8b": _decoder(_LLAMA, 32, 4096, 14336, 32, 8, 128256),
    "llama-3.1-70b": _decoder(_LLAMA, 80, 8192, 28672, 64, 8, 128256),
    "llama-3.1-405b": _decoder(_LLAMA, 126, 16384, 53248, 128, 8, 128256),
    "mistral-7b": _decoder(_MISTRAL, 32, 4096, 14336, 32, 8, 32000),
    "mixtral-8x7b": _decoder(_MIXTRAL, 32, 4096, 14336, 32, 8, 32000) | {"num_local_experts": 8},
    "qwen2.5-7b": _decoder(_QWEN, 28, 3584, 18944, 28, 4, 152064),
    "qwen2.5-72b": _decoder(_QWEN, 80, 8192, 29568, 64, 8, 152064),
    "bert-large": {
        "architectures": ["BertForMaskedLM"],
        "model_type": "bert",
        "num_hidden_layers": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
    },
    "vit-l": {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "num_hidden_layers": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_labels": 1000,
    },
    "t5-11b": {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "num_layers": 24,
        "d_model": 1024,
        "d_ff": 65536,
        "d_kv": 128,
        "num_heads": 128,
    },
}
"""Name -> Hugging Face configuration; what is not said is transformers' default."""


LOSS_TYPES = {"gpt2": "ForCausalLM"}
"""Of models whose loss transformers guesses from the class's name, which breaks a graph where the name has none."""


def build(model: str | Path, dtype: torch.dtype = torch.bfloat16, *, runs: bool = False) -> nn.Module:
    """The module of ``model`` on the meta device, its parameters in ``dtype``. Nothing is downloaded or allocated.

    Args:
        model: a name from `SHAPES`, or the path of a Hugging Face ``config.json`` (or of its folder).
        runs: with its arithmetic, so by transformers: as it is trained, without a cache of keys and values.

    Raises:
        ValueError: no such name or file, or a configuration that transformers does not know.
        ModuleNotFoundError: transformers makes it, and is not installed.
    """
    config = dict(SHAPES.get(str(model)) or _read(Path(model)))
    if str(model) in SHAPES and not runs:
        with torch.device("meta"):
            module = decoder(config)
        if module is not None:
            return module.to(dtype)
    try:
        import transformers
    except ModuleNotFoundError as e:
        raise ModuleNotFoundError(
            f"the layers of {model} are made by Hugging Face transformers, which is not installed: "
            "pip install transformers."
        ) from e
    kind, architectures = config.pop("model_type", None), config.pop("architectures", None) or ()
    if kind is None:
        raise ValueError(f'{model}: no "model_type" in it: expected a Hugging Face model\'s config.json.')
    try:
        made = transformers.AutoConfig.for_model(kind, **config)
    except ValueError as e:
        raise ValueError(
            f"{model}: model_type {kind!r} is not known to transformers {transformers.__version__}."
        ) from e
    if runs:
        made.use_cache = False
    cls = getattr(transformers, architectures[0], None) if architectures else None
    with torch.device("meta"):
        module = transformers.AutoModel.from_config(made) if cls is None else cls(made)
    if runs and kind in LOSS_TYPES:
        module.loss_type = LOSS_TYPES[kind]
    return module.to(dtype)


def batch_of(module: nn.Module, samples: int, length: int) -> dict[str, torch.Tensor]:
    """What a module of transformers is called with in training: ``samples`` of ``length`` tokens, or of one image."""
    config: Any = module.config
    if (size := getattr(config, "image_size", None)) is not None:
        channels = getattr(config, "num_channels", 3)
        labels = torch.zeros(samples, dtype=torch.int64, device="meta")
        return {"pixel_values": torch.zeros(samples, channels, size, size, device="meta"), "labels": labels}
    tokens = torch.zeros(samples, length, dtype=torch.int64, device="meta")
    return {"input_ids": tokens, "labels": tokens}


def _read(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"{str(path)!r}: no such file, and no model of the table ({', '.join(SHAPES)}). "
            "Expected one of these names, or the path of a Hugging Face model's config.json."
        )
    try:
        config = json.loads(file.read_text())
    except ValueError as e:
        raise ValueError(f"{file}: not JSON: {e}.") from e
    if not isinstance(config, dict):
        raise ValueError(f"{file}: expected a JSON object, a Hugging Face model's configuration.")
    return config
