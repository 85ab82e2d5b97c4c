"""What zerofx knows of Hugging Face's transformers, which it never imports."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch import nn


def is_model(module: nn.Module) -> bool:
    """Whether ``module`` is a ``transformers.PreTrainedModel``."""
    return any(cls.__name__ == "PreTrainedModel" for cls in type(module).__mro__)


def keep_in_step(module: nn.Module) -> None:
    """Have ``generate`` go on on every rank until the last is done: its ``synced_gpus`` is True unless it is given.

    In stage 3 each forward gathers weights from all ranks: one that stops early would leave the others waiting.
    (transformers does it by itself for modules that carry FSDP's mark. But Dynamo looks for that mark too, and makes a
    graph of each of their layers.)
    """
    for model in filter(is_model, module.modules()):
        if hasattr(model, "generate"):
            model.generate = functools.partial(_generate, model)  # type: ignore[assignment]


def _generate(model: Any, *args: Any, synced_gpus: bool | None = None, **kwargs: Any) -> Any:
    synced = True if synced_gpus is None else synced_gpus
    return type(model).generate(model, *args, synced_gpus=synced, **kwargs)


@contextlib.contextmanager
def each_by_itself(module: nn.Module) -> Iterator[None]:
    """What models do with all ranks they do by themselves inside: `generate`, and `save_pretrained`."""
    places = [(model, name) for model in module.modules() for name in ("generate", "save_pretrained")]
    kept = [(model, name, vars(model)[name]) for model, name in places if _is_ours(model, name)]
    for model, name, _ in kept:
        delattr(model, name)
    try:
        yield
    finally:
        for model, name, method in kept:
            setattr(model, name, method)


def _is_ours(module: nn.Module, name: str) -> bool:
    method = vars(module).get(name)
    return isinstance(method, functools.partial) and method.func.__module__.startswith("zerofx.")
