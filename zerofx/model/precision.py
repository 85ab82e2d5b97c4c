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
========  ==================================  ========================================

The fields are those of PyTorch's ``torch.distributed.fsdp.MixedPrecisionPolicy`` and mean the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerofx._torch import pytree


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes of weights, gradients, inputs and outputs; None: leave as it is.

    Attributes:
        param_dtype: what the module computes in.
        reduce_dtype: what gradients are reduced in. None: ``param_dtype``; of a weight that is gathered outside of
            graphs its own dtype.
        output_dtype: what floating-point outputs are cast to.
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

    def install(self, module: nn.Module) -> Casts:
        """Have ``module`` cast what it is called with and what it returns, for as long as the result is `Casts.on`."""
        casts = Casts(self)
        if self.cast_forward_inputs and self.param_dtype is not None:
            module.register_forward_pre_hook(casts.inputs, with_kwargs=True, prepend=True)
        if self.output_dtype is not None:
            module.register_forward_hook(casts.outputs)
        return casts


class Casts:
    """The hooks of a module under mixed precision.

    Attributes:
        on: whether they cast. False while the module has its masters for weights (`zerofx.unsharded`).
    """

    def __init__(self, precision: MixedPrecision) -> None:
        self.precision = precision
        self.on = True

    def inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The forward pre-hook."""
        return cast_floats((args, kwargs), self.precision.param_dtype) if self.on else (args, kwargs)

    def outputs(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        """The forward hook."""
        return cast_floats(outputs, self.precision.output_dtype) if self.on else outputs


def cast_floats(values: Any, dtype: torch.dtype | None) -> Any:
    """``values``, any nesting of containers, with every floating-point tensor in it cast to ``dtype``."""

    def cast(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    return pytree.tree_map(cast, values)
