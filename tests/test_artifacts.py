"""`cache=`: what a start has left in a folder serves the next one on another host, and nothing there is an error."""

from __future__ import annotations

import contextlib
import os
import platform
import unittest.mock
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.slow import slow
from tests.test_warm import cache_in, counted
from tests.workers import Workers
from zerofx.compiler import artifacts


@contextlib.contextmanager
def new_host(folder: Path) -> Iterator[None]:
    """As in a process that has just started, with PyTorch's caches in ``folder``."""
    from torch._dynamo.utils import counters
    from torch._inductor.utils import clear_caches
    from torch.compiler._cache import CacheArtifactManager

    torch._dynamo.reset()
    clear_caches()
    CacheArtifactManager.clear()
    artifacts._of.cache_clear()
    counters.clear()
    with cache_in(folder):
        yield


def trained(cache: Path, executor: str, steps: int = 3, stage: int = 3) -> list[float]:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    net = zerofx.compile(net, stage=stage, executor=executor, cache=cache, groups=zerofx.Grouping(min_bytes=0))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = []
    for _ in range(steps):
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def two_hosts(folder: str, executor: str) -> list[Any]:
    """Losses, hits and misses of a start, and of one on another host, where nothing can be compiled."""
    import torch._inductor.cpp_builder

    found = []
    for host in ("a", "b"):
        refused = unittest.mock.patch.object(torch._inductor.cpp_builder.CppBuilder, "build", side_effect=OSError)
        with new_host(Path(folder, host)), refused if host == "b" else contextlib.nullcontext():
            found.append((trained(Path(folder, "shared"), executor), *counted()))
    return found


@pytest.mark.parametrize("executor", ["eager", slow("inductor"), slow("regional")])
def test_another_host_is_served_what_this_one_left_its_kernels_too(
    workers2: Workers, tmp_path: Path, executor: str
) -> None:
    for (cold, *first), (warm, *second) in workers2.run(two_hosts, str(tmp_path), executor, timeout=280):
        assert first == [0, 1] and second == [1, 0]
        assert cold == warm
    files = [path.name for path in (tmp_path / "shared").iterdir()]
    assert sorted(name.split("-")[0] for name in files) == ["rank0", "rank1"], "one file for each rank, and whole"


@pytest.fixture
def left(fake_world: Any, tmp_path: Path) -> Path:
    """The file that a start has left in ``tmp_path / "shared"``."""
    fake_world(2)
    with new_host(tmp_path / "a"):
        trained(tmp_path / "shared", "eager")
        assert counted() == (0, 1)
    (path,) = (tmp_path / "shared").iterdir()
    return path


def on_another_host(left: Path) -> tuple[int, int]:
    with new_host(left.parent.parent / "b"):
        trained(left.parent, "eager")
        return counted()


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "cut off":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "a bit":
        path.write_bytes(content[:200] + bytes([content[200] ^ 1]) + content[201:])
    else:
        with zipfile.ZipFile(path, "w") as file:
            file.comment = artifacts.versions().encode()
            file.writestr("artifacts" if how == "no artifacts of PyTorch's" else "other", b"nothing")


@pytest.mark.parametrize("how", ["cut off", "empty", "a bit", "no artifacts of PyTorch's", "other parts"])
def test_a_damaged_file_is_ignored_with_one_line(left: Path, caplog: pytest.LogCaptureFixture, how: str) -> None:
    damage(left, how)
    assert on_another_host(left) == (0, 1)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "zerofx"]
    assert "of 1 files for rank 0, 1 are damaged and 0 of another" in said


@pytest.mark.parametrize("what", ["torch", "zerofx", "processor", "python"])
def test_so_is_one_of_another_version_or_processor(
    left: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    before = artifacts.versions()
    artifacts.versions.cache_clear()
    with monkeypatch.context() as patched:
        if what == "torch":
            patched.setattr(torch, "__version__", "2.99")
        elif what == "python":
            patched.setattr(platform, "python_version", lambda: "3.99")
        else:
            other = {"zerofx": "source_digest", "processor": "_processor"}[what]
            patched.setattr(artifacts, other, lambda: "another")
        assert artifacts.versions() != before
        with new_host(left.parent.parent / "b"):
            artifacts.Artifacts(left.parent)
    artifacts.versions.cache_clear()
    (said,) = [record.getMessage() for record in caplog.records if record.name == "zerofx"]
    assert "0 are damaged and 1 of another zerofx, PyTorch or processor" in said


def test_who_is_served_writes_nothing_and_what_is_new_is_left_too(left: Path) -> None:
    before = left.stat().st_mtime_ns
    assert on_another_host(left) == (1, 0)
    assert [*left.parent.iterdir()] == [left] and left.stat().st_mtime_ns == before
    with new_host(left.parent.parent / "b"):
        trained(left.parent, "eager", stage=2)
        assert counted() == (0, 1)
    assert len([*left.parent.iterdir()]) == 2


def test_a_folder_that_cannot_be_written_is_one_line(
    fake_world: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake_world(2)
    (tmp_path / "file").touch()
    with new_host(tmp_path / "a"):
        trained(tmp_path / "file", "eager", steps=2)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "zerofx"]
    assert "what was compiled is not there for others" in said


def test_a_file_writes_nothing_outside_of_the_folder_of_code(left: Path) -> None:
    with zipfile.ZipFile(left, "a") as file:
        file.writestr("libraries/../../outside.so", b"no library")
    assert on_another_host(left) == (1, 0)
    assert not [*left.parent.parent.rglob("outside.so")]


def test_other_ranks_files_are_left_alone(left: Path, fake_world: Any) -> None:
    fake_world(2, 1)
    assert on_another_host(left) == (0, 1)
    assert sorted(name.split("-")[0] for name in os.listdir(left.parent)) == ["rank0", "rank1"]


def test_a_dry_run_leaves_nothing(tmp_path: Path) -> None:
    with new_host(tmp_path / "a"):
        zerofx.dry_run(nn.Linear(4, 4), torch.ones(2, 4), world_size=2, cache=tmp_path / "shared")
    assert not (tmp_path / "shared").exists()


def test_what_is_no_folder_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cache=True: expected a folder, or None"):
        zerofx.compile(nn.Linear(4, 4), cache=True)
