"""The norm of all gradients, as far as the host computes it: sums of squares, of this rank and over all.

::

    squares           a number for each set of ranks over which state is divided      `Span.ranks`
    sum_of_squares    these, added up over their ranks                                 a collective for each

`zerofx.runtime.optim.device_step` has what the device computes of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from zerofx.kernels import cpu
from zerofx.runtime.optim.spans import Run, Span, ranks_of


def sum_of_squares(spans: Sequence[Span], runs: Sequence[Run]) -> float:
    """Over all ranks, of what is sharded; what is not is the same on every rank. A collective per process group."""
    shared, mine = ranks_of(spans), squares(runs)
    totals = {names: torch.tensor([mine.get(names, 0.0)], dtype=torch.float64) for names in ((), *shared)}
    for names, chain in shared.items():
        for ranks in chain:
            ranks.sum_(totals[names])
    return sum(total.item() for total in totals.values())


def squares(runs: Sequence[Run]) -> dict[tuple[str, ...], float]:
    """What this rank adds to it, by `Span.ranks`. The host waits for gradients that come to it."""
    found: dict[tuple[str, ...], float] = defaultdict(float)
    for run in runs:
        with run.span.gradients_resident():
            found[run.span.ranks] += sum(map(cpu.sum_of_squares, run.summed()))
    return found
