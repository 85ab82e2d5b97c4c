"""The parity suites with NCCL's spelling, on real ranks: what they train, and how far from their references that is.

A *cell* is a case of a suite in one stage, with one executor, on some ranks. Buffers are moved at last (`stand_in.py`);
in the suite of stages, by the same compiled model, at once as well.

==================  ====================================================  ==========================================
suite               what it trains                                        its reference
==================  ====================================================  ==========================================
stages              a GPT with AdamW, clipping, three ways to accumulate  DistributedDataParallel; gloo's spelling too
hugging face        a model of transformers, SGD and AdamW                one process on the whole batch
cases of FSDP2      a case of PyTorch's own tests                         one process; it raises where they differ
==================  ====================================================  ==========================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import zerofx
from tests import models
from tests.nccl.events import races, under_way
from tests.nccl.stand_in import AT_LAST, AT_ONCE, StandIn, nccl_spelling
from tests.pairwise import EXECUTORS, STAGES
from tests.parity import test_fsdp2_cases as fsdp2
from tests.parity import test_hugging_face as hugging_face
from tests.parity import test_stages as stages
from tests.workers import Workers

BOUND = 1e-5
"""How far a loss may be from its reference, relative: what the suites ask for."""


@dataclass(frozen=True)
class Cell:
    suite: str
    case: str
    stage: int
    executor: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.suite}, {self.case}, stage {self.stage}, {self.executor}, {self.ranks} ranks"


@dataclass(frozen=True)
class Found:
    """What came of a cell.

    Attributes:
        off: the largest relative difference of a loss from the reference.
        off_gloo: the same from the run with gloo's spelling; None where there is none.
        collectives: how many a rank has started.
        races: what touched memory that a collective was at, as far as the process group sees it.
    """

    off: float
    off_gloo: float | None
    collectives: int
    races: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return self.off <= BOUND and not self.races


def cells() -> list[Cell]:
    """All of the table. What is cheap goes first."""
    found = []
    for executor in EXECUTORS:
        found += [Cell("stages", "GPT", stage, executor, ranks) for ranks in (2, 3) for stage in STAGES]
        names = models.HUGGING_FACE if executor == "eager" else ("llama",)
        for ranks in (2, 3):
            found += [Cell("hugging face", name, stage, executor, ranks) for name in names for stage in STAGES]
        if executor == "eager":
            found += [Cell("cases of FSDP2", name, stage, executor, 2) for name in fsdp2.PARITY for stage in STAGES]
    return found


def run(workers: Workers, cell: Cell, timeout: float = 280) -> Found:
    """Trains a cell."""
    run_cell = {"stages": _stages, "hugging face": _hugging_face, "cases of FSDP2": _fsdp2}[cell.suite]
    return run_cell(workers, cell, timeout)


def difference(found: list[float], wanted: list[float]) -> float:
    """The largest relative one; not a number where one is none."""
    differences = torch.tensor([abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True)])
    return differences.max().item()  # NaN, where there is one


def _told(group: StandIn) -> tuple[int, tuple[str, ...]]:
    events = group.log.events
    left = tuple(f"{event} was never waited for" for event in under_way(events))
    return len([event for event in events if event.kind == "start"]), (*races(events), *left)


# ---- stages ----------------------------------------------------------------------------------------------------------


def train_stages(stage: int, executor: str) -> tuple[list[dict[str, list[float]]], int, tuple[str, ...]]:
    """On each rank: one compiled model, moved at once and at last; losses and norms by mode."""
    modes = list(stages.MODES) if executor == "eager" else ["no_sync", "one"]
    with nccl_spelling() as group:
        model = stages.build()
        start = {name: value.clone() for name, value in model.state_dict().items()}
        zerofx.compile(model, stage=stage, executor=executor, groups=zerofx.Grouping(min_bytes=0))  # type: ignore[arg-type]
        runs = []
        for moment in (AT_ONCE, AT_LAST):
            group.moment = moment
            runs.append({mode: stages.train(model, mode, lambda: zerofx.no_sync(model), start) for mode in modes})
        return runs, *_told(group)


def _stages(workers: Workers, cell: Cell, timeout: float) -> Found:
    results = workers.run(train_stages, cell.stage, cell.executor, timeout=timeout)
    wanted = workers.run(stages.references, timeout=timeout)[0]
    gloo = None
    if cell.executor == "eager":
        gloo = workers.run(stages.zerofx_runs, cell.stage, "eager", list(stages.MODES), timeout=timeout)[0]
    off, off_gloo = [], []
    for runs, _, _ in results:
        for found in runs:
            off += [difference(found[mode], wanted[mode]) for mode in found]
            off_gloo += [difference(found[mode], gloo[mode]) for mode in found] if gloo else []
    _, collectives, found_races = results[0]
    return Found(_largest(off), _largest(off_gloo) if gloo else None, collectives, found_races)


# ---- hugging face ----------------------------------------------------------------------------------------------------


def train_hugging_face(name: str, stage: int, executor: str) -> tuple[Any, int, tuple[str, ...]]:
    with nccl_spelling() as group:
        results = hugging_face.train_sharded(name, stage, executor)
        return {key: losses for key, (losses, _) in results.items()}, *_told(group)


def _hugging_face(workers: Workers, cell: Cell, timeout: float) -> Found:
    results = workers.run(train_hugging_face, cell.case, cell.stage, cell.executor, timeout=timeout)
    off = [
        difference(losses[optimizer], hugging_face.reference(cell.case, optimizer, cell.ranks)[0])
        for losses, _, _ in results
        for optimizer in hugging_face.OPTIMIZERS
    ]
    return Found(_largest(off), None, *results[0][1:])


# ---- cases of FSDP2 --------------------------------------------------------------------------------------------------


def train_fsdp2(name: str, stage: int, executor: str) -> tuple[int, tuple[str, ...]]:
    with nccl_spelling() as group:
        fsdp2.run_parity(name, stage, executor)  # raises where losses, gradients or weights differ
        return _told(group)


def _fsdp2(workers: Workers, cell: Cell, timeout: float) -> Found:
    results = workers.run(train_fsdp2, cell.case, cell.stage, cell.executor, timeout=timeout)
    return Found(0.0, None, *results[0])


def _largest(differences: list[float]) -> float:
    return torch.tensor(differences).max().item()
