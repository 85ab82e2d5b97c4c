"""Ranks of one host, which share a folder of code: each graph's code is generated once, and nobody waits in vain."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import unittest.mock
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.slow import slow
from tests.workers import Workers
from zerofx import _torch
from zerofx._torch import code_locks

KEY = "fkey"


@contextlib.contextmanager
def folder_of_code(folder: str | Path) -> Iterator[None]:
    with unittest.mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": str(folder)}):
        yield


def start(executor: str, stage: int) -> tuple[float, int, int]:
    """The loss after a step; hits and misses of graphs."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    net = zerofx.compile(net, stage=stage, executor=executor, groups=zerofx.Grouping(min_bytes=0))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found = counters["inductor"]
    return loss.item(), found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]


def starts(folder: str, executor: str, stage: int) -> list[Any]:
    with folder_of_code(folder):
        return [start("eager", stage), start(executor, stage)]


@pytest.mark.parametrize(
    ("executor", "stage"),
    [("inductor", 3), slow("regional", 3), slow("inductor", 0), slow("inductor", 1), slow("regional", 2)],
)
def test_the_code_of_each_graph_is_generated_by_one_rank_and_loaded_by_the_other(
    workers2: Workers, tmp_path: Path, executor: str, stage: int
) -> None:
    (eager, first), (eager_2, second) = workers2.run(starts, str(tmp_path), executor, stage, timeout=280)
    graphs = sum(first[1:])
    assert graphs == sum(second[1:]) >= 2
    assert first[2] + second[2] == graphs, "code was generated twice, or keys differ between ranks"
    assert (first[0], second[0]) == pytest.approx((eager[0], eager_2[0]), rel=1e-6)


def late(folder: str) -> tuple[float, int, int]:
    """Rank 0 writes its code when rank 1 has a loss: that, and what rank 1 has hit and missed.

    A loss without a gradient is of one graph, and no collective is in it in stage 0.
    """
    from torch._dynamo.utils import counters
    from torch._inductor.codecache import FxGraphCache

    rank, store, theirs = dist.get_rank(), dist.PrefixStore(folder, _torch.default_store()), FxGraphCache._save_graph

    def save(*args: Any) -> None:
        store.set("compiled", "")
        store.wait(["done"])
        theirs(*args)

    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    net = zerofx.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), stage=0)
    with folder_of_code(folder), torch.no_grad():
        if rank == 0:
            with unittest.mock.patch.object(FxGraphCache, "_save_graph", save):
                loss = net(torch.ones(2, 8)).sum().item()
        else:
            store.wait(["compiled"])
            with unittest.mock.patch.object(code_locks, "PATIENCE", 0.1):
                loss = net(torch.ones(2, 8)).sum().item()
            store.set("done", "")
    found = counters["inductor"]
    return loss, found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]


def test_who_has_waited_for_long_generates_the_code_by_itself(workers2: Workers, tmp_path: Path) -> None:
    first, second = workers2.run(late, str(tmp_path))
    assert first == second and first[1:] == (0, 1)


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """Another process, which generates the code of `KEY`."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (tmp_path / "locks").mkdir()
    lock = tmp_path / "locks" / f"zerofx-{KEY}.lock"
    text = f"import filelock as f; x = f.FileLock({str(lock)!r}); x.acquire(); print('held', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", text], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def write(folder: Path) -> None:
    """What Inductor's cache has of `KEY`."""
    (folder / "fxgraph" / KEY[1:3] / KEY).mkdir(parents=True)
    (folder / "fxgraph" / KEY[1:3] / KEY / "entry").touch()


def test_who_need_not_wait_is_told_that_another_process_has_the_graph(held: Any) -> None:
    with _torch.unclaimed(), pytest.raises(_torch.Claimed):
        code_locks._locked(KEY)
    lock = code_locks._locked("another key")
    assert lock is not None
    lock.release()


@pytest.mark.parametrize("written", [False, True])
def test_where_the_other_process_is_killed_the_wait_ends(held: Any, tmp_path: Path, written: bool) -> None:
    """With its lock, for who waited; but where the code was written before, there is nothing to lock."""
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(code_locks._locked(KEY)), daemon=True)
    waiting.start()
    if written:
        write(tmp_path)
    held.kill()
    waiting.join(timeout=180)
    assert len(found) == 1 and (found[0] is None) == written
    if not written:
        found[0].release()
    else:  # nor is it locked now
        assert code_locks._locked(KEY) is None


def test_late_code_is_one_line_in_the_log(
    held: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(code_locks, "PATIENCE", 0.1)
    assert code_locks._locked(KEY) is None
    assert [record.getMessage() for record in caplog.records] == [
        "another process has compiled a graph for 0.1 s: it is compiled here as well"
    ]


def test_code_that_is_written_is_not_locked(held: Any, tmp_path: Path) -> None:
    write(tmp_path)
    assert code_locks._locked(KEY) is None


@pytest.mark.parametrize("error", [OSError, NotImplementedError])
def test_a_folder_without_locks_is_one_where_each_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def acquire(*args: Any) -> None:
        raise error("no locks available")

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("filelock.FileLock.acquire", acquire)
    assert code_locks._locked(KEY) is None


def seen(monkeypatch: pytest.MonkeyPatch, compile_one: Callable[[], Any]) -> list[str]:
    """The keys that are locked."""
    keys: list[str] = []
    monkeypatch.setattr(code_locks, "_locked", keys.append)
    compile_one()
    return keys


@pytest.mark.parametrize("how", ["caches off", "ranks wait", ""])
def test_nothing_is_locked_without_a_cache_or_where_ranks_wait_for_one_another(
    fake_world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    import torch._inductor.config
    import torch.compiler.config

    fake_world(2)
    settings = torch.compiler.config.patch(force_disable_caches=how == "caches off")  # type: ignore[attr-defined]
    waits = torch._inductor.config.patch(distributed_max_autotune_gemm=how.startswith("ranks"))

    def infer() -> None:
        torch._dynamo.reset()
        with settings, waits, folder_of_code(tmp_path), torch.no_grad():
            zerofx.compile(nn.Linear(4, 4))(torch.ones(2, 4))

    assert len(seen(monkeypatch, infer)) == (not how)
