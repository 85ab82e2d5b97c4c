"""Compiled graphs under a name: in the log as they are compiled, in a `torch.profiler` trace whenever they run.

`zerofx.runtime.ranks.tracing` has the table of names.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch.profiler import record_function

from zerofx.compiler.rewriting import Rewriting
from zerofx.model.units import format_bytes

log: logging.Logger = logging.getLogger("zerofx")


def named(compiled: Callable, name: str, groups: Sequence[str]) -> Callable:
    """The boxed ``compiled`` of these ``groups``, named whenever it runs."""
    ends = " to ".join(dict.fromkeys([groups[0], groups[-1]])) if groups else ""
    label = f"zerofx: {name} {ends}".rstrip()

    def run(args: list[Any]) -> Any:
        with record_function(label):
            return compiled(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def groups_of(trace: Rewriting) -> tuple[str, ...]:
    """The groups that a graph gathers or reduces, by name, in order."""
    return tuple(dict.fromkeys(layout.name for layout in _layouts(trace)))


def log_compiled(trace: Rewriting) -> None:
    """Say in the log what was compiled."""
    if not log.isEnabledFor(logging.INFO):
        return
    context, seconds = trace.context, sum(trace.seconds.values())
    moved = [f"reads {format_bytes(sum(layout.nbytes for layout in context.found.shards))} of weights"]
    if context.gathers:
        moved[0] += f", at most {format_bytes(context.found.gathered_bytes)} gathered at once"
    if context.found.reductions:
        moved.append(f"reduces {format_bytes(sum(map(_nbytes, context.found.reductions)))} of gradients")
    log.info("%s: %d groups; %s; rewritten in %.3f s", trace.name, len(groups_of(trace)), "; ".join(moved), seconds)
    for name, edits in trace.edits.items():
        log.debug("%s: %s made %d edits in %.3f s", trace.name, name, edits, trace.seconds[name])


def _nbytes(reduction: Any) -> int:
    return sum(slot.numel for slot in reduction.slots) * reduction.layout.dtype.itemsize


def _layouts(trace: Rewriting) -> list[Any]:
    return [*trace.context.found.shards, *(reduction.layout for reduction in trace.context.found.reductions)]
