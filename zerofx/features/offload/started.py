"""A copy between a device and pinned memory that was started: as much of a `Future` as a graph's waits ask for.

::

    start    result()      what the computing stream is given next comes after the copy; the host goes on
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class Started:
    """A copy of ``flat`` that was started: as much of a `Future` as a graph's waits ask for."""

    def __init__(self, value: torch.Tensor, flat: torch.Tensor, wait: Callable[[], None]) -> None:
        self._value, self._flat, self._wait = value, flat, wait

    def result(self) -> torch.Tensor:
        """What the computing stream may use from now on."""
        self._wait()
        return self._value
