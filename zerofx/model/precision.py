"""Which dtype weights compute in, gradients travel in, and inputs and outputs have.

========  ==================================  ========================================
what      dtype                               where it changes
========  ==================================  ========================================
master    the module's own (float32)          the optimizer works on it
weight    ``param_dtype``                     cast on the shard, before it is gathered
gradient  ``reduce_dtype``, else the          cast before it is reduced; ``.grad`` has
          dtype it is computed in             the master's dtype
inputs    ``param_dtype``                     cast as the module is called
outputs   ``output_dtype``, else as computed  cast as the module returns
buffers   their own                           never
quantized their own                           never
========  ==================================  ========================================

The fields are those of PyTorch's ``torch.distributed.fsdp.MixedPrecisionPolicy`` and mean the same. Parts of a module
may have policies of their own (`zerofx.model.policies`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from zerofx._torch import pytree
from zerofx.model.layout import is_quantized


def keeps_dtype(parameter: torch.Tensor) -> bool:
    """Whether no policy casts ``parameter``: it is quantized, or stands inside of a tensor subclass (`note_inside`)."""
    return is_quantized(parameter.dtype) or hasattr(parameter, _INSIDE)


def note_inside(parameter: torch.Tensor) -> None:
    """``parameter`` stands inside of a tensor subclass, which is cast in its place (`zerofx.compiler.subclasses`)."""
    setattr(parameter, _INSIDE, True)


_INSIDE = "_zerofx_inside"


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes of weights, gradients, inputs and outputs; None: leave as it is.

    Attributes:
        param_dtype: what the module computes in.
        reduce_dtype: what gradients are reduced in. None: ``param_dtype``; of a weight that is gathered outside of
            graphs its own dtype.
        output_dtype: what floating-point outputs are cast to. None: those of a whole module stay as they are, those of
            a part are cast to what the module around it computes in.
        cast_forward_inputs: whether floating-point inputs are cast to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"MixedPrecision({name}={dtype!r}): expected a floating-point torch.dtype, or None.")

    def casts(
        self, computed: torch.dtype | None, around: torch.dtype | None
    ) -> tuple[torch.dtype | None, torch.dtype | None]:
        """What inputs and outputs are cast to; None: they stay as they are.

        Args:
            computed: what the part that has this policy computes in; None: in several dtypes.
            around: what the module around the part computes in; None: there is none, or it computes in several.
        """
        back = around if around != computed else None
        return computed if self.cast_forward_inputs else None, self.output_dtype or back


def cast_floats(values: Any, dtype: torch.dtype | None) -> Any:
    """``values``, any nesting of containers, with every floating-point tensor in it cast to ``dtype``.

    Containers without such a tensor of another dtype are the same objects: the module may write to them.
    """

    def differs(x: Any) -> bool:
        return isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != dtype

    if not any(differs(x) for x in pytree.tree_leaves(values)):
        return values
    return pytree.tree_map(lambda x: x.to(dtype) if differs(x) else x, values)
