"""State in files on disks that are read-only, full or slow: a named error on every rank, or the same numbers."""

from __future__ import annotations

import gc
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import zerofx
from tests.test_offload import EACH_LAYER, Net, small, steps, whole
from tests.test_offload_costs import Counter, offload
from tests.workers import Workers

Mounted = Callable[[str], Path]


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mounted]:
    """A file system of its own, in memory, with such options; for who may mount one."""
    places: list[Path] = []
    if shutil.which("mount") is None:
        pytest.skip("no mount(8)")

    def mount(options: str) -> Path:
        place = tmp_path / f"disk{len(places)}"
        place.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", place], capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"no right to mount: {done.stderr.decode().strip()}")
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", "-l", place], check=True)


def refused(folder: str) -> tuple[str, bool]:
    """What a rank hears; and whether the module still is what it was."""
    net = Net()
    before = [p.clone() for p in net.parameters()]
    try:
        zerofx.compile(net, stage=3, executor="eager", groups=EACH_LAYER, offload=offload(folder, "mwg"))
    except zerofx.OffloadError as e:
        same = all(type(p) is torch.nn.Parameter and p.equal(b) for p, b in zip(net.parameters(), before, strict=True))
        return str(e), same
    return "", False


def test_a_disk_that_is_read_only_is_refused_by_its_name_and_the_module_stays(
    workers2: Workers, mounted: Mounted
) -> None:
    disk = mounted("size=1m,ro")
    for error, same in workers2.run(refused, str(disk)):
        assert error.startswith("offload= on rank ") and str(disk) in error, error
        assert "cannot be made: Read-only file system" in error
        assert same


def filled(folder: str, parts: str) -> str:
    said = trained(folder, parts)
    gc.collect()  # the model is in a cycle, and its file with it
    return said


def trained(folder: str, parts: str) -> str:
    with small():
        options = {"stage": 3, "executor": "eager", "groups": EACH_LAYER, "offload": offload(folder, parts)}
        model = zerofx.compile(Net(), **options)
        optimizer = zerofx.AdamW(model.parameters(), lr=0.1)
        try:
            steps(model, optimizer, "", 3)
        except zerofx.OffloadError as e:
            return str(e)
    return "trained"


@pytest.mark.parametrize(("kilobytes", "parts"), [(200, "m"), (450, "mwg"), (4096, "mwg")])
def test_a_disk_without_room_is_an_error_in_the_first_step_on_all_ranks(
    workers2: Workers, mounted: Mounted, kilobytes: int, parts: str
) -> None:
    """Two ranks have 137 kB of weights between them, and four times as much in all."""
    disk = mounted(f"size={kilobytes}k")
    for said in workers2.run(filled, str(disk), parts):
        if kilobytes == 4096:
            assert said == "trained"
        else:
            assert "cannot be enlarged: No space left on device" in said and str(disk) in said, said
            assert "The optimizer's state is a mixture of two steps now" in said
    assert not list(disk.iterdir()), "what a run has left is removed"


def throttled(folder: str, pace: float) -> tuple[bool, int]:
    """Whether a run on a slow disk has the numbers of one without any; and how many transfers there were."""

    def run(where: zerofx.Offload | None) -> list[torch.Tensor]:
        model = zerofx.compile(Net(), stage=3, executor="eager", groups=EACH_LAYER, offload=where)
        optimizer = zerofx.AdamW(model.parameters(), lr=0.1, max_grad_norm=1.0)
        return [*steps(model, optimizer, "accumulation", 3), *whole(model)]

    wanted = run(None)
    with small(), pytest.MonkeyPatch.context() as patch:
        counter = Counter(patch, pace)
        found = run(offload(folder, "mwg"))
    return all(a.equal(b) for a, b in zip(found, wanted, strict=True)), len(counter.order)


def test_a_slow_disk_makes_a_run_slower_and_loses_nothing(workers2: Workers, tmp_path: Path) -> None:
    for same, transfers in workers2.run(throttled, str(tmp_path), 5e6):
        assert same and transfers > 100
