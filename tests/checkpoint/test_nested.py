"""What a state dict may hold besides tensors, and in which containers: what is saved can be loaded."""

from __future__ import annotations

import io
import json
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import zerofx
from tests.workers import Workers
from zerofx import ShardedTensor
from zerofx.integrations.states import full_optimizer_state

EXTRA: dict[str, Any] = {
    "a dict": {"seen": 3},
    "a nested one": {"a": {"b": [1, {"c": torch.arange(3)}], "d.e": None}, "f": (1, torch.ones(2, 2))},
    "keys that are no strings": {3: "three", (1, 2): torch.zeros(()), "3x": True, None: 1.5},
    "nothing": None,
    "an empty dict": {},
    "empty containers": {"a": {}, "b": [], "c": (), "d": [{}, []]},
    "a stream": io.BytesIO(b"bytes of somebody's"),
    "a stream in a list": [io.BytesIO(b"one"), b"two", bytearray(b"three")],
    "a tensor": torch.arange(6).view(2, 3),
    "a number": 7,
    "a list": [1.5, "text", torch.float16, torch.Size([2])],
    "ordered": OrderedDict([("z", 1), ("a", torch.ones(3))]),
    "sets": {"set": {1, 2}, "frozen": frozenset("ab")},
    "numpy's": {"array": np.arange(4.0), "number": np.float32(2.5)},
}


class Counting(nn.Module):
    """A weight, and extra state of any kind."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 5), 2.0))
        self.extra = extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def same(a: Any, b: Any) -> bool:
    if isinstance(a, ShardedTensor):
        a = a.full_tensor()
    if isinstance(b, ShardedTensor):
        b = b.full_tensor()
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        in_order = not isinstance(a, OrderedDict) or list(a) == list(b)
        return in_order and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and bool((a == b).all())
    return a.getvalue() == b.getvalue() if isinstance(a, io.BytesIO) else a == b


def counting(extra: Any, stage: int | None) -> nn.Module:
    module = nn.Sequential(Counting(extra), nn.Linear(5, 2))
    return module if stage is None else zerofx.shard(module, stage=stage)


def check_extra_state(folder: str) -> None:
    for i, (kind, extra) in enumerate(EXTRA.items()):
        stages = (3, None) if i else (3, 0, 1, 2, None)
        saved = counting(extra, stages[i % 2])
        path = zerofx.save(f"{folder}/{i}", saved, background=True).result()
        befores: list[tuple[Any, int | None]] = [(0, stage) for stage in stages]
        for before, stage in [*befores, (torch.zeros(9), 3), ({"other": 1}, 3), ({}, 3)]:
            module: Any = counting(before, stage)
            zerofx.load(path, module)
            assert same(module[0].extra, extra), (kind, module[0].extra)
        whole = zerofx.full_state_dict(saved, rank0_only=False)
        module.load_state_dict(whole)
        assert same(module[0].extra, extra), kind
        file = f"{folder}/{i}-{dist.get_rank()}.pt"
        torch.save(whole, file)
        module = counting(0, 3)
        zerofx.load(file, module)
        assert same(module[0].extra, extra), (kind, module[0].extra)


def test_extra_state_of_any_kind_comes_back(workers2: Workers, tmp_path: Path) -> None:
    workers2.run(check_extra_state, str(tmp_path))


def check_by_rank(folder: str) -> None:
    rank = dist.get_rank()
    saved = zerofx.shard(nn.Sequential(Counting({"rank": rank, f"of {rank}": torch.full((2 + rank,), rank)}), Mean()))
    saved[1].mean.fill_(rank)
    saved[1].square.fill_(rank)
    zerofx.save(folder, saved)
    module: Any = zerofx.shard(nn.Sequential(Counting(None), Mean()))
    zerofx.load(folder, module)
    assert same(module[0].extra, {"rank": 0, "of 0": torch.zeros(2, dtype=torch.int64)}), module[0].extra
    assert module[1].mean.item() == module[1].square.item() == 0


class Mean(nn.Module):
    """Buffers in which ranks differ."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("mean", "square"):
            self.register_buffer(name, torch.zeros(()))


def test_extra_state_and_buffers_are_those_of_rank_0(workers2: Workers, tmp_path: Path) -> None:
    workers2.run(check_by_rank, str(tmp_path / "c"))


class Odd:
    pass


def test_what_could_not_be_loaded_is_refused_by_name_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(
        zerofx.CheckpointError, match=r"model\.0\._extra_state\.deep=list holds what cannot be loaded wi"
    ):
        zerofx.save(tmp_path / "c", counting({"deep": [1, Odd()]}, None))
    assert zerofx.latest(tmp_path / "c") is None
    with torch.serialization.safe_globals([Odd]):  # whoever trusts the class may have it
        zerofx.save(tmp_path / "c", counting({"deep": [1, Odd()]}, None))
        module: Any = counting(0, None)
        zerofx.load(tmp_path / "c", module)
    assert isinstance(module[0].extra["deep"][1], Odd)


@pytest.mark.parametrize("extra", [{"seen": 3}, {"a": [torch.ones(2), {"b": 1}]}, io.BytesIO(b"x"), {}, 5])
def test_a_folder_that_notes_no_form_is_loaded_too(tmp_path: Path, extra: Any) -> None:
    """As torch.distributed.checkpoint writes them, and versions of zerofx that noted none."""
    saved = counting(extra, None)
    dcp.save({"model": saved.state_dict()}, checkpoint_id=str(tmp_path / "pair"), no_dist=True)
    dcp.save(saved.state_dict(), checkpoint_id=str(tmp_path / "alone"), no_dist=True)
    for folder in ("pair", "alone"):
        module: Any = counting(type(extra)(), None)
        zerofx.load(tmp_path / folder, module)
        assert same(module[0].extra, extra), module[0].extra


