"""A corner is one line in a table: without it, and without its file, everything else works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zerofx.runtime.corners import CORNERS

WITHOUT = '''
import importlib.abc, sys
corner, rank, store = sys.argv[1], int(sys.argv[2]), sys.argv[3]

class Deleted(importlib.abc.MetaPathFinder):
    """The file is gone: whoever imports it fails."""
    def find_spec(self, name, path=None, target=None):
        if name == corner:
            raise ModuleNotFoundError(f"{name} was deleted")

class Struck(importlib.abc.MetaPathFinder):
    """The line is gone from the table, before zerofx reads it."""
    def find_spec(self, name, path=None, target=None):
        if name != "zerofx.runtime.corners":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            assert corner in module.CORNERS
            module.CORNERS = tuple(line for line in module.CORNERS if line != corner)
        spec.loader.exec_module = exec_module
        return spec

import importlib.util
sys.meta_path[:0] = [Deleted(), Struck()]

import copy, os
import torch, torch.distributed as dist
from torch import nn
import zerofx

assert corner not in sys.modules
torch.manual_seed(0)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
net = nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 3))
for options in ({"stage": 3}, {"stage": 3, "leaf_modules": ["2"]}, {"stage": 2}, {"stage": 0}):
    plain, model = copy.deepcopy(net), zerofx.compile(copy.deepcopy(net), executor="eager", **options)
    steps = torch.optim.SGD(plain.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        words = torch.arange(16).view(2, 2, 4) + step
        wanted, found = plain(words.view(4, 4)).square().mean(), model(words[rank]).square().mean()
        wanted.backward(), found.backward()
        [(each.step(), each.zero_grad()) for each in steps]
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        q = q.full_tensor() if isinstance(q, zerofx.ShardedTensor) else q
        torch.testing.assert_close(q.detach(), p.detach(), rtol=1e-5, atol=1e-6)
if corner.endswith("one_copy"):
    try:
        zerofx.shard(net, one_copy=True)
    except ValueError as error:
        assert "one_copy" in str(error)
    else:
        raise AssertionError("one_copy=True was taken")
if corner.endswith("lookups"):
    try:
        zerofx.compile(net, stage=3, lookups=True)
    except ValueError as error:
        assert "lookups" in str(error)
    else:
        raise AssertionError("lookups=True was taken")
    assert not any(name.startswith(corner) for name in sys.modules)
print("trained")
sys.stdout.flush()
os._exit(0)
'''


@pytest.mark.slow
@pytest.mark.parametrize("corner", CORNERS)
def test_without_a_corner_a_model_trains_as_before(tmp_path: Path, corner: str) -> None:
    command = [sys.executable, "-c", WITHOUT, corner]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in (0, 1)
    ]
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(text.endswith("trained\n") for text in said), said[0] + said[1]


def test_no_file_imports_a_corner() -> None:
    from tests.test_packaging import arrows, within

    assert not [
        (module, other)
        for module, others in arrows().items()
        for other in others
        for corner in CORNERS
        if within(other, corner) and not within(module, corner)
    ]
