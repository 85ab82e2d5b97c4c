"""Compiled graphs under a name: in the log as they are compiled, in a `torch.profiler` trace whenever they run.

`zerofx.runtime.ranks.tracing` has the table of names.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch.profiler import record_function

from zerofx.compiler.rewriting import Rewriting
from zerofx.model.units import format_bytes

log: logging.Logger = logging.getLogger("zerofx")


def observed(compiled: Callable, trace: Rewriting) -> Callable:
    """The boxed ``compiled``, logged now and named whenever it runs."""
    groups = list(dict.fromkeys(layout.name for layout in _layouts(trace)))
    _log(trace, len(groups))
    name = f"zerofx: {trace.name} {' to '.join(dict.fromkeys([groups[0], groups[-1]])) if groups else ''}".rstrip()

    def run(args: list[Any]) -> Any:
        with record_function(name):
            return compiled(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _log(trace: Rewriting, groups: int) -> None:
    if not log.isEnabledFor(logging.INFO):
        return
    context, seconds = trace.context, sum(trace.seconds.values())
    moved = [f"reads {format_bytes(sum(layout.nbytes for layout in context.found.shards))} of weights"]
    if context.gathers:
        moved[0] += f", at most {format_bytes(context.found.gathered_bytes)} gathered at once"
    if context.found.reductions:
        moved.append(f"reduces {format_bytes(sum(map(_nbytes, context.found.reductions)))} of gradients")
    log.info("%s: %d groups; %s; rewritten in %.3f s", trace.name, groups, "; ".join(moved), seconds)
    for name, edits in trace.edits.items():
        log.debug("%s: %s made %d edits in %.3f s", trace.name, name, edits, trace.seconds[name])


def _nbytes(reduction: Any) -> int:
    return sum(slot.numel for slot in reduction.slots) * reduction.layout.dtype.itemsize


def _layouts(trace: Rewriting) -> list[Any]:
    return [*trace.context.found.shards, *(reduction.layout for reduction in trace.context.found.reductions)]
