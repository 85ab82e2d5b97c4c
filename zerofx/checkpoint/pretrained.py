"""``model.save_pretrained(folder)`` of a sharded model of transformers, as its users and trainers write it.

transformers would write what ``state_dict()`` has, slices, on every rank into one folder. So each rank gathers, as
`full_state_dict` does, and rank 0 writes. Whoever gives a ``state_dict=`` has gathered it, and writes it himself.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from zerofx.checkpoint.export import full_state_dict
from zerofx.checkpoint.ranks import Ranks
from zerofx.model.hugging_face import is_model


def save_whole(module: nn.Module) -> None:
    """Have ``save_pretrained`` of the models of transformers in ``module`` write whole weights, on rank 0."""
    for model in filter(is_model, module.modules()):
        model.save_pretrained = functools.partial(_save_pretrained, model)  # type: ignore[assignment]


def _save_pretrained(model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    save = functools.partial(type(model).save_pretrained, model, save_directory)
    if len(args) > 1 or kwargs.get("state_dict") is not None:
        return save(*args, **kwargs)
    whole = full_state_dict(model)
    ranks = Ranks.of(model)
    with ranks.call("save_pretrained"):
        what = f"Saving a {type(model).__name__} to {save_directory}"
        return ranks.together(what, lambda: save(*args, **{**kwargs, "state_dict": whole}), only=0)[ranks.rank]
