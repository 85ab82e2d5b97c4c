"""peft's adapters on a sharded base: they are saved whole, by rank 0, and nothing but they travels for it.

::

    model = zerofx.compile(get_peft_model(base, LoraConfig(...)))
    ...
    zerofx.integrations.peft.save_pretrained(model, folder)      # was: model.save_pretrained(folder)

Training needs nothing of this: a frozen base has no gradients, and no optimizer state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerofx.checkpoint.export import gathered_value
from zerofx.checkpoint.ranks import Ranks
from zerofx.runtime.eager.whole import unsharded
from zerofx.runtime.state.group import groups_of


def is_adapted(module: nn.Module) -> bool:
    """Whether ``module`` is a ``peft.PeftModel``. peft is not imported for it."""
    return any(cls.__name__ == "PeftModel" for cls in type(module).__mro__)


def save_pretrained(model: Any, folder: str | Path, **kwargs: Any) -> None:
    """``model.save_pretrained(folder)`` of a sharded ``PeftModel``: rank 0 writes. A collective.

    Args:
        model: a ``PeftModel``, sharded in any stage.
        folder: ``PeftModel.from_pretrained(base, folder)`` reads it.
        **kwargs: as peft's.

    Raises:
        TypeError: another kind of model.
        CheckpointError: on every rank, where rank 0 could not write.
    """
    if not is_adapted(model):
        raise TypeError(
            f"save_pretrained of a {type(model).__name__}: expected a peft.PeftModel. Of any other model use "
            "zerofx.export_safetensors(model, folder)."
        )
    whole, prompts = adapter_state_dict(model), getattr(model, "prompt_encoder", None)
    with contextlib.ExitStack() as stack:
        if prompts is not None and groups_of(prompts):  # peft computes prompts anew
            stack.enter_context(unsharded(prompts, writeback=False))
        Ranks.of(model).together(
            f"Saving an adapter to {folder}", lambda: model.save_pretrained(folder, state_dict=whole, **kwargs), only=0
        )


def adapter_state_dict(model: Any) -> dict[str, torch.Tensor]:
    """Of ``model.state_dict()`` what its adapters consist of, whole, on rank 0; {} on the others. A collective."""
    names = _names_of_adapters(model)
    whole = {name: gathered_value(value) for name, value in model.state_dict().items() if name in names}
    return {name: value for name, value in whole.items() if value is not None} if Ranks.of(model).rank == 0 else {}


def _names_of_adapters(model: Any) -> set[str]:
    """Which entries of the state peft would save: it is asked with tensors that have no values."""
    from peft import get_peft_model_state_dict

    stand_ins = {name: torch.empty(v.shape, dtype=v.dtype, device="meta") for name, v in model.state_dict().items()}
    name_of = {id(value): name for name, value in stand_ins.items()}
    names: set[str] = set()
    for adapter in model.peft_config:
        for value in get_peft_model_state_dict(model, state_dict=stand_ins, adapter_name=adapter).values():
            if id(value) not in name_of:  # peft computes it, of what we cannot see
                return set(stand_ins)
            names.add(name_of[id(value)])
    return names


def checkpointed(model: nn.Module) -> nn.Module:
    """What of ``model`` belongs in a checkpoint to resume from: of a ``PeftModel`` all but its frozen base."""
    return WithoutBase(model) if is_adapted(model) else model


class WithoutBase(nn.Module):
    """A model as `zerofx.save` and `zerofx.load` see it without its frozen parameters, which no step changes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "model", model)  # not a child: names stay the model's

    model: nn.Module

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.model.parameters(recurse)

    def state_dict(self, *args: Any, keep_vars: bool = False, **kwargs: Any) -> Any:
        state = self.model.state_dict(keep_vars=True)
        frozen = {name for name, v in state.items() if isinstance(v, nn.Parameter) and not v.requires_grad}
        return {name: v if keep_vars else _detached(v) for name, v in state.items() if name not in frozen}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return self.model.load_state_dict(state_dict, strict=False, assign=assign)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
