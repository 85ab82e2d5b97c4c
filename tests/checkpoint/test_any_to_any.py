"""A checkpoint of any stage and world size is, bit for bit, the same state in any other."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerofx
from tests.checkpoint.nets import EACH_GROUP, Net, differing, digests, disturb, full_state, train
from tests.workers import Workers

OPTIMIZERS = {0: torch.optim.AdamW, 1: torch.optim.AdamW, 2: zerofx.AdamW, 3: zerofx.AdamW}
GROUPS = {0: None, 1: EACH_GROUP, 2: None, 3: EACH_GROUP}


def start(stage: int, seed: int = 0) -> tuple[Any, Any]:
    model = zerofx.compile(Net(seed), stage=stage, executor="eager", groups=GROUPS[stage])
    return model, OPTIMIZERS[stage](model.parameters(), lr=0.02, betas=(0.8, 0.9), weight_decay=0.1)


def save_and_go_on(folder: str, stage: int) -> tuple[dict[str, str], list[float]]:
    model, optimizer = start(stage)
    train(model, optimizer, range(2))
    zerofx.save(f"{folder}/{stage}-{dist.get_world_size()}", model, optimizer)
    state = digests(full_state(model, optimizer))
    return state, train(model, optimizer, range(2, 4))


def load_all(folder: str, stage: int, pairs: list[tuple[int, int]]) -> list[tuple[dict[str, str], list[float]]]:
    model, optimizer = start(stage, seed=1)
    train(model, optimizer, range(9, 10))
    found = []
    for saved_stage, size in pairs:
        disturb(model, optimizer)
        zerofx.load(f"{folder}/{saved_stage}-{size}", model, optimizer, rng=False)
        state = digests(full_state(model, optimizer))
        found.append((state, train(model, optimizer, range(2, 4))))
    return found


def mean(results: list[Any], step: int) -> float:
    return sum(losses[step] for _, losses in results) / len(results)


def check(make_workers: Callable[[int], Workers], folder: Path, pairs: list[tuple[int, int]]) -> None:
    """All of ``pairs`` (stage, world size) into all of them."""
    runs = {pair: make_workers(pair[1]).run(save_and_go_on, str(folder), pair[0]) for pair in pairs}
    for stage, size in pairs:
        loaded = make_workers(size).run(load_all, str(folder), stage, pairs)
        for i, pair in enumerate(pairs):
            now = [loaded[rank][i] for rank in range(size)]
            for state, _ in now:
                assert not differing(state, runs[pair][0][0]), f"{pair} into {(stage, size)}"
            if pair == (stage, size):
                assert [losses for _, losses in now] == [losses for _, losses in runs[pair]]
            for step in range(2):
                assert mean(now, step) == pytest.approx(mean(runs[pair], step), rel=1e-6, abs=0), (pair, stage, size)


def test_stages_and_world_sizes_load_each_other_bit_for_bit_and_go_on_alike(
    make_workers: Callable[[int], Workers], tmp_path: Path
) -> None:
    check(make_workers, tmp_path, [(0, 2), (1, 3), (2, 1), (2, 2), (3, 2), (3, 3)])


@pytest.mark.slow
def test_every_stage_and_world_size_loads_every_other(make_workers: Callable[[int], Workers], tmp_path: Path) -> None:
    check(make_workers, tmp_path, list(itertools.product((0, 1, 2, 3), (1, 2, 3, 4))))
