"""What `offload=` costs: a disk is measured; plans and predictions beside what a file really reads and writes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import zerofx
from tests.workers import Workers
from zerofx.inspect.predict import disk
from zerofx.runtime.ranks.sharing import PretendedRanks
from zerofx.runtime.state.state_file import StateFile


class Counter:
    """Bytes that files read and write, by what is done; ``pace``: no faster than so many bytes per second each."""

    def __init__(self, patch: pytest.MonkeyPatch, pace: float = 0.0) -> None:
        self.moved = {"read": 0, "written": 0}
        transfer = StateFile._transfer

        def counted(file: StateFile, move: Any, buffer: memoryview, at: int, what: str) -> None:
            start = time.perf_counter()
            transfer(file, move, buffer, at, what)
            self.moved[what] += len(buffer)
            if pace:
                time.sleep(max(0.0, len(buffer) / pace - (time.perf_counter() - start)))

        patch.setattr(StateFile, "_transfer", counted)


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def test_a_disk_is_measured_by_what_passes_through_a_file_both_ways(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(disk, "FILE", 1 << 24)
    counter = Counter(patch, pace=50e6)
    rate = 1 / disk.seconds_per_byte(tmp_path, PretendedRanks(1, "gloo"))
    assert counter.moved == {"read": disk.RUNS << 24, "written": (1 + disk.RUNS) << 24}
    assert 50e6 < rate < 100e6  # both ways at once: one after the other it would be 50 MB/s
    assert not list(tmp_path.iterdir())


def calibrated(folder: str, bad: int) -> Any:
    """Rates; or the error of a folder that rank ``bad`` cannot make."""
    path = Path(folder, str(dist.get_rank()))
    if dist.get_rank() == bad:
        path.write_text("no folder")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "FILE", 1 << 22)
        try:
            return zerofx.calibrate(path=path)
        except zerofx.OffloadError as e:
            return str(e)


def test_all_ranks_have_one_rate_of_the_disk_or_one_error(workers2: Workers, tmp_path: Path) -> None:
    first, second = workers2.run(calibrated, str(tmp_path), -1)
    assert first == second and first.disk_bytes_per_s > 0
    (tmp_path / "1").rmdir()
    for error in workers2.run(calibrated, str(tmp_path), 1):
        assert error.startswith("zerofx.calibrate(path=) on rank 1: ") and "cannot be made" in error
