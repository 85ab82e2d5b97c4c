"""What a sharded tensor leaves to packages above this one: a table of callbacks that they fill in.

==================  =========================================  ======================================
callback            what it is asked for                       who fills it in
==================  =========================================  ======================================
``operation``       an operation on sharded tensors            `zerofx.runtime.eager.elementwise`
``replace``         ``set_()``                                 `zerofx.runtime.eager.elementwise`
``gather``          ``full_tensor()``                          `zerofx.runtime.eager.ondemand`
``write_items``     three questions of                         `zerofx.checkpoint.dcp`
``chunk_list``      torch.distributed.checkpoint
``tensor_shard``
``is_zerofx``       "is this ``torch.compile`` backend ours?"  `zerofx.compiler.backend`
==================  =========================================  ======================================

Imports run down only. A call that has to go up is a callback.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Callbacks:
    """The table. An entry that nobody has filled in is missing: reading it is an AttributeError with its name."""

    replace: Callable[[Any, torch.Tensor], None]
    operation: Callable[[Callable, tuple, dict[str, Any]], Any]
    gather: Callable[[Any], Any]
    write_items: Callable[[Any, str], list[Any]]
    chunk_list: Callable[[Any], list[Any]]
    tensor_shard: Callable[[Any, Any], Any]
    is_zerofx: Callable[[Any], bool]


CALLBACKS = Callbacks()
