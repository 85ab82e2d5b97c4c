"""The most precise number there is survives a change of precision, wherever it was kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zerofx
from tests.checkpoint.nets import EACH_GROUP, Net, differing, digests, disturb
from tests.slow import quick_if
from tests.workers import Workers
from zerofx.kernels.split import join

Make = Callable[[int], tuple[Any, Any]]


def make(kind: str, seed: int) -> tuple[Any, Any]:
    if kind in ("fp32", "mixed", "torch"):
        precision = zerofx.MixedPrecision(torch.bfloat16, torch.float32) if kind == "mixed" else None
        options: dict[str, Any] = {"mixed_precision": precision, "stage": 2 if kind == "mixed" else 3}
        model = zerofx.shard(Net(seed), groups=EACH_GROUP, **options)
        return model, (torch.optim.AdamW if kind == "torch" else zerofx.AdamW)(model.parameters(), lr=0.02)
    master: Any = kind if kind in ("float32", "split") else None
    stage = 3 if kind == "split" else 2
    model = zerofx.shard(Net(seed).bfloat16(), stage=stage, groups=EACH_GROUP)
    return model, zerofx.AdamW(model.parameters(), lr=0.02, master=master)


def step(model: Any, optimizer: Any, seed: int) -> None:
    """With gradients that lie between bfloat16's numbers."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    optimizer.step()
    optimizer.zero_grad()


KINDS = ("fp32", "mixed", "torch", "float32", "split", "none")
PRECISE = KINDS[:-1]


def masters(model: Any, optimizer: Any) -> dict[str, Any]:
    """The weights that the optimizer works on, in float32."""
    found = {}
    for name, p in model.named_parameters():
        state = optimizer.state.get(p, {})
        if "master" in state:
            value = state["master"].full_tensor()
        elif "remainder" in state:
            value = join(p.full_tensor(), state["remainder"].full_tensor())
        else:
            value = p.full_tensor().float()
        found[name] = value
    return digests(found)


def moments(model: Any, optimizer: Any) -> dict[str, Any]:
    names = {p: name for name, p in model.named_parameters()}
    return digests(
        {
            f"{what} of {names[p]}": value.full_tensor() if hasattr(value, "full_tensor") else value
            for p, state in optimizer.state.items()
            for what, value in state.items()
            if what not in ("master", "remainder")
        }
    )


def save_one(folder: str, kind: str) -> tuple[Any, Any, Any]:
    model, optimizer = make(kind, 0)
    for seed in range(3):
        step(model, optimizer, seed)
    zerofx.save(f"{folder}/{kind}", model, optimizer)
    state = masters(model, optimizer), moments(model, optimizer)
    step(model, optimizer, 3)
    return *state, masters(model, optimizer)


def load_one(folder: str, kind: str) -> list[tuple[Any, Any, Any]]:
    model, optimizer = make(kind, 1)
    found = []
    for i, source in enumerate(KINDS):
        if i % 2:
            disturb(model, optimizer)  # state is there already, and wrong
        zerofx.load(f"{folder}/{source}", model, optimizer)
        now = masters(model, optimizer), moments(model, optimizer)
        step(model, optimizer, 3)
        found.append((*now, masters(model, optimizer)))
    return found


@pytest.fixture(scope="module")
def saved(make_workers: Callable[[int], Workers], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict]:
    folder = str(tmp_path_factory.mktemp("precisions"))
    return folder, {kind: make_workers(2).run(save_one, folder, kind)[0] for kind in KINDS}


@quick_if(lambda kind: kind in ("mixed", "torch", "float32"))
@pytest.mark.parametrize("kind", KINDS)
def test_masters_and_moments_are_bitwise_those_that_were_saved(
    saved: tuple[str, dict], workers2: Workers, kind: str
) -> None:
    folder, states = saved
    results = workers2.run(load_one, folder, kind)[0]
    for source, (weights, found, after) in zip(KINDS, results, strict=True):
        expected = states[source]
        frozen = {"frozen"}  # no gradient, no master: rounded with the weight
        if kind in PRECISE:
            wrong = {k: v for k, v in differing(weights, expected[0]).items() if k not in frozen}
            assert not wrong, (source, kind)
        if kind != "none" and source not in ("none",):  # else moments are rounded to the weights' dtype
            assert not differing(found, expected[1]), (source, kind)
        if source == kind:
            assert after == expected[2]


def check_bfloat16_moments(folder: str) -> None:
    model, optimizer = make("fp32", 0)
    for seed in range(2):
        step(model, optimizer, seed)
    zerofx.save(folder, model, optimizer)
    other, _ = make("fp32", 1)
    low = zerofx.AdamW(other.parameters(), lr=0.02, moments=torch.bfloat16)
    zerofx.load(folder, other, low)
    for p, q in zip(model.parameters(), other.parameters()):
        for name in ("exp_avg", "exp_avg_sq") if optimizer.state.get(p) else ():
            expected = optimizer.state[p][name].full_tensor().bfloat16()
            found = low.state[q][name].full_tensor()
            assert found.dtype == torch.bfloat16 and torch.equal(found, expected)


def test_moments_take_the_dtype_that_the_optimizer_has_for_them(workers2: Workers, tmp_path: Path) -> None:
    workers2.run(check_bfloat16_moments, str(tmp_path / "c"))
