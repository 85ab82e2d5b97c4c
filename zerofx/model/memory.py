"""One budget for all that a rank holds: what `zerofx.compile(memory=...)` is told.

::

    nbytes    ┌ at rest                                  ┌ while a step runs
              │  weights: shards, replicas, masters      │  gathered weights
              │  what the optimizer keeps                │  activations
              │  buffers, the batch                      │  gradients in flight, and those that wait for the step
              └                                          └  temporaries, workspace of kernels
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from zerofx.model.units import parse_bytes


@dataclass(frozen=True)
class Memory:
    """How many bytes of its device a rank may use, and what zerofx cannot see of that.

    Attributes:
        nbytes: of the device, for all in the picture above.
        moments: what the optimizer keeps of each trained parameter, as a multiple of the parameter's own bytes: 2 for
            Adam, 1 for SGD with momentum, 0 for plain SGD.
        micro_batches: how many forwards and backwards there are per optimizer step.
        no_sync: whether all but the last of these run in `zerofx.no_sync`, which keeps whole gradients.
        rates: of `zerofx.calibrate`, for the times by which divisions are compared. None: those of an ordinary machine
            (`zerofx.simulate.clock.ordinary`); then the times that a refusal names are those.
    """

    nbytes: int
    moments: float = 2
    micro_batches: int = 1
    no_sync: bool = False
    rates: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.nbytes, bool) or not isinstance(self.nbytes, int) or self.nbytes <= 0:
            said = 'a number of bytes above 0, a text such as "80GB", or a zerofx.Memory'
            raise ValueError(f"memory={self.nbytes!r}: expected {said}.")
        if not (isinstance(self.moments, (int, float)) and self.moments >= 0):
            raise ValueError(f"Memory(moments={self.moments!r}): expected a number from 0 on: 2 for Adam.")
        if not (isinstance(self.micro_batches, int) and self.micro_batches >= 1):
            raise ValueError(f"Memory(micro_batches={self.micro_batches!r}): expected a whole number from 1 on.")
        if self.no_sync and self.micro_batches == 1:
            raise ValueError("Memory(no_sync=True) with micro_batches=1: expected how many there are, 2 or more.")
        if self.rates is not None and not hasattr(self.rates, "seconds"):
            raise ValueError(f"Memory(rates={self.rates!r}): expected the zerofx.Rates that zerofx.calibrate returns.")

    @property
    def hint(self) -> str:
        """After what is said of too small a budget: whether gigabytes were meant."""
        return f' A number is of bytes: did you mean "{self.nbytes}GB"?' if self.nbytes < 1024 else ""

    @staticmethod
    def of(given: Any) -> Memory | None:
        """A number of bytes, or a text such as ``"80GB"``, means a `Memory` of so many.

        Raises:
            ValueError: it is neither.
        """
        if isinstance(given, str):
            with contextlib.suppress(ValueError):
                given = int(parse_bytes(given))
        return given if given is None or isinstance(given, Memory) else Memory(given)
