"""Plain parameters in an optimizer that has sharded ones: whether their gradients are the same on all ranks.

zerofx averages the gradients of what was in the module at ``zerofx.compile``. A head that joins the module later, or a
wrapper around it, is averaged by nobody, so each rank trains another head::

    zerofx.compile(model)
    model.score = nn.Linear(32, 1)          # plain: gradients stay this rank's own
    AdamW(model.parameters()).step()        # warns, once

Where such a parameter runs in a graph of the module, `zerofx.compiler.captured` refuses it. Elsewhere the step is the
first to see it.
"""

from __future__ import annotations

import warnings
import weakref

import torch
from torch import nn

from zerofx.runtime.eager.averages import is_ignored
from zerofx.runtime.ranks.sharing import RankGroup

_asked: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
"""How many such parameters an optimizer had when its ranks were compared."""

_ALIKE = 1e-3
"""Most that norms may differ, relative. Those of other data differ more; those of the same, by rounding."""


def warn_of_differing(optimizer: torch.optim.Optimizer, everyone: RankGroup) -> None:
    """Warn on rank 0 of a plain parameter whose gradient differs between ranks. A collective where there are any, once.

    It is asked again once the optimizer has more of them. What ``ignored=`` has left plain is not meant.
    """
    plain = [
        p
        for group in optimizer.param_groups
        for p in group["params"]
        if type(p) is nn.Parameter and not is_ignored(p) and not hasattr(p, "_group")
    ]
    if everyone.size == 1 or _asked.get(optimizer, 0) >= len(plain):
        return
    _asked[optimizer] = len(plain)
    found = everyone.all_gathered([_norm(p) for p in plain])
    if any(len(norms) != len(plain) for norms in found):
        return
    differing = [p for p, *norms in zip(plain, *found, strict=True) if max(norms) - min(norms) > _ALIKE * max(norms)]
    if differing and everyone.rank == 0:
        warnings.warn(
            f"{type(optimizer).__name__} has {len(differing)} plain parameters beside sharded ones, the first of shape "
            f"{tuple(differing[0].shape)}, whose gradients differ between ranks: each rank trains another weight. "
            "zerofx averages what was in the module at zerofx.compile. Add them before that, or compile the module "
            "that has them, too.",
            UserWarning,
            stacklevel=6,
        )


def _norm(parameter: nn.Parameter) -> float:
    """Of the gradient; 0 where there is none, or where it is no dense tensor."""
    grad = parameter.grad
    if type(grad) is not torch.Tensor or grad.layout is not torch.strided:
        return 0.0
    return float(torch.linalg.vector_norm(grad.detach()))
