"""What forward may save under `memory=`: less where what enters a layer is enough, and not what enters each group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zerofx
from tests.test_activation_budget import data
from tests.test_memory import Small, built, check, division, needed, trained
from tests.workers import Workers
from zerofx.compiler import activations

SPLIT: dict[str, Any] = {"groups": zerofx.Grouping(min_bytes=0, max_bytes=6000)}
"""Each matrix is a group of its own."""


class Square(Small):
    """What enters each of a layer's matrices is as large as what enters the layer."""

    def __init__(self) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(nn.ModuleList(nn.Linear(32, 32) for _ in range(3)) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(x).repeat(16, 1, 1)
        for block in self.blocks:
            inside = hidden
            for linear in block:  # type: ignore[union-attr]
                inside = linear(torch.tanh(inside))
            hidden = hidden + inside
        return F.cross_entropy(self.head(hidden.unflatten(0, (16, -1)).mean(0)).flatten(0, 1), y.flatten())


def trained_in_least() -> dict[str, Any]:
    wanted, _ = trained(built(Square, None, **SPLIT))
    nbytes = needed(Square, **SPLIT)
    net = built(Square, nbytes, **SPLIT)
    losses, peak = trained(net)
    record = zerofx.graphs(net)[0].forward
    assert record is not None
    return {
        "losses": losses,
        "wanted": wanted,
        "budget": nbytes,
        "peak": peak,
        "said": division(net),
        "saved": record.activations.saved_bytes,
        "groups": len({ref.layout.name for ref in record.context.parameters.values()}),
    }


def test_layers_of_several_groups_save_what_enters_a_layer_and_losses_stay(
    workers2: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in workers2.run(trained_in_least, timeout=120):
        assert rank["groups"] > 12
        check([rank])


def saved_by(net: type[nn.Module], layers: bool) -> list[int]:
    """Of each ladder the least that is saved."""
    found: list[int] = []
    theirs = activations.ladders

    def looked(cut: Any, nbytes: float, fuses: bool, save_entries: Any, **how: Any) -> Any:
        def mark(forward: Any, *, layers: bool) -> int:
            return int(save_entries(forward, layers=layers and wanted))

        wanted = layers
        made = theirs(cut, nbytes, fuses, mark, **how)
        found.extend(min(chosen.saved_bytes for _, chosen in ladder) for ladder in made)
        return made

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("zerofx.compiler.division.ladders", looked)
        needed(net, **SPLIT)
    return found


def test_the_second_ladder_saves_less_and_is_there_only_where_layers_are_several_groups(fake_world: Any) -> None:
    fake_world(2)
    groups, layer = saved_by(Square, layers=True)
    assert layer < 0.7 * groups
    assert saved_by(Square, layers=False) == [groups]


def test_an_activation_budget_of_nothing_saves_what_enters_layers_whatever_their_groups_are(fake_world: Any) -> None:
    fake_world(2)
    saved = []
    for options in ({}, SPLIT):
        net = built(Square, None, activation_budget=0, **options)
        net(*data()).backward()
        forward = zerofx.graphs(net)[0].forward
        assert forward is not None and forward.activations is not None
        saved.append(forward.activations.saved_bytes / forward.activations.whole_bytes)
    assert saved[1] <= 1.05 * saved[0] and saved[0] < 0.3
