"""What zerofx knows of Hugging Face's transformers, which it never imports."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn


def is_model(module: nn.Module) -> bool:
    """Whether ``module`` is a ``transformers.PreTrainedModel``."""
    return any(cls.__name__ == "PreTrainedModel" for cls in type(module).__mro__)


def keep_in_step(module: nn.Module) -> None:
    """Have ``generate`` go on on every rank until the last is done, as transformers does for FSDP: ``synced_gpus``.

    In stage 3 each forward gathers weights from all ranks: one that stops early would leave the others waiting. The
    layers that speech models skip at random are run everywhere for the same reason.
    """
    for model in filter(is_model, module.modules()):
        model._is_fsdp_managed_module = True  # type: ignore[assignment]


@contextlib.contextmanager
def each_by_itself(module: nn.Module) -> Iterator[None]:
    """`keep_in_step` undone: ranks generate by themselves."""
    models: list[Any] = [m for m in module.modules() if getattr(m, "_is_fsdp_managed_module", False) is True]
    for model in models:
        model._is_fsdp_managed_module = False
    try:
        yield
    finally:
        for model in models:
            model._is_fsdp_managed_module = True
