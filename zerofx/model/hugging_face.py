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
    """`keep_in_step` undone: ranks generate by themselves."""
    kept: list[tuple[nn.Module, Any]] = [(m, vars(m)["generate"]) for m in module.modules() if _is_kept(m)]
    for model, _ in kept:
        del model.generate
    try:
        yield
    finally:
        for model, generate in kept:
            model.generate = generate


def _is_kept(module: nn.Module) -> bool:
    generate = vars(module).get("generate")
    return isinstance(generate, functools.partial) and generate.func is _generate
