"""Options that are left open: ``stage="auto"``, ``wire="auto"``, or a ``batch`` to choose them by.

::

    zerofx.compile(model, memory="80GB", batch=inputs) ──▶ chosen ── CHOOSERS ──▶ zerofx.inspect.choose ──▶ options

What chooses compiles graphs, many times, so it lives above this package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from zerofx.compiler.options import Options

AUTO = "auto"
OPEN = ("stage", "wire")
"""The options that may be `AUTO`."""


class Choice(Protocol):
    """`zerofx.Choice`, as far as it is asked here."""

    @property
    def options(self) -> dict[str, Any]: ...


CHOOSERS: list[Callable[[nn.Module, dict[str, Any], Any], Choice]] = []
"""Of a module, its options, and a batch; alike on all ranks. The first is asked."""


def is_open(options: dict[str, Any], batch: Any) -> bool:
    """Whether there is something to choose."""
    return batch is not None or any(options.get(name) == AUTO for name in OPEN)


def check_open(options: dict[str, Any], batch: Any) -> None:
    """Refuse options that are wrong, in every stage where that is open, or that leave nothing to choose by.

    Raises:
        ValueError: what `Options` says, of the last stage.
    """
    if not is_open(options, batch):
        Options.of(options)
        return
    if batch is None:
        name = next(name for name in OPEN if options.get(name) == AUTO)
        raise ValueError(
            f'{name}="auto" without batch=: what a step takes depends on its inputs. Give batch=, what the module is '
            "called with (tensors of the meta device will do); or give stage= a number, and wire= a zerofx.Wire."
        )
    if options.get("memory") is None:
        raise ValueError(
            "batch= without memory=: what is fastest depends on what there is room for. Give memory=, what a rank may "
            'use of its device, such as "80GB"; or leave batch= out.'
        )
    stages = (0, 2, 3) if options.get("stage", AUTO) == AUTO else (options["stage"],)
    wire = {"wire": None} if options.get("wire") == AUTO else {}
    for i, stage in enumerate(stages, start=1):
        try:
            Options.of({**options, **wire, "stage": stage})
        except ValueError:
            if i == len(stages):
                raise
        else:
            return


def chosen(module: nn.Module, options: dict[str, Any], batch: Any) -> Choice:
    """What is chosen for ``module``. A collective.

    Raises:
        ValueError: nothing fits; or there is nothing to choose by.
    """
    check_open(options, batch)
    return CHOOSERS[0](module, options, batch)
