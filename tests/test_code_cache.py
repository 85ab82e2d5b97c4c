"""Inductor's cache of code: a second start is served from it, what decides the code is in its key, damage is mended."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.agreement import assert_ranks_agree
from tests.workers import ROOT, Workers
from zerofx._torch.code_cache import drop_cut_off


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8)) for _ in "ab"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


def start(options: dict[str, Any], plain: bool = False) -> tuple[list[float], int, int, int]:
    """Two steps, as in a process that has just started: losses, and how many graphs were hits, misses, neither."""
    from torch._dynamo.utils import counters
    from torch._inductor.utils import clear_caches

    torch._dynamo.reset()
    clear_caches()  # in memory: the folder stays
    counters.clear()
    torch.manual_seed(0)
    net: Any = Net()
    net = torch.compile(net) if plain else zerofx.compile(net, groups=zerofx.Grouping(min_bytes=0), **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = net(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if not plain:
        assert_ranks_agree(net)
    found = counters["inductor"]
    return losses, *(found[f"fxgraph_cache_{what}"] for what in ("hit", "miss", "bypass"))  # type: ignore[return-value]


def starts(folder: str, ways: list[dict[str, Any]]) -> list[Any]:
    """On each rank, in an empty folder of its own: plain ``torch.compile``, then each way twice."""
    import os

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, str(dist.get_rank()))
    try:
        return [start({}, plain=True), *(start(options) for options in ways for _ in range(2))]
    finally:
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]


WAYS: list[dict[str, Any]] = [
    {"stage": 3},
    {"stage": 2},
    {"stage": 0},
    {"stage": 3, "mixed_precision": zerofx.MixedPrecision(torch.bfloat16, torch.float32)},
    {"stage": 3, "activation_budget": 0.5},
]


@pytest.mark.slow
@pytest.mark.parametrize("ways", [WAYS[:2], WAYS[2:]], ids=["stages", "options"])
def test_a_second_start_compiles_nothing_and_no_other_way_is_served(
    workers2: Workers, ways: list[dict[str, Any]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for rank in workers2.run(starts, folder, ways, timeout=300):
            _, *twice = rank
            for (cold, *first), (warm, *second) in zip(twice[::2], twice[1::2], strict=True):
                assert first == [0, 2, 0], "a graph of another way was taken"
                assert second == [2, 0, 0]
                assert cold == warm


def alone() -> float:
    """The loss of a step on one rank, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        losses, *_ = start({"stage": 3})
        dist.destroy_process_group()
    return losses[-1]


@pytest.mark.slow
def test_libraries_that_were_cut_off_are_deleted_with_one_line_and_compiled_anew(tmp_path: Path) -> None:
    import os

    def run() -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", "import tests.test_code_cache as t; print(t.alone())"]
        return subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=840, check=True
        )

    whole = run()
    libraries = list(tmp_path.rglob("*.so"))
    assert libraries and "cut off" not in whole.stderr
    for path in libraries:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)
    again = run()
    assert again.stdout == whole.stdout
    assert f"{len(libraries)} compiled kernels in {tmp_path} were cut off" in again.stderr
    assert "cut off" not in run().stderr


def test_what_another_process_writes_now_and_what_is_whole_stays(tmp_path: Path) -> None:
    from filelock import FileLock

    whole = next(Path(torch.__file__).parent.rglob("libtorch_python.so"))
    (tmp_path / "whole.so").symlink_to(whole)
    (tmp_path / "cut.so").write_bytes(whole.read_bytes()[:5000])
    (tmp_path / "headless.so").write_bytes(bytes(5000))
    (tmp_path / "locks").mkdir()
    (tmp_path / "written.so").write_bytes(b"")
    with (
        FileLock(tmp_path / "locks" / "written.lock"),
        pytest.warns(UserWarning, match="2 compiled kernels in .* were cut"),
    ):
        assert drop_cut_off(str(tmp_path)) == 2
    assert sorted(path.name for path in tmp_path.glob("*.so")) == ["whole.so", "written.so"]
