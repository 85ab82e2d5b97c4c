"""A feature is one folder and one line in a list: without them everything else works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.slow import quick_if
from zerofx.features import FEATURES

WITHOUT = '''
import importlib.abc, sys
gone, rank, store = sys.argv[1].split(), int(sys.argv[2]), sys.argv[3]

class Deleted(importlib.abc.MetaPathFinder):
    """The folders are gone: whoever imports of them fails."""
    def find_spec(self, name, path=None, target=None):
        if name.startswith("zerofx.features.") and name.split(".")[2] in gone:
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
            assert set(gone) <= set(module.FEATURES)
            module.FEATURES = tuple(line for line in module.FEATURES if line not in gone)
        spec.loader.exec_module = exec_module
        return spec

import importlib.util
sys.meta_path[:0] = [Deleted(), Struck()]

import copy, os
import torch, torch.distributed as dist
from torch import nn
import zerofx

assert not any(name.startswith(f"zerofx.features.{feature}") for name in sys.modules for feature in gone)
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
options = {
    "one_copy": {"one_copy": True},
    "lookups": {"lookups": True},
    "wire": {"wire": zerofx.Wire("int8")},
    "offload": {"offload": "/nowhere"},
    "partition_activations": {"partition_activations": "tp"},
    "meshes": {"sharding": zerofx.Sharding()},
}
for feature in options.keys() & set(gone):
    try:
        zerofx.compile(copy.deepcopy(net), stage=3, **options[feature])
    except ValueError as error:
        assert "this zerofx has no such feature" in str(error), error
    else:
        raise AssertionError(f"{options[feature]} was taken")
print("trained")
sys.stdout.flush()
os._exit(0)
'''


@quick_if(lambda gone: " " in gone)
@pytest.mark.parametrize("gone", [*FEATURES, " ".join(FEATURES)], ids=[*FEATURES, "all"])
def test_without_a_feature_a_model_trains_as_before(tmp_path: Path, gone: str) -> None:
    command = [sys.executable, "-c", WITHOUT, gone]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in (0, 1)
    ]
    try:
        said = [rank.communicate(timeout=360)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(text.endswith("trained\n") for text in said), said[0] + said[1]


def test_no_file_outside_of_a_feature_imports_it() -> None:
    from tests.test_packaging import arrows, within

    found: dict[str, set[str]] = {}
    for module, others in arrows().items():
        for name in FEATURES:
            folder = f"zerofx.features.{name}"
            if not within(module, folder) and any(within(other, folder) for other in others):
                found.setdefault(name, set()).add(module)
    assert not found
