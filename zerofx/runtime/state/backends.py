"""Sharded weights in what another backend than zerofx's compiles: its code would read memory that is not there."""

from __future__ import annotations

import warnings
from types import CodeType
from typing import NoReturn

import torch.distributed as dist

from zerofx._torch import run_while_tracing, skip_call, skip_calls, skippable_code, traced_for
from zerofx.runtime.state.callbacks import CALLBACKS


def refuse_backend(what: str) -> NoReturn:
    """Raise: ``what`` is in code that cannot run uncompiled."""
    raise RuntimeError(
        f"{what} is being compiled by another backend than zerofx, whose code would read memory that is not there. "
        'Use zerofx.compile(module), or torch.compile(..., backend="zerofx"); outside of compiled code write `if` for '
        "torch.cond; export the module as it is inside of `with zerofx.unsharded(module):`."
    )


@run_while_tracing
def check_backend(what: str) -> None:
    """While Dynamo traces for another backend: this call runs uncompiled, where it can."""
    if traced_for(CALLBACKS.is_zerofx):
        return
    code = skippable_code()
    if code is None:
        refuse_backend(what)
    run_uncompiled(
        code,
        f"{code.co_name!r} is compiled by another backend than zerofx, and takes {what}: such calls run uncompiled. "
        "Right, but slow: call it inside of a module that zerofx has compiled, where it becomes a part of the graph, "
        'or compile it with backend="zerofx". If that is zerofx\'s own in a function of yours, mark it with '
        "functools.wraps.",
    )


def run_uncompiled(code: CodeType, warning: str) -> NoReturn:
    """While Dynamo compiles ``code``: this call of it runs as it reads. Rank 0 gives the ``warning``, once."""
    place = code.co_filename, code.co_firstlineno
    if place not in _uncompiled:
        _uncompiled.add(place)
        if not dist.is_initialized() or dist.get_rank() == 0:
            warnings.warn_explicit(warning, UserWarning, *place)
    skip_call()


_uncompiled: set[tuple[str, int]] = set()
skip_calls()
