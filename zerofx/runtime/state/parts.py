"""Stage 0 of a module that had DTensors: its parameters are this rank's parts, plain, and say so who asks.

=================================  ==============================================================================
asked of a part                    answer
=================================  ==============================================================================
``.grad`` of a parameter           the part's, as a `PartOfGradient`: norms of it are of the whole
``module.state_dict()``            DTensors, as torch.distributed.checkpoint writes them
``module.load_state_dict(...)``    takes these, and whole tensors
``optimizer.state_dict()``         DTensors for what has an element for each of the parameter's
=================================  ==============================================================================

All else is asked of the part itself: an optimizer updates it as any other plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerofx._torch import DisableTorchFunction, DTensorLayout, as_dtensor, inlined_alone, is_dtensor, pytree
from zerofx.runtime.ranks.sharing import RankGroup

_NORMS = ("norm", "vector_norm", "linalg_vector_norm", "_foreach_norm")


class PartOfGradient(torch.Tensor):
    """The gradient of a part: the same memory. Norms of it, and whether it is finite, are of the whole: collectives."""

    _over: list[RankGroup]

    @classmethod
    @inlined_alone
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").split(".")[0]
        with DisableTorchFunction():
            result = func(*args, **kwargs)
            if torch.compiler.is_compiling():
                return result
            if name in _NORMS and not any(kwargs.get(x) for x in ("dim", "keepdim", "out")) and len(args) < 3:
                order = args[1] if len(args) > 1 else kwargs.get("p", kwargs.get("ord", 2.0))
                order = 2.0 if order in (None, "fro") else float(order)
                if isinstance(result, (list, tuple)):
                    return type(result)(_whole(x, of, order) for x, of in zip(result, args[0], strict=True))
                return _whole(result, args[0], order)
            if name.startswith("_amp_foreach_non_finite_check"):
                parts = [x for x in pytree.tree_leaves(args[0]) if isinstance(x, cls)]
                for ranks in {ranks.name: ranks for part in parts for ranks in part._over}.values():
                    ranks.sum_(args[1], dist.ReduceOp.MAX)
            return result


def part_of_gradient(gradient: torch.Tensor, over: list[RankGroup]) -> torch.Tensor:
    """``gradient``, which ``over`` divide."""
    part = gradient.as_subclass(PartOfGradient)
    part._over = over
    return part


def _whole(norm: torch.Tensor, of: Any, order: float) -> torch.Tensor:
    """The norm of all parts, of the norm of one."""
    if not isinstance(of, PartOfGradient):
        return norm
    if order == float("inf"):
        norm = norm.nan_to_num(nan=float("inf"), posinf=float("inf"))
        for ranks in of._over:
            ranks.sum_(norm, dist.ReduceOp.MAX)
        return norm
    total = norm**order
    for ranks in of._over:
        ranks.sum_(total)
    return total ** (1 / order)


def say_so(module: nn.Module) -> None:
    """Have the state dicts of ``module`` hold DTensors in the place of parts."""
    for m in module.modules():
        if any(_layout_of(p) is not None for p in m.parameters(recurse=False)):
            m.register_state_dict_post_hook(_give)
            m.register_load_state_dict_pre_hook(_take)


def say_so_of(optimizer: torch.optim.Optimizer) -> None:
    """The same of an optimizer's state, where it has parts. Before its first step it has no state; so this is early."""
    parts = any(_layout_of(p) is not None for group in optimizer.param_groups for p in group["params"])
    if parts and not hasattr(optimizer, "_zerofx_parts"):
        optimizer._zerofx_parts = True  # type: ignore[attr-defined]
        optimizer.register_state_dict_post_hook(_give_state)
    for p, state in optimizer.state.items() if parts else ():
        for what, value in state.items():
            if is_dtensor(value) and (layout := _layout_of(p)) is not None:
                state[what] = layout.local_of(value)


def _layout_of(p: Any) -> DTensorLayout | None:
    """Of a part; a sharded tensor answers for itself."""
    return getattr(p, "_dtensor", None) if not hasattr(p, "_local") else None


def _give(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, p in module.named_parameters(recurse=False):
        if (layout := _layout_of(p)) is not None and (found := state.get(prefix + name)) is not None and found is not p:
            state[prefix + name] = as_dtensor(found, layout)


def _take(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, p in module.named_parameters(recurse=False):
        found, layout = state.get(prefix + name), _layout_of(p)
        if layout is not None and isinstance(found, torch.Tensor) and found.shape == layout.shape:
            state[prefix + name] = layout.local_of(found) if is_dtensor(found) else layout.part_of(found)


def _give_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, values in state["state"].items():
        p = parameters[number]
        if (layout := _layout_of(p)) is not None:
            per_element = {what: x for what, x in values.items() if isinstance(x, torch.Tensor) and x.shape == p.shape}
            given = {what: as_dtensor(x, layout) for what, x in per_element.items() if x.dim()}
            state["state"][number] = {**values, **given}
