"""A feature is one folder and one line in a list: without them everything else works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zerofx.features import FEATURES

KNOWN = {
    "offload": {
        "zerofx.runtime.state.activation_store",
        "zerofx.runtime.state.carriage",
        "zerofx.simulate.recorder",
    },
    "partition_activations": {"zerofx.compiler.alike"},
    "wire": {
        "zerofx.compiler.runners",
        "zerofx.features.meshes.part",
        "zerofx.features.meshes.row_copy",
        "zerofx.inspect.predict.wires",
        "zerofx.runtime.state.weights",
    },
}
"""Features that files outside of them still import, and these files. Nothing is to be added here."""

WITHOUT = '''
import importlib.abc, sys
feature, rank, store = sys.argv[1], int(sys.argv[2]), sys.argv[3]

class Deleted(importlib.abc.MetaPathFinder):
    """The folder is gone: whoever imports of it fails."""
    def find_spec(self, name, path=None, target=None):
        if name == f"zerofx.features.{feature}" or name.startswith(f"zerofx.features.{feature}."):
            raise ModuleNotFoundError(f"{name} was deleted")

class Struck(importlib.abc.MetaPathFinder):
    """The line is gone from the table, before zerofx reads it."""
    def find_spec(self, name, path=None, target=None):
        if name != "zerofx.features":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            assert feature in module.FEATURES
            module.FEATURES = tuple(line for line in module.FEATURES if line != feature)
        spec.loader.exec_module = exec_module
        return spec

import importlib.util
sys.meta_path[:0] = [Deleted(), Struck()]

import copy, os
import torch, torch.distributed as dist
from torch import nn
import zerofx

assert not any(name.startswith(f"zerofx.features.{feature}") for name in sys.modules)
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
if feature == "one_copy":
    try:
        zerofx.shard(net, one_copy=True)
    except ValueError as error:
        assert "one_copy" in str(error)
    else:
        raise AssertionError("one_copy=True was taken")
if feature == "lookups":
    try:
        zerofx.compile(net, stage=3, lookups=True)
    except ValueError as error:
        assert "lookups" in str(error)
    else:
        raise AssertionError("lookups=True was taken")
print("trained")
sys.stdout.flush()
os._exit(0)
'''


@pytest.mark.slow
@pytest.mark.parametrize("feature", [name for name in FEATURES if name not in KNOWN])
def test_without_a_feature_a_model_trains_as_before(tmp_path: Path, feature: str) -> None:
    command = [sys.executable, "-c", WITHOUT, feature]
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


def test_no_file_outside_of_a_feature_imports_it_but_those_that_still_do() -> None:
    from tests.test_packaging import arrows, within

    found: dict[str, set[str]] = {}
    for module, others in arrows().items():
        for name in FEATURES:
            folder = f"zerofx.features.{name}"
            if not within(module, folder) and any(within(other, folder) for other in others):
                found.setdefault(name, set()).add(module)
    assert found == KNOWN
