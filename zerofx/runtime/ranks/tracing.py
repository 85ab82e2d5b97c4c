"""What zerofx does, under names: in a `torch.profiler` trace, and in the log.

=====================================  ===================================================================
region in a trace                      what runs in it
=====================================  ===================================================================
``zerofx: forward tokens to norm``     a compiled graph, whole; from the first to the last of its groups
``zerofx: backward norm to tokens``    the same; ``backward (keep)`` inside of `zerofx.no_sync`
``zerofx: start all-gather blocks.0``  inside of a graph, one collective of it: sends and receives are asked for
``zerofx: wait for all-gather ...``    until its bytes are here; so with ``reduce-scatter``. Pairwise exchanges only
                                       (gloo, stages 1 to 3); others have PyTorch's names, and no group's
``zerofx: refresh blocks.0``           stages 1 and 2: a replica is brought up to date, started here
``zerofx: wait for meeting ...``       ``one_copy``: until all ranks may read, or have read
``zerofx: gather blocks.0.up.weight``  one parameter, on demand: eager code or ``full_tensor()``
``zerofx: reduce blocks.0.up.weight``  the gradient of one, on demand
``Optimizer.step#AdamW.step``          PyTorch's own name for the step
=====================================  ===================================================================

The log is ``logging.getLogger("zerofx")``: a line per compiled graph at INFO, one per pass at DEBUG. See them with
``logging.basicConfig(level=logging.INFO)``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch.profiler import record_function

from zerofx._torch import profiler_is_on

_F = TypeVar("_F", bound=Callable[..., Any])


def region(verb: str, name_of: Callable[..., str]) -> Callable[[_F], _F]:
    """A decorator: calls are regions named by ``verb`` and what ``name_of`` says of the arguments."""

    def decorate(function: _F) -> _F:
        @functools.wraps(function)
        def named(*args: Any, **kwargs: Any) -> Any:
            with record_function(f"zerofx: {verb} {name_of(*args, **kwargs)}"):
                return function(*args, **kwargs)

        return named  # type: ignore[return-value]

    return decorate


def while_profiled(name: Callable[[], str]) -> contextlib.AbstractContextManager[Any]:
    """A region, where a profiler is on; otherwise it has no name and costs nothing."""
    return record_function(f"zerofx: {name()}") if profiler_is_on() else contextlib.nullcontext()
