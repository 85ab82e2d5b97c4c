"""`partition_activations`: a tensor-parallel rank that died, was stopped or does not come is an error that names it."""

from __future__ import annotations

import datetime
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerofx
from tests.slow import quick_if
from tests.test_partition_activations import ROWS, WIDTH, build
from tests.test_watch import outcome
from tests.workers import Workers
from zerofx.runtime.ranks import watch


def split(replicas: int, **options: Any) -> tuple[nn.Module, torch.Tensor]:
    """A model that two tensor-parallel ranks share, and its batch; ``replicas``: ranks of zerofx's group."""
    watch.TICK, watch.SILENT = 0.25, 2.0
    mesh = init_device_mesh("cpu", (replicas, 2), mesh_dim_names=("dp", "tp"))
    model = build(mesh["tp"])
    zerofx.compile(model, mesh=mesh["dp"], executor="eager", partition_activations=mesh["tp"], **options)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(mesh["dp"].get_local_rank()))
    model(x).backward()
    return model, x


def train(model: nn.Module, x: torch.Tensor, steps: int = 1_000_000) -> None:
    for _ in range(steps):
        model(x).backward()


def stay_away(folder: str, stops: bool) -> tuple[str, str, float]:
    """Rank 1 sleeps, or is stopped as a whole until rank 0 has heard of it.

    A message that gloo was sending when its connection was closed may be waited for until gloo's own timeout.
    """
    model, x = split(1, timeout=4)
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=20))
    pid = Path(folder) / "pid"
    if dist.get_rank():
        if not stops:
            return outcome(lambda: time.sleep(12))
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        pid.write_text(str(os.getpid()))
        return outcome(lambda: train(model, x))
    said = outcome(lambda: train(model, x, 1_000_000 if stops else 1))
    if stops:
        os.kill(int(pid.read_text()), signal.SIGCONT)
    return said


@quick_if(lambda stops: stops)
@pytest.mark.parametrize("stops", [False, True], ids=["sleeps", "is stopped"])
def test_a_tensor_parallel_rank_that_does_not_come_is_named(workers2: Workers, tmp_path: Path, stops: bool) -> None:
    """zerofx's own group has one rank: nobody else would notice before gloo does, after half an hour."""
    (kind, message, seconds), (other, heard, _) = workers2.run(stay_away, str(tmp_path), stops, timeout=90)
    assert kind == "OutOfStepError", message
    assert re.search(r"rank 0 has waited 4 s for .*ward.*; missing: rank 1 \(last at ", message), message
    assert 3 < seconds < 30
    if stops:
        assert (other, heard) == (kind, message)


def killed(folder: str) -> None:
    """Rank 3 dies: rank 2 shares its layers, rank 1 its shards, and rank 0 neither."""
    model, x = split(2)
    if dist.get_rank() == 3:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
    kind, message, _ = outcome(lambda: train(model, x))
    (Path(folder) / f"rank{dist.get_rank()}").write_text(f"{kind} {message}")


@pytest.mark.slow
def test_a_tensor_parallel_rank_that_is_killed_is_named_by_the_others(
    make_workers: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("tests.workers.GRACE_SECONDS", 40.0)  # the others shall have their say
    with pytest.raises(AssertionError, match="SIGKILL"):
        make_workers(4).run(killed, str(tmp_path), timeout=120)
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found.keys() == {"rank0", "rank1", "rank2"}
    for text in found.values():
        assert re.search(r"OutOfStepError rank \d waited for .*, which failed: rank [13] was not heard of", text), text


def test_a_graph_that_computes_for_longer_than_the_timeout_is_no_hang() -> None:
    """Nobody is missing while all are in the same graph, and their watchdogs are heard."""
    states = {1: {"beat": 1, "at": [3, 0], "last": "forward"}}
    one = watch.Watch.__new__(watch.Watch)
    one.timeout, one.failure, one.called, one.rank = 0.01, "", [4, 5], 0
    one._count, one._started, one._waiting, one._heard = 3, 0, {}, {}
    one._inside = time.monotonic() - 1, "the collectives of forward"
    said: list[str] = []
    one._fail, one._states = said.append, lambda: states  # type: ignore[method-assign, assignment]
    silent, watch.SILENT = watch.SILENT, 0.05
    try:
        for beat in range(3):
            states[1]["beat"] = beat
            one._check_waiting()
            time.sleep(0.06)
        assert not said
        one._check_waiting()
        assert said and "missing: rank 5 (last at forward)" in said.pop()
        states[1] |= {"beat": 9, "at": [2, 0]}
        one._check_waiting()
        assert said and "rank 4 has waited 0.01 s for the collectives of forward; missing: rank 5" in said.pop()
    finally:
        watch.SILENT = silent
