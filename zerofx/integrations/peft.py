"""peft's adapters on a sharded base: they are saved whole, by rank 0, and nothing but they travels for it.

::

    model = zerofx.compile(get_peft_model(base, LoraConfig(...)))
    ...
    zerofx.integrations.peft.save_pretrained(model, folder)      # was: model.save_pretrained(folder)
    for name, weight in merged_parameters(model): ...            # was: model.merge_and_unload(), then its state_dict()

Training needs nothing of this: a frozen base has no gradients, and no optimizer state.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from zerofx.checkpoint.export import gathered_value
from zerofx.checkpoint.parameters import full_parameters
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


def merged_parameters(
    model: Any,
    *,
    buffer: int | str = "1GB",
    dtype: torch.dtype | None = None,
    ranks: Literal["all", 0] = "all",
    adapters: Sequence[str] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole weights of the base with the adapters merged into them, a group at a time. A collective.

    ::

        for name, weight in merged_parameters(model, dtype=torch.bfloat16): ...

    Names and values are those of ``model.merge_and_unload().state_dict()``, but for its buffers. Each layer's own
    ``merge`` computes its weights. The model is not changed.

    Args:
        model: a ``PeftModel``, sharded in any stage.
        buffer, ranks: as in `zerofx.full_parameters`. A layer waits beside it until its adapters have come.
        dtype: of floating-point weights, once they are merged; None: the base's.
        adapters: those to merge, by name; None: the active ones.

    Raises:
        TypeError: another kind of model; or a layer that has no weight of floating point to merge into.
        OutOfStepError: as `zerofx.full_parameters`.
    """
    if not is_adapted(model):
        raise TypeError(
            f"merged_parameters of a {type(model).__name__}: expected a peft.PeftModel. Of any other model use "
            "zerofx.full_parameters(model)."
        )
    layers = _adapted_layers(model)
    return _merged(model, layers, dtype, adapters, full_parameters(model, buffer=buffer, ranks=ranks))


def _adapted_layers(model: Any) -> dict[str, Any]:
    """The layers with adapters, by name."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in found) or not _is_wrapper(module):
            continue
        base = getattr(module, "base_layer", None)
        weights = list(base.parameters()) if isinstance(base, nn.Module) else []
        if hasattr(module, "unload_and_optionally_merge_module") and not hasattr(module, "modules_to_save"):
            weights = []  # peft makes another module of it
        if not hasattr(module, "modules_to_save") and not (weights and all(w.is_floating_point() for w in weights)):
            raise TypeError(
                f"merged_parameters: {name} is a {type(module).__name__}: expected a layer with weights of floating "
                "point to merge into. Merge it whole: `with zerofx.unsharded(model, writeback=False): "
                "copy.deepcopy(model).merge_and_unload()`, or send base and adapters apart: zerofx.full_parameters."
            )
        found[name] = module
    return found


def _is_wrapper(module: nn.Module) -> bool:
    return hasattr(module, "merged_adapters") and hasattr(module, "active_adapters")


def _merged(
    model: Any, layers: dict[str, Any], dtype: torch.dtype | None, adapters: Any, parts: Iterator[Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    tied = _tied_to(model, layers)
    waiting: dict[str, dict[str, torch.Tensor]] = {name: {} for name in layers}
    missing = {
        name: {n for n, p in layer.state_dict(keep_vars=True).items() if isinstance(p, nn.Parameter)}
        for name, layer in layers.items()
    }
    for name, value in parts:
        if name in tied:  # it is what is merged, and comes with that
            continue
        outer = _owner(name, layers)
        if outer is None:
            yield _base_name(name), value if dtype is None or not value.is_floating_point() else value.to(dtype)
            continue
        inner = name[len(outer) + 1 :]
        waiting[outer][inner] = value
        missing[outer].discard(inner)
        del value
        if not missing[outer]:
            with torch.no_grad():
                found = list(_merge(layers[outer], waiting.pop(outer), adapters))
            for inner, weight in found:
                value = weight if dtype is None else weight.to(dtype)
                for each in (f"{outer}.{inner}", *(n for n, of in tied.items() if of == f"{outer}.base_layer.{inner}")):
                    yield _base_name(each), value


def _owner(name: str, layers: dict[str, Any]) -> str | None:
    """The layer with adapters that has the weight ``name``."""
    return next((layer for layer in layers if name.startswith(f"{layer}.")), None)


def _tied_to(model: Any, layers: dict[str, Any]) -> dict[str, str]:
    """Weights outside of ``layers`` that are also one that is merged there, and the name that this has."""
    state = {n: p for n, p in model.state_dict(keep_vars=True).items() if isinstance(p, nn.Parameter)}
    merged = {id(p): n for n, p in state.items() if _owner(n, layers) is not None}
    return {n: merged[id(p)] for n, p in state.items() if id(p) in merged and _owner(n, layers) is None}


def _base_name(name: str) -> str:
    """The name that a weight has in the base."""
    return name.removeprefix("base_model.model.")


def _merge(layer: Any, whole: dict[str, torch.Tensor], adapters: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of what ``layer`` is around, by their names there, with adapters merged into ``whole``."""
    if hasattr(layer, "modules_to_save"):
        chosen = f"modules_to_save.{layer.active_adapters[0]}."
        yield from ((name.removeprefix(chosen), value) for name, value in whole.items() if name.startswith(chosen))
        return
    kept = {key: copy.copy(value) for key, value in vars(layer).items() if isinstance(value, (list, dict, set))}
    own = ("_parameters", "_buffers", "_modules")
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: vars(layer).update({key: value for key, value in kept.items() if key not in own}))
        for name, value in whole.items():
            path, _, last = name.rpartition(".")
            holder = layer.get_submodule(path)
            stack.callback(holder._parameters.__setitem__, last, holder._parameters[last])
            holder._parameters[last] = nn.Parameter(value, requires_grad=False)
        layer.merge(adapter_names=adapters)
        yield from ((name, p.data) for name, p in layer.get_base_layer().named_parameters())


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