def test_what_zerofx_saved_is_loaded_by_torch_too(tmp_path: Path) -> None:
    zerofx.save(tmp_path / "c", counting({"seen": 3, "at": torch.ones(2)}, None))
    target = {"model": counting({"seen": 0, "at": torch.zeros(2)}, None).state_dict()}
    dcp.load(target, checkpoint_id=str(tmp_path / "c"), no_dist=True)
    assert same(target["model"]["0._extra_state"], {"seen": 3, "at": torch.ones(2)})


# -- optimizers


class Hoarder(torch.optim.Optimizer):
    """An elementwise optimizer that keeps state of all kinds, not the same for each parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "plan": {"warm": [1, 2], 3: {}}, "name": None})
        self.beside: Any = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                state = self.state[p]
                if not state:
                    state["past"] = [torch.zeros_like(p), (torch.ones_like(p), i)]
                    state["both"] = (torch.zeros_like(p), {"last": torch.zeros_like(p), 7: None})
                    state["coefficients"] = torch.arange(3.0)
                    state["preconditioner"] = torch.eye(max(p.shape))
                    state["odd" if i % 2 else "even"] = torch.zeros_like(p)
                state["past"][0].add_(p.grad)
                state["both"][1]["last"].copy_(p.grad)
                state["coefficients"] += 1
                state["preconditioner"] *= 2
                p.add_(state["past"][0], alpha=-group["lr"])
        self.state["own"] = {"steps": self.state.get("own", {}).get("steps", 0) + 1, "trace": torch.ones(4)}
        self.beside = ["seen", torch.full((2,), 3.0)]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "beside": self.beside}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.beside = state_dict["beside"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "beside"})


def square(stage: int | None) -> nn.Module:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    return module if stage is None else zerofx.shard(module, stage=stage)


def trained(module: nn.Module, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        for i, p in enumerate(module.parameters()):
            p.grad = torch.full(p.shape, 0.1 * (i + step))
        optimizer.step()


def check_hoarder(folder: str) -> None:
    for stage in (3, 0, 1, None):
        saved = square(stage)
        optimizer = Hoarder(saved.parameters())
        trained(saved, optimizer, 2)
        path = zerofx.save(f"{folder}/{stage}", saved, optimizer)
        file = f"{folder}/{stage}-{dist.get_rank()}.pt"
        given: Any = [full_optimizer_state(optimizer)]
        dist.broadcast_object_list(given)
        torch.save({"model": zerofx.full_state_dict(saved, rank0_only=False), "optimizer": given[0]}, file)
        expected = optimizer.state_dict()
        for other in (3, 2, 0, None):
            for source in (path, file):
                module = square(other)
                mine = Hoarder(module.parameters())
                zerofx.load(source, module, mine)
                found = mine.state_dict()
                assert same(found, expected), (stage, other, source, found)
                for p in module.parameters() if other and source == path and stage == 3 else ():
                    assert isinstance(mine.state[p]["both"][1]["last"], ShardedTensor)
                    assert not isinstance(mine.state[p]["preconditioner"], ShardedTensor), "it was whole"


@pytest.mark.slow
def test_an_optimizer_may_keep_lists_tuples_dicts_and_state_of_its_own(workers2: Workers, tmp_path: Path) -> None:
    workers2.run(check_hoarder, str(tmp_path))


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: torch.optim.LBFGS(ps, max_iter=2),
        lambda ps: torch.optim.Adafactor(ps),
        lambda ps: torch.optim.AdamW([{"params": ps[:1], "amsgrad": True}, {"params": ps[1:]}]),
        lambda ps: torch.optim.SGD([{"params": ps[:1], "momentum": 0.9}, {"params": ps[1:]}]),
    ],
    ids=["LBFGS", "Adafactor", "AMSGrad for some", "momentum for some"],
)
def test_optimizers_of_torch_come_back_with_all_that_they_keep(tmp_path: Path, make: Any) -> None:
    def built() -> Any:
        module = square(None)
        return module, make(list(module.parameters()))

    def closure() -> torch.Tensor:
        for i, p in enumerate(saved.parameters()):
            p.grad = torch.full(p.shape, 0.1 * i) * p.detach()
        return sum(p.detach().sum() for p in saved.parameters())  # type: ignore[return-value]

    saved, optimizer = built()
    for _ in range(2):
        optimizer.step(closure)
    zerofx.save(tmp_path / "c", saved, optimizer)
    module, mine = built()
    zerofx.load(tmp_path / "c", module, mine)
    assert same(mine.state_dict(), optimizer.state_dict()), mine.state_dict()


def test_a_form_that_names_what_is_not_there_is_damage(tmp_path: Path) -> None:
    for name in ("seen", "found"):
        zerofx.save(tmp_path / name, counting({name: 3}, None))
    shutil.copy(tmp_path / "seen" / "extra_0.pt", tmp_path / "found")
    mark = json.loads((tmp_path / "found" / "zerofx.json").read_text())
    mark["files"]["extra_0.pt"] = json.loads((tmp_path / "seen" / "zerofx.json").read_text())["files"]["extra_0.pt"]
    (tmp_path / "found" / "zerofx.json").write_text(json.dumps(mark))
    with pytest.raises(zerofx.CheckpointError, match=r"is damaged: it lacks 'model\.0\._extra_state\.seen'"):
        zerofx.load(tmp_path / "found", counting({}, None))
