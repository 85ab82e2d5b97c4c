"""What a parameter was before it was converted: its class, and what that put on it. Copies and pickles know it as that.

::

    Params4bit            quant_state, blocksize, …            bitsandbytes' Linear4bit reads them in forward
    ShardedParameter      quant_state, blocksize, …            the same object, in another class
    a deep copy of the module in zerofx.unsharded              a Params4bit with copies of them
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


class PlainlyCopied(nn.Parameter):
    """A whole parameter of a class of ours: copied or pickled it is what it was before.

    Attributes:
        _was: its class then.
        _own: the names of the attributes that it had then; only where that was a class of its own.
    """

    _was: type[nn.Parameter] = nn.Parameter
    _own: tuple[str, ...] = ()

    def plain(self, memo: dict[int, Any] | None = None) -> nn.Parameter:
        """A parameter of the class that it was, with a copy of the values, in no memory of ours."""
        values = self.detach().as_subclass(torch.Tensor).clone()
        made: Any = torch.Tensor._make_subclass(self._was, values, self.requires_grad)
        memo = {} if memo is None else memo
        memo[id(self)] = made
        copy_own(self, made, memo)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return self.plain(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)


def origin_of(parameter: nn.Parameter) -> dict[str, Any]:
    """What to remember of a parameter that is about to get another class: ``_was`` and ``_own``."""
    was = type(parameter)
    return {"_was": was, "_own": () if was is nn.Parameter else tuple(vars(parameter))}


def share_own(parameter: Any, other: Any) -> None:
    """``other`` has from now on what the class of ``parameter`` put on that: the same objects."""
    if parameter._own:
        other._was, other._own = parameter._was, parameter._own
        other.__dict__.update({name: vars(parameter)[name] for name in parameter._own})


def copy_own(parameter: Any, made: Any, memo: dict[int, Any]) -> None:
    """``made`` gets copies of what the class of ``parameter`` put on that; ``memo`` is of `copy.deepcopy`."""
    if parameter._own:
        made.__dict__.update({name: copy.deepcopy(vars(parameter)[name], memo) for name in parameter._own})
