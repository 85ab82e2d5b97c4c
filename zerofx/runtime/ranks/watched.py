"""Compiled graphs whose collectives are under watch (`zerofx.runtime.ranks.watch`)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch.distributed as dist

from zerofx._torch import resolve_process_group
from zerofx.runtime.ranks.agree import Schedule
from zerofx.runtime.ranks.watch import watch_of


def watched(compiled: Callable, schedule: Schedule, name: str, timeout: float | None) -> Callable:
    """A compiled graph whose collectives are under watch."""
    if not schedule.collectives or watch_of(name) is None:
        return compiled
    digest, agrees = schedule.digest, any(c.kind == "all-reduce" for c in schedule.collectives)

    def run(args: list[Any]) -> Any:
        watch = watch_of(name)
        assert watch is not None
        watch.enter(schedule, digest, timeout)
        if agrees:
            watch.agree(schedule, digest)
        with watch.explaining(f"the collectives of {schedule.phase}"):
            outputs = compiled(args)
        watch.check()
        return outputs

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def watched_beside(
    compiled: Callable, schedule: Schedule, name: str, timeout: float | None, also: Collection[str]
) -> Callable:
    """A compiled graph in which ranks of another process group talk, too: ``name``, and ``also``, of the same ranks.

    ``schedule``: what of it is zerofx's; the rest is the model's own.
    """
    watch = watch_of(name)
    if watch is None:
        return compiled
    watch.called = dist.get_process_group_ranks(resolve_process_group(name))
    watch.names |= {*also}
    watch.store.set(f"schedule/{schedule.digest}", schedule.to_json())
    what = f"the collectives of {schedule.phase} among the tensor-parallel ranks {watch.called}"

    def run(args: list[Any]) -> Any:
        watch = watch_of(name)
        assert watch is not None
        watch.enter(schedule, schedule.digest, timeout)
        with watch.inside(what):
            return compiled(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
