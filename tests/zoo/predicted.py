"""What `zerofx.predict` says of a step of one architecture, beside what the step does: on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

import zerofx
from tests.counting import count_collectives
from tests.memory import allocated_peak
from tests.zoo.architectures import ARCHITECTURES
from tests.zoo.base import make_batch
from tests.zoo.run import ROWS, loss_of

OUTSIDE = ("lstm", "wav2vec2", "hubert")
"""Those that compute, outside of any graph, what takes memory at the peak or reads weights: that is not predicted."""


@dataclass(frozen=True)
class Figures:
    """Of one rank's step, in bytes: the most it has allocated, and what it received. None: nothing was compiled."""

    peak: int
    wire: int
    predicted_peak: int | None = None
    predicted_wire: int | None = None

    @property
    def off(self) -> float:
        """How far the predicted peak is from the measured one, as a part of that."""
        return (self.predicted_peak or 0) / self.peak - 1


def measure(name: str, stage: int = 3, executor: str = "eager") -> Figures:
    """On each rank: the third step, when all is compiled and replicas are stale."""
    architecture = ARCHITECTURES[name]
    model, batch = architecture.build(0), make_batch(architecture.batch, ROWS, seed=dist.get_rank())
    zerofx.compile(model, stage=stage, executor=executor, groups=zerofx.Grouping(min_bytes=0))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step() -> None:
        loss_of(model, batch).backward()

    for _ in range(2):
        step()
        optimizer.step()
        optimizer.zero_grad()
    with count_collectives() as log:
        peak = allocated_peak(step)
    if not any(record.forward for record in zerofx.graphs(model)):
        return Figures(peak, log.total_bytes)
    prediction = zerofx.predict(model, probe=True)
    return Figures(peak, log.total_bytes, prediction.peak_bytes, prediction.wire_bytes)
